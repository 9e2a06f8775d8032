"""The methods and classes of vLLM that kvtxn replaces or calls; releases change them unnoticed.

Attributes that are read are in ``engine_protocols`` and ``runner_protocols``.

The methods that mixins override are listed where the mixins' hooks check them; here they get the
names of their classes. Left out is what cannot change unnoticed or is no private matter of vLLM's:

- its public interface: what users and plug-ins of other projects call and implement, as connectors
  do with ``KVConnectorBase_V1``;
- functions without parameters, and classes of which only the type is looked at: in a release
  without one the import fails before an engine serves, and kvtxn stays out with that reason;
- methods that a class inherits as it is, or implements as an interface of vLLM's asks: the one that
  it inherits them from, or one implementation, stands for all.

``policy.release_records`` keeps, for each release, their parameters and a hash of their source;
``tests/vllm_plugin/unit/test_hook_points.py`` finds whatever is missing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ..policy.engine_facts import GATED_DELTA, MAMBA2, OLMO_DELTA, SHORT_CONV
from . import (
    aligned_states,
    audited_requests,
    batches,
    containment,
    cpu_states,
    layers,
    prefix_lookups,
    state_commits,
    state_layers,
    whole_graphs,
)

#: Where a hook point matters: on any device, on a CPU, on a GPU, or for recurrent states on a CPU
#: or on a GPU.
PLACES: Final = ("all", "cpu", "gpu", "states", "states on gpu")

_SCHED: Final = "vllm.v1.core.sched"
_KV: Final = "vllm.v1.kv_cache_interface"
_V1: Final = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_V1_CPU: Final = "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
_V2: Final = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
_FLASH: Final = "vllm.v1.attention.backends.flash_attn"
_LAYERS: Final = "vllm.model_executor.layers"
_MLA: Final = "vllm.v1.attention.backends.mla"
_LATENT: Final = f"{_LAYERS}.attention.mla_attention"
_TRITON: Final = "vllm.v1.attention.backends.triton_attn"
_OPS: Final = "vllm.v1.attention.ops"
_MAMBA_COPIES: Final = "vllm.v1.worker.mamba_utils"
_FLA: Final = "vllm.third_party.flash_linear_attention.ops"
_CONNECTORS: Final = "vllm.distributed.kv_transfer"

#: Methods of the runners that say in which order the replaced ones run; the audit looks whether
#: they fail, whatever they take.
_STEP: Final = ("execute_model", "sample_tokens")


def _of(owner: str, methods: Iterable[str]) -> tuple[str, ...]:
    """Return the dotted names of a class's methods, each once."""
    return tuple(f"{owner}.{method}" for method in dict.fromkeys(methods))


