"""The parts that the engines of ``audit_jobs`` are made of."""

from __future__ import annotations

from typing import Any, Final

import one_gpu_jobs
from gpu_jobs import drafter

LEDGER: Final = {"audit": "ledger"}
BYTES: Final = {"audit": "bytes"}
POISON: Final = {"audit": "bytes", "poison": True}
UNDO: Final = {"policy": "undo", "on_error": "raise"}
DEFERRED: Final = {"policy": "deferred", "on_error": "raise"}

HELD: Final = {"policy": "auto", "on_error": "raise", "recurrent": "exact"}

FULL: Final = ["eight", "chunked", "prefix", "preempted", "same_step"]
MORE: Final = [*FULL, "reused", "aborted", "sampled", "n2"]
#: Here tokens are drawn by lot.
DRAWN: Final = ("sampled", "n2")
STEADY: Final = {"async_scheduling": False}
EAGER: Final = {"enforce_eager": True}
#: Graphs of whole forwards, without what takes long to compile.
UNCOMPILED: Final = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}
FULL_GRAPHS: Final = {"compilation_config": {"cudagraph_mode": "FULL"}}
PIECES: Final = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
DRAFT: Final = {"method": "draft_model", "num_speculative_tokens": 3}
GEMMA: Final = {"prefix_cache_retention_interval": None}
SHARE: Final = 0.1
NO_LIMIT: Final = {"max_model_len": 288, "num_gpu_blocks_override": None}
#: Fewer blocks than the requests of a round fill.
LARGE: Final = {
    "max_model_len": 1024,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 8192,
    "num_gpu_blocks_override": 8000,
    "kv_cache_memory_bytes": 1 << 30,
}
LONG: Final = {
    **{"rows": 10**9, "seconds": 150.0},
    **{"requests": 768, "longest": 900, "outputs": 100},
}


def names(faults: Any) -> list[str]:
    """The names of faults."""
    return [fault.__name__ for fault in faults]


def engine(model: str, attention: str | None, asked: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One engine; see ``gpu_audit_child``."""
    return {"model": model, "attention": attention, "asked": asked, "scenarios": FULL, **more}


FA: Final = "FLASH_ATTN"
COME_BACK: Final = ["come_back", "preempted"]


#: Pages of recurrent layers are large, and vLLM chooses the size of blocks.
RECURRENT: Final = {
    "block_size": None,
    "num_gpu_blocks_override": None,
    "kv_cache_memory_bytes": 512 << 20,
    "enable_prefix_caching": False,
    "mamba_ssm_cache_dtype": "float32",
    "gdn_prefill_backend": "triton",
}


def recurrent(model: str, asked: dict[str, Any] = LEDGER, **more: Any) -> dict[str, Any]:
    """One engine of a small hybrid with random weights."""
    given = {"scenarios": ["eight", "chunked"], "options": RECURRENT, "states": True, **more}
    return engine(model, None, asked, random=True, **given)


#: The prefix cache keeps states at the ends of blocks.
KEPT: Final = RECURRENT | {
    "enable_prefix_caching": True,
    "prefix_cache_retention_interval": None,
    "max_model_len": 2048,
    "max_num_batched_tokens": 1024,
}


def aligned(model: str, asked: dict[str, Any] = LEDGER, **more: Any) -> dict[str, Any]:
    """One engine of a small hybrid whose prefix cache keeps states."""
    return recurrent(model, asked, **{"scenarios": ["ends"], "options": KEPT, **more})


def shared(
    asked: dict[str, Any], size: str, environment: dict[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    """One engine of two ranks that share a GPU, without graphs, to start sooner."""
    return engine(
        *("llama", "TRITON_ATTN", asked),
        dtype="float32",
        scenarios=["eight", "prefix"],
        options=EAGER | NO_LIMIT | one_gpu_jobs.OPTIONS | {size: 2},
        environment=one_gpu_jobs.ENVIRONMENT | (environment or {}),
        worker="one_gpu_audit.AuditWorker",
        **more,
    )


def connected(*connectors: Any, **more: Any) -> dict[str, Any]:
    """One engine with connectors."""
    given = {"asked": LEDGER, "scenarios": COME_BACK, **more}
    return engine("llama", FA, connectors=[*connectors], **given)


EAGLE: Final = drafter("eagle", "eagle")
MTP: Final = drafter("mtp")

TRANSFERS: Final = ["loaded_into_another_block", "another_block_stored", "stored_too_early"]

#: By what an engine's log says: the reason why vLLM itself, without the audit, cannot run it here.
LACKING: Final = {
    "'_moe_C' object has no attribute": "this vLLM was built without its kernels for experts",
}
