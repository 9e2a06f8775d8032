"""vLLM's FlashAttention backend, reading windows whose drafts wait in spare slots of the cache.

It is registered under vLLM's own name for the backend, so models and captured graphs use it as
they are. Without a window, and in layers that are not the target's, it runs vLLM's own code. With
a window it calls vLLM's own writer, but drafts go to spare slots behind the last block; and it
makes vLLM's own call of FlashAttention, but with blocks of one row, so that the block table leads
to those slots. Its sums are stock's to the last bit, whatever the layer's window, cap or sinks.

A fixed buffer says where drafts go and is read as the forward runs, so one captured graph serves
windows, bypassed steps and fallbacks. Outside of graphs the host has to keep up with all layers, so
arguments that the calls share are made once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor

from ....backends.graphs.slot_block_table import slot_tables
from ....layers import LayerRef
from ...serving.graph_steps import GraphSteps
from ..internals import Foreign, batches, flash

_BUILDER, _IMPL, _BACKEND = flash.classes()


@attrs.frozen(eq=False)
class FlashHook:
    """The steps of a target layer, its caches, and the arguments that it always passes.

    Attributes:
        steps: the runner's steps.
        ref: the layer, as the steps' manager knows it.
        spare: the first slot in which drafts of the layer's group wait.
        caches: keys and values, ``[num_blocks, block_size, num_kv_heads, head_size]`` each, spare
            blocks included.
        rows: the cache as blocks of one row, ``[num_slots, num_kv_heads, 1, 2 * head_size]``.
        fixed: arguments of all its calls of FlashAttention; None: vLLM's own code makes the calls.
    """

    steps: GraphSteps
    ref: LayerRef
    spare: int
    caches: tuple[Tensor, Tensor]
    rows: Tensor
    fixed: dict[str, Any] | None


@attrs.define(eq=False)
class Reading:
    """The slots and tables by which one forward reads its window.

    It is the attribute ``kvtxn`` of some layers' attention metadata.

    Attributes:
        steps: the runner's steps.
        captured: the forward is being captured in a graph, which will serve steps of any kind.
        builder: the builder of the metadata.
        slots: the slots of the batch's rows, spare ones for drafts.
        metadata: vLLM's metadata with a block table by slot; None before the first layer wrote.
        batch: arguments of FlashAttention that all layers share; None: vLLM's own code makes the
            calls.
    """

    steps: GraphSteps
    captured: bool
    builder: WindowFlashBuilder
    slots: Tensor | None = None
    metadata: Foreign = None
    batch: flash.BatchArguments | None = None

    @property
    def stopped(self) -> bool:
        """Tell whether an earlier layer failed, so that the other layers run vLLM's own code."""
        return not (self.captured or self.steps.waits)

    def prepare(self, hook: FlashHook, metadata: Foreign, slots: Tensor) -> Tensor:
        """Make, at the first layer, everything that all layers share; a graph captures this, too.

        Args:
            hook: the first layer's hook.
            metadata: vLLM's metadata of the batch.
            slots: vLLM's slots of the batch, int64 ``[num_rows]``.

        Returns:
            The slots of the batch's rows, spare ones for drafts.
        """
        starts, seq_lens, block_table, longest = flash.table_arguments(metadata)
        table, self.slots = slot_tables(
            *(starts, seq_lens, block_table, slots),
            self.steps.windows.position,
            spare=hook.spare,
            block_size=hook.ref.planes[0].block_size,
            longest=longest,
        )
        schedules = bool(self.builder.schedules)
        self.metadata = flash.by_slot(metadata, table, self.builder, schedules=schedules)
        # Break the reference cycle, so the block table is freed at the end of the step.
        self.metadata.kvtxn = None
        self.batch = flash.batch_arguments(self.metadata)
        return self.slots

    def read(self) -> Foreign:
        """Return the metadata by which rows are found where ``do_kv_cache_update`` put them.

        Raises:
            RuntimeError: something else wrote the rows, and to other slots.
        """
        if self.metadata is None:
            raise RuntimeError("kvtxn: a layer's rows were not written by do_kv_cache_update")
        return self.metadata


def warm_up(block_sizes: Iterable[int], position: Tensor) -> None:
    """Launch each kernel of a step once, so that nothing compiles later.

    Args:
        block_sizes: rows per block of each group.
        position: the window's buffer that marks draft rows.
    """
    none = torch.zeros(2, 1, dtype=torch.int32, device=position.device)
    slots = torch.full((1,), -1, device=position.device)
    for size in block_sizes:
        slot_tables(
            none[:, 0], none[:1, 0], none[:1], slots, position, spare=0, block_size=size, longest=1
        )


