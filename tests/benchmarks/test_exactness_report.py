"""Tables of `kvtxn bench exactness`."""

from __future__ import annotations

import pytest
from kvtxn.benchmarks import exactness_report

MACHINE = {"processor": "abacus", "torch": "2", "commit": "0", "command": "kvtxn"}


@pytest.mark.parametrize("failed", [{}, {"undo": "ValueError: no room", "deferred": "Killed"}])
def test_engines_without_a_result_are_named(failed):
    """With what they said last; older results do not have it."""
    result = {"engines": [], "machine": MACHINE, **({"failed": failed} if failed else {})}
    said = "Without a result: undo (`ValueError: no room`); deferred (`Killed`). "
    assert (said in exactness_report.tokens(result)) == bool(failed)
    assert ("Without a result" in exactness_report.tokens(result)) == bool(failed)
