"""Cells, Markdown, plot and files of ``kvtxn bench vllm``, from engines that only pretend."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import deque
from itertools import pairwise

import attrs
import pytest
from kvtxn.benchmarks import report, vllm_bench, vllm_cell, vllm_files, vllm_report
from kvtxn.benchmarks.vllm_child import Measured
from kvtxn.benchmarks.vllm_engine import EngineError, EngineSpec
from kvtxn.benchmarks.vllm_work import SCENARIOS, Point, make, positions

from kvtxn.cli import main

POINT = Point(scenario="short", context=8, tokens=4, requests=2, acceptance=0.3)


class Pretender:
    """An engine of known speed; remembers what it was given, and when."""

    def __init__(self, policy: str, speed: float, log: deque[str]) -> None:
        self.spec = EngineSpec(policy=policy, arguments={})
        self.speed, self.log, self.works, self.steps = speed, log, [], 0

    def run(self, work):
        self.log.append(self.spec.label)
        self.works.append(work)
        self.steps += 10
        drift = 1 + len(self.works)  # every round is slower than the one before
        return Measured(
            seconds=drift * 8 / self.speed,
            generated=8,
            drafted=12,
            accepted=5 if self.spec.policy != "undo" else 4,
            digest="same",
            first_token=[0.5, 1.0],
            per_token=[drift / self.speed, drift / self.speed],
            token_ids=None,
        )

    def clock(self, work):
        self.run(work)
        return [{"steps": 7, "begin": 8.4, "commit": 5.6, "both": 14.2}]

    def snapshot(self):
        if self.spec.policy == "stock":
            return []
        return [
            {
                "kvtxn_active": 1.0,
                "kvtxn_windows_total": self.steps * 9,
                "kvtxn_bypassed_windows_total": self.steps,
                "kvtxn_bypassed_windows_total_resting": self.steps,
                "kvtxn_fallbacks_total": 0,
                "kvtxn_rows_staged_total": self.steps * 40,
                "kvtxn_rows_committed_total": self.steps * 10,
                "kvtxn_bytes_written_total": self.steps * 2**20,
                "kvtxn_bytes_avoided_total": self.steps * 2**21,
                "kvtxn_acceptance_rate": 0.25,
            }
        ]


@pytest.fixture
def log():
    return deque()


@pytest.fixture
def cell(log):
    engines = [Pretender(*each, log) for each in (("stock", 1.0), ("deferred", 0.5), ("undo", 1))]
    return vllm_cell.measure(engines, POINT, lambda turn: f"work {turn}", rounds=6)


@pytest.fixture
def result(cell):
    return {
        "format": vllm_files.FORMAT,
        "machine": {"processor": "abacus", "torch": "2", "commit": "0", "command": "kvtxn"},
        "settings": {
            **{"model": "tiny", "drafter": "ngram", "drafts": 4, "rounds": 6, "tokens": 4},
            **{"scenario": ["short"], "context": [8], "requests": [2], "acceptance": [0.3]},
        },
        "conditions": {
            "announced": {"stock": None, "deferred": "policy='deferred'"},
            "engines": 3,
            "processors": 2,
            "started": "today",
            "seconds": 9.0,
            "gpu": "1980 MHz, 50, 200 W",
            "environment": {"VLLM_THIS": "1"},
        },
        "cells": [cell],
    }


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
    text = vllm_report.report(result)
    assert "| short | 8 | 2 | 30 % |" in text
    assert "**0.500** (0.500 to 0.500)" in text
    assert "an interval that holds the true median with 96.9 %" in text
    assert "| deferred | 540 | 90.0 % | 25.0 % | 60.0 | 120.0 | 0 | 60: resting 60 |" in text
    assert "3 engines at once on 2 processors" in text
    assert "power and its limit: 1980 MHz, 50, 200 W." in text
    assert "`VLLM_THIS=1`" in text
    assert text.count("| no |") == 1


def test_markdown_takes_all_cells_together(result, cell, log):
    """The median of all rounds' ratios, no matter how few each cell has."""
    assert "| all |" not in vllm_report.report(result)
    engines = [Pretender("stock", 1.0, log), Pretender("deferred", 0.8, log)]
    other = vllm_cell.measure(engines, attrs.evolve(POINT, requests=3), str, rounds=7)
    del cell["engines"]["undo"]
    text = vllm_report.speed([cell, other])
    assert text.splitlines()[-1] == (
        "| all |  |  |  |  |  | **0.800** (0.500 to 0.800) | **1.250** (1.250 to 2.000) |  |"
    )
    for each in other["engines"]["stock"]["rounds"]:
        del each["per_token_ms"]  # as in older results
    assert "| **2.000** (2.000 to 2.000) |  |" in vllm_report.speed([cell, other])
    for each in ("stock", "deferred"):
        assert len(vllm_report.speed([only(cell, each), only(other, each)]).splitlines()) == 4


