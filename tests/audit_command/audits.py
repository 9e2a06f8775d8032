"""Runs of ``kvtxn audit`` as a user makes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import commands
from commands import Ended


def audit(
    folder: Path,
    workload: str,
    *words: object,
    engine: Mapping[str, Any] | None = None,
    run: Callable[..., Ended] = commands.run,
) -> Ended:
    """Audit an engine; the shipped model if ``engine`` is None."""
    given = () if engine is None else ("--engine-args", json.dumps(engine))
    return run(folder, "audit", "--workload", workload, *given, *words)
