"""vLLM's engine as kvtxn reads it: a protocol for each class, with the attributes that are read.

They are named as vLLM names them, so a type checker sees a name that is misspelt or of another
class. The docstring of each begins with vLLM's class; ``tests/vllm_plugin/unit/test_protocols.py``
looks for its attributes there. Attributes that some releases lack are not here: code asks for them
by ``getattr`` with a default. Model runners, layers and their metadata
are in ``runner_protocols``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

# -- configuration --------------------------------------------------------------------


class ParallelConfig(Protocol):
    """``vllm.config.parallel.ParallelConfig``."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    prefill_context_parallel_size: int
    distributed_executor_backend: object

    @property
    def use_ubatching(self) -> bool:
        """A step is divided into microbatches."""


class TextConfig(Protocol):
    """``transformers.PreTrainedConfig``: the text model's; most settings are not every model's."""

    model_type: str


class ModelConfig(Protocol):
    """``vllm.config.model.ModelConfig``."""

    dtype: torch.dtype
    runner_type: str
    max_model_len: int
    hf_text_config: TextConfig
    served_model_name: object

    @property
    def use_mla(self) -> bool:
        """The model's attention keeps latent rows."""

    @property
    def is_hybrid(self) -> bool:
        """The model has layers of attention and layers with states."""

    @property
    def is_encoder_decoder(self) -> bool:
        """The model has an encoder."""

    def get_vocab_size(self) -> int:
        """Return the number of token ids."""

    def get_head_size(self) -> int:
        """Return the size of an attention head."""

    def get_total_num_kv_heads(self) -> int:
        """Return the heads of keys and values, of all ranks together."""


class SpeculativeConfig(Protocol):
    """``vllm.config.speculative.SpeculativeConfig``."""

    num_speculative_tokens: int
    method: str | None
    draft_model_config: ModelConfig
    enable_adaptive_verification: bool
    num_speculative_tokens_per_batch_size: object


class CacheConfig(Protocol):
    """``vllm.config.cache.CacheConfig``."""

    block_size: int
    cache_dtype: str
    kv_cache_layout: str | None
    enable_prefix_caching: bool
    kv_cache_memory_bytes: int | None
    num_gpu_blocks: int | None
    mamba_block_size: int | None
    mamba_cache_dtype: str
    mamba_cache_mode: str
    mamba_ssm_cache_dtype: str


class SchedulerConfig(Protocol):
    """``vllm.config.scheduler.SchedulerConfig``."""

    max_num_seqs: int
    scheduler_cls: object

    def get_scheduler_cls(self) -> type:
        """Return the class of the scheduler."""


class DeviceConfig(Protocol):
    """``vllm.config.device.DeviceConfig``."""

    device_type: str


class NamedChoice(Protocol):
    """``enum.Enum``: a member of one of vLLM's enumerations."""

    @property
    def name(self) -> str:
        """The member's name."""

    @property
    def value(self) -> Any:
        """The member's value."""


class GraphMode(NamedChoice, Protocol):
    """``vllm.config.compilation.CUDAGraphMode``."""

    def mixed_mode(self) -> GraphMode:
        """Return the mode of steps with prompts among them."""


class CompilationConfig(Protocol):
    """``vllm.config.compilation.CompilationConfig``."""

    static_forward_context: Mapping[str, Layer]
    cudagraph_mode: GraphMode
    max_cudagraph_capture_size: int | None
    use_inductor_graph_partition: bool
    pass_config: object


class AttentionConfig(Protocol):
    """``vllm.config.attention.AttentionConfig``."""

    backend: NamedChoice | None
    flash_attn_version: int | None


class MambaConfig(Protocol):
    """``vllm.config.mamba.MambaConfig``."""

    backend: NamedChoice


class TransferConfig(Protocol):
    """``vllm.config.kv_transfer.KVTransferConfig``."""

    kv_connector: str | None
    kv_connector_extra_config: Mapping[str, object]


class VllmConfig(Protocol):
    """``vllm.config.vllm.VllmConfig``."""

    additional_config: object
    attention_config: AttentionConfig
    cache_config: CacheConfig
    compilation_config: CompilationConfig
    device_config: DeviceConfig
    kv_transfer_config: TransferConfig | None
    mamba_config: MambaConfig
    model_config: ModelConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig
    speculative_config: SpeculativeConfig | None

    @property
    def num_speculative_tokens(self) -> int:
        """The most drafts of a request in one step."""

    @property
    def use_v2_model_runner(self) -> bool:
        """Workers have the V2 model runner."""


# -- the KV cache ---------------------------------------------------------------------


class KVCacheSpec(Protocol):
    """``vllm.v1.kv_cache_interface.KVCacheSpec``: the cache of a layer, or of a group of them."""

    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """The bytes of a block in one layer."""


class Layer(Protocol):
    """``vllm.model_executor.layers.attention_layer_base.AttentionLayerBase``: one with a cache."""

    kv_cache: Tensor | tuple[Tensor, ...]


