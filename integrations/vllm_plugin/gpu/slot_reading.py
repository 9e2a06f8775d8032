"""vLLM's attention over windows whose drafts wait in spare slots of the cache.

What all attention backends share. kvtxn's classes are registered under vLLM's own names for the
backends, so models and captured graphs use them as they are. Without a window, and in layers that
are not the target's, they run vLLM's own code. With a window they call vLLM's own writer, but
drafts go to spare slots behind the last block; and they make vLLM's own call of the attention, but
with blocks of one row, so that the block table leads to those slots. Backends are taken in if their
sums are then stock's to the last bit.

A fixed buffer says where drafts go and is read as the forward runs, so one captured graph serves
windows, bypassed steps and fallbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import attrs
import torch
from torch import Tensor

from ....backends.graphs.slot_block_table import slot_tables
from ....layers import LayerRef
from ...serving.graph_steps import GraphSteps
from ..seam import Foreign, batches
from ..seam.backends import Tables
from ..seam.runner_protocols import AttentionLayer

T = TypeVar("T")


@attrs.frozen(eq=False)
class SlotHook:
    """The steps of a target layer, and its cache.

    Attributes:
        steps: the runner's steps.
        ref: the layer, as the steps' manager knows it.
        spare: the first slot in which drafts of the layer's group wait.
        rows: the cache as blocks of one row, spare blocks included.
        module: vLLM's layer.
    """

    steps: GraphSteps
    ref: LayerRef
    spare: int
    rows: Tensor
    module: AttentionLayer


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
    """

    steps: GraphSteps
    captured: bool
    builder: SlotBuilder
    slots: Tensor | None = None
    metadata: Foreign = None

    @property
    def stopped(self) -> bool:
        """True if an earlier layer failed in this step: the other layers run vLLM's own code.

        Never in a forward that is captured.
        """
        return not (self.captured or self.steps.waits)

    def prepare(self, hook: SlotHook, metadata: object, slots: Tensor) -> Tensor:
        """Make the slots and tables that all layers share, at the first layer; return the slots.

        Sets ``slots`` and ``metadata``. A graph captures this, too.

        Args:
            hook: the first layer's hook.
            metadata: vLLM's metadata of the batch.
            slots: vLLM's slots of the batch, int64 ``[num_rows]``.

        Returns:
            int64 ``[num_rows]``, with spare slots for the window's drafts.
        """
        tables = self.builder.kvtxn_tables
        given = tables.arguments(metadata)
        table, self.slots = slot_tables(
            *(given.starts, given.seq_lens, given.blocks, slots),
            self.steps.windows.position,
            spare=hook.spare,
            block_size=hook.ref.planes[0].block_size,
            longest=given.longest,
            lines=given.lines,
        )
        self.metadata = tables.by_slot(metadata, table, self.builder)
        # Break the reference cycle, so the block table is freed at the end of the step.
        self.metadata.kvtxn = None
        self.complete()
        return self.slots

    def complete(self) -> None:
        """Make what the layers of one backend share beside slots and tables; none by default."""

    def read(self) -> object:
        """Return the metadata by which rows are found where ``do_kv_cache_update`` put them.

        Raises:
            RuntimeError: something else wrote the rows, and to other slots.
        """
        if self.metadata is None:
            raise RuntimeError("kvtxn: a layer's rows were not written by do_kv_cache_update")
        return self.metadata


def warm_up(block_sizes: Iterable[int], position: Tensor) -> None:
    """Compile the kernel of tables by slot for each size of blocks, by a launch over no rows."""
    none = torch.zeros(2, 1, dtype=torch.int32, device=position.device)
    slots = torch.full((1,), -1, device=position.device)
    for size in block_sizes:
        slot_tables(
            none[:, 0], none[:1, 0], none[:1], slots, position, spare=0, block_size=size, longest=1
        )


class SlotBuilder:
    """A mixin of vLLM's builders of metadata, which also marks forwards that have a window.

    Attributes:
        kvtxn: the runner's steps; None for layers that are not the target's.
        kvtxn_tables: how this backend's metadata names blocks.
        kvtxn_reading: the class of the marks.
        kvtxn_capturing: the metadata is for a graph that will serve every step of its shape.
    """

    kvtxn: GraphSteps | None = None
    kvtxn_tables: ClassVar[Tables]
    kvtxn_reading: ClassVar[type[Reading]] = Reading
    kvtxn_capturing = False

    def build_for_cudagraph_capture(self, common_attn_metadata: object) -> object:
        """Build metadata, with a ``Reading``, for a graph that serves every step of its shape."""
        self.kvtxn_capturing = True
        try:
            found: object = super().build_for_cudagraph_capture(  # type: ignore[misc]
                common_attn_metadata
            )
            return found
        finally:
            self.kvtxn_capturing = False

    def build(
        self, common_prefix_len: int, common_attn_metadata: object, fast_build: bool = False
    ) -> object:
        """Build metadata for one step, with a ``Reading`` in ``kvtxn`` if the step's drafts wait.

        Also if a graph is being captured; not for a drafter, which asks for a fast build, nor in
        layers that are not the target's.
        """
        steps, capturing = self.kvtxn, self.kvtxn_capturing
        window = steps is not None and steps.waits and not (fast_build or capturing)
        metadata = self.kvtxn_make(common_prefix_len, common_attn_metadata, fast_build, window)
        if steps is not None and (window or capturing):
            metadata.kvtxn = self.kvtxn_reading(steps, capturing, self)
        return metadata

    def kvtxn_make(self, prefix: int, common: object, fast: bool, window: bool) -> Foreign:
        """Let vLLM build a step's metadata; ``window`` is for subclasses."""
        return super().build(prefix, common, fast)  # type: ignore[misc]

    def update_block_table(
        self, metadata: object, blk_table: Tensor, slot_mapping: Tensor
    ) -> object:
        """Copy metadata for another KV-cache group, as vLLM does, with a ``Reading`` of its own.

        vLLM's V1 runner copies an earlier group's metadata; its ``Reading`` must not be shared,
        since block table and slots differ by group.
        """
        updated: Foreign = super().update_block_table(  # type: ignore[misc]
            metadata, blk_table, slot_mapping
        )
        reading = getattr(metadata, "kvtxn", None)
        if reading is not None:
            updated.kvtxn = self.kvtxn_reading(reading.steps, reading.captured, reading.builder)
        return updated


