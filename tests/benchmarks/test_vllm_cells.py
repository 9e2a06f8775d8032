"""Cells of ``kvtxn bench vllm`` and their Markdown, from engines that only pretend."""

from __future__ import annotations

from collections import deque

import attrs
import pytest
from kvtxn.benchmarks.engines import cell as vllm_cell
from kvtxn.benchmarks.engines.load import Work
from pretended_engines import POINT, Pretender, narrow_report, narrow_speed


def test_ratios_are_taken_within_rounds(cell):
    """Rounds differ sevenfold, the ratio never: the interval is a point, on the right side."""
    found = cell["engines"]["deferred"]["of_stock"]
    speed = found["tokens_per_s"]
    assert (speed["low"], speed["median"], speed["high"]) == pytest.approx((0.5, 0.5, 0.5))
    assert speed["rounds"] == 6
    assert found["per_token_ms"]["median"] == pytest.approx(2)
    assert found["first_token_ms"]["median"] == pytest.approx(1)
    assert "of_stock" not in cell["engines"]["stock"]


def test_counts_are_compared_round_by_round(cell):
    """Accepted drafts and tokens, each by itself."""
    engines = cell["engines"]
    assert engines["deferred"]["of_stock"]["same_accepted"]
    assert not engines["undo"]["of_stock"]["same_accepted"]
    assert engines["undo"]["of_stock"]["same_tokens"]


def test_turns_rotate_after_a_round_that_is_dropped(cell, log):
    """Each goes first twice in six rounds, and the first round of all counts for nothing."""
    turns = [list(log)[i : i + 3] for i in range(0, 21, 3)]
    assert all(sorted(turn) == ["deferred", "stock", "undo"] for turn in turns)
    assert sorted(turn[0] for turn in turns[1:]) == ["deferred"] * 2 + ["stock"] * 2 + ["undo"] * 2
    assert len(cell["engines"]["stock"]["rounds"]) == 6


def test_counters_are_those_of_the_measured_rounds(cell):
    """Six of seven runs; coverage is windows by steps with drafts."""
    engine = cell["engines"]["deferred"]
    assert engine["counters"][0]["kvtxn_windows_total"] == 540
    assert "kvtxn_active" not in engine["counters"][0]
    assert engine["coverage"] == pytest.approx(0.9)
    assert cell["engines"]["stock"]["counters"] == []


def test_latency_is_over_requests(cell):
    """In milliseconds."""
    assert cell["engines"]["stock"]["first_token_ms"] == {"p50": 750.0, "p95": 1000.0}
    one_token = attrs.evolve(Pretender("stock", 1.0, deque()).run(None), per_token=[])
    assert vllm_cell.summary([one_token])["per_token_ms"] is None


def test_markdown_says_it_all(result):
    """Speed with its interval, bold as it differs; latency; windows with their reasons."""
    text = narrow_report(result)
    assert "| short | 8 | 2 | 30 % |" in text
    assert "**0.500** (0.500 to 0.500)" in text
    assert "an interval that holds the true median with 96.9 %" in text
    assert "| deferred | 540 | 90.0 % | 25.0 % | 60.0 | 120.0 | 0 | 60: resting 60 |" in text
    assert "3 engines at once on 2 processors" in text
    assert "power and its limit: 1980 MHz, 50, 200 W." in text
    assert "`VLLM_THIS=1`" in text
    assert text.count("| no |") == 1


def only(cell, label):
    """The cell with one engine alone."""
    engine = {key: value for key, value in cell["engines"][label].items() if key != "of_stock"}
    return cell | {"engines": {label: engine}}


