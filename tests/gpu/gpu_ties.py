"""Two engines may part at near-ties only; the logits that both report tell.

Logits are bfloat16 and so lie on a grid, whose step at their size is the unit here: 1/16 from 8 to
16, 1/8 from 16 to 32. Two sums of the same products in another order are a few steps apart, and the
likelier of two tokens changes where they are no further apart than that.
"""

from __future__ import annotations

import math
from typing import Any

#: Number of likeliest tokens whose logits are reported for each generated token.
CANDIDATES = 4

#: Steps that a logit may differ by between engines that have generated the same so far, and steps
#: by which stock's best token may lead the one that the other engine took: twice what such models
#: show on a CPU between vLLM's attention and another, 4 and 3. Stock with another attention of its
#: own is held to the same, and the page says how near that comes.
NOISE = 8
NEAR = 6


def step(logit: float) -> float:
    """Return the distance between neighbouring bfloat16 numbers at the size of ``logit``."""
    return 2.0 ** (math.frexp(logit)[1] - 8)


def compare(ours: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    """Compare one scenario's report of an engine with stock's.

    Returns:
        ``gap``: of requests that part from stock's, the most by which stock's best logit exceeds
        that of the token which the other engine took, infinite where that is none of the likeliest;
        ``noise``: the most that a logit differs by after the same tokens, the first that differs
        included; both in steps. ``by_lot``: requests that part at a draft that was accepted by lot,
        so that it says nothing about logits; ``followed``: those whose prompts the other engine
        has not seen, since they quote another request's answer.
    """
    found = {"gap": 0.0, "noise": 0.0, "by_lot": 0, "followed": 0}
    for number, place in pairs(ours, stock):
        if place is None:
            found["followed"] += 1
            continue
        expected, scores = stock["tokens"][number], stock["logits"][number]
        tokens, others = ours["tokens"][place], ours["logits"][place]
        equal = (a == b for a, b in zip(expected, tokens, strict=True))
        first = next((place for place, same in enumerate(equal) if not same), None)
        alike = len(tokens) if first is None else first + 1
        for here, there in zip(scores[:alike], others[:alike], strict=True):
            found["noise"] = max(found["noise"], noise(dict(here), dict(there)))
        if first is None:
            continue
        chosen = (expected[first], dict(scores[first])), (tokens[first], dict(others[first]))
        if any(best(logits) > logits[token] for token, logits in chosen):
            found["by_lot"] += 1
        else:
            found["gap"] = max(found["gap"], gap(chosen[0][1], tokens[first]))
    return found


def pairs(ours: dict[str, Any], stock: dict[str, Any]) -> list[tuple[int, int | None]]:
    """Pair each request of stock's with the other engine's of the same prompt, or None."""
    waiting: dict[str, list[int]] = {}
    for place, prompt in enumerate(ours.get("prompts") or range(len(ours["tokens"]))):
        waiting.setdefault(str(prompt), []).append(place)
    found = []
    for number, prompt in enumerate(stock.get("prompts") or range(len(stock["tokens"]))):
        places = waiting.get(str(prompt))
        found.append((number, places.pop(0) if places else None))
    return found


def best(logits: dict[int, float]) -> float:
    """Return the largest logit."""
    return max(logits.values())


def noise(here: dict[int, float], there: dict[int, float]) -> float:
    """Return the largest difference, in steps, of logits that both reports name."""
    both = here.keys() & there.keys()
    most = max((abs(here[token] - there[token]) for token in both), default=math.inf)
    return most / step(best(here))


def gap(logits: dict[int, float], token: int) -> float:
    """Return how many steps a token's logit lies below the best logit."""
    return (best(logits) - logits.get(token, -math.inf)) / step(best(logits))