class WindowBackend:
    """A mixin of vLLM's attention backends, by which vLLM finds kvtxn's classes.

    Attributes:
        kvtxn_impl: the class of the layers' attention.
        kvtxn_builder: the class of the metadata builders.
    """

    kvtxn_impl: ClassVar[type]
    kvtxn_builder: ClassVar[type[SlotBuilder]]

    @classmethod
    def get_impl_cls(cls) -> type:
        """Return the class of the layers' attention."""
        return cls.kvtxn_impl

    @classmethod
    def get_builder_cls(cls) -> type[SlotBuilder]:
        """Return the class of the metadata builders."""
        return cls.kvtxn_builder


def reading_of(hook: SlotHook | None, metadata: object) -> Reading | None:
    """Return the ``Reading`` of a layer's metadata; None if vLLM's own code runs as it is.

    So it does without a window, in layers that are not the target's, and after an earlier layer
    failed.
    """
    reading: Reading | None = None if hook is None else getattr(metadata, "kvtxn", None)
    return None if reading is None or reading.stopped else reading


def write(hook: SlotHook | None, write_to: Callable[[Tensor], None], slots: Tensor) -> None:
    """Write the batch's rows: the window's drafts to spare slots, all others to their own.

    Without a window all go to their own. If it fails, the step falls back, and all rows go to their
    own; during a capture it raises.

    Args:
        hook: the layer's; None for a layer that is not the target's.
        write_to: vLLM's own writer, given the slots.
        slots: vLLM's slots of the batch, int64 ``[num_rows]``.
    """
    metadata = None if hook is None else batches.metadata_of(hook.module)
    reading = reading_of(hook, metadata)
    if hook is None or reading is None:
        write_to(slots)
        return
    try:
        led = reading.slots
        write_to(reading.prepare(hook, metadata, slots) if led is None else led)
        if not reading.captured:
            hook.steps.note_staged(hook.ref)
    except Exception as error:
        if reading.captured:
            raise
        hook.steps.fall_back(error)
        write_to(slots)


def attend(
    hook: SlotHook | None, call: Callable[[Tensor, object], T], cache: Tensor, metadata: object
) -> T:
    """Attend over cache and window; without a window, or after an error, run vLLM's own attention.

    After an error the step falls back; during a capture it raises.

    Args:
        hook: the layer's; None for a layer that is not the target's.
        call: attends, given a cache and metadata.
        cache: vLLM's cache.
        metadata: vLLM's metadata.

    Returns:
        What ``call`` returned.
    """
    reading = reading_of(hook, metadata)
    if hook is not None and reading is not None:
        try:
            return call(hook.rows.view(cache.dtype), reading.read())
        except Exception as error:
            if reading.captured:
                raise
            hook.steps.fall_back(error)
    return call(cache, metadata)


class WindowLatentImpl:
    """A mixin of vLLM's latent attention of a layer, which reads the step's window if there is one.

    The part that decodes reads the cache by its block table. What vLLM counts among prompts reads
    the step's own rows from the forward; it is vLLM's own code over vLLM's own blocks.
    """

    kvtxn: SlotHook | None = None

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        *others: Any,
        **named: Any,
    ) -> None:
        """Write the batch's rows as ``write`` does: the window's drafts to spare slots."""
        own = super().do_kv_cache_update  # type: ignore[misc]
        write(
            self.kvtxn,
            lambda slots: own(kv_c_normed, k_pe, kv_cache, slots, *others, **named),
            slot_mapping,
        )

    def forward_mqa(
        self, q: object, kv_c_and_k_pe_cache: Tensor, attn_metadata: object, layer: object
    ) -> object:
        """Return what vLLM's attention computes over cache and window, as ``attend`` does."""
        own = super().forward_mqa  # type: ignore[misc]
        found: object = attend(
            self.kvtxn,
            lambda cache, metadata: own(q, cache, metadata, layer),
            *(kv_c_and_k_pe_cache, attn_metadata),
        )
        return found