def test_first_tokens_are_compared_by_round(result, cell, log):
    """With the rounds that are run for them alone, per cell and over all cells."""
    stock, slow = Pretender("stock", 1.0, log), Pretender("deferred", 1.0, log)
    slow.first_token = [1.0, 2.0]
    del cell["engines"]["undo"]
    point = attrs.evolve(POINT, requests=3)
    other = vllm_cell.measure([stock, slow], point, a_work, rounds=6, first_token_rounds=9)
    found = other["engines"]["deferred"]
    assert found["of_stock"]["first_token_ms"] | {"low": 2, "high": 2} == {
        **{"median": 2.0, "low": 2, "high": 2},
        **{"confidence": pytest.approx(0.961, abs=0.005), "rounds": 9},
    }
    assert found["new_prompts_ms"] == [1500.0] * 9
    assert found["first_token_ms"] == {"p50": 1500.0, "p95": 2000.0}
    assert [work.prompts for work in slow.works] == [[[1], [2]]] * 7 + [[[5 + n]] for n in range(9)]
    assert [work.max_tokens for work in slow.works] == [4] * 7 + [2] * 9
    assert len(found["rounds"]) == 6
    assert found["counters"][0]["kvtxn_windows_total"] == 540  # the measured rounds alone
    result["cells"] = [cell, other]
    text = narrow_report(result)
    assert "| **2.000** (2.000 to 2.000) |" in text
    assert (
        "| all | | | | deferred | | | 2.000 (1.000 to 2.000) | | | 1.500 (1.000 to 2.000) |" in text
    )
    assert "First tokens are those of 9 rounds of their own, each with new prompts" in text
    assert "prompts in the prefix cache" in narrow_report(result | {"cells": [cell]})
    for each in cell["engines"].values():
        del each["new_prompts_ms"]  # as in older results
    assert "First tokens" not in narrow_report(result | {"cells": [cell]})
    for each in cell["engines"]["stock"]["rounds"]:
        del each["first_token_ms"]  # as in still older ones
    assert "| all | | | | deferred | | | **2.000** (2.000 to 2.000) |" in narrow_report(result)


def test_requests_that_arrive_over_time_have_no_rounds_of_two_tokens(log):
    """So short, fewer of them would run at once: another load."""
    engine = Pretender("stock", 1.0, log)
    point = attrs.evolve(POINT, scenario="mixed")
    vllm_cell.measure([engine], point, a_work, rounds=1, first_token_rounds=9)
    assert len(engine.works) == 2


def a_work(turn: int, *, new: bool = False) -> Work:
    """Two requests of four tokens; or a new one."""
    return Work(prompts=[[5 + turn]] if new else [[1], [2]], max_tokens=4)


def test_windows_are_timed_where_asked_for(result, log):
    """In a round of its own, on every engine with windows."""
    engines = [Pretender("stock", 1.0, log), Pretender("undo", 1.0, log)]
    result["cells"] = [vllm_cell.measure(engines, POINT, str, rounds=6, clock=True)]
    [text] = [part for part in narrow_report(result).split("## ") if "Windows" in part[:9]]
    assert "| host: begin + commit, us |" in text
    assert "| 8 + 6 |" in text
    stock, undo = (result["cells"][0]["engines"][label] for label in ("stock", "undo"))
    assert "host_us" not in stock
    assert len(stock["rounds"]) == len(undo["rounds"]) == 6
    assert undo["counters"][0]["kvtxn_windows_total"] == 540
    assert engines[0].works == engines[1].works == list("01234567")  # what is drawn stays alike


def test_audits_are_written_up(result, log):
    """Rows and violations of the whole cell, the host's time, and no windows."""
    engines = [Pretender(policy, 1.0, log) for policy in ("stock", "bytes")]
    engines[1].wrong = 9
    result["cells"] = [vllm_cell.measure(engines, POINT, a_work, rounds=6, clock=True)]
    audited = result["cells"][0]["engines"]["bytes"]
    assert audited["audit"] == {
        **{"steps": 160, "rows": 1600, "states": 0, "violations": 9, "unjudged": 0},
        "kinds": {"foreign": 9},
        "first": [{"rank": 1, "kind": "foreign", "request": "7", "slot": 33, "layer": None}] * 5,
    }
    assert audited["counters"][0]["kvtxn_audit_rows_checked_total"] == 600  # measured rounds alone
    assert audited["coverage"] is None
    text = narrow_report(result)
    assert "## Windows" not in text
    assert "| bytes | 160 | 1600 | 0 | **9**: foreign 9 | 0 | 8 | 6 | 14 |" in text


def test_few_rounds_show_nothing(log):
    """An interval of 75 % is never printed in bold."""
    engines = [Pretender("stock", 1.0, log), Pretender("undo", 0.5, log)]
    cell = vllm_cell.measure(engines, POINT, lambda turn: turn, rounds=3)
    assert [engine.works for engine in engines] == [[0, 1, 2, 3]] * 2  # what warms up is not timed
    assert "0.500 (0.500 to 0.500)" in narrow_speed([cell])
    assert "**" not in narrow_speed([cell])
