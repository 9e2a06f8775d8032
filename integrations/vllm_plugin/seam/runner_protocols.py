"""vLLM's model runners as kvtxn reads them, their layers, batches and connectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from ...serving.step import Array
from .engine_protocols import (
    CacheConfig,
    CompilationConfig,
    KVCacheConfig,
    KVCacheSpec,
    LoRARequest,
    ModelConfig,
    RequestState,
    SpeculativeConfig,
    VllmConfig,
)

# -- batches and runners --------------------------------------------------------------


class Mirrored(Protocol):
    """``vllm.v1.utils.CpuGpuBuffer``: a tensor on the host and on the device."""

    np: Array
    gpu: Tensor


class BlockTable(Protocol):
    """``vllm.v1.worker.block_table.BlockTable``: one group's of the V1 runner."""

    block_size: int
    block_table: Mirrored
    slot_mapping: Mirrored

    def get_cpu_tensor(self) -> Tensor:
        """Return the host's table."""


class InputBatchV1(Protocol):
    """``vllm.v1.worker.gpu_input_batch.InputBatch``."""

    block_table: Sequence[BlockTable]
    num_computed_tokens_cpu: Array
    num_prompt_tokens: Array
    vocab_size: int

    @property
    def req_ids(self) -> list[str]:
        """The requests' ids in the order of the batch."""

    @property
    def num_reqs(self) -> int:
        """The number of requests."""

    def swap_states(self, i1: int, i2: int) -> None:
        """Let two requests change places."""


class InputBatchV2(Protocol):
    """``vllm.v1.worker.gpu.input_batch.InputBatch``."""

    req_ids: list[str]
    num_reqs: int
    num_tokens: int
    num_draft_tokens: int
    num_draft_tokens_per_req: Array | None
    num_scheduled_tokens: Array
    idx_mapping_np: Array
    is_prefilling_np: Array
    has_prefill: bool
    num_computed_prefill_tokens_np: Array
    prefill_len_np: Array
    cu_num_logits: Tensor
    logits_indices: Tensor
    query_start_loc: Tensor


class DraftCounts(Protocol):
    """``vllm.v1.spec_decode.metadata.SpecDecodeMetadata``."""

    num_draft_tokens: list[int]


#: The result of the V1 runner's ``_prepare_inputs``: the rows with logits, int ``[num_outputs]``,
#: the drafts of each request, None without any, and the most tokens that a request can get.
Prepared: TypeAlias = tuple[Tensor, DraftCounts | None, int]


class SamplerOutput(Protocol):
    """``vllm.v1.outputs.SamplerOutput``."""

    sampled_token_ids: Tensor


class AttentionGroup(Protocol):
    """``vllm.v1.worker.utils.AttentionGroup``: layers that share a builder of metadata."""

    layer_names: list[str]
    metadata_builders: list[MetadataBuilder]


class AdapterManager(Protocol):
    """``vllm.lora.model_manager.LoRAModelManager``."""

    def get_adapter(self, adapter_id: int) -> object:
        """Return an adapter that is loaded; None if it is not."""


class WorkerAdapters(Protocol):
    """``vllm.lora.worker_manager.WorkerLoRAManager``."""

    _adapter_manager: AdapterManager

    def _load_adapter(self, lora_request: LoRARequest) -> object:
        """Load an adapter's files."""


class Runner(Protocol):
    """``vllm.v1.worker.gpu_model_runner.GPUModelRunner``: what it shares with the V2 runner."""

    cache_config: CacheConfig
    compilation_config: CompilationConfig
    device: torch.device
    dtype: torch.dtype
    kv_cache_config: KVCacheConfig
    lora_manager: WorkerAdapters
    max_model_len: int
    max_num_reqs: int
    max_num_tokens: int
    model_config: ModelConfig
    speculative_config: SpeculativeConfig | None
    vllm_config: VllmConfig
    attn_groups: list[list[AttentionGroup]]

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Describe each layer's cache."""

    def get_model(self) -> nn.Module:
        """Return the target model."""


class RunnerV1(Runner, Protocol):
    """``vllm.v1.worker.gpu_model_runner.GPUModelRunner``."""

    discard_request_mask: Mirrored
    input_batch: InputBatchV1
    input_ids: Mirrored
    num_prompt_logprobs: dict[str, int]
    positions: Tensor
    query_start_loc: Mirrored
    uniform_decode_query_len: int
    requests: dict[str, RequestState]
    seq_lens: Tensor


class PendingReceive(Protocol):
    """``vllm.v1.worker.gpu.pp_utils.PendingRecv``: what a pipeline stage is sent of a step."""

    idx_mapping_np: Array
    gen_at_receive_np: Array


