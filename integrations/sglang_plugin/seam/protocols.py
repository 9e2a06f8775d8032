"""SGLang's classes, as far as kvtxn reads their objects, under SGLang's own names."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class ForwardMode(Protocol):
    """``sglang.srt.model_executor.forward_batch_info.ForwardMode``."""

    name: str


class SpecInput(Protocol):
    """``sglang.srt.speculative.spec_info.SpecInput`` of a step that verifies drafts.

    Attributes:
        draft_token_num: rows of each request: the root, and the drafts behind it.
        retrieve_next_token: of a tree, int64 ``[num_requests, draft_token_num]``, the first row
            that follows each row, by its number within the request; -1 without any.
        retrieve_next_sibling: of a tree, likewise, the next row that follows the same row.
    """

    draft_token_num: int
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor


class ForwardBatch(Protocol):
    """``sglang.srt.model_executor.forward_batch_info.ForwardBatch``.

    Attributes:
        rids: the names of the requests; None in a warm-up and in a captured step.
        input_ids: int64 ``[num_rows]``, request by request.
        positions: int64 ``[num_rows]``.
        out_cache_loc: int64 ``[num_rows]``, the slot that each row is written to.
        req_pool_indices: int64 ``[num_requests]``, the line of ``req_to_token`` of each request.
        seq_lens: int64 ``[num_requests]``, with the step's rows; in a verify step without them.
        extend_seq_lens: int32 ``[num_requests]``, rows of each request; None in a decode step.
        extend_prefix_lens_cpu: rows of each request that are in the cache; likewise.
        extend_seq_lens_cpu: rows of each request; likewise.
        lora_ids: the adapter of each request.
        mamba_clear_indices: of a hybrid, int ``[n]``, states that are cleared in front of the
            forward; None without any.
        mamba_cow_src_indices: likewise, states that are copied then, in front of a hit's rows.
        mamba_cow_dst_indices: likewise, to which slots.
        mamba_track_mask: bool ``[num_requests]``, those of which a state is kept for the tree; None
            if none is, and where a commit tells.
        mamba_track_indices: int64 ``[num_requests]``, its slot.
        mamba_track_seqlens: int64 ``[num_requests]``, of prompts, a number of tokens: the state is
            the one behind the last whole chunk up to there.
    """

    forward_mode: ForwardMode
    rids: Sequence[str] | None
    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    extend_seq_lens: Tensor | None
    extend_prefix_lens_cpu: Sequence[int] | None
    extend_seq_lens_cpu: Sequence[int] | None
    spec_info: SpecInput | None
    is_prefill_only: bool
    mamba_clear_indices: Tensor | None
    mamba_cow_src_indices: Tensor | None
    mamba_cow_dst_indices: Tensor | None
    mamba_track_mask: Tensor | None
    mamba_track_indices: Tensor | None
    mamba_track_seqlens: Tensor | None


class KvInfo(Protocol):
    """``sglang.srt.managers.schedule_batch.ReqKvInfo``.

    Attributes:
        req_pool_idx: the line of ``req_to_token``; None without rows.
        kv_allocated_len: slots that the line names.
    """

    kv_committed_len: int
    kv_allocated_len: int
    req_pool_idx: int | None


class Grammar(Protocol):
    """``sglang.srt.constrained.base_grammar_backend.BaseGrammarObject``."""

    def rollback(self, k: int) -> None:
        """Forget the last ``k`` tokens."""


class FinishReason(Protocol):
    """``sglang.srt.managers.schedule_batch.FINISH_ABORT``."""

    message: str
    status_code: int | None

    def to_json(self) -> dict[str, object]:
        """Return the reason as clients get it."""


class TimeStats(Protocol):
    """``sglang.srt.observability.req_time_stats.SchedulerReqTimeStats``."""

    def set_wait_queue_entry_time(self) -> None:
        """Note that the request waits from now on."""


class Req(Protocol):
    """``sglang.srt.managers.schedule_batch.Req``.

    Attributes:
        rid: the name; a request that is computed again after a retraction has the same.
        origin_input_ids: the prompt, with a hash of its content for each position of an image.
        output_ids: the tokens that the host has taken in; a step behind the device under overlap.
        input_embeds: vectors in place of tokens, if any.
        is_retracted: it waits to be computed again; results of its steps are passed over.
        return_logprob: its client wants logprobs.
        send_output_token_logprobs_offset: tokens whose logprobs were sent.
        skip_radix_cache_insert: none of its rows get into the tree.
        inflight_middle_chunks: steps under way that compute a part of its prompt.
        to_finish: why it ends with its next result, such as an abort; None if it does not.
        finished_reason: why it is done; None while it is not.
        finished_output: its client was told so.
    """

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    lora_id: str | None
    input_embeds: object | None
    positional_embed_overrides: object | None
    kv: KvInfo
    is_retracted: bool
    inflight_middle_chunks: int
    return_logprob: bool
    send_output_token_logprobs_offset: int
    skip_radix_cache_insert: bool
    _compute_max_prefix_len: Callable[[int], int]
    grammar: Grammar | None
    to_finish: FinishReason | None
    finished_reason: FinishReason
    finished_output: bool | None
    time_stats: TimeStats

    def __hash__(self) -> int:
        """Return a hash of the object."""

    def finished(self) -> bool:
        """Tell whether the request is done; False for a retracted one."""


class ScheduleBatch(Protocol):
    """``sglang.srt.managers.schedule_batch.ScheduleBatch``."""

    reqs: Sequence[Req]
    batch_is_full: bool

    def filter_batch(self, *, keep_indices: list[int]) -> None:
        """Keep some requests, by their numbers."""


class NextBatchPlan(Protocol):
    """``sglang.srt.managers.scheduler.NextBatchPlan``."""

    batch_to_run: ScheduleBatch | None


class L2Transfer(Protocol):
    """``sglang.srt.mem_cache.l2_transfer.L2Transfer``: a copy between the device and the host.

    Attributes:
        host_pool: the pool in the host's memory.
        host_indices: int64 ``[n]``, its slots.
        device_indices: int64 ``[n]``, the slots on the device.
        is_draft: the rows are a drafter's.
    """

    host_pool: object
    host_indices: Tensor
    device_indices: Tensor
    is_draft: bool


class HostPool(Protocol):
    """``sglang.srt.mem_cache.pool_host.base.HostKVCache``.

    Attributes:
        size: slots.
        alloc: gives slots away, int64 ``[n]`` on the host; None if there are too few.
    """

    size: int
    alloc: Callable[..., Tensor | None]


class HostPoolEntry(Protocol):
    """``sglang.srt.mem_cache.pool_host.group.PoolEntry``."""

    host_pool: HostPool
    device_pool: object


class HostPoolGroup(Protocol):
    """``sglang.srt.mem_cache.pool_host.group.HostPoolGroup``."""

    entries: Sequence[HostPoolEntry]


class TransferEngine(Protocol):
    """``sglang.srt.mem_cache.l2_transfer.L2TransferEngine``.

    Attributes:
        submit_device_to_host: launches copies; takes ``L2Transfer`` ones.
        submit_host_to_device: likewise, the other way.
    """

    submit_device_to_host: Callable[..., object]
    submit_host_to_device: Callable[..., object]


class HiCacheController(Protocol):
    """``sglang.srt.managers.cache_controller.HiCacheController``.

    Attributes:
        enable_storage: a storage behind the host's memory brings rows, too.
    """

    mem_pool_host: HostPoolGroup
    l2_transfer_engine: TransferEngine
    enable_storage: bool


class TreeCache(Protocol):
    """``sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache``.

    Attributes:
        tree_components: the kinds of what it has; only of ``UnifiedRadixCache``.
    """

    tree_components: Sequence[object]

    def evict_host(self, num_tokens: int, component_type: object) -> int:
        """Let slots of the host's memory go; only of ``UnifiedRadixCache``."""

    def supports_prefix_sharing(self) -> bool:
        """Tell whether requests find rows of others."""

    def supports_swa(self) -> bool:
        """Tell whether it has rows with a window."""

    def supports_mamba(self) -> bool:
        """Tell whether it has recurrent states."""

    def evictable_size(self) -> int:
        """Return the rows that no request has locked."""

    def full_evictable_size(self) -> int:
        """Return those of them without a window."""

    def swa_evictable_size(self) -> int:
        """Return those of them with a window."""

    def mamba_evictable_size(self) -> int:
        """Return the states that no request has locked."""

    def protected_size(self) -> int:
        """Return the rows that requests have locked."""

    def all_values_flatten(self) -> Tensor:
        """Return all slots, int64 ``[n]``; an empty ``RadixCache`` raises."""

    def evict(self, params: object) -> object:
        """Let rows leave, the least recently used ones first."""

    def session_records(self) -> Mapping[str, KvInfo]:
        """Return the rows that streaming sessions hold."""

    def release_session(self, session_id: str) -> None:
        """Let a streaming session give back its rows; its next turn computes them."""


