"""vLLM's FlashAttention backend, reading a window: prefix in the cache, merged with fresh rows.

Registered under vLLM's own name for it, so models and captured graphs use it as they are. With
no window and at layers that are not the target's it is vLLM's own code, untouched. With one,
FlashAttention attends over the rows before the step (not causal, with log-sum-exp), and one
kernel adds the step's own rows, stages the drafts and, in a captured graph, writes the rest.
Two parts are right whether or not the drafts are written, so one graph serves every step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..backends.attention_shapes import Keep, Prefix, crowds
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
        prefix: the requests with drafts, over the rows that they had before the step.
        rest: all other requests, over all their rows; None without any.
        slots: the batch's slots without the drafts'.
    """

    steps: GpuSteps
    layout: RowLayout
    captured: bool
    prefix: inside.FlashRequests | None = None
    rest: inside.FlashRequests | None = None
    slots: Tensor | None = None

    @property
    def stopped(self) -> bool:
        """An earlier layer failed: the rest of this forward is vLLM's own."""
        step = self.steps.step
        return not self.captured and (step is None or step.direct)

    def prepare(self, metadata: Any) -> inside.FlashRequests:
        """What layers share, made at the first of them; inside a graph it is captured there."""
        layout, count = self.layout, self.layout.num_requests
        lengths = torch.empty(count, dtype=torch.int32, device=metadata.query_start_loc.device)
        longest = max(end - start for start, end in pairwise(layout.starts))
        prefix = inside.FlashRequests.leading(metadata, lengths, longest, captured=self.captured)
        self.steps.window.prefix(prefix.starts, metadata.seq_lens[:count], lengths)
        if not self.captured:
            self.slots = metadata.slot_mapping.clone()
            self.slots[: layout.num_rows].masked_fill_(layout.is_draft, -1)
            if metadata.num_actual_tokens > layout.num_rows:
                self.rest = inside.FlashRequests.following(metadata, count)
        self.prefix = prefix
        return prefix

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
        prefix = self.prefix or self.prepare(metadata)
        steps, layout, ref = self.steps, self.layout, hook.ref
        rows = slice(layout.num_rows)
        if self.slots is not None:  # a request admitted in this step may read what others write
            inside.flash_write(impl, layer, ref, key, value, self.slots)
        lse = prefix.attend(impl, ref, self.window(hook), query[rows], output[rows])
        keep = hook.keep
        if self.captured:
            keep = steps.window.keep(ref, metadata.slot_mapping[rows])
        steps.attention.merge_into(layout, ref, query, (key, value), output, lse, hook.args, keep)
        if self.captured:
            return
        if self.rest is not None:
            self.rest.attend(impl, ref, impl.sliding_window, query, output)
        assert steps.step is not None
        steps.step.staged.append(ref)


def warm_up(hook: FlashHook, heads: int, dtype: torch.dtype) -> None:
    """Launch every form of the window kernel that a step outside of graphs may need.

    Forms differ by the longest request, by whether all have its length, and by how many rows
    there are. Graphs compile theirs when they are captured.

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
                steps.attention.merge(
                    layout,
                    ref,
                    query,
                    (fresh, fresh),
                    Prefix.single(query, lse),
                    hook.args,
                    hook.keep,
                    query,
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