#: Dotted names by place; of a class the fields count, of a function parameters and source.
HOOK_POINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "all": (
        "vllm.v1.worker.worker_base.WorkerWrapperBase.init_device",
        "vllm.v1.engine.llm_engine.LLMEngine.__init__",
        "vllm.v1.engine.async_llm.AsyncLLM.__init__",
        "vllm.v1.engine.core_client.AsyncMPClient._call_utility_async",
        "vllm.v1.engine.core_client.MPClient.shutdown",
        "vllm.v1.engine.input_processor.InputProcessor.process_inputs",
        "vllm.multimodal.processing.processor.BaseMultiModalProcessor.apply",
        "vllm.multimodal.processing.inputs.ProcessorInputs.get_mm_hashes",
        "vllm.forward_context.ForwardContext",
        f"{_LATENT}.MLACommonMetadata",
        f"{_SCHED}.output.SchedulerOutput",
        f"{_SCHED}.output.NewRequestData",
        f"{_SCHED}.output.CachedRequestData",
        f"{_KV}.KVCacheConfig",
        f"{_KV}.KVCacheGroupSpec",
        *_of(f"{_SCHED}.scheduler.Scheduler", ("__init__", *containment.SCHEDULER_METHODS)),
        *_of(f"{_SCHED}.scheduler.Scheduler", prefix_lookups.PLANNING_METHODS),
        *_of("vllm.v1.core.kv_cache_manager.KVCacheManager", prefix_lookups.LOOKING_METHODS),
        "vllm.v1.outputs.ModelRunnerOutput",
        "vllm.v1.outputs.SamplerOutput",
        "vllm.v1.spec_decode.metadata.SpecDecodeMetadata",
        # The V1 runner on a CPU has them from the one on a GPU.
        *_of(
            _V1,
            (
                *(name for name in batches.V1_METHODS if name != "initialize_kv_cache"),
                *(
                    name
                    for name in audited_requests.AUDITED_METHODS
                    if name != "initialize_kv_cache"
                ),
                *(*state_layers.METHODS, *_STEP),
            ),
        ),
    ),
    "cpu": (
        # All others of the runner's methods are those of the V1 runner on a GPU.
        f"{_V1_CPU}.initialize_kv_cache",
        *_of(
            "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl", layers.ATTENTION_METHODS
        ),
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadata",
        *_of(f"{_MLA}.cpu_mla.CPUMLAImpl", layers.LATENT_METHODS),
        *_of(f"{_MLA}.amx_mla.AMXMLAImpl", layers.LATENT_METHODS),
        f"{_CONNECTORS}.kv_connector.v1.offloading.config.get_offloading_group_ids",
        f"{_KV}.SlidingWindowSpec",
        f"{_KV}.ChunkedLocalAttentionSpec",
    ),
    "gpu": (
        *_of(_V1, (each for each in batches.V1_GPU_METHODS if each not in batches.V1_METHODS)),
        f"{_V1}.initialize_kv_cache",
        *_of(
            _V2,
            (
                *batches.V2_METHODS,
                *audited_requests.AUDITED_V2_METHODS,
                "get_kv_cache_spec",
                *_STEP,
            ),
        ),
        # What the ledger reads in between, or is told by.
        *_of(_V2, ("finish_requests", "add_requests")),
        *_of("vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager", ("capture", "run_fullgraph")),
        *_of("vllm.v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager", whole_graphs.METHODS),
        "vllm.v1.worker.gpu.cudagraph_utils.BatchExecutionDescriptor",
        # When pipeline stages hear what was accepted; ``serving.pipeline_steps`` builds on it.
        f"{_V2}._remove_request",
        *_of(
            "vllm.v1.worker.gpu.pp_utils.PPHandler",
            ("__init__", "on_req_idx_freed", "get_prev_sampled_outputs", "receive"),
        ),
        "vllm.v1.worker.gpu.pp_utils.PendingRecv",
        "vllm.v1.worker.gpu.block_table.BlockTables.__init__",
        "vllm.v1.worker.gpu.block_table.BlockTables.compute_slot_mappings",
        "vllm.v1.worker.gpu.block_table.BlockTables.gather_block_tables",
        "vllm.v1.worker.gpu.input_batch.InputBuffers.__init__",
        "vllm.v1.worker.gpu.input_batch.get_num_sampled_and_rejected",
        "vllm.v1.worker.gpu.async_utils.AsyncOutput.get_output",
        "vllm.v1.worker.gpu_worker.Worker.compile_or_warm_up_model",
        "vllm.v1.worker.gpu_worker.Worker.determine_available_memory",
        # What sleep takes away, and what comes back.
        *_of("vllm.v1.worker.gpu_worker.Worker", ("sleep", "discard", "wake_up")),
        "vllm.v1.worker.gpu.input_batch.InputBatch",
        *_of(
            f"{_FLASH}.FlashAttentionMetadataBuilder",
            (
                *("build", "build_for_cudagraph_capture", "update_block_table"),
                "_get_scheduler_metadata",
            ),
        ),
        *_of(f"{_FLASH}.FlashAttentionImpl", ("__init__", *layers.ATTENTION_METHODS)),
        f"{_FLASH}.FlashAttentionMetadata",
        f"{_TRITON}.TritonAttentionMetadataBuilder.build",
        *_of(f"{_TRITON}.TritonAttentionImpl", layers.ATTENTION_METHODS),
        f"{_TRITON}.TritonAttentionMetadata",
        f"{_OPS}.triton_unified_attention.unified_attention",
        f"{_LATENT}.MLACommonMetadataBuilder.build",
        f"{_LATENT}.MLACommonDecodeMetadata",
        f"{_LATENT}.MLAAttention.update_kv_cache",
        "vllm.v1.attention.backend.MLAAttentionImpl.do_kv_cache_update",
        f"{_MLA}.triton_mla.TritonMLAImpl.forward_mqa",
        f"{_OPS}.triton_decode_attention.decode_attention_fwd",
        f"{_MLA}.flashattn_mla.FlashAttnMLAMetadataBuilder._schedule_decode",
        f"{_MLA}.flashattn_mla.FlashAttnMLADecodeMetadata",
        f"{_MLA}.flashattn_mla.FlashAttnMLAImpl.forward_mqa",
        f"{_FLASH}.canonicalize_singleton_dim_strides",
        f"{_FLASH}.get_flash_attn_version",
        "vllm._custom_ops.reshape_and_cache_flash",
        "vllm.vllm_flash_attn.flash_attn_interface.flash_attn_varlen_func",
        f"{_CONNECTORS}.kv_connector.utils.get_kv_connector_cache_layout",
        # When the runners call connectors, which read rows then or later; ``policy.supported`` says
        # why that is not before a commit.
        *_of(
            "vllm.v1.worker.gpu.kv_connector.ActiveKVConnector",
            ("pre_forward", "post_forward", "finalize_step"),
        ),
        "vllm.v1.worker.kv_connector_model_runner_mixin."
        "KVConnectorModelRunnerMixin._get_kv_connector_output",
        *_of(
            f"{_CONNECTORS}.kv_connector.v1.offloading.worker.OffloadingConnectorWorker",
            ("handle_preemptions", "start_kv_transfers", "prepare_store_kv"),
        ),
        *_of(
            "vllm.v1.simple_kv_offload.worker.SimpleCPUOffloadWorker",
            ("start_load_kv", "wait_for_save"),
        ),
    ),
    "states": (
        f"{cpu_states.CORE_MODULE}.{cpu_states.CORE}",
        f"{_LAYERS}.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention.rearrange_mixed_qkv",
        "vllm._custom_ops.fused_sigmoid_gating_delta_rule_update_cpu",
        "vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadata",
        f"{_LAYERS}.mamba.mamba_mixer2.MambaMixer2.{cpu_states.FORWARDS[MAMBA2][0]}",
        f"{_LAYERS}.mamba.short_conv.ShortConv.{cpu_states.FORWARDS[SHORT_CONV][0]}",
        f"{_LAYERS}.mamba.ops.ssu_dispatch.selective_state_update",
        "vllm.v1.attention.backends.mamba2_attn.Mamba2AttentionMetadata",
        f"{_KV}.MambaSpec",
    ),
    # ``MambaMixer2`` and ``MambaSpec`` are above.
    "states on gpu": (
        *_of(
            f"{_LAYERS}.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention",
            (*state_layers.LAUNCHES[GATED_DELTA], *state_layers.GATED_DELTA_NORM),
        ),
        *_of(
            f"{_LAYERS}.mamba.gdn.olmo_gdn_linear_attn.OlmoHybridGatedDeltaNetAttention",
            state_layers.LAUNCHES[OLMO_DELTA],
        ),
        f"{_FLA}.fused_recurrent.fused_recurrent_gated_delta_rule",
        f"{_FLA}.fused_recurrent.fused_recurrent_gated_delta_rule_fwd_kernel",
        f"{_FLA}.fused_sigmoid_gating.fused_sigmoid_gating_delta_rule_update",
        *_of(
            "vllm.v1.worker.gpu.model_states.mamba_hybrid.MambaHybridModelState",
            state_commits.MODEL_STATE_METHODS,
        ),
        "vllm.v1.worker.gpu.model_states.mamba_hybrid.MambaHybridModelState.preprocess_state",
        "vllm.v1.worker.gpu.model_states.mamba_hybrid.MambaHybridModelState.postprocess_state",
        *_of(f"{_MAMBA_COPIES}.MambaSpecDecodeGPUContext", ("create", *aligned_states.METHODS)),
        f"{_MAMBA_COPIES}.precopy_mamba_align_fused_kernel",
        f"{_MAMBA_COPIES}.postprocess_mamba_fused_kernel",
        *_of(_V1, (*batches.V1_STATE_METHODS, *aligned_states.V1_METHODS)),
        # Where the V1 runner counts accepted drafts, and where it copies states and pasts.
        f"{_V1}._update_states_after_model_execute",
        *_of(_MAMBA_COPIES, ("preprocess_mamba", "postprocess_mamba_align_gpu")),
        f"{_MAMBA_COPIES}.MambaSpecDecodeGPUContext.initialize_from_forward_context",
        "vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadataBuilder.build",
    ),
}


def places_of(device: str) -> tuple[str, ...]:
    """Return the places of ``HOOK_POINTS`` that concern a device, "all" first.

    Those of both devices for one that is neither "cpu" nor "cuda".
    """
    own = {"cpu": ("cpu", "states"), "cuda": PLACES[2:]}.get(device, PLACES[1:])
    return ("all", *own)