def only(cell, label):
    """The cell with one engine alone."""
    engine = {key: value for key, value in cell["engines"][label].items() if key != "of_stock"}
    return cell | {"engines": {label: engine}}


def test_windows_are_timed_where_asked_for(result, log):
    """In a round of its own, on every engine with windows."""
    engines = [Pretender("stock", 1.0, log), Pretender("undo", 1.0, log)]
    result["cells"] = [vllm_cell.measure(engines, POINT, str, rounds=6, clock=True)]
    [text] = [part for part in vllm_report.report(result).split("## ") if "Windows" in part[:9]]
    assert "| host: begin + commit, us |" in text
    assert "| 8 + 6 |" in text
    stock, undo = (result["cells"][0]["engines"][label] for label in ("stock", "undo"))
    assert "host_us" not in stock
    assert len(stock["rounds"]) == len(undo["rounds"]) == 6
    assert undo["counters"][0]["kvtxn_windows_total"] == 540
    assert engines[0].works == engines[1].works == list("01234567")  # what is drawn stays alike


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"requests": [2, 8]}, ["- short, 8 tokens of context, 8 requests, 30 % acceptance"]),
        (
            {"cells": [["mixed", 16, 1, None], ["short", 8, 2, 0.3]]},
            ["- mixed, 16 tokens of context, 1 request, real acceptance"],
        ),
        ({"tokens": 5}, ["- short, 8 tokens of context, 2 requests, 30 % acceptance"]),
        ({}, []),
    ],
)
@pytest.mark.parametrize("ended", [None, "the engine 'undo' gave no answer within 9 s"])
def test_markdown_lists_what_was_not_measured(result, settings, missing, ended):
    """As the settings asked for it, with the reason where there is one."""
    result["settings"] |= settings
    result["conditions"] |= {} if ended is None else {"ended": ended}
    text = vllm_report.report(result)
    assert [line for line in text.splitlines() if line.startswith("- ")] == missing
    assert ("## Not measured" in text) == bool(missing)
    assert (f"({ended or 'the run did not get that far'}):" in text) == bool(missing)


def test_a_result_without_a_cell_has_markdown_and_no_plot(result, tmp_path):
    """All that was asked for is listed."""
    path = vllm_files.write(tmp_path, "nothing", result | {"cells": []})
    assert vllm_files.publish(path) == [path, path.with_suffix(".md")]
    text = path.with_suffix(".md").read_text()
    assert "- short, 8 tokens of context, 2 requests, 30 % acceptance" in text
    assert "## Speed" not in text


class Failing(Pretender):
    """An engine that ends in the second cell."""

    def announced(self):
        return None

    def run(self, work):
        if len(self.works) == 2:
            raise self.failure
        return super().run(work)


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (
            EngineError("bench vllm", "the engine 'stock' ended\nin flames"),
            "the engine 'stock' ended",
        ),
        (SystemExit(143), "the run ended with SystemExit"),
    ],
)
def test_cells_are_kept_when_an_engine_fails(failure, says, monkeypatch, tmp_path, log):
    """Markdown and JSON of what was measured, with what was not and why; the error goes on."""
    engine = Failing("stock", 1.0, log)
    engine.failure = failure
    monkeypatch.setattr(vllm_bench, "running", lambda _: contextlib.nullcontext([engine]))
    parser = argparse.ArgumentParser()
    vllm_bench.add_arguments(parser)
    given = ["--policies", "stock", "--requests", "1,3", "--rounds", "1", "--output", "cut"]
    args = parser.parse_args([*given, "--folder", str(tmp_path)])
    with pytest.raises(type(failure)):
        vllm_bench.run(args)
    found = json.loads((tmp_path / "cut.json").read_text())
    assert [cell["requests"] for cell in found["cells"]] == [1]
    text = (tmp_path / "cut.md").read_text()
    assert f"({says}):" in text
    assert "- short, 64 tokens of context, 3 requests, real acceptance" in text
    assert "| short | 64 | 1 | real |" in text


