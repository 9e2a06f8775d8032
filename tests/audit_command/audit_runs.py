"""Runs of ``kvtxn audit`` and ``kvtxn trace`` over real engines, by name, for the pool.

Three run as a user starts them; the others, of the same command, in forks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import forked_commands
import model_files
from audits import audit
from commands import Ended
from commands import run as command

#: Arguments for models that have no tokenizer.
BARE = {"skip_tokenizer_init": True, "max_model_len": 288, "num_gpu_blocks_override": 96}
RECURRENT = {"enable_prefix_caching": False, "block_size": None}
#: With attention layers, too.
HYBRID = {**BARE, **RECURRENT, "num_gpu_blocks_override": 300}


@attrs.frozen
class Fault:
    """A fault, and the audit that finds it.

    Attributes:
        releases: releases with the fault; the others of ``fixed`` are healthy in this audit.
        fixed: releases without the fault.
        workload: the workload of the audit.
        kind: the kind of its first violation; others follow, of those who read the row later.
        model: a tiny model of ``model_files`` or ``mixer_models``; None for the model that comes
            with kvtxn.
        engine: changes of the plain engine's arguments; None leaves an argument out.
        requests: requests of the workload.
    """

    releases: tuple[str, ...]
    fixed: tuple[str, ...]
    workload: str
    kind: str
    model: str | None = None
    engine: dict[str, Any] = attrs.field(factory=dict)
    requests: int = 60


FAULTS = {
    "sessions": Fault(("0.29.0", "0.31.0", "0.32.0"), (), "sessions", "foreign", requests=100),
    "offloading": Fault(("0.28.0", "0.29.0"), ("0.32.0",), "offload", "exported", "llama", BARE),
    "mamba2": Fault(("0.32.0",), (), "chat", "state", "mamba2", {**BARE, **RECURRENT}, 24),
}


def chat(folder: Path) -> Ended:
    """Audit the plain engine."""
    return audit(folder, "chat", "--requests", 24, "--html", "page.html")


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

    return audit(folder, "chat", "--html", "page.html", engine={**PLAIN, "max_model_len": -3})


def pooling(folder: Path) -> Ended:
    """Audit an engine that generates nothing."""
    engine = {"model": model_files.write("llama", folder), "runner": "pooling", **BARE}
    return audit(folder, "chat", engine=engine, run=forked_commands.run)


def trace(folder: Path) -> Ended:
    """Trace one prompt under ``deferred``."""
    words = ("--count", 1, "--max-tokens", 32, "--html", "t.html", "--svg", "t.svg")
    return command(folder, "trace", *words)


def write_model(name: str, folder: Path) -> str:
    """Write a tiny model into ``folder``; returns the path."""
    if name in ("nemotron_h", "falcon_h1"):
        import mixer_models  # a module of the engines' processes

        return mixer_models.write(name, folder)
    return model_files.write(name, folder)


def known_fault(folder: Path, name: str) -> Ended:
    """Audit the engine in which a fault of vLLM's shows."""
    from kvtxn.integrations.audit_command.command import PLAIN

    fault = FAULTS[name]
    engine = {**PLAIN, **fault.engine}
    if fault.model is not None:
        engine["model"] = write_model(fault.model, folder)
    return audit(
        folder, fault.workload, "--requests", fault.requests, "--json", "--html", "page.html",
        engine={key: value for key, value in engine.items() if value is not None},
        run=forked_commands.run,
    )  # fmt: skip


RUNS: dict[str, Callable[[Path], Ended]] = {
    "chat": chat,
    "own-prompts": own_prompts,
    "refused": refused,
    "pooling": pooling,
    "trace": trace,
    **{f"fault-{name}": lambda folder, name=name: known_fault(folder, name) for name in FAULTS},
}


def run(folder: Path) -> dict[str, Any]:
    """Carry out the run that the folder is named after; returns its end, and the folder."""
    name = folder.name.removeprefix("command-").partition(".")[0]
    return attrs.asdict(RUNS[name](folder)) | {"folder": str(folder)}
