"""Runs of ``kvtxn bench vllm`` and ``kvtxn demo`` over real engines, by name, for the pool.

The demo runs as a user starts it, the benchmarks in forks: they have six engines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import commands
import forked_commands

#: The engines of the run "bench", in the order in which they are named.
BENCHED = ("stock", "undo", "deferred", "ledger", "bytes")

RUNS: dict[str, tuple[object, ...]] = {
    "bench": (
        *("bench", "vllm", "--policies", *BENCHED, "--mask-modes", "loop", "--rounds", 2),
        *("--scenario", "short", "mixed", "--requests", 3, "--batch", 2, "--arrivals", 40),
        *("--clock", "--first-token-rounds", 3, "--context", 40, "--tokens", 16, "--drafts", 3),
        *("--output", "smoke", "--folder", "results"),
    ),
    "bench-one-engine": (
        *("bench", "vllm", "--policies", "stock", "undo", "--one-engine", "--requests", 3),
        *("--rounds", 3, "--clock", "--tokens", 24, "--output", "smoke", "--folder", "results"),
    ),
    "demo": ("demo", "--count", 2, "--max-tokens", 32, "--json"),
}


def run(folder: Path) -> dict[str, Any]:
    """Carry out the run that the folder is named after; returns its end, and the folder."""
    name = folder.name.removeprefix("command-").partition(".")[0]
    command = commands.run if name == "demo" else forked_commands.run
    return attrs.asdict(command(folder, *RUNS[name])) | {"folder": str(folder)}