class StageHandler(Protocol):
    """``vllm.v1.worker.gpu.pp_utils.PPHandler``."""

    is_last_rank: bool
    queue: Sequence[PendingReceive | None]
    req_idx_gen_np: Array


class BlockTablesV2(Protocol):
    """``vllm.v1.worker.gpu.block_table.BlockTables``."""

    slot_mappings: Tensor


class RunnerV2(Runner, Protocol):
    """``vllm.v1.worker.gpu.model_runner.GPUModelRunner``."""

    block_tables: BlockTablesV2
    decode_query_len: int
    is_last_pp_rank: bool
    kv_connector: object
    model_state: object
    pp_handler: StageHandler | None


# -- KV connectors --------------------------------------------------------------------


class BlockList(Protocol):
    """``vllm.v1.kv_offload.base.GPULoadStoreSpec``: blocks of the cache, group after group."""

    block_ids: Array
    block_indices: Sequence[int]
    group_sizes: Sequence[int]


class CacheTensor(Protocol):
    """``vllm.v1.kv_offload.base.CanonicalKVCacheTensor``: a cache, ``[num_blocks, ...]``."""

    tensor: Tensor


class CacheTensorRef(Protocol):
    """``vllm.v1.kv_offload.base.CanonicalKVCacheRef``: a layer's part of a cache."""

    tensor_idx: int


class CacheTensors(Protocol):
    """``vllm.v1.kv_offload.base.CanonicalKVCaches``: the caches as connectors get them."""

    tensors: list[CacheTensor]
    group_data_refs: list[list[CacheTensorRef]]


class OffloadingJob(Protocol):
    """``vllm.distributed.kv_transfer.kv_connector.v1.offloading.common.TransferJob``."""

    req_id: str
    src_spec: Any  # a ``BlockList`` of a store, a place in the connector's store of a load
    dst_spec: Any  # the other one


class OffloadingJobs(Protocol):
    """``vllm.distributed.kv_transfer.kv_connector.v1.offloading.common.OffloadingConnectorMetadata``."""

    load_jobs: dict[int, OffloadingJob]
    store_jobs: dict[int, OffloadingJob]


class LooseBlocks(Protocol):
    """``vllm.v1.simple_kv_offload.metadata.SimpleCPUOffloadMetadata``."""

    load_gpu_blocks: list[int]
    store_gpu_blocks: list[int]


class SlotTransfer(Protocol):
    """``vllm.distributed.kv_transfer.kv_connector.v1.example_connector.ReqMeta``."""

    is_store: bool
    slot_mapping: Tensor
    token_ids: Tensor


class SlotTransfers(Protocol):
    """``vllm.distributed.kv_transfer.kv_connector.v1.example_connector.ExampleConnectorMetadata``."""

    requests: list[SlotTransfer]


class ConnectorOutput(Protocol):
    """``vllm.v1.outputs.KVConnectorOutput``."""

    finished_recving: set[str] | None


# -- layers ---------------------------------------------------------------------------


class Backend(Protocol):
    """``vllm.v1.attention.backend.AttentionBackend``."""

    def get_name(self) -> str:
        """Return vLLM's name of the backend."""


class AttentionLayer(Protocol):
    """``vllm.model_executor.layers.attention.attention.Attention``; ``MLAAttention``, too."""

    impl: Any  # each backend's is another; ``FlashImpl`` and ``LatentImpl`` are two of them
    kv_cache: Tensor
    kv_cache_dtype: str
    layer_name: str
    _k_scale: Tensor
    _v_scale: Tensor
    _k_scale_float: float
    _v_scale_float: float

    def get_attn_backend(self) -> Backend:
        """Return the layer's backend."""


class FlashImpl(Protocol):
    """``vllm.v1.attention.backends.flash_attn.FlashAttentionImpl``."""

    alibi_slopes: Tensor | None
    kv_cache_dtype: str
    logits_soft_cap: float
    scale: float
    sinks: Tensor | None
    sliding_window: tuple[int, int]
    vllm_flash_attn_version: int | None


class RecurrentLayer(Protocol):
    """``vllm.model_executor.layers.mamba.abstract.MambaBase``: a layer with states."""

    kv_cache: tuple[Tensor, ...]


