"""``kvtxn bench soak`` over real engines: a healthy one, and planted faults that it has to find."""

from __future__ import annotations

import pytest
from command_runs import PLANTED
from engine_jobs import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.engines("command-soak")
def test_a_healthy_engine(ended):
    """Windows, a connector, aborts, texts: all is accounted for, and nothing is left."""
    end, _ = ended("soak")
    assert end.code == 0, end.out + end.err
    found = end.json()
    assert found["wrong"] == []
    assert found["asked"] == found["finished"] + found["aborted"] > 20
    assert min(found[name] for name in ("windows", "accepted", "aborted", "loaded")) > 0
    assert found["texts"] == found["same"] > 0


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(said, marks=pytest.mark.engines(f"command-soak-{name}"), id=name)
        for said, name in PLANTED.items()
    ],
)
def test_a_planted_fault_is_found(ended, said):
    """Blocks or bytes are lost, or tokens are others; ``test_soak_verdict`` has all faults."""
    end, _ = ended(f"soak-{PLANTED[said]}")
    assert end.code == 1, end.out + end.err
    wrong = [line for line in end.out.splitlines() if line.startswith("WRONG: ")]
    assert any(said in line for line in wrong), end.out
