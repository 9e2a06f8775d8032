"""The engines on GPUs that run with the audit; see ``gpu_audit``."""

from __future__ import annotations

from typing import Any, Final

import gpu_jobs
import gpu_planted
import one_gpu_jobs
import planted_ends
import planted_states
from connected_jobs import EXAMPLE, OFFLOAD, SIMPLE, WHOLE
from gpu_jobs import V1, drafter

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

#: By name.
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "llama-ledger": engine("llama", FA, LEDGER, scenarios=MORE, time="eight"),
    "llama-bytes": engine("llama", FA, BYTES, scenarios=MORE, time="eight"),
    "llama-plain": engine("llama", FA, LEDGER, scenarios=MORE, speculation=None, time="eight"),
    "llama-ngram-gpu": engine("llama", FA, BYTES, scenarios=MORE, speculation=gpu_jobs.ON_GPU),
    "llama-full": engine("llama", FA, BYTES, options=FULL_GRAPHS),
    "llama-eager": engine("llama", FA, LEDGER, options={"enforce_eager": True}),
    "llama-undo": engine("llama", FA, BYTES | UNDO, scenarios=MORE),
    "llama-undo-ledger": engine("llama", FA, LEDGER | UNDO),
    "llama-deferred": engine("llama", FA, BYTES | DEFERRED, scenarios=MORE),
    "llama-deferred-full": engine("llama", FA, BYTES | DEFERRED, options=FULL_GRAPHS),
    "llama-triton": engine("llama", "TRITON_ATTN", BYTES),
    "llama-fp8": engine("llama", FA, BYTES | DEFERRED, options=gpu_jobs.FP8),
    "llama-blocks-16": engine("llama", FA, BYTES, options={"block_size": 16}),
    "gemma3": engine("gemma3", FA, BYTES, scenarios=MORE, options=GEMMA),
    "gemma3-deferred": engine("gemma3", FA, BYTES | DEFERRED, options=GEMMA),
    "mla": engine("deepseek", "TRITON_MLA", BYTES, scenarios=MORE),
    "mla-undo": engine("deepseek", "TRITON_MLA", BYTES | UNDO),
    "mla-fp8": engine("deepseek", "TRITON_MLA", BYTES, options=gpu_jobs.FP8),
    "eagle": engine("llama", FA, BYTES, **EAGLE, time="eight"),
    "eagle-ledger": engine("llama", FA, LEDGER, scenarios=MORE, **EAGLE, time="eight"),
    "eagle-deferred": engine("llama", FA, BYTES | DEFERRED, **EAGLE),
    "eagle3": engine("llama", FA, BYTES, **drafter("eagle3", "eagle3")),
    "mtp": engine("deepseek_mtp", "TRITON_MLA", BYTES, **MTP),
    "draft": engine("llama", FA, BYTES, draft="draft", speculation=DRAFT),
    "draft-deferred": engine("llama", FA, BYTES | DEFERRED, draft="draft", speculation=DRAFT),
    "qwen3next": engine(
        *("qwen3next", None, LEDGER),
        scenarios=["eight", "chunked"],
        options={"block_size": None, "num_gpu_blocks_override": None},
        states=True,
    ),
    "mamba2": engine(
        *("mamba2", None, LEDGER),
        scenarios=["eight"],
        speculation=None,
        options={"block_size": None, "num_gpu_blocks_override": None},
        no_rows=True,
        states=True,
    ),
    "qwen35": recurrent("qwen3_5"),
    "qwen35-eager": recurrent("qwen3_5", options=RECURRENT | {"enforce_eager": True}),
    "qwen35-plain": recurrent("qwen3_5", speculation=None),
    "nemotron": recurrent("nemotron_h"),
    "v1-qwen35": recurrent("qwen3_5", environment=V1),
    "v1-nemotron": recurrent("nemotron_h", environment=V1),
    "v1-llama": engine("llama", FA, BYTES, scenarios=MORE, environment=V1, time="eight"),
    "v1-llama-ledger": engine("llama", FA, LEDGER, environment=V1, time="eight"),
    "v1-llama-undo": engine("llama", FA, BYTES | UNDO, environment=V1),
    "v1-llama-deferred": engine("llama", FA, BYTES | DEFERRED, environment=V1),
    "v1-gemma3": engine("gemma3", FA, BYTES, environment=V1, options=GEMMA),
    "v1-mla": engine("deepseek", "TRITON_MLA", BYTES, environment=V1),
    "v1-eagle": engine("llama", FA, BYTES, environment=V1, **EAGLE),
    "v1-draft": engine("llama", FA, BYTES, environment=V1, draft="draft", speculation=DRAFT),
    "v1-mtp": engine("deepseek_mtp", "TRITON_MLA", BYTES, environment=V1, **MTP),
    "v1-qwen3next": engine(
        *("qwen3next", None, LEDGER),
        scenarios=["eight", "chunked"],
        environment=V1,
        options={"block_size": None, "num_gpu_blocks_override": None},
        states=True,
    ),
    "apart": engine(
        *("llama", FA, BYTES), scenarios=MORE, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    ),
    "tp2": engine(
        *("demo", FA, BYTES),
        scenarios=["eight", "prefix"],
        options={"tensor_parallel_size": 2, "disable_custom_all_reduce": True} | NO_LIMIT,
        gpus=2,
    ),
    "pp2": engine(
        *("llama", FA, LEDGER),
        scenarios=["eight", "prefix"],
        speculation=gpu_jobs.ON_GPU,
        options={"pipeline_parallel_size": 2},
        gpus=2,
        unwatched_ranks=[0],
    ),
    "pp2-plain": engine(
        *("llama", FA, BYTES),
        scenarios=["eight", "prefix"],
        speculation=None,
        options={"pipeline_parallel_size": 2},
        gpus=2,
    ),
    # Two ranks on one GPU: what they say to each other goes through gloo (``one_gpu``).
    "tp2-shared": shared(LEDGER, "tensor_parallel_size", ranks_differ=True),
    "tp2-shared-v1": shared(LEDGER, "tensor_parallel_size", V1, ranks_differ=True),
    "tp2-shared-bytes": shared(BYTES | {"audit_every": 8}, "tensor_parallel_size"),
    "pp2-shared": shared(
        LEDGER, "pipeline_parallel_size", speculation=gpu_jobs.ON_GPU, unwatched_ranks=[0]
    ),
    # Rows leave through a connector, and come back.
    "offload": connected(OFFLOAD, scenarios=[*COME_BACK, "full_blocks"]),
    "offload-undo": connected(OFFLOAD, asked=LEDGER | UNDO),
    "offload-bytes": connected(OFFLOAD, asked=BYTES, scenarios=["come_back"]),
    "simple": connected(SIMPLE),
    "example": connected(EXAMPLE, scenarios=["come_back"], options=WHOLE),
    "example-deferred": connected(
        EXAMPLE, asked=LEDGER | DEFERRED, scenarios=["come_back"], options=WHOLE
    ),
    "several": connected(SIMPLE, EXAMPLE, scenarios=["come_back"], options=WHOLE),
    "v1-offload": connected(OFFLOAD, scenarios=[*COME_BACK, "full_blocks"], environment=V1),
    "v1-simple": connected(SIMPLE, environment=V1),
    "planted-offload": connected(
        OFFLOAD, scenarios=["come_back"], options=STEADY, faults=TRANSFERS
    ),
    # As much as these engines hold, for minutes; nothing is planted.
    "long": engine("llama", FA, LEDGER, scenarios=["eight"], options=LARGE, long=LONG),
    "long-bytes": engine("llama", FA, BYTES, scenarios=["eight"], options=LARGE, long=LONG),
    "long-v1": engine(
        *("llama", FA, LEDGER), scenarios=["eight"], options=LARGE, long=LONG, environment=V1
    ),
    # vLLM sizes the cache by what is free, beside the ledger.
    "memory": engine(
        *("llama", FA, BYTES),
        scenarios=["eight"],
        options=NO_LIMIT | {"kv_cache_memory_bytes": None, "gpu_memory_utilization": SHARE},
        alone=True,
    ),
    # Faults: nothing is scheduled ahead, so that it is known which step reads what.
    "planted": engine("llama", FA, LEDGER, options=STEADY, faults=names(gpu_planted.V2)),
    "planted-few": engine(
        *("llama", FA, LEDGER),
        scenarios=["eight"],
        options=STEADY,
        faults=["lost_write", "anothers_table", "accepted_one_too_many"],
    ),
    "planted-full": engine(
        *("llama", FA, LEDGER), options=STEADY | UNCOMPILED, faults=names(gpu_planted.V2)
    ),
    "planted-every": engine(
        *("llama", FA, BYTES | {"audit_every": 1}),
        options=STEADY | EAGER,
        faults=names(gpu_planted.BYTES),
    ),
    "planted-bytes": engine("llama", FA, BYTES, options=STEADY, faults=names(gpu_planted.BYTES)),
    "planted-mla": engine(
        *("deepseek", "TRITON_MLA", BYTES),
        options=STEADY,
        faults=[*names(gpu_planted.BYTES), "lost_write", "anothers_table"],
    ),
    "planted-deferred": engine(
        *("llama", FA, BYTES | DEFERRED),
        options=STEADY,
        faults=[*names(gpu_planted.BYTES), "accepted_one_too_many", "anothers_table"],
    ),
    "planted-eagle": engine(
        *("llama", FA, BYTES),
        **EAGLE,
        options=STEADY,
        faults=[*names(gpu_planted.DRAFTERS), "flipped_bit", "accepted_one_too_many"],
    ),
    "planted-v1": engine(
        *("llama", FA, LEDGER), options=STEADY, environment=V1, faults=names(gpu_planted.V1)
    ),
    "contained": engine(
        *("demo", FA, LEDGER | {"on_violation": "contain"}), options=STEADY, contains=True
    ),
    "sleeps": engine(
        *("demo", FA, BYTES),
        scenarios=["eight"],
        options=STEADY | {"enable_sleep_mode": True},
        sleeps=True,
    ),
    "sleeps-ahead": engine(
        *("demo", FA, LEDGER), scenarios=["eight"], options={"enable_sleep_mode": True}, sleeps=True
    ),
    "planted-states": recurrent(
        "qwen3_5",
        # A graph would read the layers' own tensors, not those that a fault puts in their place.
        options=RECURRENT | STEADY | EAGER,
        environment=V1,
        faults=names(planted_states.FAULTS),
    ),
    "planted-v1-bytes": engine(
        *("llama", FA, BYTES), options=STEADY, environment=V1, faults=names(gpu_planted.BYTES)
    ),
    # Bytes of states, and what is dead filled with NaN.
    "poison": engine("llama", FA, POISON, scenarios=MORE),
    "poison-full": engine("llama", FA, POISON, options=FULL_GRAPHS),
    "poison-pieces": engine("llama", FA, POISON, options=PIECES),
    "poison-fp8": engine("llama", FA, POISON, options=gpu_jobs.FP8 | UNCOMPILED),
    "poison-triton": engine("llama", "TRITON_ATTN", POISON),
    "poison-gemma3": engine("gemma3", FA, POISON, options=GEMMA),
    "poison-mla": engine("deepseek", "TRITON_MLA", POISON),
    "poison-mla-fp8": engine("deepseek", "TRITON_MLA", POISON, options=gpu_jobs.FP8),
    "poison-deferred": engine("llama", FA, POISON | DEFERRED),
    "poison-v1": engine("llama", FA, POISON, environment=V1),
    "poison-qwen35": recurrent("qwen3_5", POISON),
    "poison-nemotron": recurrent("nemotron_h", POISON, options=RECURRENT | UNCOMPILED),
    "poison-v1-qwen35": recurrent("qwen3_5", POISON, environment=V1),
    "bytes-qwen35": recurrent("qwen3_5", BYTES),
    "bytes-qwen35-full": recurrent("qwen3_5", BYTES, options=RECURRENT | FULL_GRAPHS),
    "bytes-v1-nemotron": recurrent("nemotron_h", BYTES, environment=V1),
    "planted-dead": engine(
        *("llama", FA, POISON),
        scenarios=["eight", "prefix"],
        options=STEADY | UNCOMPILED,
        faults=["dead_row_read", "not_a_number", *names(gpu_planted.BYTES)],
        harmless=["dead_row_written"],
    ),
    "planted-dead-pieces": engine(
        *("llama", FA, POISON),
        scenarios=["eight", "prefix"],
        options=STEADY | PIECES,
        faults=["dead_row_read", "not_a_number"],
        harmless=["dead_row_written"],
    ),
    "planted-dead-mla": engine(
        *("deepseek", "TRITON_MLA", POISON),
        scenarios=["eight", "prefix"],
        options=STEADY | UNCOMPILED,
        faults=["dead_row_read", "not_a_number"],
        harmless=["dead_row_written"],
    ),
    "planted-v1-nan": engine(
        *("llama", FA, BYTES),
        scenarios=["eight"],
        options=STEADY | EAGER,
        environment=V1,
        faults=["not_a_number"],
    ),
    "planted-states-bytes": recurrent(
        *("qwen3_5", POISON),
        options=RECURRENT | STEADY | UNCOMPILED,
        faults=["flipped_state", "dead_state_read"],
    ),
    "planted-states-nemotron": recurrent(
        *("nemotron_h", POISON),
        options=RECURRENT | STEADY | UNCOMPILED,
        faults=["flipped_state", "dead_state_read"],
    ),
    # States at the ends of blocks, which the prefix cache keeps.
    "aligned-qwen35": aligned("qwen3_5"),
    "aligned-qwen35-plain": aligned("qwen3_5", speculation=None),
    "aligned-v1-plain": aligned("qwen3_5", speculation=None, environment=V1),
    "aligned-nemotron": aligned("nemotron_h", BYTES, options=KEPT | UNCOMPILED),
    "aligned-v1-qwen35": aligned("qwen3_5", BYTES, environment=V1),
    "aligned-v1-nemotron": aligned("nemotron_h", environment=V1),
    **{
        f"aligned-{name}": aligned(
            "qwen3_5",
            connectors=[connector],
            scenarios=["states_come_back"],
            speculation=None,
            verified=True,
        )
        for name, connector in (("offload", OFFLOAD), ("simple", SIMPLE))
    },
    "planted-aligned": aligned(
        "qwen3_5", options=KEPT | STEADY | EAGER, ends=True, faults=names(planted_ends.FAULTS)
    ),
    "planted-aligned-v1": aligned(
        *("qwen3_5",),
        options=KEPT | STEADY | EAGER,
        environment=V1,
        ends=True,
        faults=names(planted_ends.FAULTS),
    ),
    # States that kvtxn's windows hold.
    "held-qwen35": recurrent("qwen3_5", LEDGER | HELD),
    "held-qwen35-fast": recurrent("qwen3_5", BYTES | HELD | {"recurrent": "fast"}),
    "held-nemotron": recurrent("nemotron_h", LEDGER | HELD),
    "held-v1-qwen35": recurrent("qwen3_5", LEDGER | HELD, environment=V1),
    "held-aligned-qwen35": aligned("qwen3_5", LEDGER | HELD, options=KEPT | UNCOMPILED),
    "held-aligned-fast": aligned("qwen3_5", LEDGER | HELD | {"recurrent": "fast"}),
    "held-aligned-v1-nemotron": aligned("nemotron_h", LEDGER | HELD, environment=V1),
    "planted-held-v1": recurrent(
        *("qwen3_5", LEDGER | HELD),
        options=RECURRENT | STEADY | EAGER,
        environment=V1,
        faults=["anothers_state", "count_one_too_few", "counts_forgotten"],
    ),
    # Forwards that fail in an engine that goes on.
    "fails": engine(
        "llama", FA, BYTES, scenarios=["eight"], options=STEADY | UNCOMPILED, fails=True
    ),
    "fails-full": engine(
        *("llama", FA, LEDGER), scenarios=["eight"], options=STEADY | FULL_GRAPHS, fails=True
    ),
    "fails-v1": engine(
        *("demo", FA, LEDGER),
        scenarios=["eight"],
        options=STEADY | UNCOMPILED,
        environment=V1,
        fails=True,
    ),
    "fails-deferred": engine(
        *("llama", FA, LEDGER | DEFERRED), scenarios=["eight"], options=STEADY, fails=True
    ),
}
