"""What kvtxn takes from vLLM's inside on GPUs; what it imports comes from ``vllm_internals``.

Both model runners, their batches and graphs, and the calls of FlashAttention's operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..errors import LayerError
from ..layers import LayerRef
from . import vllm_internals as internals

#: Methods of the V2 runner that are overridden, with the parameters they have to have.
RUNNER_METHODS: Final = {
    "profile_run": ("randomize_inputs",),
    "initialize_kv_cache": ("kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
    "gather_batch_req_state": ("scheduler_output", "dummy_run"),
    "prepare_attn": ("input_batch",),
    "postprocess_sampled": (
        *("idx_mapping", "sampled_tokens", "num_sampled", "num_rejected", "query_start_loc"),
    ),
}

#: Likewise for the V1 runner; two more are only passed through, whatever they take.
V1_METHODS: Final = {
    "profile_run": ("randomize_inputs",),
    "_may_reorder_batch": ("scheduler_output",),
    **{
        name: internals.RUNNER_METHODS[name]
        for name in ("initialize_kv_cache", "_update_states", "_prepare_inputs", "_sample")
    },
}


def after_warm_up(wrapper: Any, then: Callable[[], None]) -> None:
    """Do something once a worker has warmed up.

    With the V2 runner vLLM goes through whole steps for that, drafts and all, of requests that
    nobody sent and that its own counters leave out.

    Args:
        wrapper: the worker's.
        then: what to do.
    """
    own = wrapper.worker.compile_or_warm_up_model

    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        then()
        return result

    wrapper.worker.compile_or_warm_up_model = compile_or_warm_up_model


# -- the V2 runner ------------------------------------------------------------------


#: The rows of a batch as the host knows them, numpy ``[num_requests]`` each: drafts per request, or
#: None where the batch has none; rows per request; and whether these are still the prompt's.
#: A plain tuple: in the middle of a step, with the processor's caches full of all else, making an
#: object takes long.
BatchRows = tuple[Any, Any, Any]


def batch_rows(batch: Any) -> BatchRows:
    """What ``prepare_attn`` is given."""
    drafts = batch.num_draft_tokens_per_req if batch.num_draft_tokens else None
    return drafts, batch.num_scheduled_tokens, batch.is_prefilling_np


def query_len(runner: Any) -> int:
    """Most rows of a request with drafts: all of them, and the token sampled last."""
    v1 = getattr(runner, "uniform_decode_query_len", None)
    return int(runner.decode_query_len if v1 is None else v1)


def prepared_rows(runner: Any, prepared: Any, lengths: Any) -> BatchRows:
    """What the V1 runner's ``_prepare_inputs`` was given and returned."""
    metadata, batch = prepared[1], runner.input_batch
    count = len(lengths)
    drafts = None
    if metadata is not None and any(metadata.num_draft_tokens):
        drafts = lengths.copy()
        drafts[:] = metadata.num_draft_tokens
    known = batch.num_computed_tokens_cpu[:count]
    return drafts, lengths, known < batch.num_prompt_tokens[:count]


def lead_with_drafts(runner: Any, scheduler_output: Any) -> None:
    """Let the requests with drafts lead the V1 runner's batch."""
    batch, drafts = runner.input_batch, scheduler_output.scheduled_spec_decode_tokens
    leading = 0
    for place, request in enumerate(list(batch.req_ids)):
        if drafts.get(request):
            if place != leading:
                batch.swap_states(leading, place)
            leading += 1


def slots_of_groups(runner: Any, groups: Sequence[str]) -> list[Tensor]:
    """The V1 runner's slots of these groups, int64 ``[max_tokens]`` each."""
    tables = runner.input_batch.block_table
    return [tables[int(group.partition(".")[2])].slot_mapping.gpu for group in groups]


