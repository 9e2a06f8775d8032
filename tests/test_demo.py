"""The demo runs a real engine three times and can tell when something differs."""

from __future__ import annotations

import attrs
import pytest
from command_runs import RUNS
from commands import run
from engine_jobs import missing

pytest.importorskip("rich")

from kvtxn.integrations.demo import command
from kvtxn.integrations.demo.engine import Result

OFF = Result(token_ids=[[1, 2]], texts=["a b"], drafted=4, accepted=2, seconds=1.0, counters={})
COUNTERS = {
    "kvtxn_windows_total": 3.0,
    "kvtxn_rows_staged_total": 4.0,
    "kvtxn_rows_committed_total": 2.0,
    "kvtxn_rows_rejected_total": 2.0,
    "kvtxn_bytes_avoided_total": 512.0,
    "kvtxn_bypassed_windows_total": 0.0,
    "kvtxn_fallbacks_total": 0.0,
}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, (True, True)),
        ({"token_ids": [[1, 3]]}, (False, True)),
        ({"accepted": 1}, (True, False)),
        ({"drafted": 5}, (True, False)),
    ],
)
def test_a_difference_is_noticed(change, verdict):
    """In a token, in the acceptance, in neither."""
    found = command.compare({"off": OFF, "undo": attrs.evolve(OFF, **change)})
    assert (found["tokens_identical"], found["acceptance_identical"]) == verdict


def test_table_shows_what_was_spared():
    """Rejected rows count as never written only where no byte was moved for them."""
    undo = attrs.evolve(OFF, counters=COUNTERS | {"kvtxn_bytes_avoided_total": 0.0})
    deferred = attrs.evolve(OFF, counters=COUNTERS)
    rows = dict(command.table_rows({"off": OFF, "undo": undo, "deferred": deferred}))
    assert rows["rows never written"] == ["-", "0", "2"]
    assert rows["acceptance"] == ["50.0%"] * 3


@pytest.mark.engines("command-demo")
def test_a_real_engine_three_times(request, tmp_path):
    """Stock, undo and deferred: the same tokens, the same acceptance, rows really spared."""
    pytest.importorskip("vllm")
    if missing() is None:
        end, _ = request.getfixturevalue("ended")("demo")
    else:  # vLLM for a GPU, where there is no pool of engines
        end = run(tmp_path, *RUNS["demo"])
    assert end.code == 0, end.err[-4000:]
    found = end.json()
    assert found["tokens_identical"]
    assert found["acceptance_identical"]
    deferred = found["runs"]["deferred"]["counters"]
    assert deferred["kvtxn_rows_rejected_total"] > 0
    assert deferred["kvtxn_bytes_avoided_total"] > 0
    assert deferred["kvtxn_fallbacks_total"] == 0
    assert found["runs"]["off"]["counters"] == {}
    assert all(text.strip() for text in found["runs"]["off"]["texts"])