class KVCacheGroup(Protocol):
    """``vllm.v1.kv_cache_interface.KVCacheGroupSpec``."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec


class KVCacheTensor(Protocol):
    """``vllm.v1.kv_cache_interface.KVCacheTensor``: an allocation, in bytes."""

    size: int
    block_stride: int


class KVCacheConfig(Protocol):
    """``vllm.v1.kv_cache_interface.KVCacheConfig``."""

    num_blocks: int
    kv_cache_groups: list[KVCacheGroup]
    kv_cache_layout: str | None
    kv_cache_tensors: list[KVCacheTensor]


# -- requests and steps, as the scheduler tells them ----------------------------------


class LoRARequest(Protocol):
    """``vllm.lora.request.LoRARequest``."""

    lora_int_id: int
    lora_name: str
    lora_path: str


class Placeholder(Protocol):
    """``vllm.multimodal.inputs.PlaceholderRange``: positions that an input takes."""

    offset: int
    length: int
    is_embed: Tensor | None


class Feature(Protocol):
    """``vllm.multimodal.inputs.MultiModalFeatureSpec``."""

    identifier: str
    mm_hash: str | None
    modality: str
    mm_position: Placeholder


class MediaItems(Protocol):
    """``vllm.multimodal.parse.ModalityDataItems``: the items of one modality in a prompt."""

    def get_all_items_for_hash(self) -> list[object]:
        """Return each item; None for one of which the client sent the name alone."""


class ProcessorInputs(Protocol):
    """``vllm.multimodal.processing.inputs.ProcessorInputs``: a prompt, its items, their names."""

    mm_data_items: Mapping[str, MediaItems]
    mm_uuid_items: Mapping[str, Sequence[str | None]] | None

    def get_mm_hashes(self, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
        """Return the name or the hash of each item, by modality."""
        raise NotImplementedError


if TYPE_CHECKING:  # likewise
    BeforeInputs = ProcessorInputs
else:
    BeforeInputs = object


class SamplingParams(Protocol):
    """``vllm.sampling_params.SamplingParams``."""

    extra_args: dict[str, Any] | None
    prompt_logprobs: int | None


class EngineCoreRequest(Protocol):
    """``vllm.v1.engine.EngineCoreRequest``: a request, as the front end sends it."""

    mm_features: list[Feature] | None
    sampling_params: SamplingParams | None


class RequestContent(Protocol):
    """``vllm.v1.core.sched.output.NewRequestData``: what it shares with ``RequestState``."""

    prompt_token_ids: list[int] | None
    prompt_embeds: Tensor | None
    prompt_is_token_ids: list[bool] | None
    mm_features: Sequence[Feature]
    lora_request: LoRARequest | None
    num_computed_tokens: int
    block_ids: Sequence[list[int]]


class NewRequest(RequestContent, Protocol):
    """``vllm.v1.core.sched.output.NewRequestData``."""

    req_id: str


class RequestState(RequestContent, Protocol):
    """``vllm.v1.worker.gpu_input_batch.CachedRequestState``: the V1 runner's of a request."""

    output_token_ids: list[int]
    sampling_params: SamplingParams | None


class CachedRequests(Protocol):
    """``vllm.v1.core.sched.output.CachedRequestData``: requests of a step that are not new."""

    req_ids: list[str]
    resumed_req_ids: set[str]
    all_token_ids: dict[str, list[int]]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]


class SchedulerOutput(Protocol):
    """``vllm.v1.core.sched.output.SchedulerOutput``: a step."""

    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_encoder_inputs: dict[str, list[int]]
    free_encoder_mm_hashes: list[str]
    finished_req_ids: set[str]
    preempted_req_ids: set[str] | None
    kv_cache_block_copies: Sequence[BlockCopy] | None
    new_block_ids_to_zero: list[int] | None
    kv_connector_metadata: object


class BlockCopy(Protocol):
    """``vllm.v1.core.kv_cache_utils.KVCacheBlockCopy``."""

    src_block_id: int
    dst_block_id: int


# -- the scheduler --------------------------------------------------------------------


class Request(Protocol):
    """``vllm.v1.request.Request``."""

    request_id: str
    num_computed_tokens: int
    is_prefill_chunk: bool
    num_tokens: int
    skip_reading_prefix_cache: bool | None
    drop_stale_output: bool
    block_hashes: Sequence[bytes]
    sampling_params: SamplingParams | None

    def is_finished(self) -> bool:
        """Tell whether the request has ended."""


class CacheManager(Protocol):
    """``vllm.v1.core.kv_cache_manager.KVCacheManager``."""

    enable_caching: bool
    kv_cache_config: KVCacheConfig
    coordinator: CacheCoordinator

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return a request's blocks by group."""

    def evict_blocks(self, block_ids: Collection[int]) -> None:
        """Take blocks out of the prefix cache."""


class CacheCoordinator(Protocol):
    """``vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator``."""

    single_type_managers: Sequence[CacheGroupManager]
    scheduler_block_size: int
    eagle_group_ids: set[int]


class CacheGroupManager(Protocol):
    """``vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager``."""

    block_size: int
    kv_cache_group_id: int
    block_pool: BlockPool


