"""Runs of ``kvtxn audit``, ``kvtxn trace`` and the programs of faults, by name, for the pool.

One command runs as a user starts it, which imports vLLM anew; the others in forks.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import forked_commands
import model_files
from audits import audit
from commands import Ended
from folders import TESTS
from kvtxn.integrations.audit_command.vllm_engine import offloading

#: Arguments for models that have no tokenizer.
BARE = {"skip_tokenizer_init": True, "max_model_len": 288, "num_gpu_blocks_override": 96}
RECURRENT = {"enable_prefix_caching": False, "block_size": None}
#: With attention layers, too.
HYBRID = {
    **{**BARE, **RECURRENT, "num_gpu_blocks_override": 160},
    "mamba_ssm_cache_dtype": "float32",  # vLLM chooses by what the CPU can do
}


@attrs.frozen
class Fault:
    """A fault, and the audit that finds it.

    Attributes:
        releases: releases with the fault; the others of ``fixed`` are healthy in this audit.
        fixed: releases without the fault.
        workload: the workload of the audit, or the name of the file that ``write_prompts`` writes.
        kind: the kind of its first violation; others follow, of those who read the row later.
        model: a tiny model of ``model_files`` or ``mixer_models``; None for the model that comes
            with kvtxn.
        engine: changes of the plain engine's arguments; None leaves an argument out.
        requests: requests of the workload.
        varies: what the requests say depends on which of them meet in a step, and so do the kinds
            and numbers of violations.
    """

    releases: tuple[str, ...]
    fixed: tuple[str, ...]
    workload: str
    kind: str
    model: str | None = None
    engine: dict[str, Any] = attrs.field(factory=dict)
    requests: int = 60
    varies: bool = False


#: No drafts are needed.
STORED_SESSIONS = {
    **BARE,
    **{"kv_transfer_config": offloading("cpu", 64 << 20), "speculative_config": None},
}
#: What a preempted request computes again takes several steps, as a long prompt does.
CHUNKS = {
    **HYBRID,
    **{"num_gpu_blocks_override": 300, "max_num_seqs": 14, "long_prefill_token_threshold": 12},
}
#: Fewer tokens in a step than the requests want with their drafts: some sit it out.
CROWDED = {**HYBRID, "max_num_batched_tokens": 12}
#: A connector that keeps prompts in files, and prompts that take several steps.
STORED_CHUNKS = {
    **BARE,
    "max_num_batched_tokens": 64,
    "kv_transfer_config": {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": "stored"},
    },
}
PHRASES = "phrases.jsonl"

#: In the order of integrations/FAULTS.md.
FAULTS = {
    "sessions": Fault(
        ("0.29.0", "0.31.0", "0.32.0"), ("0.33.0",), "sessions", "foreign", requests=100
    ),
    "hybrid-sessions": Fault(
        ("0.32.0",), (), "sessions", "state", "nemotron_h", HYBRID, varies=True
    ),
    "stored-sessions": Fault(
        ("0.32.0",), ("0.33.0",), "sessions", "exported", "llama", STORED_SESSIONS, varies=True
    ),
    "offloading": Fault(("0.28.0", "0.29.0"), ("0.32.0",), "offload", "exported", "llama", BARE),
    "mamba2": Fault(
        ("0.32.0",), (), "chat", "state", "mamba2", {**BARE, **RECURRENT}, 24, varies=True
    ),
    "one-token": Fault(("0.32.0",), (), "chat", "state", "falcon_h1", HYBRID, varies=True),
    "resumed": Fault(("0.32.0",), (), "preempt", "state", "nemotron_h", CHUNKS, varies=True),
    "skipped": Fault(("0.32.0",), (), PHRASES, "state", "counting", CROWDED, 24, varies=True),
    "stored-chunks": Fault(
        ("0.32.0",), (), "prefix", "exported", "llama", STORED_CHUNKS, varies=True
    ),
}


def chat(folder: Path) -> Ended:
    """Audit the plain engine."""
    return audit(folder, "chat", "--requests", 24, "--html", "page.html", run=forked_commands.run)


def own_prompts(folder: Path) -> Ended:
    """Audit an engine with windows, by a file of prompts."""
    from kvtxn.integrations.audit_command.command import PLAIN

    (folder / "prompts.jsonl").write_text(
        '"It was a fine evening"\n{"prompt_token_ids": [5, 6, 7, 5, 6, 7, 5], "max_tokens": 12}\n'
    )
    engine = {**PLAIN, "additional_config": {"kvtxn": {"policy": "undo"}}}
    return audit(folder, "prompts.jsonl", "--json", engine=engine, run=forked_commands.run)


def refused(folder: Path) -> Ended:
    """Audit an engine that does not start."""
    from kvtxn.integrations.audit_command.command import PLAIN

    engine = {**PLAIN, "max_model_len": -3}
    return audit(folder, "chat", "--html", "page.html", engine=engine)


def pooling(folder: Path) -> Ended:
    """Audit an engine that generates nothing."""
    engine = {"model": model_files.write("llama", folder), "runner": "pooling", **BARE}
    return audit(folder, "chat", engine=engine, run=forked_commands.run)


def trace(folder: Path) -> Ended:
    """Trace one prompt under ``deferred``."""
    words = ("--count", 1, "--max-tokens", 32, "--html", "t.html", "--svg", "t.svg")
    return forked_commands.run(folder, "trace", *words)


def write_model(name: str, folder: Path) -> str:
    """Write a tiny model into ``folder``; returns the path."""
    if name in ("nemotron_h", "falcon_h1", "counting"):
        # pytest puts this folder on the path only if it collects tests there.
        states = str(TESTS / "vllm_plugin" / "states")
        sys.path[:0] = [] if states in sys.path else [states]
        import mixer_models

        return mixer_models.write(name, folder)
    return model_files.write(name, folder)


def write_prompts(path: Path, count: int) -> None:
    """Write short prompts with long answers; drafts for every other one are found late.

    When they are found, the next request, which had drafts accepted, has to sit out steps.
    """
    chance = random.Random(3)
    phrases = [[64 * (1 - i % 2) + chance.randrange(4, 60) for _ in range(3)] for i in range(count)]
    lines = [{"prompt_token_ids": phrase * 3, "max_tokens": 120} for phrase in phrases]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def known_fault(folder: Path, name: str) -> Ended:
    """Audit the engine in which a fault of vLLM's shows."""
    from kvtxn.integrations.audit_command.command import PLAIN

    fault = FAULTS[name]
    if fault.workload == PHRASES:
        write_prompts(folder / PHRASES, fault.requests)
    engine = {**PLAIN, **fault.engine}
    if fault.model is not None:
        engine["model"] = write_model(fault.model, folder)
    return audit(
        folder, fault.workload, "--requests", fault.requests, "--json", "--html", "page.html",
        engine={key: value for key, value in engine.items() if value is not None},
        run=forked_commands.run,
    )  # fmt: skip


#: Faults with a program of their own.
PROGRAMS = (
    *("preempted-in-its-step", "failed-load", "replaced-adapter", "stale-rows"),
    *("left-out-of-hashes", "ended-by-session", "reset-connector"),
)


def fault_program(folder: Path, name: str) -> Ended:
    """Run the program of a fault."""
    program = TESTS / "audit_command" / "fault_programs" / f"{name.replace('-', '_')}.py"
    return forked_commands.run_program(folder, program, "--json")


RUNS: dict[str, Callable[[Path], Ended]] = {
    "chat": chat,
    "own-prompts": own_prompts,
    "refused": refused,
    "pooling": pooling,
    "trace": trace,
    **{f"fault-{name}": lambda folder, name=name: known_fault(folder, name) for name in FAULTS},
    **{name: lambda folder, name=name: fault_program(folder, name) for name in PROGRAMS},
}


def run(folder: Path) -> dict[str, Any]:
    """Carry out the run that the folder is named after; returns its end, and the folder."""
    name = folder.name.removeprefix("command-").partition(".")[0]
    return attrs.asdict(RUNS[name](folder)) | {"folder": str(folder)}
