"""A usual step with recurrent states asks torch for nothing, and makes one launch."""

from __future__ import annotations

import pytest
import torch
from engine_jobs import missing
from kernels_here import importing_kernels

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

with importing_kernels():
    from state_step_rig import StateSteps
    from step_rig import Calls


@pytest.mark.parametrize("joined", [True, False])
def test_what_a_usual_step_asks_for(joined, monkeypatch):
    """Joined, no operator of torch; each costs the host more than all else of a commit."""
    steps = StateSteps(monkeypatch, joined=joined)
    with torch.inference_mode():
        for _ in range(9):
            steps.begin()
            steps.commit()
        steps.launches.made.clear()
        with Calls() as calls:
            steps.begin()
            steps.commit()
    assert steps.launches.made == (["both"] if joined else ["states", "rows"])
    assert (calls.names == []) == joined
