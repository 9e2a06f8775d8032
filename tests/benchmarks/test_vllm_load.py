"""Loads of ``kvtxn bench vllm``: what requests of each scenario ask for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from kvtxn.benchmarks.engines.load import SCENARIOS, Point, make, positions

from kvtxn.cli import main


def work(scenario: str, turn: int, acceptance: float = 0.5, **others):
    """The work of a round of a small cell."""
    point = Point(scenario=scenario, context=32, tokens=16, requests=5, acceptance=acceptance)
    settings = {"text": 100, "drafts": 3, "arrivals": 10.0, **others}
    return make(point, turn, **settings)


def test_a_plain_load_is_the_same_every_round():
    """All alike and at once, so that prompts come from the prefix cache."""
    first = work("short", 0)
    assert first == work("long", 3)
    assert {len(prompt) for prompt in first.prompts} == {32}
    assert first.lengths() == [16] * 5
    assert first.arrivals == []


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


def test_new_prompts_are_of_one_round_alone():
    """Nor of another cell, and as long."""
    rounds = [work("short", turn, rate, new=True) for turn in range(3) for rate in (0.3, 0.5)]
    assert rounds[3] == work("short", 1, new=True)
    prompts = [tuple(prompt) for each in (*rounds, work("short", 1)) for prompt in each.prompts]
    assert len(set(prompts)) == 7 * 5
    assert {len(prompt) for prompt in prompts} == {32}


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
