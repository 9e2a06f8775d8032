"""Engines with recurrent layers, by name: what each is asked for."""

from __future__ import annotations

from typing import Any

import attrs

#: Scenarios of the grid, with requests of this folder's own under "preempted".
SCENARIOS = ["one", "eight", "chunked", "preempted", "abort", "stop"]
#: Faults inside kvtxn, and the reason under which each is counted.
FAULTS = {
    "plan": "begin",
    "window": "begin",
    "stage_state": "stage",
    "stage_rows": "stage",
    "lend": "stage",
    "give_back": "attend",
    "accept": "commit",
    "advance": "commit",
    "half_advance": "commit",
    "commit": "commit",
    "half_commit": "commit",
}
EXACT = {"policy": "auto", "recurrent": "exact"}


@attrs.frozen(kw_only=True)
class Job:
    """An engine and its scenarios.

    Attributes:
        scenarios: their names, ``scenario@fault`` for one with a fault.
        kvtxn: settings of kvtxn; None for an engine without.
        speculates: the engine has drafts.
        watched: the oracle looks at every step.
        blocks: blocks of the cache.
        undone: in the end all hooks are undone.
    """

    scenarios: list[str]
    kvtxn: dict[str, Any] | None = None
    speculates: bool = True
    watched: bool = True
    blocks: int = 21
    undone: bool = False


JOBS = {
    "windows": Job(
        scenarios=[*SCENARIOS, *(f"chunked@{fault}" for fault in FAULTS), "chunked@one_more"],
        kvtxn=EXACT | {"audit": "ledger"},
        undone=True,
    ),
    "greedy": Job(scenarios=SCENARIOS, speculates=False),
    "stock": Job(scenarios=["chunked"], watched=False, blocks=120),
    "raise": Job(scenarios=["chunked@half_advance"], kvtxn=EXACT | {"on_error": "raise"}),
}