class GenerationBatchResult(Protocol):
    """``sglang.srt.managers.utils.GenerationBatchResult``, as a model worker returns it.

    Attributes:
        next_token_ids: int ``[num_requests]`` on the device; in a verify step int
            ``[num_requests * draft_token_num]``: what follows each accepted row, then anything.
        accept_lens: int32 ``[num_requests]``, accepted drafts and one; None without drafts.
        delay_sample_func: samples later, after the step before was taken in; None if it is done.
    """

    next_token_ids: Tensor | None
    accept_lens: Tensor | None
    delay_sample_func: Callable[[], object] | None


class InternalState(Protocol):
    """``sglang.srt.managers.io_struct.GetInternalStateReqOutput``."""

    internal_state: dict[str, object]


class MambaPool(Protocol):
    """``sglang.srt.mem_cache.memory_pool.MambaPool``.

    Attributes:
        copy_from: copies states; takes the slots to read, then those to write.
    """

    copy_from: Callable[..., None]


class MambaSlotAllocator(Protocol):
    """``sglang.srt.mem_cache.allocator.mamba.MambaSlotAllocator``.

    Attributes:
        size: slots that are handed out, from 1 on.
    """

    size: int


class ReqToTokenPool(Protocol):
    """``sglang.srt.mem_cache.memory_pool.ReqToTokenPool``.

    Attributes:
        req_to_token: int32 ``[requests + 1, positions]``, the slot of each row; line 0 is padding.
        req_index_to_mamba_index_mapping: int32 ``[requests + 1]``, the slot of each request's
            state; only of ``HybridReqToTokenPool``.
        mamba_pool: the states; likewise.
        mamba_allocator: hands out their slots; likewise.
        mamba_ckpt_pool: has states of the tree in another format; likewise, None without it.
    """

    req_to_token: Tensor
    req_index_to_mamba_index_mapping: Tensor
    mamba_pool: MambaPool
    mamba_allocator: MambaSlotAllocator
    mamba_ckpt_pool: object | None


