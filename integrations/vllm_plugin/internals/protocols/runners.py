"""vLLM's model runners as kvtxn reads them, their batches and connectors; see ``engine``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from ....serving.step import Array
from .engine import (
    CacheConfig,
    CompilationConfig,
    KVCacheConfig,
    ModelConfig,
    RequestState,
    SpeculativeConfig,
    VllmConfig,
)
from .layers import KVCacheSpec, MetadataBuilder

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


#: The bases of classes that kvtxn puts before a runner's own. A type checker learns from them what
#: the runner has; there is nothing in them when kvtxn runs.
if TYPE_CHECKING:
    BeforeRunner = Runner
    BeforeV1 = RunnerV1
    BeforeV2 = RunnerV2
else:
    BeforeRunner = BeforeV1 = BeforeV2 = object


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
