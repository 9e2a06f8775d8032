"""The engine arguments that a page or a record may show: none that can hold a secret.

Arguments are shown by name, since vLLM adds some with each release: every value that is not known
to be harmless, such as ``hf_token`` or a connector's keys, shows as ``...``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: In place of a value that is not shown.
HIDDEN: Final = "..."


def _plain(names: str) -> dict[str, None]:
    """Return the names in a text, parted by white space, each with None: its value is plain."""
    return dict.fromkeys(names.split())


#: The arguments that are shown. A mapping names the keys of a nested argument that are shown.
_SHOWN: Final[Mapping[str, Any]] = {
    **_plain(
        """
        async_scheduling attention_backend block_size calculate_kv_scales cpu_offload_gb
        data_parallel_size decode_context_parallel_size disable_custom_all_reduce
        disable_hybrid_kv_cache_manager disable_log_stats disable_sliding_window
        distributed_executor_backend dtype enable_chunked_prefill enable_expert_parallel
        enable_lora enable_prefix_caching enable_prompt_embeds enable_sleep_mode enforce_eager
        gpu_memory_utilization kv_cache_dtype
        kv_cache_memory_bytes language_model_only load_format mamba_block_size mamba_cache_dtype
        mamba_cache_mode mamba_ssm_cache_dtype max_logprobs max_lora_rank max_loras max_model_len
        max_num_batched_tokens max_num_partial_prefills max_num_seqs model model_impl
        num_gpu_blocks_override pipeline_parallel_size prefill_context_parallel_size
        prefix_caching_hash_algo quantization revision runner scheduling_policy seed
        skip_tokenizer_init stream_interval swap_space tensor_parallel_size tokenizer tokenizer_mode
        trust_remote_code worker_cls
        """
    ),
    **_plain(  # SGLang's
        """
        chunked_prefill_size context_length cuda_graph_backend_prefill cuda_graph_max_bs_decode
        disable_cuda_graph disable_overlap_schedule disable_radix_cache enable_mixed_chunk log_level
        max_running_requests max_total_tokens mem_fraction_static model_path page_size random_seed
        speculative_algorithm speculative_draft_model_path speculative_eagle_topk
        speculative_num_draft_tokens speculative_num_steps tp_size
        """
    ),
    "additional_config": {
        "kvtxn": _plain(
            """
            acceptance audit audit_every backend debug log_tokens max_rows on_error on_violation
            poison policy record recurrent required staging unchecked
            """
        )
    },
    "compilation_config": _plain("cudagraph_mode level mode"),
    "kv_transfer_config": _plain(
        "kv_connector kv_load_failure_policy kv_parallel_size kv_rank kv_role"
    ),
    "speculative_config": _plain(
        """
        attention_backend draft_tensor_parallel_size max_model_len method model
        num_speculative_tokens parallel_drafting prompt_lookup_max prompt_lookup_min quantization
        rejection_sample_method speculative_token_tree
        """
    ),
}


def shown(arguments: Mapping[str, Any], names: Mapping[str, Any] = _SHOWN) -> dict[str, Any]:
    """Return engine arguments with ``HIDDEN`` for each value that is not known to be harmless.

    Args:
        arguments: as for vLLM's ``LLM(...)``.
        names: the names whose values are shown; None for a plain value, names in turn for a
            mapping.
    """
    return {
        name: _value(value, names[name]) if name in names else HIDDEN
        for name, value in arguments.items()
    }


def _value(value: Any, names: Mapping[str, Any] | None) -> Any:
    """Return a plain value, or with ``names`` a mapping as ``shown`` returns it; else HIDDEN."""
    if names is not None:
        return shown(value, names) if isinstance(value, Mapping) else HIDDEN
    return value if value is None or isinstance(value, bool | int | float | str) else HIDDEN
