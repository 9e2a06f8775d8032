"""Runs of ``kvtxn bench`` and ``kvtxn demo`` over real engines, by name, for the pool."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import forked_commands

#: The engines of the run "bench", in the order in which they are named.
BENCHED = ("stock", "undo", "deferred", "ledger", "bytes")

#: Classes of ``tests/benchmarks/planted_schedulers.py``, by what a soak says of their engines.
PLANTED = {
    "blocks did not come back": "LosesBlocks",
    "the host's memory grows": "KeepsBytes",
    "texts are not stock's": "SaysOther",
}


def soak(planted: str | None = None) -> tuple[object, ...]:
    """A short soak: conversations, and for a healthy engine more requests than blocks."""
    engine = {} if planted is None else {"scheduler_cls": f"planted_schedulers.{planted}"}
    compared = () if planted in (None, "SaysOther") else ("--no-texts",)
    seconds = {None: 6, "KeepsBytes": 12}.get(planted, 3)  # a slope takes samples
    patience = 20 if planted == "LosesBlocks" else 120  # on a busy machine a step may take seconds
    return (
        *("bench", "soak", "--workloads", "chat", *(("offload",) if planted is None else ())),
        *("--requests", 1, "--every", 0.1, "--seconds", seconds),
        *("--patience", patience, "--engine-args", json.dumps(engine), *compared),
    )


def audit_of_the_real_model() -> tuple[object, ...]:
    """An audit of a real model with windows."""
    from kvtxn.integrations.audit_command.command import PLAIN
    from kvtxn.integrations.demo import smol

    windows = {"additional_config": {"kvtxn": {"policy": "deferred"}}}
    engine = {**PLAIN, **windows, "model": str(smol.prepared())}
    return ("audit", "--requests", 6, "--json", "--engine-args", json.dumps(engine))


RUNS: dict[str, tuple[object, ...] | Callable[[], tuple[object, ...]]] = {
    "soak": (*soak(), "--json"),
    **{f"soak-{planted}": soak(planted) for planted in PLANTED.values()},
    "bench": (
        *("bench", "vllm", "--policies", *BENCHED, "--rounds", 2),
        *("--scenario", "short", "mixed", "--requests", 3, "--arrivals", 40),
        *("--clock", "--first-token-rounds", 3, "--context", 40, "--tokens", 16, "--drafts", 3),
        *("--engine-args", json.dumps({"max_num_seqs": 2})),
        *("--output", "smoke", "--folder", "results"),
    ),
    "demo": ("demo", "--count", 2, "--max-tokens", 32, "--json"),
    "demo-real": ("demo", "--real", "--count", 2, "--max-tokens", 32, "--json"),
    "audit-real": audit_of_the_real_model,
}


def run(folder: Path) -> dict[str, Any]:
    """Carry out the run that the folder is named after; returns its end, and the folder."""
    name = folder.name.removeprefix("command-").partition(".")[0]
    words = RUNS[name]
    words = words() if callable(words) else words
    return attrs.asdict(forked_commands.run(folder, *words)) | {"folder": str(folder)}