class WindowFlashBuilder(_BUILDER):  # type: ignore[misc, valid-type]
    """vLLM's builder of metadata, which also marks forwards that have a window.

    For such a forward vLLM's schedule of FlashAttention, three launches, is left out: the first
    layer makes one for blocks of one row in a single launch, and in a graph the host launches none.

    Attributes:
        kvtxn: the runner's steps; None for layers that are not the target's.
        capturing: the metadata is for a graph that will serve every step of its shape.
        schedules: vLLM makes a schedule; None until it was asked for one.
    """

    kvtxn: GraphSteps | None = None
    capturing = False
    schedules: bool | None = None

    def build_for_cudagraph_capture(self, common_attn_metadata: Foreign) -> Foreign:
        """Build metadata for a graph that will serve every step of its shape."""
        self.capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self.capturing = False

    def build(
        self, common_prefix_len: int, common_attn_metadata: Foreign, fast_build: bool = False
    ) -> Foreign:
        """Build metadata for one step; a drafter asks for a fast build of its own."""
        steps, capturing = self.kvtxn, self.capturing
        window = steps is not None and steps.waits and not (fast_build or capturing)
        quick = fast_build or (window and self.schedules is not None)
        metadata = super().build(common_prefix_len, common_attn_metadata, quick)
        if not quick:
            self.schedules = flash.has_schedule(metadata)
        if steps is not None and capturing:
            # vLLM would read the schedule from a buffer that every step fills anew, and the
            # drafter's graphs too; without one FlashAttention makes its own.
            flash.drop_schedule(metadata)
        if steps is not None and (window or capturing):
            metadata.kvtxn = Reading(steps, capturing, self)
        return metadata

    def update_block_table(
        self, metadata: Foreign, blk_table: Tensor, slot_mapping: Tensor
    ) -> Foreign:
        """Give another KV-cache group's copy of the metadata a ``Reading`` of its own.

        vLLM's V1 runner copies an earlier group's metadata; its ``Reading`` must not be shared,
        since block table and slots differ by group.
        """
        updated = super().update_block_table(metadata, blk_table, slot_mapping)
        reading = getattr(metadata, "kvtxn", None)
        if reading is not None:
            updated.kvtxn = Reading(reading.steps, reading.captured, reading.builder)
        return updated


class WindowFlashImpl(_IMPL):  # type: ignore[misc, valid-type]
    """vLLM's FlashAttention of a layer, which reads the step's window if the step has one."""

    kvtxn: FlashHook | None = None

    def do_kv_cache_update(
        self, layer: Foreign, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the batch's rows: the window's drafts to spare slots, all others to their own."""
        hook = self.kvtxn
        metadata = None if hook is None else batches.metadata_of(layer)
        reading: Reading | None = getattr(metadata, "kvtxn", None)
        if hook is None or reading is None or reading.stopped:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        try:
            slots = reading.slots
            if slots is None:
                slots = reading.prepare(hook, metadata, slot_mapping)
            flash.write(self, layer, (key, value), hook.caches, slots)
            if not reading.captured:
                hook.steps.note_staged(hook.ref)
        except Exception as error:
            if reading.captured:
                raise
            hook.steps.fall_back(error)
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Foreign,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Foreign,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend over cache and window; without a window run vLLM's own attention."""
        hook, reading = self.kvtxn, getattr(attn_metadata, "kvtxn", None)
        scales = output_scale, output_block_scale
        if hook is not None and reading is not None and not reading.stopped:
            try:
                metadata, batch = reading.read(), reading.batch
                if batch is None or hook.fixed is None or scales != (None, None):
                    given = layer, query, key, value, hook.rows, metadata, output
                    return super().forward(*given, *scales)  # type: ignore[no-any-return]
                flash.attend(query, output, hook.fixed, batch)
                return output
            except Exception as error:
                if reading.captured:
                    raise
                hook.steps.fall_back(error)
        own = layer, query, key, value, kv_cache, attn_metadata, output
        return super().forward(*own, *scales)  # type: ignore[no-any-return]


class WindowFlashBackend(_BACKEND):  # type: ignore[misc, valid-type]
    """kvtxn's attention backend, which vLLM finds under the name FLASH_ATTN.

    Attributes:
        supports_kv_cache_update_bypass: False: a model may not write its rows by itself and leave
            ``do_kv_cache_update`` out, which 0.33 lets models do over vLLM's own backend.
    """

    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_impl_cls() -> type[WindowFlashImpl]:
        """Return the class of the layers' attention."""
        return WindowFlashImpl

    @staticmethod
    def get_builder_cls() -> type[WindowFlashBuilder]:
        """Return the class of the metadata builders."""
        return WindowFlashBuilder