def test_few_rounds_show_nothing(log):
    """An interval of 75 % is never printed in bold."""
    engines = [Pretender("stock", 1.0, log), Pretender("undo", 0.5, log)]
    cell = vllm_cell.measure(engines, POINT, lambda turn: turn, rounds=3)
    assert [engine.works for engine in engines] == [[0, 1, 2, 3]] * 2  # what warms up is not timed
    assert "0.500 (0.500 to 0.500)" in vllm_report.speed([cell])
    assert "**" not in vllm_report.speed([cell])


@pytest.mark.parametrize("policies", [("stock",), ("undo", "deferred")])
def test_without_anything_to_compare(policies, log, result, tmp_path):
    """Stock alone, or policies without stock: absolute numbers, and the plot too."""
    pytest.importorskip("matplotlib")
    engines = [Pretender(policy, 1.0, log) for policy in policies]
    result["cells"] = [vllm_cell.measure(engines, POINT, lambda turn: None, rounds=1)]
    path = vllm_files.write(tmp_path, "alone", result)
    assert [made.suffix for made in vllm_files.publish(path)] == [".json", ".md", ".png"]
    text = path.with_suffix(".md").read_text()
    assert "of stock |" not in text.partition("## Latency")[0]
    assert ("## Windows" in text) == ("undo" in policies)


def test_report_makes_markdown_and_plot_again(result, tmp_path, capsys):
    """From the JSON alone; the plot is small and a PNG."""
    pytest.importorskip("matplotlib")
    path = vllm_files.write(tmp_path, "again", result)
    assert main(["bench", "report", str(path)]) == 0
    assert capsys.readouterr().out.split() == [
        str(path.with_suffix(suffix)) for suffix in (".json", ".md", ".png")
    ]
    plot = path.with_suffix(".png").read_bytes()
    assert plot.startswith(b"\x89PNG")
    assert len(plot) < 100_000
    assert not list(tmp_path.glob("*.part"))


def test_report_refuses_other_files(tmp_path, capsys):
    """A result of another kind, and no file at all."""
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"rows": []}))
    for path in (other, tmp_path / "nothing.json"):
        assert main(["bench", "report", str(path)]) == 2
        assert "is not a result of `kvtxn bench vllm`" in capsys.readouterr().err
    assert report.help


def work(scenario: str, turn: int, **others):
    """The work of a round of a small cell."""
    point = Point(scenario=scenario, context=32, tokens=16, requests=5, acceptance=0.5)
    settings = {"text": 100, "drafts": 3, "temperature": 0.5, "arrivals": 10.0, **others}
    return make(point, turn, **settings)


def test_a_plain_load_is_the_same_every_round():
    """All alike and at once, so that prompts come from the prefix cache."""
    first = work("short", 0)
    assert first == work("long", 3)
    assert {len(prompt) for prompt in first.prompts} == {32}
    assert first.lengths() == [16] * 5
    assert first.arrivals == []
    assert first.temperature == 0.5


def test_a_mixed_load_is_new_every_round_and_the_same_for_all():
    """Prompts and answers of all lengths; requests arrive over time, faster where asked to."""
    first = work("mixed", 1)
    assert first == work("mixed", 1)
    assert first.prompts != work("mixed", 2).prompts
    assert len({len(prompt) for prompt in first.prompts}) > 1
    assert all(4 <= len(prompt) <= 32 for prompt in first.prompts)
    assert all(4 <= length <= 16 for length in first.lengths())
    assert first.arrivals[0] == 0
    assert list(first.arrivals) == sorted(first.arrivals)
    slower = work("mixed", 1, arrivals=1.0).arrivals
    assert slower[-1] == pytest.approx(10 * first.arrivals[-1])


def test_prompts_come_from_the_text_there_is():
    """Cut out of it, around its end too."""
    prompts = work("short", 0, text=[7, 8, 9]).prompts
    assert all(len(prompt) == 32 for prompt in prompts)
    for prompt in prompts:
        assert all((b - a) % 3 == 1 for a, b in pairwise(prompt))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.6, 1.0])
def test_synthetic_rates_accept_the_share_asked_for(rate):
    """On average over positions, and never more at a later one."""
    found = positions(rate, 4)
    assert sum(found) / 4 == pytest.approx(rate, abs=1e-6)
    assert found == sorted(found, reverse=True)


def test_the_help_has_scenarios_and_models(capsys):
    """With what they default to."""
    with pytest.raises(SystemExit):
        main(["bench", "vllm", "--help"])
    text = capsys.readouterr().out
    assert all(f"{each.context} tokens of context" in text for each in SCENARIOS.values())
    assert "llama3-8b   32 layers of 4096, random weights" in text
    assert max(map(len, text.splitlines())) <= 100
