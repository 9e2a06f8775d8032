"""Arguments of small engines, with and without KV connectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scenarios import NGRAM


def options(model: str, kvtxn: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Arguments of an engine whose pool is small enough to preempt; ``model`` is a folder."""
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "seed": 0,
        "enforce_eager": True,
        "block_size": 32,
        "num_gpu_blocks_override": 22,
        "max_model_len": 288,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "disable_log_stats": False,
        "enable_prefix_caching": True,
        "mamba_ssm_cache_dtype": "float32",  # vLLM chooses by what the CPU can do
        "speculative_config": NGRAM,
        "additional_config": {"kvtxn": kvtxn},
        **more,
    }


def connector(folder: Path, kind: str) -> dict[str, Any]:
    """The settings of a KV connector that keeps what it stores in files or in memory."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "stored")},
    }
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "MemoryStoreSpec",
            "spec_module_path": "kvtxn.integrations.vllm_plugin.seam.memory_store",
            "cpu_bytes_to_use": 64 << 20,
            "offload_prompt_only": False,
        },
    }
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [offloading, example]},
    }
    bench = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}
    found = {"example": example, "offloading": offloading, "several": several, "bench": bench}
    return found[kind]