def window_rows(config: Any) -> int:
    """Most rows of a window, unless the user says: what requests with drafts have in one step.

    Where that is far beyond the largest captured graph, buffers for it would be out of proportion;
    so they take no more than twice what the rows of that graph take.
    """
    most = internals.most_window_rows(config)
    captured = int(config.compilation_config.max_cudagraph_capture_size or 0)
    return min(most, captured * 15 // 8) if captured else most  # the rest is for tables


def room_for_rows(runner: Any, rows: int) -> Tensor:
    """As much memory as ``rows`` rows of the target's layers take."""
    drafters = internals.draft_layers(runner)
    each = sum(
        -(-spec.page_size_bytes // spec.block_size)
        for name, spec in runner.get_kv_cache_spec().items()
        if name not in drafters
    )
    return torch.empty(rows * each, dtype=torch.uint8, device=runner.device)


def admits(state: Any) -> bool:
    """Whether a batch has requests whose prompt is not done."""
    return state is not None and bool(state.has_prefill)


def slot_mappings(runner: Any, groups: Sequence[str]) -> Tensor:
    """The slots of these groups, int64 ``[num_groups, max_tokens]``, one buffer for ever.

    Raises:
        LayerError: they are not neighbours in the runner's buffer.
    """
    slots: Tensor = runner.block_tables.slot_mappings
    numbers = [int(group.partition(".")[2]) for group in groups]
    first = numbers[0]
    if numbers != list(range(first, first + len(numbers))):
        raise LayerError(
            "vllm",
            "the target's KV-cache groups are not neighbours",
            expected="consecutive groups",
            got=numbers,
        )
    return slots[first : first + len(numbers)]


def metadata_builders(runner: Any, names: set[str]) -> list[Any]:
    """The builders that make the attention metadata of these layers."""
    return [
        builder
        for groups in runner.attn_groups
        for group in groups
        if not names.isdisjoint(group.layer_names)
        for builder in group.metadata_builders
    ]


# -- FlashAttention -------------------------------------------------------------------


def scores_of(impl: Any) -> internals.Scores:
    """A layer's settings; vLLM says -1 and 0 where there is no window and no cap."""
    left, cap = int(impl.sliding_window[0]), float(impl.logits_soft_cap)
    return internals.Scores(
        float(impl.scale), left + 1 if left >= 0 else None, cap if cap > 0 else None
    )


def query_heads(impl: Any) -> int:
    """Query heads of a layer, on this rank."""
    return int(impl.num_heads)


def flash_shape(common: Any) -> tuple[int, int, int]:
    """Requests, rows of the longest request and rows of a batch that is to be captured."""
    return int(common.num_reqs), int(common.max_query_len), int(common.num_actual_tokens)


@attrs.define(eq=False)
class FlashRequests:
    """Requests that follow each other in a batch, as FlashAttention takes them.

    Made once per step; all that its layers share is in here, since tensors that are sliced for
    each layer take as long on the host as the call itself.

    Attributes:
        starts: int32 ``[num_requests + 1]``, each one's first row in the batch, and the end.
        keys: int32 ``[num_requests]``, how many of each one's keys in the cache it sees.
        blocks: int32 ``[num_requests, max_blocks]``, its blocks.
        longest: most rows of one.
        most_keys: most keys of one.
        causal: whether the last row sees the last key and each one before it one less; else every
            row sees all.
        splits: most parts that one's keys are divided into; 0 lets FlashAttention choose.
        schedules: which part of the GPU does what, by sliding window.
    """

    starts: Tensor
    keys: Tensor
    blocks: Tensor
    longest: int
    most_keys: int
    causal: bool
    splits: int
    schedules: dict[tuple[int, int], Tensor | None] = attrs.Factory(dict)

    @classmethod
    def leading(cls, metadata: Any, keys: Tensor, longest: int, *, captured: bool) -> FlashRequests:
        """The first ``len(keys)`` requests of a batch, over that many keys, not causal."""
        count = keys.shape[0]
        return cls(
            metadata.query_start_loc[: count + 1],
            keys,
            metadata.block_table[:count],
            longest,
            metadata.max_seq_len,
            causal=False,
            splits=metadata.max_num_splits if captured else _splits(metadata),
        )

    @classmethod
    def following(cls, metadata: Any, count: int, keys: Tensor) -> FlashRequests:
        """The requests after the first ``count``, causal; ``keys`` are those of all requests."""
        return cls(
            metadata.query_start_loc[count:],
            keys[count:],
            metadata.block_table[count:],
            metadata.max_query_len,
            metadata.max_seq_len,
            causal=True,
            splits=_splits(metadata),
        )

    def attend(
        self, impl: Any, ref: LayerRef, window: tuple[int, int], query: Tensor, output: Tensor
    ) -> Tensor:
        """One layer's attention, into ``output``.

        Args:
            impl: vLLM's attention of the layer, whose rows are stored as they are.
            ref: the layer.
            window: rows that a row sees to the left and to the right of its place; -1 is all.
            query: ``[rows, num_q_heads, head_size]``, rows as ``starts`` counts them.
            output: likewise.

        Returns:
            The log-sum-exp, float32 ``[num_q_heads, rows]``.
        """
        if window not in self.schedules:
            self.schedules[window] = self._schedule(impl, ref, window)
        _, lse = internals.flash_attention().flash_attn_varlen_func(
            q=query,
            k=ref.key_cache,
            v=ref.value_cache,
            out=output,
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.longest,
            seqused_k=self.keys,
            max_seqlen_k=self.most_keys,
            softmax_scale=impl.scale,
            causal=self.causal,
            window_size=window,
            softcap=impl.logits_soft_cap,
            block_table=self.blocks,
            return_softmax_lse=True,
            scheduler_metadata=self.schedules[window],
            num_splits=self.splits,
            fa_version=impl.vllm_flash_attn_version,
        )
        found: Tensor = lse
        return found

    def _schedule(self, impl: Any, ref: LayerRef, window: tuple[int, int]) -> Tensor | None:
        """FlashAttention 3 would make it anew in every call; other versions have none."""
        if impl.vllm_flash_attn_version != 3:
            return None
        schedule: Tensor = internals.flash_attention().get_scheduler_metadata(
            batch_size=self.keys.shape[0],
            max_seqlen_q=self.longest,
            max_seqlen_k=self.most_keys,
            num_heads_q=impl.num_heads,
            num_heads_kv=impl.num_kv_heads,
            headdim=impl.head_size,
            cache_seqlens=self.keys,
            qkv_dtype=ref.key_cache.dtype,
            cu_seqlens_q=self.starts,
            page_size=ref.key_cache.shape[1],
            causal=self.causal,
            window_size=window,
            has_softcap=bool(impl.logits_soft_cap),
            num_splits=self.splits,
        )
        return schedule


def _splits(metadata: Any) -> int:
    """Outside of graphs FlashAttention knows best, unless results must not depend on the batch."""
    return 1 if metadata.max_num_splits == 1 else 0


def flash_write(
    impl: Any, module: Any, ref: LayerRef, key: Tensor, value: Tensor, slots: Tensor
) -> None:
    """Write a batch's rows as the stock attention does, but those whose slot is -1."""
    internals.flash_attention().reshape_and_cache_flash(
        key,
        value,
        ref.key_cache,
        ref.value_cache,
        slots,
        impl.kv_cache_dtype,
        module._k_scale,
        module._v_scale,
    )
