"""Runs of ``kvtxn audit`` as a user makes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commands import Ended, run


def audit(
    folder: Path, workload: str, *words: object, engine: Mapping[str, Any] | None = None
) -> Ended:
    """Audit an engine; the shipped model if ``engine`` is None."""
    given = () if engine is None else ("--engine-args", json.dumps(engine))
    return run(folder, "audit", "--workload", workload, *given, *words)