class AttnBackend(Protocol):
    """``sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend``.

    Attributes:
        linear_attn_backend: of the layers with states.
        update_mamba_state_after_mtp_verify: writes states once drafts are decided; takes the number
            of each request's last accepted row, the slots of states for the tree, and the numbers
            of the rows behind which these are, -1 for none.
    """

    linear_attn_backend: object
    update_mamba_state_after_mtp_verify: Callable[..., None]


class Allocator(Protocol):
    """``sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator``.

    Attributes:
        size: slots that are handed out; slot 0, and in pages page 0, is padding beside them.
        size_full: of ``SWATokenToKVPoolAllocator`` alone, likewise for rows without a window.
        size_swa: likewise for rows with one.
        page_size: slots per page.
    """

    size: int
    size_full: int
    size_swa: int
    page_size: int

    def get_kvcache(self) -> RowPool:
        """Return the pool with the rows."""


class RowPool(Protocol):
    """``sglang.srt.mem_cache.memory_pool.KVCache``.

    Attributes:
        k_buffer: by layer, ``[slots, heads, size]``; only of ``MHATokenToKVPool``.
        v_buffer: likewise.
        kv_buffer: by layer, ``[slots, 1, size]``; only of ``MLATokenToKVPool``.
        start_layer: the number of the first layer.
        full_kv_pool: the rows of layers without a window; only of ``SWAKVPool``, and of
            ``HybridLinearKVPool``.
        swa_kv_pool: the rows of layers with a window; only of ``SWAKVPool``.
        layers_mapping: by layer, its number in its pool, and True with a window; likewise.
        full_to_swa_index_mapping: int64 ``[slots]``, the slot in ``swa_kv_pool`` of each slot of
            ``full_kv_pool``, 0 for none; likewise.
        full_attention_layer_id_mapping: by layer, its number in ``full_kv_pool``; only of
            ``HybridLinearKVPool``.
        move_kv_cache: copies rows; takes the slots to write, then the slots to read, both on the
            device.
    """

    k_buffer: Sequence[Tensor]
    v_buffer: Sequence[Tensor]
    kv_buffer: Sequence[Tensor]
    start_layer: int
    full_kv_pool: RowPool
    swa_kv_pool: RowPool
    layers_mapping: Mapping[int, tuple[int, bool]]
    full_to_swa_index_mapping: Tensor
    full_attention_layer_id_mapping: Mapping[int, int]
    move_kv_cache: Callable[[Tensor, Tensor], None]


