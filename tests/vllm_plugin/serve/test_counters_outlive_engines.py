"""The counters of an engine outlive it, and those of two engines are not mixed."""

from __future__ import annotations

import pytest
from engine_jobs import missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.engines("outlived"),
]

STAGED = "kvtxn_rows_staged_total"


@pytest.fixture(scope="module")
def report(reports):
    """The report of ``outlived_engines``."""
    return reports("outlived")["alone"]


def test_snapshots_survive_a_shutdown(report):
    """The last ones: what was counted after the last time anybody asked is in them."""
    [before], _ = report["living"]
    [after], [again], _ = report["one shut down"]
    assert before["kvtxn_active"] == after["kvtxn_active"] == 1
    assert after[STAGED] > before[STAGED] > 0
    assert after["kvtxn_windows_total"] > before["kvtxn_windows_total"]
    assert again == after


def test_engines_side_by_side_are_not_mixed(report):
    """Counters of an in-process engine and of one with own processes stay apart."""
    _, [other] = report["living"]
    [one], _, [still] = report["one shut down"]
    assert still == other != one
    assert other["kvtxn_bytes_avoided_total"] > one["kvtxn_bytes_avoided_total"] == 0


def test_snapshots_of_engines_that_are_gone_are_kept(report):
    """In the order of their ends: one was shut down, the other deleted."""
    [one], _, [other] = report["one shut down"]
    assert report["all gone"] == [[one], [other]]
