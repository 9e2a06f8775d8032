"""Runs of commands over real engines, carried out in the pool of engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audits import Ended


@pytest.fixture
def ended(reports: Callable[[str], Any]) -> Callable[[str], tuple[Ended, Path]]:
    """Return how a run of ``audit_runs`` ended, and its folder, by the run's name."""

    def of(name: str) -> tuple[Ended, Path]:
        found = reports(f"command-{name}")["alone"]
        return Ended(found["code"], found["out"], found["err"]), Path(found["folder"])

    return of
