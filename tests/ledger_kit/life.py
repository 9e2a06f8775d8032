"""Random runs of the small engine, and the comparison of the ledgers' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvtxn.audit import Ledger, RowGroup, StateGroup
from kvtxn.audit.groups import Group

from .engine import SmallEngine
from .model import Finding, LedgerModel, finding_of

#: Groups of layers, by a name for the kind of engine.
GROUPS: Final[Mapping[str, Sequence[Group]]] = {
    "plain": (RowGroup("full", 4, 40),),
    "sliding": (
        RowGroup("full", 4, 60, pool="pages"),
        RowGroup("sliding", 2, 60, window=7, pool="pages", drafter=False),
    ),
    "shared": (RowGroup("full", 4, 40), RowGroup("reader", 4, 40, window=5, reads="full")),
    "rings": (RowGroup("ring", 3, 60, ring=9, window=6), RowGroup("chunks", 4, 40, chunk=8)),
    "states": (
        RowGroup("full", 4, 60, pool="pages"),
        StateGroup("mamba", 60, pool="pages"),
    ),
}
MAX_REQUESTS: Final = 12
MAX_LENGTH: Final = 60


def live(engine: SmallEngine, steps: int, updates: float = 0.0) -> None:
    """Run an engine with requests that come, end, are preempted, stored and continued.

    Args:
        engine: an engine without requests.
        steps: the number of forward passes.
        updates: the chance that weights change before a forward pass.
    """
    chance = engine.random
    beginnings = [[engine.token() for _ in range(24)] for _ in range(3)]
    for _ in range(steps):
        present = len(engine.running) + len(engine.waiting)
        if present == 0 or (present < MAX_REQUESTS and chance.random() < 0.4):
            beginning = beginnings[chance.randrange(3)][: chance.randint(0, 24)]
            engine.add([*beginning, *(engine.token() for _ in range(chance.randint(1, 9)))])
        if engine.running:
            request = chance.choice(engine.running)
            what = chance.random()
            if what < 0.08:
                engine.finish(request)
            elif what < 0.16:
                engine.preempt(request)
            elif what < 0.28 and len(request.tokens) < MAX_LENGTH // 2:
                more = [engine.token() for _ in range(chance.randint(1, 8))]
                engine.go_on(request, more, drop=chance.random() < 0.5)
            elif what < 0.4:
                engine.store(request)
        if chance.random() < 0.1:
            for pool in engine.pools.values():
                pool.forget()
        if updates and chance.random() < updates:
            engine.tell("new_epoch", chance.choice(("target", "target", "drafter")))
        engine.step()


def said(ledger: Ledger) -> list[Finding]:
    """Return a ledger's violations, reduced to the fields that a model also reports."""
    return [finding_of(violation.as_dict()) for violation in ledger.violations()]


def new_engine(
    engine: type[SmallEngine], name: str, ledgers: Sequence[Any], *, seed: int, **named: Any
) -> SmallEngine:
    """Make an engine with the groups called ``name``."""
    return engine(GROUPS[name], ledgers, seed=seed, max_length=MAX_LENGTH, **named)


def new_ledger(name: str, **named: Any) -> Ledger:
    """Make a ledger for the groups called ``name``."""
    return Ledger(GROUPS[name], max_requests=MAX_REQUESTS + 4, max_length=MAX_LENGTH + 8, **named)


def new_model(name: str, stale: str = "count") -> LedgerModel:
    """Make a model for the groups called ``name``."""
    return LedgerModel(GROUPS[name], stale)


def ages_of(ledger: Ledger) -> dict[tuple[str | None, str, int], int]:
    """Return a ledger's reads of stale rows and states as a model's ``ages`` has them."""
    return {
        (each.request, what, age): number
        for each in ledger.read_ages()
        for what in ("rows", "draft_rows", "states")
        for age, number in getattr(each, what).items()
    }