class BlockPool(Protocol):
    """``vllm.v1.core.block_pool.BlockPool``."""

    hash_block_size: int

    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: list[int]
    ) -> list[object] | None:
        """Return the blocks of some groups under a hash; None if the cache lacks one of them."""


class Scheduler(Protocol):
    """``vllm.v1.core.sched.scheduler.Scheduler``."""

    kv_cache_config: KVCacheConfig
    kv_cache_manager: CacheManager
    requests: dict[str, Request]
    running: list[Request]
    grammar_compile_error_reqs: Any  # a set up to 0.32, then a dict

    def _preempt_request(
        self, request: Request, timestamp: float, *, drop_stale_output: bool
    ) -> None:
        """Take a request's blocks away, to compute it again."""


#: The bases of classes that kvtxn puts before a scheduler's, and its cache manager's, own. A type
#: checker learns from them what these have; there is nothing in it when kvtxn runs.
if TYPE_CHECKING:
    BeforeScheduler = Scheduler
    BeforeCacheManager = CacheManager
else:
    BeforeScheduler = BeforeCacheManager = object


# -- statistics -----------------------------------------------------------------------


class PrefixCacheStats(Protocol):
    """``vllm.v1.metrics.stats.PrefixCacheStats``."""

    hits: int


class DraftStats(Protocol):
    """``vllm.v1.spec_decode.metrics.SpecDecodingStats``."""

    num_draft_tokens: int
    num_accepted_tokens: int


class SchedulerStats(Protocol):
    """``vllm.v1.metrics.stats.SchedulerStats``."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    prefix_cache_stats: PrefixCacheStats
    connector_prefix_cache_stats: PrefixCacheStats | None
    spec_decoding_stats: DraftStats | None


class IterationStats(Protocol):
    """``vllm.v1.metrics.stats.IterationStats``."""

    num_generation_tokens: int
    num_preempted_reqs: int


# -- workers and the front end --------------------------------------------------------


class Worker(Protocol):
    """``vllm.v1.worker.gpu_worker.Worker``."""

    model_runner: Any  # which of the runners it is, the configuration says

    def compile_or_warm_up_model(self) -> object:
        """Warm up, and capture graphs."""

    def determine_available_memory(self) -> int:
        """Return the bytes that the KV cache may take."""


class WorkerWrapper(Protocol):
    """``vllm.v1.worker.worker_base.WorkerWrapperBase``."""

    rpc_rank: int
    vllm_config: VllmConfig
    worker: Worker


class RankGroup(Protocol):
    """``vllm.distributed.parallel_state.GroupCoordinator``."""

    cpu_group: torch.distributed.ProcessGroup
    rank_in_group: int
    world_size: int

    @property
    def is_last_rank(self) -> bool:
        """This process is the group's last one."""

    def broadcast_object(self, obj: Any, src: int) -> Any:
        """Return the object that the rank ``src`` gives."""


class Client(Protocol):
    """``vllm.v1.engine.core_client.EngineCoreClient``."""

    kvtxn_pid: int  # kvtxn's own: the process that the client belongs to

    def collective_rpc(self, method: str) -> Iterable[Any]:
        """Call a method of every worker; returns the answers by rank."""

    def shutdown(self) -> None:
        """End the engine."""


if TYPE_CHECKING:  # likewise
    BeforeClient = Client
else:
    BeforeClient = object


class EngineResources(Protocol):
    """``vllm.v1.engine.core_client.BackgroundResources``."""

    engine_dead: bool


class AsyncClient(Client, Protocol):
    """``vllm.v1.engine.core_client.AsyncMPClient``."""

    client_index: int
    core_engines: list[bytes]
    engine_ranks_managed: list[int]
    kvtxn_task: object  # kvtxn's own: it publishes the counters
    resources: EngineResources

    async def _call_utility_async(self, method: str, *args: object, engine: bytes) -> Any:
        """Call a method of one engine."""


class VllmEngine(Protocol):
    """``vllm.v1.engine.llm_engine.LLMEngine``: what it shares with ``AsyncLLM``."""

    engine_core: Any  # a ``Client``; of an engine in this process it has the core itself
    input_processor: object
    log_stats: bool
    vllm_config: VllmConfig


class CompletionOutput(Protocol):
    """``vllm.outputs.CompletionOutput``."""

    token_ids: Sequence[int]
    finish_reason: str | None


class RequestOutput(Protocol):
    """``vllm.outputs.RequestOutput``."""

    outputs: list[CompletionOutput]


class AsyncEngine(VllmEngine, Protocol):
    """``vllm.v1.engine.async_llm.AsyncLLM``."""

    def generate(
        self, prompt: object, sampling_params: object, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Make a request; yields its outputs as they come."""

    async def abort(self, request_id: str) -> None:
        """Give a request up."""

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> object:
        """Empty the prefix cache."""

    async def collective_rpc(self, method: str) -> list[Any]:
        """Call a method of every worker; returns the answers by rank."""

    def shutdown(self) -> None:
        """End the engine and its processes."""


class OfflineEngine(Protocol):
    """``vllm.entrypoints.llm.LLM``."""

    llm_engine: VllmEngine
