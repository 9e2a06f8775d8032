"""Every part of vLLM that kvtxn replaces, calls, or reads; named once, for those who record them.

The methods that mixins override are listed where the mixins' hooks check them; here they get the
names of their classes. ``policy.releases`` keeps, for each release, their parameters and a hash of
their source; ``tests/vllm_plugin/unit/test_hook_points.py`` finds whatever is missing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ..policy.engine import GATED_DELTA, MAMBA2, SHORT_CONV
from . import (
    aligned_states,
    audited,
    audited_v2,
    batches,
    gated_delta,
    gated_delta_hooks,
    layers,
    mixers,
    olmo_rows,
    scheduling,
    state_layers,
    verified_rows,
    verify_steps,
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

#: Methods of attention backends and of their builders of metadata.
_GIVES: Final = ("get_impl_cls", "get_builder_cls")
_BUILDS: Final = ("build", "build_for_cudagraph_capture")


def _of(owner: str, methods: Iterable[str]) -> tuple[str, ...]:
    """Return the dotted names of a class's methods."""
    return tuple(f"{owner}.{method}" for method in dict.fromkeys(methods))


#: Dotted names by place; of a class the fields count, of a function parameters and source.
HOOK_POINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "all": (
        "vllm.v1.worker.worker_base.WorkerWrapperBase.init_device",
        "vllm.v1.engine.llm_engine.LLMEngine.__init__",
        "vllm.v1.engine.async_llm.AsyncLLM.__init__",
        "vllm.v1.engine.async_llm.AsyncLLM.from_vllm_config",
        "vllm.v1.engine.core_client.AsyncMPClient._call_utility_async",
        "vllm.v1.engine.core_client.InprocClient.shutdown",
        "vllm.v1.engine.core_client.MPClient.shutdown",
        "vllm.engine.arg_utils.EngineArgs.create_engine_config",
        "vllm.engine.arg_utils.AsyncEngineArgs",
        "vllm.engine.protocol.StreamingInput",
        "vllm.sampling_params.RequestOutputKind",
        "vllm.forward_context.get_forward_context",
        "vllm.forward_context.ForwardContext",
        "vllm.distributed.parallel_state.get_tp_group",
        "vllm.distributed.parallel_state.get_pp_group",
        f"{_CONNECTORS}.kv_transfer_state.get_kv_transfer_group",
        f"{_CONNECTORS}.kv_transfer_state.has_kv_transfer_group",
        f"{_LAYERS}.attention.attention.Attention.__init__",
        f"{_LATENT}.MLAAttention.__init__",
        f"{_LATENT}.MLACommonMetadata",
        "vllm.v1.attention.backend.AttentionType",
        f"{_SCHED}.output.SchedulerOutput",
        f"{_SCHED}.output.NewRequestData",
        f"{_SCHED}.output.CachedRequestData",
        f"{_KV}.KVCacheConfig",
        f"{_KV}.KVCacheGroupSpec",
        f"{_KV}.AttentionSpec",
        "vllm.v1.core.kv_cache_utils.get_max_concurrency_for_kv_cache_config",
        *_of(f"{_SCHED}.scheduler.Scheduler", ("__init__", *scheduling.SCHEDULER_METHODS)),
        "vllm.outputs.RequestError",
        "vllm.v1.outputs.ModelRunnerOutput",
        "vllm.v1.outputs.SamplerOutput",
        "vllm.v1.spec_decode.metadata.SpecDecodeMetadata",
        *_of(
            f"{_CONNECTORS}.kv_connector.v1.base.KVConnectorBase_V1",
            (
                *("bind_connector_metadata", "wait_for_save"),
                *("handle_preemptions", "get_finished", "get_block_ids_with_load_errors"),
            ),
        ),
    ),
    "cpu": (
        *_of(_V1_CPU, (*batches.V1_METHODS, *audited.AUDITED_METHODS, *_STEP)),
        "vllm.v1.worker.cpu_worker.CPUWorker.compile_or_warm_up_model",
        *_of(
            "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl", layers.ATTENTION_METHODS
        ),
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadata",
        *_of(f"{_MLA}.cpu_mla.CPUMLAImpl", layers.LATENT_METHODS),
        *_of(f"{_MLA}.amx_mla.AMXMLAImpl", layers.LATENT_METHODS),
        f"{_CONNECTORS}.kv_connector.v1.offloading.config.get_offloading_group_ids",
        f"{_KV}.SlidingWindowSpec",
        f"{_KV}.ChunkedLocalAttentionSpec",
        f"{_KV}.EncoderOnlyAttentionSpec",
        f"{_KV}.CrossAttentionSpec",
        "vllm.v1.kv_offload.base.OffloadingWorker",
        "vllm.v1.kv_offload.base.TransferResult",
        "vllm.v1.kv_offload.cpu.spec.CPUOffloadingSpec.get_worker",
    ),
    "gpu": (
        *_of(
            _V1,
            (*batches.V1_GPU_METHODS, *audited.AUDITED_METHODS, "get_kv_cache_spec", *_STEP),
        ),
        *_of(
            _V2,
            (*batches.V2_METHODS, *audited_v2.AUDITED_METHODS, "get_kv_cache_spec", *_STEP),
        ),
        # What the ledger reads in between, or is told by.
        *_of(_V2, ("finish_requests", "add_requests")),
        *_of("vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager", ("capture", "run_fullgraph")),
        *_of("vllm.v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager", whole_graphs.METHODS),
        "vllm.v1.worker.gpu.cudagraph_utils.BatchExecutionDescriptor",
        "vllm.config.compilation.CUDAGraphMode",
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
        *_of(f"{_FLASH}.FlashAttentionBackend", ("get_impl_cls", "get_builder_cls")),
        f"{_FLASH}.FlashAttentionMetadata",
        *_of(f"{_TRITON}.TritonAttentionMetadataBuilder", _BUILDS),
        *_of(f"{_TRITON}.TritonAttentionImpl", layers.ATTENTION_METHODS),
        *_of(f"{_TRITON}.TritonAttentionBackend", _GIVES),
        f"{_TRITON}.TritonAttentionMetadata",
        f"{_OPS}.triton_unified_attention.unified_attention",
        *_of(f"{_LATENT}.MLACommonMetadataBuilder", _BUILDS),
        f"{_LATENT}.MLACommonDecodeMetadata",
        f"{_LATENT}.MLAAttention.update_kv_cache",
        "vllm.v1.attention.backend.MLAAttentionImpl.do_kv_cache_update",
        *_of(f"{_MLA}.triton_mla.TritonMLABackend", _GIVES),
        f"{_MLA}.triton_mla.TritonMLAImpl.forward_mqa",
        f"{_OPS}.triton_decode_attention.decode_attention_fwd",
        *_of(f"{_MLA}.flashattn_mla.FlashAttnMLABackend", _GIVES),
        f"{_MLA}.flashattn_mla.FlashAttnMLAMetadataBuilder._schedule_decode",
        f"{_MLA}.flashattn_mla.FlashAttnMLADecodeMetadata",
        f"{_MLA}.flashattn_mla.FlashAttnMLAImpl.forward_mqa",
        f"{_FLASH}.canonicalize_singleton_dim_strides",
        f"{_FLASH}.get_flash_attn_version",
        "vllm._custom_ops.reshape_and_cache_flash",
        "vllm.vllm_flash_attn.flash_attn_interface.flash_attn_varlen_func",
        f"{_CONNECTORS}.kv_connector.utils.get_kv_connector_cache_layout",
        # When connectors read rows; ``policy.supported`` says why that is not before a commit.
        *_of(
            "vllm.v1.worker.gpu.kv_connector.ActiveKVConnector",
            ("pre_forward", "post_forward", "finalize_step"),
        ),
        "vllm.v1.worker.kv_connector_model_runner_mixin."
        "KVConnectorModelRunnerMixin._get_kv_connector_output",
        *_of(
            f"{_CONNECTORS}.kv_connector.v1.offloading.worker.OffloadingConnectorWorker",
            ("register_kv_caches", "handle_preemptions", "start_kv_transfers", "prepare_store_kv"),
        ),
        *_of(
            "vllm.v1.simple_kv_offload.worker.SimpleCPUOffloadWorker",
            ("register_kv_caches", "start_load_kv", "wait_for_save", "get_finished"),
        ),
        *_of(
            f"{_CONNECTORS}.kv_connector.v1.example_connector.ExampleConnector",
            ("start_load_kv", "save_kv_layer", "build_connector_meta"),
        ),
        f"{_CONNECTORS}.kv_connector.v1.base.KVConnectorBase_V1.get_transfer_results",
        "vllm.v1.attention.backends.registry.AttentionBackendEnum.get_path",
        "vllm.v1.attention.backends.registry.register_backend",
    ),
    "states": (
        *_of(_V1_CPU, state_layers.METHODS),
        f"{gated_delta.CORE_MODULE}.{gated_delta.CORE}",
        f"{_LAYERS}.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention.rearrange_mixed_qkv",
        f"{_LAYERS}.mamba.mamba_utils.is_conv_state_dim_first",
        "vllm._custom_ops.fused_sigmoid_gating_delta_rule_update_cpu",
        "vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadata",
        f"{_LAYERS}.mamba.mamba_mixer2.MambaMixer2.{mixers.FORWARDS[MAMBA2][0]}",
        f"{_LAYERS}.mamba.short_conv.ShortConv.{mixers.FORWARDS[SHORT_CONV][0]}",
        f"{_LAYERS}.mamba.ops.ssu_dispatch.selective_state_update",
        "vllm.v1.attention.backends.mamba2_attn.Mamba2AttentionMetadata",
        "vllm.v1.attention.backends.short_conv_attn.ShortConvAttentionMetadata",
        f"{_KV}.MambaSpec",
    ),
    # ``MambaMixer2`` and ``MambaSpec`` are above.
    "states on gpu": (
        *_of(
            f"{_LAYERS}.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention",
            (*verified_rows.LAUNCHES[GATED_DELTA], *gated_delta_hooks.NORM),
        ),
        *_of(
            f"{_LAYERS}.mamba.gdn.olmo_gdn_linear_attn.OlmoHybridGatedDeltaNetAttention",
            olmo_rows.METHODS,
        ),
        f"{_FLA}.fused_recurrent.fused_recurrent_gated_delta_rule",
        f"{_FLA}.fused_recurrent.fused_recurrent_gated_delta_rule_fwd",
        f"{_FLA}.fused_recurrent.fused_recurrent_gated_delta_rule_fwd_kernel",
        f"{_FLA}.fused_sigmoid_gating.fused_sigmoid_gating_delta_rule_update",
        *_of(
            "vllm.v1.worker.gpu.model_states.mamba_hybrid.MambaHybridModelState",
            verify_steps.METHODS,
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
        "vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadataBuilder.update_block_table",
    ),
}


def places_of(device: str) -> tuple[str, ...]:
    """Return the places that concern a device; both devices' for a device that is neither."""
    own = {"cpu": ("cpu", "states"), "cuda": ("gpu", "states on gpu")}.get(device, PLACES[1:])
    return ("all", *own)
