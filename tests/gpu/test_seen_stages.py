"""Reports of engines with pipeline stages are reduced as they are; no GPU needed."""

from __future__ import annotations

from typing import Any

import pytest
from seen_stages import drawn, recovered, reduced

EARLY = {"last": False, "device": 0, "steps": "PipelineSteps", "policy": "undo"}
LAST = {"last": True, "device": 1, "policy": "deferred"}


def run(tokens: list[list[int]], *, stays: int = 0, lost: int = 0, fallbacks=(0, 0)) -> Any:
    """A scenario's report of two stages."""
    seen = {"windows": 4, "kept": 5, "rejected": 6, "rejected_written": stays, "lost": lost}
    counts = {"kvtxn_rows_staged_total": 11, "kvtxn_rows_rejected_total": 6}
    return {
        "tokens": tokens,
        "oracle": [seen, seen],
        "kvtxn": [counts | {"kvtxn_fallbacks_total": each} for each in fallbacks],
    }


def report(**scenarios: Any) -> dict[str, Any]:
    """An engine's report."""
    facts = {"machine": "one", "graphs": "FULL", "attention": "FLASH_ATTN"}
    return facts | {"stages": [EARLY, LAST], **scenarios}


def test_an_engine_is_compared_with_stock_and_with_itself():
    ours = report(**{"eight": run([[1], [2]]), "eight.off": run([[1], [3]], stays=6)})
    found = reduced(ours, report(eight=run([[1], [2]], stays=6)))
    assert (found["requests"], found["same"], found["on_and_off"]) == (2, 2, 1)
    first, second = found["stages"]
    assert (first["stays_in_stock"], first["rejected_written"]) == (6, 0)
    assert first["counts_agree"]
    assert second["counts_agree"]
    assert reduced(ours, None)["same"] is None
    assert "| FULL | 1 " in " ".join(drawn({"flash.auto": found | {"faults": {}}}).split())


def test_counts_that_do_not_agree():
    """One row that the oracle did not see."""
    ours = run([[1]])
    ours["kvtxn"][0]["kvtxn_rows_staged_total"] += 1
    found = reduced(report(**{"eight": ours, "eight.off": run([[1]])}), None)
    assert [each["counts_agree"] for each in found["stages"]] == [False, True]


@pytest.mark.parametrize(
    ("during", "good"),
    [
        (run([[1]], fallbacks=(1, 0)), True),
        (run([[2]], fallbacks=(1, 0)), False),
        (run([[1]], fallbacks=(0, 0)), False),
        (run([[1]], fallbacks=(1, 1)), False),
        (run([[1]], lost=1, fallbacks=(1, 0)), False),
        ({"error": "it died", "oracle": []}, False),
    ],
)
def test_a_fault_is_counted_once_and_costs_nothing(during, good):
    found = {"during": during, "afterwards": run([[1]])}
    assert recovered(found, [[1]], [True, False]) == good
    assert not recovered({"during": during, "afterwards": during}, [[1]], [True, False])
