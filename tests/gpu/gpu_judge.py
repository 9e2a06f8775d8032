"""Rules for the reports of engines on a GPU; each returns what breaks it, by name."""

from __future__ import annotations

import math
from typing import Any

from gpu_jobs import JOBS
from gpu_ties import NEAR, NOISE

#: A number, the least that it may be, and the most.
Bounded = tuple[float, float, float]


def beyond(numbers: dict[str, Bounded]) -> dict[str, Bounded]:
    """Return the numbers that lie outside their bounds, or are none."""
    return {
        name: (found, least, most)
        for name, (found, least, most) in numbers.items()
        if not least <= found <= most
    }


def far(kind: str, found: dict[str, Any]) -> dict[str, Bounded]:
    """Return what rounding cannot explain in a comparison: of logits, and of tokens that part."""
    lots = math.inf if JOBS[kind].get("random") else 0
    return beyond(
        {
            "noise": (found["noise"], -math.inf, NOISE),
            "gap": (found["gap"], -math.inf, NEAR),
            "by_lot": (found["by_lot"], 0, lots),
        }
    )


def miscounted(counts: dict[str, Any], seen: dict[str, Any], policy: str) -> dict[str, Bounded]:
    """Return the oracle's numbers of one scenario that do not fit kvtxn's counters."""
    windows = counts["kvtxn_windows_total_committed"] + counts["kvtxn_bypassed_windows_total"]
    # A step without a window is as in stock, and the oracle has seen it, too.
    stocks = seen["rejected"] - counts["kvtxn_rows_rejected_total"]
    drafts = seen["kept"] + seen["rejected"] - counts["kvtxn_rows_staged_total"]
    numbers: dict[str, Bounded] = {
        "windows": (seen["windows"], windows, windows),
        "rejected without a window": (stocks, 0, 0.1 * seen["rejected"]),
        "rejected_written": (seen.get("rejected_written", 0), 0, stocks),
        "strays": (seen.get("strays", 0), 0, math.inf if stocks else 0),
        "lost": (seen.get("lost", 0), 0, 0),
    }
    if policy == "deferred":
        numbers["early"] = (seen.get("early", 0), 0, drafts)
    return beyond(numbers)


def unrecovered(found: dict[str, Any], tokens: Any, policy: str) -> dict[str, Bounded]:
    """Return what is wrong with a run in which one stage failed, and with the run after it."""
    during, afterwards = found["during"], found["afterwards"]
    [counts], [seen] = during["kvtxn"], during["oracle"]
    [later], [seen_later] = afterwards["kvtxn"], afterwards["oracle"]
    bypassed = counts.get("kvtxn_bypassed_windows_total", 0)
    windows = counts["kvtxn_windows_total_committed"] + bypassed + 1
    wrong = beyond(
        {
            "calls": (found["calls"], 1, math.inf),
            "other tokens": (during["tokens"] != tokens, 0, 0),
            "other tokens afterwards": (afterwards["tokens"] != tokens, 0, 0),
            "fallbacks": (counts["kvtxn_fallbacks_total"], 1, 1),
            "windows": (seen["windows"], windows, windows),
            "lost": (seen["lost"], 0, 0),
            "fallbacks afterwards": (later["kvtxn_fallbacks_total"], 0, 0),
            "committed afterwards": (later["kvtxn_windows_total_committed"], 1, math.inf),
        }
    )
    counted = miscounted(later, seen_later, policy)
    return wrong | {f"{name} afterwards": numbers for name, numbers in counted.items()}
