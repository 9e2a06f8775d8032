"""vLLM's FlashAttention backend, reading a window: prefix in the cache, merged with fresh rows.

Registered under vLLM's own name for it, so models and captured graphs use it as they are. With
no window and at layers that are not the target's it is vLLM's own code, untouched. With one,
FlashAttention attends over the rows before the step, with log-sum-exp, and one kernel adds the
step's own rows, stages the drafts and, in a captured graph, writes the rest. Two parts are right
whether or not the drafts are written, so one graph serves every step.

A step that admits a request is no graph. There one call attends for all, causally: over the rows
before the step for those with drafts, over all rows for the rest. From all but a request's last row
in the window that hides what the prefix ends with, and the kernel adds that, too. A sliding window
would have to begin elsewhere for the drafts than for the rest; so those layers make two calls, for
the drafts over the whole prefix.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..backends.attention_shapes import Keep, Prefix, Tail, crowds
from ..executor import AttentionArgs
from ..layers import LayerRef
from ..layout import RowLayout
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
        args: how it attends; block table and lengths come from the metadata.
        keep: where its rows are staged, in a forward that wrote the settled ones already.
    """

    steps: GpuSteps
    ref: LayerRef
    args: AttentionArgs
    keep: Keep


@attrs.define(eq=False)
class Reading:
    """How one forward reads its window; lives in the attention metadata of one KV-cache group.

    Attributes:
        steps: the runner's.
        layout: the requests with drafts, or in a captured graph any that it may serve.
        captured: the forward is a graph: it is told nothing, and admits no new request.
        lengths: int32 ``[num_requests]``: of those with drafts the rows before the step, of others
            all. In a captured graph it ends with the layout's requests.
        slots: the batch's slots without the drafts'; None in a captured graph.
        every: all requests, over that many rows.
        tail: where those rows are that this hides from the window's.
        prefix: the requests with drafts, over the rows that they had before the step.
        rest: all other requests, over all their rows; None without any.
    """

    steps: GpuSteps
    layout: RowLayout
    captured: bool
    lengths: Tensor | None = None
    slots: Tensor | None = None
    every: inside.FlashRequests | None = None
    tail: Tail | None = None
    prefix: inside.FlashRequests | None = None
    rest: inside.FlashRequests | None = None

    @property
    def stopped(self) -> bool:
        """An earlier layer failed: the rest of this forward is vLLM's own."""
        step = self.steps.step
        return not self.captured and (step is None or step.direct)

    def prepare(self, metadata: Any) -> Tensor:
        """What all layers share, made at the first of them; in a graph it is captured there."""
        count, totals = self.layout.num_requests, metadata.seq_lens
        lengths = torch.empty_like(totals[:count]) if self.captured else totals.clone()
        starts = metadata.query_start_loc[: count + 1]
        self.steps.window.prefix(starts, totals[:count], lengths[:count])
        if not self.captured:
            self.slots = metadata.slot_mapping.clone()
            self.slots[: self.layout.num_rows].masked_fill_(self.layout.is_draft, -1)
        self.lengths = lengths
        return lengths

    def at_once(self, metadata: Any, lengths: Tensor) -> inside.FlashRequests:
        """One call for all requests, made at the first layer that takes it."""
        self.tail = Tail(metadata.seq_lens, metadata.block_table)
        self.every = inside.FlashRequests.following(metadata, 0, lengths)
        return self.every

    def apart(self, metadata: Any, lengths: Tensor) -> inside.FlashRequests:
        """Calls for those with drafts and for the rest, made at the first layer that takes them."""
        count, starts = self.layout.num_requests, self.layout.starts
        longest = max(end - start for start, end in pairwise(starts))
        self.prefix = inside.FlashRequests.leading(
            metadata, lengths[:count], longest, captured=self.captured
        )
        if not self.captured and metadata.num_actual_tokens > starts[-1]:
            self.rest = inside.FlashRequests.following(metadata, count, lengths)
        return self.prefix

    def window(self, hook: FlashHook) -> tuple[int, int]:
        """How many rows before the last one of the prefix a row sees, and after it; -1 is all.

        FlashAttention aligns windows to the end of the keys, and the step's own rows are not
        among them; so their number counts off, which has to be one for all requests.
        """
        sliding = hook.args.sliding_window
        if sliding is None:
            return -1, -1
        return sliding - 1 - self.layout.starts[1], -1

    def attend(
        self,
        hook: FlashHook,
        impl: Any,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: Any,
        output: Tensor,
    ) -> None:
        """One layer's attention over the batch, into ``output``.

        In a step that is no graph, what is done here for each layer is what the host has to keep
        up with; so nothing is sliced twice, and nothing here that could be done once per step.
        """
        lengths = self.lengths
        if lengths is None:
            lengths = self.prepare(metadata)
        steps, layout, ref, keep, tail = self.steps, self.layout, hook.ref, hook.keep, None
        if self.slots is not None:  # a request admitted in this step may read what others write
            inside.flash_write(impl, layer, ref, key, value, self.slots)
        if self.captured or hook.args.sliding_window is not None:
            prefix, rows = self.prefix or self.apart(metadata, lengths), slice(layout.num_rows)
            lse = prefix.attend(impl, ref, self.window(hook), query[rows], output[rows])
        else:
            every = self.every or self.at_once(metadata, lengths)
            lse, tail = every.attend(impl, ref, impl.sliding_window, query, output), self.tail
        if self.captured:
            keep = steps.window.keep(ref, metadata.slot_mapping[: layout.num_rows])
        steps.attention.merge_into(
            layout, ref, query, (key, value), output, lse, hook.args, keep, tail
        )
        if self.captured:
            return
        if tail is None and self.rest is not None:
            self.rest.attend(impl, ref, impl.sliding_window, query, output)
        assert steps.step is not None
        steps.step.staged.append(ref)