class GatedDeltaLayer(RecurrentLayer, Protocol):
    """``vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention``."""

    A_log: Tensor
    dt_bias: Tensor
    head_k_dim: int
    head_v_dim: int
    key_dim: int
    norm: nn.Module
    num_k_heads: int
    num_v_heads: int
    prefix: str
    tp_size: int
    value_dim: int

    def rearrange_mixed_qkv(self, mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of rows."""

    def _can_use_fused_gdn_mtp_decode(self, attn_metadata: GatedDeltaMetadata) -> bool:
        """Tell whether the fused kernel computes a step."""


class Mamba2Layer(RecurrentLayer, Protocol):
    """``vllm.model_executor.layers.mamba.mamba_mixer2.MambaMixer2``."""

    A: Tensor
    D: Tensor
    dt_bias: Tensor
    head_dim: int
    is_blackwell: bool
    n_groups: int
    num_heads: int
    prefix: str
    ssm_state_size: int
    tp_size: int
    tped_conv_size: int
    tped_dt_size: int
    tped_intermediate_size: int

    def split_hidden_states_B_C_fn(self, hidden_states_B_C: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of the convolution's output: rows, B and C."""


class ShortConvLayer(RecurrentLayer, Protocol):
    """``vllm.model_executor.layers.mamba.short_conv.ShortConv``."""

    in_proj: nn.Module
    out_proj: nn.Module
    prefix: str


# -- metadata of a forward ------------------------------------------------------------


class BatchMetadata(Protocol):
    """``vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadata``; others have the same."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    num_actual_tokens: int


class TritonMetadata(BatchMetadata, Protocol):
    """``vllm.v1.attention.backends.triton_attn.TritonAttentionMetadata``."""

    max_seq_len: int


class FlashMetadata(TritonMetadata, Protocol):
    """``vllm.v1.attention.backends.flash_attn.FlashAttentionMetadata``."""

    causal: bool | Tensor
    max_num_splits: int
    max_query_len: int
    scheduler_metadata: Tensor | None


class LatentDecodes(Protocol):
    """``vllm.model_executor.layers.attention.mla_attention.MLACommonDecodeMetadata``."""

    block_table: Tensor
    seq_lens: Tensor


class LatentMetadata(Protocol):
    """``vllm.model_executor.layers.attention.mla_attention.MLACommonMetadata``."""

    causal: bool
    decode: LatentDecodes | None
    max_seq_len: int
    num_decode_tokens: int
    query_start_loc: Tensor


class FlashLatentDecodes(LatentDecodes, Protocol):
    """``vllm.v1.attention.backends.mla.flashattn_mla.FlashAttnMLADecodeMetadata``."""

    max_num_splits: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    scheduler_metadata: Tensor | None


class FlashLatentMetadata(LatentMetadata, Protocol):
    """``vllm.v1.attention.backends.mla.flashattn_mla.FlashAttnMLAMetadata``."""

    decode: FlashLatentDecodes | None


class GatedDeltaMetadata(Protocol):
    """``vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadata``.

    A tensor is None where the counts say that nothing is in it; it is looked at after them.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    has_initial_state: Tensor
    non_spec_query_start_loc: Tensor
    non_spec_state_indices_tensor: Tensor | None
    non_spec_token_indx: Tensor
    num_accepted_tokens: Tensor
    num_decodes: int
    num_prefills: int
    num_spec_decode_tokens: int
    num_spec_decodes: int
    spec_query_start_loc: Tensor
    spec_sequence_masks: Tensor | None
    spec_sequence_masks_cpu: Tensor
    spec_state_indices_tensor: Tensor
    spec_token_indx: Tensor


class SelectiveMetadata(Protocol):
    """``vllm.v1.attention.backends.mamba_attn.BaseMambaAttentionMetadata``.

    A tensor is None where the counts say that nothing is in it; it is looked at after them.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    num_accepted_tokens: Tensor | None
    num_decode_tokens: int
    num_decodes: int
    num_prefills: int
    query_start_loc_d: Tensor
    state_indices_tensor_d: Tensor | None
    state_indices_tensor_p: Tensor


class MetadataBuilder(Protocol):
    """``vllm.v1.attention.backend.AttentionMetadataBuilder``."""

    layer_names: Sequence[str]


class FlashBuilder(MetadataBuilder, Protocol):
    """``vllm.v1.attention.backends.flash_attn.FlashAttentionMetadataBuilder``."""

    block_size: int

    def _get_scheduler_metadata(self, **arguments: object) -> Tensor | None:
        """Make FlashAttention's schedule of a batch."""


class FlashLatentBuilder(MetadataBuilder, Protocol):
    """``vllm.v1.attention.backends.mla.flashattn_mla.FlashAttnMLAMetadataBuilder``."""

    page_size: int

    def _schedule_decode(self, **arguments: object) -> Tensor | None:
        """Make FlashAttention's schedule of the rows that decode."""


class ForwardContext(Protocol):
    """``vllm.forward_context.ForwardContext``."""

    attn_metadata: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
    slot_mapping: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]
