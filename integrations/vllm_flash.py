"""vLLM's FlashAttention backend, reading a window: its drafts wait in spare slots of the cache.

Registered under vLLM's own name for it, so models and captured graphs use it as they are. With
no window and at layers that are not the target's it is vLLM's own code, untouched. With one, it
still is: vLLM's own writer, but drafts go to spare slots behind the last block, and vLLM's own
call of FlashAttention, but with blocks of one row, so that the block table leads to those slots.
Its sums are stock's, to the last bit, whatever the layer's window, cap or sinks. Outside of graphs
the host has to keep up with all layers, so what these calls always get is made once.

Where drafts go is read from a fixed buffer as the forward runs, so one captured graph serves
windows, bypassed steps and fallbacks.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..backends.slot_tables import slot_tables
from ..layers import LayerRef
from . import vllm_internals as internals
from . import vllm_internals_gpu as inside
from .vllm_gpu import GpuSteps

_own: Final[Any] = internals.flash_attention()


@attrs.frozen(eq=False)
class FlashHook:
    """What a target layer's attention needs to know.

    Attributes:
        steps: the runner's.
        ref: the layer.
        spare: the first slot where its group's drafts wait.
        caches: its keys and values, ``[num_blocks, block_size, num_kv_heads, head_size]`` each, the
            spare blocks included.
        rows: its cache as blocks of one row, ``[num_slots, num_kv_heads, 1, 2 * head_size]``.
        settings: what its calls of FlashAttention always get; None: vLLM's own code makes them.
    """

    steps: GpuSteps
    ref: LayerRef
    spare: int
    caches: tuple[Tensor, Tensor]
    rows: Tensor
    settings: dict[str, Any] | None


@attrs.define(eq=False)
class Reading:
    """How one forward reads its window; lives in the attention metadata of some layers.

    Attributes:
        steps: the runner's.
        captured: the forward is a graph, and serves steps of any kind.
        builder: of the metadata.
        slots: where the batch's rows are written, the drafts' among the spare slots.
        metadata: with a block table by slot.
        batch: what FlashAttention gets of it in all layers; None: vLLM's own code makes the calls.
    """

    steps: GpuSteps
    captured: bool
    builder: WindowFlashBuilder
    slots: Tensor | None = None
    metadata: Any = None
    batch: dict[str, Any] | None = None

    @property
    def stopped(self) -> bool:
        """An earlier layer failed: the rest of this forward is vLLM's own."""
        step = self.steps.step
        return not self.captured and (step is None or step.direct)

    def prepare(self, hook: FlashHook, metadata: Any, slots: Tensor) -> None:
        """What all layers share, made at the first of them; in a graph it is captured there."""
        table, self.slots = slot_tables(
            *(metadata.query_start_loc, metadata.seq_lens, metadata.block_table, slots),
            self.steps.window.position,
            spare=hook.spare,
            block_size=hook.ref.planes[0].block_size,
            longest=metadata.max_seq_len,
        )
        self.metadata = copy(metadata)
        self.metadata.block_table = table
        if self.builder.schedules:
            self.metadata.scheduler_metadata = inside.flash_schedule(self.builder, metadata)
        self.metadata.kvtxn = None  # else the two would hold each other, and the table, for long
        self.batch = inside.flash_batch(self.metadata)

    def read(self) -> Any:
        """The metadata by which rows are found where ``do_kv_cache_update`` put them.

        Raises:
            RuntimeError: something else wrote the rows, and not there.
        """
        if self.metadata is None:
            raise RuntimeError("kvtxn: a layer's rows were not written by do_kv_cache_update")
        return self.metadata


def warm_up(block_sizes: Iterable[int], position: Tensor) -> None:
    """Launch what steps need once, so that nothing compiles later.

    Args:
        block_sizes: of the groups.
        position: of the window.
    """
    none = torch.zeros(2, 1, dtype=torch.int32, device=position.device)
    slots = torch.full((1,), -1, device=position.device)
    for size in block_sizes:
        slot_tables(
            none[:, 0], none[:1, 0], none[:1], slots, position, spare=0, block_size=size, longest=1
        )