class ModelRunner(Protocol):
    """``sglang.srt.model_executor.model_runner.ModelRunner``.

    Attributes:
        sliding_window_size: rows behind its own that a query of a layer with a window sees.
    """

    device: str
    attn_backend: AttnBackend
    sliding_window_size: int | None
    model: nn.Module


class TpWorker(Protocol):
    """``sglang.srt.managers.tp_worker.TpModelWorker``."""

    model_runner: ModelRunner


class ModelWorker(Protocol):
    """``sglang.srt.speculative.base_spec_worker.BaseSpecWorker``, or a ``TpModelWorker``."""

    forward_batch_generation: Callable[..., GenerationBatchResult]


class SpecAlgorithm(Protocol):
    """``sglang.srt.speculative.spec_info.SpeculativeAlgorithm``."""

    name: str


class Scheduler(Protocol):
    """``sglang.srt.managers.scheduler.Scheduler``.

    Attributes:
        enable_overlap: forwards run on ``forward_stream``; else on the current stream.
        model_worker: runs a step's forwards; with drafts the drafter, which has the target.
        running_batch: the requests that decode.
        last_batch: the batch that was launched last; None when nothing ran.
        chunked_req: the request whose prompt goes on in the next step.
    """

    server_args: object
    model_config: object
    enable_overlap: bool
    forward_stream: torch.cuda.Stream
    is_generation: bool
    spec_algorithm: SpecAlgorithm
    tp_worker: TpWorker
    model_worker: ModelWorker
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: Allocator
    tree_cache: TreeCache
    running_batch: ScheduleBatch
    last_batch: ScheduleBatch | None
    chunked_req: Req | None
    waiting_queue: list[Req]
    batch_result_processor: object

    def send_abort_output(self, abort_req: object, req: Req) -> None:
        """Tell a client that its request has ended."""

    def _release_aborted_request(self, req: Req) -> None:
        """Let go of what an aborted request has beside its rows."""


class ServedModel(Protocol):
    """``sglang.srt.configs.model_config.ModelConfig``."""

    vocab_size: int
    context_len: int


class ServedArguments(Protocol):
    """``sglang.srt.server_args.ServerArgs``."""

    page_size: int | None


class TokenizerManager(Protocol):
    """``sglang.srt.managers.tokenizer_manager.TokenizerManager``."""

    model_config: ServedModel
    server_args: ServedArguments

    def abort_request(self, rid: str) -> None:
        """End every request whose name begins with ``rid``."""

    async def flush_cache(self) -> object:
        """Empty the radix tree, unless requests run."""

    async def get_internal_state(self) -> list[dict[str, Any]]:
        """Return the state of each data-parallel rank's first scheduler."""


class ServedEngine(Protocol):
    """``sglang.srt.entrypoints.engine.Engine``."""

    tokenizer_manager: TokenizerManager

    async def async_generate(self, **arguments: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Make a request; with ``stream`` its outputs so far come as they grow."""

    def shutdown(self) -> None:
        """End the engine and its processes."""
