"""vLLM's FlashAttention over windows whose drafts wait in spare slots.

See ``slot_reading``. The host has to keep up with all layers outside of graphs, so arguments that
all calls share are made once. FLASH_ATTN_MLA is in ``flash_latent_backend``.
"""

from __future__ import annotations

import attrs
from torch import Tensor

from ..seam import Foreign, backends, batches
from ..seam.backends import FlashTables
from ..seam.runner_protocols import AttentionLayer
from .slot_reading import Reading, SlotBuilder, SlotHook, WindowBackend, reading_of

_FlashBuilder, _FlashImpl, _FlashBackend = backends.flash_attention()


@attrs.frozen(eq=False)
class FlashHook(SlotHook):
    """The steps of a target layer, its caches, and the arguments that it always passes.

    Attributes:
        caches: keys and values, ``[num_blocks, block_size, num_kv_heads, head_size]`` each, spare
            blocks included.
        fixed: arguments of all its calls of FlashAttention; None: vLLM's own code makes the calls.
    """

    caches: tuple[Tensor, Tensor]
    fixed: dict[str, object] | None


@attrs.define(eq=False)
class FlashReading(Reading):
    """The slots and tables by which one forward reads its window.

    Attributes:
        batch: arguments of FlashAttention that all layers share; None: vLLM's own code makes the
            calls.
    """

    batch: backends.BatchArguments | None = None

    def complete(self) -> None:
        """Set ``batch`` to the arguments that all layers share."""
        self.batch = backends.batch_arguments(self.metadata)


class WindowFlashBuilder(SlotBuilder, _FlashBuilder):  # type: ignore[misc, valid-type]
    """vLLM's builder of metadata, which also marks forwards that have a window.

    For such a forward vLLM's schedule of FlashAttention, three launches, is left out: the first
    layer makes one for blocks of one row in a single launch, and in a graph the host launches none.
    """

    kvtxn_tables = FlashTables()
    kvtxn_reading = FlashReading
    schedules: bool | None = None

    def kvtxn_make(self, prefix: int, common: object, fast: bool, window: bool) -> Foreign:
        """Let vLLM build a step's metadata, without a schedule where the window makes its own.

        A full build notes in ``schedules`` whether vLLM makes any. Metadata of a graph to be
        captured has none in the target's layers.
        """
        quick = fast or (window and self.schedules is not None)
        metadata = super().kvtxn_make(prefix, common, quick, window)
        if not quick:
            self.schedules = backends.has_schedule(metadata)
        if self.kvtxn is not None and self.kvtxn_capturing:
            # vLLM would read the schedule from a buffer that every step fills anew, and the
            # drafter's graphs too; without one FlashAttention makes its own.
            backends.drop_schedule(metadata)
        return metadata


class WindowFlashImpl(_FlashImpl):  # type: ignore[misc, valid-type]
    """vLLM's FlashAttention of a layer, which reads the step's window if the step has one."""

    kvtxn: FlashHook | None = None

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write the batch's rows: the window's drafts to spare slots, all others to their own.

        If that fails, the step falls back, and vLLM's own writer is called; during a capture it
        raises.
        """
        hook = self.kvtxn
        metadata = None if hook is None else batches.metadata_of(layer)
        reading = reading_of(hook, metadata)
        if hook is None or reading is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        try:
            slots = reading.slots
            if slots is None:
                slots = reading.prepare(hook, metadata, slot_mapping)
            backends.write_by_flash(self, layer, (key, value), hook.caches, slots)
            if not reading.captured:
                hook.steps.note_staged(hook.ref)
        except Exception as error:
            if reading.captured:
                raise
            hook.steps.fall_back(error)
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: object,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend over cache and window into ``output``; without a window run vLLM's own attention.

        If that fails, the step falls back, and vLLM's own attention is called; during a capture it
        raises.
        """
        hook, scales = self.kvtxn, (output_scale, output_block_scale)
        reading = reading_of(hook, attn_metadata)
        if hook is not None and reading is not None:
            try:
                metadata, batch = reading.read(), reading.batch  # type: ignore[attr-defined]
                if batch is None or hook.fixed is None or scales != (None, None):
                    given = layer, query, key, value, hook.rows, metadata, output
                    return super().forward(*given, *scales)  # type: ignore[no-any-return]
                backends.attend_by_flash(query, output, hook.fixed, batch)
                return output
            except Exception as error:
                if reading.captured:
                    raise
                hook.steps.fall_back(error)
        own = layer, query, key, value, kv_cache, attn_metadata, output
        return super().forward(*own, *scales)  # type: ignore[no-any-return]


class WindowFlashBackend(WindowBackend, _FlashBackend):  # type: ignore[misc, valid-type]
    """kvtxn's attention backend, which vLLM finds under the name FLASH_ATTN.

    Attributes:
        supports_kv_cache_update_bypass: False: a model may not write its rows by itself and leave
            ``do_kv_cache_update`` out, which 0.33 lets models do over vLLM's own backend.
    """

    supports_kv_cache_update_bypass = False
    kvtxn_impl, kvtxn_builder = WindowFlashImpl, WindowFlashBuilder
