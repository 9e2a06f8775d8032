"""The tests of the kit that a benchmark runs before it writes a number."""

from __future__ import annotations

import pytest
from kvtxn.benchmarks.common import conformance_gate

from kvtxn import testing

recurrent = pytest.importorskip("kvtxn.benchmarks.kernels.recurrent")


@pytest.mark.parametrize(
    ("kit", "tests"),
    [("ExecutorConformance", conformance_gate.TESTS), ("ReplayConformance", recurrent.GATE)],
)
def test_the_kits_have_them(kit, tests):
    """Else a benchmark would say at its end that nothing was tested, and write nothing."""
    assert [name for name in tests if not hasattr(getattr(testing, kit), name)] == []


def test_a_test_that_is_not_there_is_told():
    with pytest.raises(SystemExit, match="ReplayConformance has no test test_lost; no result"):
        conformance_gate.passed("ReplayConformance", ["test_replayed_states", "test_lost"])