def warm_up(hook: FlashHook, heads: int, dtype: torch.dtype) -> None:
    """Launch every form of the window kernel that a step outside of graphs may need.

    Forms differ by the longest request, by whether all have its length, by how many rows there
    are, and by whether the prefix hides its end. Graphs compile theirs when they are captured.

    Args:
        hook: of a layer; others like it share its kernels.
        heads: query heads.
        dtype: of queries, keys and values.
    """
    steps, ref = hook.steps, hook.ref
    device, (kv_heads, size) = ref.device, ref.planes[0].row_shape
    for longest in range(2, steps.query_len + 1):
        for last in ((longest,), (longest, 2)):
            for rows in crowds(kv_heads, steps.attention.processors):
                lengths = (longest,) * (rows // longest) + last
                if sum(lengths) > steps.manager.config.max_rows:
                    continue
                drafts = tuple(length - 1 for length in lengths)
                layout = RowLayout.build(drafts, (1,) * len(lengths), device)
                query = torch.zeros(layout.num_rows, heads, size, dtype=dtype, device=device)
                fresh = query[:, :kv_heads].contiguous()
                lse = torch.zeros(heads, layout.num_rows, device=device)
                none = torch.zeros(len(lengths), 1, dtype=torch.int32, device=device)
                steps.attention.merge(
                    layout,
                    ref,
                    query,
                    (fresh, fresh),
                    Prefix.single(query, lse),
                    hook.args,
                    hook.keep,
                    query,
                    Tail(none[:, 0], none) if hook.args.sliding_window is None else None,
                )


class WindowFlashBuilder(_own.FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Builds vLLM's metadata; where the step has a window, without the stock schedule.

    Attributes:
        kvtxn: the runner's steps; None for layers that are not the target's.
        capturing: what is built is for a graph that will serve every step of its shape.
    """

    kvtxn: GpuSteps | None = None
    capturing = False

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
        """Metadata for one step."""
        steps, layout = self.kvtxn, None
        if steps is not None and self.capturing:
            layout = steps.graph_layout(*inside.flash_shape(common_attn_metadata))
        elif steps is not None and steps.deferred and steps.step is not None and not fast_build:
            layout = steps.step.layout
        # The first build of all decides for ever whether stock's schedule is possible.
        first = self.aot_sliding_window is None
        quick = fast_build or (layout is not None and not first)
        metadata = super().build(common_prefix_len, common_attn_metadata, quick)
        if steps is not None and layout is not None:
            metadata.kvtxn = Reading(steps, layout, self.capturing)
        return metadata

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        """The V1 runner's metadata for another KV-cache group like this: a reading of its own.

        vLLM copies an earlier group's, and what that one's layers share are its blocks and slots.
        """
        updated = super().update_block_table(metadata, blk_table, slot_mapping)
        reading = getattr(metadata, "kvtxn", None)
        if reading is not None:
            updated.kvtxn = Reading(reading.steps, reading.layout, reading.captured)
        return updated


class WindowFlashImpl(_own.FlashAttentionImpl):  # type: ignore[misc]
    """Attends through the step's window where there is one."""

    kvtxn: FlashHook | None = None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the batch's rows, unless ``forward`` is going to."""
        if self.kvtxn is not None:
            reading = getattr(internals.metadata_of(layer), "kvtxn", None)
            if reading is not None and not reading.stopped:
                return
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
        if hook is not None and reading is not None and not reading.stopped:
            try:
                reading.attend(hook, self, layer, query, key, value, attn_metadata, output)
                return output
            except Exception as error:
                if reading.captured:
                    raise
                reading.steps.fell_back(error)
                super().do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
        attended: Tensor = super().forward(
            *(layer, query, key, value, kv_cache, attn_metadata, output),
            output_scale,
            output_block_scale,
        )
        return attended


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
