"""The gap of logits at which two engines part; no GPU needed."""

from __future__ import annotations

import math

import pytest
from gpu_judge import far, miscounted
from gpu_ties import NEAR, NOISE, compare, pairs, step


def report(*requests, prompts=None):
    """A scenario's report: per request and token, its logits, the token taken first."""
    return {
        "tokens": [[logits[0][0] for logits in request] for request in requests],
        "prompts": prompts or [[number] for number in range(len(requests))],
        "logits": [
            [sorted(([*pair] for pair in logits), key=lambda pair: -pair[1]) for logits in request]
            for request in requests
        ],
    }


EIGHT = [(5, 9.0), (6, 8.0), (7, 7.0)]  # a step is 1/16 here
STOCK = report([EIGHT, [(1, 12.0), (2, 11.9375), (3, 4.0)], [(4, 20.0), (5, 2.0)]])


@pytest.mark.parametrize("exponent", range(-6, 7))
def test_a_step_is_what_bfloat16_has(exponent):
    """The step between two bfloat16 numbers is the one by which torch rounds."""
    import torch

    for value in (2.0**exponent, 1.9 * 2.0**exponent):
        number = torch.tensor(value, dtype=torch.bfloat16)
        above = (number.view(torch.int16) + 1).view(torch.bfloat16)
        assert float(above - number) == step(float(number)) == step(-float(number))


def test_the_same():
    assert compare(STOCK, STOCK) == {"gap": 0, "noise": 0, "by_lot": 0, "followed": 0}


def test_a_near_tie():
    """Two engines part where the best logits are a step apart; later tokens are not compared."""
    ours = report([EIGHT, [(2, 12.0), (1, 11.875), (9, 5.0)], [(9, 1.0), (5, 0.5)]])
    assert compare(ours, STOCK) == {"gap": 1, "noise": 2, "by_lot": 0, "followed": 0}
    assert far("flash", compare(ours, STOCK)) == {}


def test_requests_are_those_of_the_same_prompt():
    """Requests are paired by prompt, since later prompts can quote earlier answers."""
    more = report([EIGHT], [EIGHT], [EIGHT], prompts=[[1], [2], [1]])
    less = report([EIGHT], [EIGHT], prompts=[[3], [1]])
    assert pairs(less, more) == [(0, 1), (1, None), (2, None)]
    assert pairs(more, less) == [(0, None), (1, 0)]
    assert compare(less, more) == {"gap": 0, "noise": 0, "by_lot": 0, "followed": 2}


def test_no_near_tie():
    """The other token is one of stock's likeliest, but far behind; or it is none of them."""
    other = report([EIGHT, [(3, 12.0), (1, 11.9375), (2, 11.0)], [(4, 20.0), (5, 2.0)]])
    assert compare(other, STOCK)["gap"] == 128 > NEAR
    unknown = report([EIGHT, [(8, 12.0), (1, 11.9375), (2, 11.9375)], [(4, 20.0), (5, 2.0)]])
    assert compare(unknown, STOCK)["gap"] == math.inf
    for wrong in (other, unknown):
        assert "gap" in far("flash", compare(wrong, STOCK))


def test_logits_that_part_without_another_token():
    """Differing logits are noticed although the tokens agree."""
    ours = report([[(5, 9.75), (6, 8.0), (7, 7.0)], *STOCK["logits"][0][1:]])
    found = compare(ours, STOCK)
    assert found == {"gap": 0, "noise": 12, "by_lot": 0, "followed": 0}
    assert far("flash", found) == {"noise": (12, -math.inf, NOISE)}


def test_logits_of_other_tokens():
    """Logits are infinitely apart if two engines name no likely token in common."""
    ours = report([[(15, 9.0), (16, 8.0)], *STOCK["logits"][0][1:]])
    assert compare(ours, STOCK)["noise"] == math.inf


def test_a_draft_that_is_accepted_by_lot():
    """A draft accepted by lot need not be likeliest; only engines that draw lots may part there."""
    ours = report([EIGHT, [(7, 3.0), (1, 12.0), (2, 11.9375)], [(4, 20.0), (5, 2.0)]])
    found = compare(ours, STOCK)
    assert found == {"gap": 0, "noise": 0, "by_lot": 1, "followed": 0}
    assert far("eagle", found) == {}
    assert far("flash", found) == {"by_lot": (1, 0, 0)}


def test_a_prompt_that_quotes_another_answer():
    """Prompts that follow from different answers differ, and are not compared."""
    first, second = [EIGHT], [[(1, 12.0), (2, 3.0)]]
    stock = report(first, second, prompts=[[1], [1, 5]])
    ours = report([[(6, 9.0), (5, 9.0)]], [[(9, 4.0), (8, 3.0)]], prompts=[[1], [1, 6]])
    assert compare(ours, stock) == {"gap": 16, "noise": 16, "by_lot": 0, "followed": 1}


def test_what_the_oracle_saw_can_fail():
    """Counts fail on a rejected row left, an accepted row lost, an early row and a stray."""
    counts = {
        **{"kvtxn_windows_total_committed": 9, "kvtxn_bypassed_windows_total": 0},
        **{"kvtxn_rows_staged_total": 30, "kvtxn_rows_rejected_total": 20},
    }
    seen = {"windows": 9, "kept": 10, "rejected": 20, "lost": 0, "early": 0, "strays": 0}
    assert miscounted(counts, seen, "deferred") == {}
    for wrong in ("rejected_written", "lost", "early", "strays"):
        assert miscounted(counts, seen | {wrong: 1}, "deferred") == {wrong: (1, 0, 0)}
    for wrong in ({"windows": 8}, {"rejected": 19}):
        assert miscounted(counts, seen | wrong, "deferred")


def test_a_number_that_is_none():
    """A comparison that yields no number is not taken for a near one."""
    assert list(far("flash", {"noise": math.nan, "gap": math.nan, "by_lot": 0})) == ["noise", "gap"]