class WindowFlashBuilder(_own.FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Builds vLLM's metadata, and says where the forward has a window.

    There FlashAttention's schedule is left out, which vLLM makes with three launches: the first
    layer makes it with one, and in a graph with none that the host would see.

    Attributes:
        kvtxn: the runner's steps; None for layers that are not the target's.
        capturing: what is built is for a graph that will serve every step of its shape.
        schedules: whether vLLM makes a schedule; None until it was asked for one.
    """

    kvtxn: GpuSteps | None = None
    capturing = False
    schedules: bool | None = None

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Metadata for a graph that will serve every step of its shape."""
        self.capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self.capturing = False

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Metadata for one step; a drafter builds its own fast."""
        steps, capturing = self.kvtxn, self.capturing
        window = steps is not None and steps.step is not None and not (fast_build or capturing)
        quick = fast_build or (window and self.schedules is not None)
        metadata = super().build(common_prefix_len, common_attn_metadata, quick)
        if not quick:
            self.schedules = metadata.scheduler_metadata is not None
        if steps is not None and capturing:
            # vLLM would read it from a buffer that every step fills anew, a drafter's graphs, too;
            # without one FlashAttention makes its own.
            metadata.scheduler_metadata = None
        if steps is not None and (window or capturing):
            metadata.kvtxn = Reading(steps, capturing, self)
        return metadata

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        """The V1 runner's metadata for another KV-cache group like this: a reading of its own.

        vLLM copies an earlier group's, and what that one's layers share is their blocks and slots.
        """
        updated = super().update_block_table(metadata, blk_table, slot_mapping)
        reading = getattr(metadata, "kvtxn", None)
        if reading is not None:
            updated.kvtxn = Reading(reading.steps, reading.captured, reading.builder)
        return updated


class WindowFlashImpl(_own.FlashAttentionImpl):  # type: ignore[misc]
    """Attends through the step's window where there is one."""

    kvtxn: FlashHook | None = None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the batch's rows, the window's drafts where they wait."""
        hook = self.kvtxn
        metadata = None if hook is None else internals.metadata_of(layer)
        reading = getattr(metadata, "kvtxn", None)
        if hook is None or reading is None or reading.stopped:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        try:
            if reading.slots is None:
                reading.prepare(hook, metadata, slot_mapping)
            scales = layer._k_scale, layer._v_scale
            _own.reshape_and_cache_flash(
                *(key, value, *hook.caches, reading.slots, self.kv_cache_dtype, *scales)
            )
            if not reading.captured:
                hook.steps.waits(hook.ref)
        except Exception as error:
            if reading.captured:
                raise
            hook.steps.fell_back(error)
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend; through the window while there is one."""
        hook, reading = self.kvtxn, getattr(attn_metadata, "kvtxn", None)
        scales = output_scale, output_block_scale
        if hook is not None and reading is not None and not reading.stopped:
            try:
                metadata, batch = reading.read(), reading.batch
                if batch is None or hook.settings is None or scales != (None, None):
                    given = layer, query, key, value, hook.rows, metadata, output
                    return super().forward(*given, *scales)  # type: ignore[no-any-return]
                rows = slice(metadata.num_actual_tokens)
                _own.flash_attn_varlen_func(
                    q=query[rows], out=output[rows], **hook.settings, **batch
                )
                return output
            except Exception as error:
                if reading.captured:
                    raise
                hook.steps.fell_back(error)
        own = layer, query, key, value, kv_cache, attn_metadata, output
        return super().forward(*own, *scales)  # type: ignore[no-any-return]


class WindowFlashBackend(_own.FlashAttentionBackend):  # type: ignore[misc]
    """What vLLM finds under the name FLASH_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[WindowFlashImpl]:
        """The attention."""
        return WindowFlashImpl

    @staticmethod
    def get_builder_cls() -> type[WindowFlashBuilder]:
        """The metadata builder."""
        return WindowFlashBuilder
