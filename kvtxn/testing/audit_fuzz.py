"""Many row reads of random engines without a fault, which a ledger must not accuse.

``python -m kvtxn.testing.audit_fuzz 10_000_000`` lives engines of every kind of groups until that
many rows were read and compared, prints how many and what the ledger takes per step, and ends with
an error if there was a violation. Engines preempt, abort, speculate, share prefixes, go on with
sessions, store and load; their contexts are long, so that a step reads many rows at once.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from ..audit import Ledger, RowGroup, StateGroup, Step
from ..audit.groups import Group
from .audit_connector import ConnectedEngine

#: Groups with long blocks, by the kind of engine.
LONG: Final[Mapping[str, Sequence[Group]]] = {
    "plain": (RowGroup("full", 64, 700),),
    "sliding": (
        RowGroup("full", 64, 900, pool="pages"),
        RowGroup("sliding", 32, 900, window=300, pool="pages"),
    ),
    "shared": (RowGroup("full", 64, 700), RowGroup("reader", 64, 700, window=500, reads="full")),
    "rings": (
        RowGroup("ring", 64, 700, ring=1280, window=700),
        RowGroup("chunks", 64, 900, chunk=512),
    ),
    "states": (RowGroup("full", 64, 800, pool="pages"), StateGroup("mamba", 800, pool="pages")),
}
_MAX_LENGTH: Final = 2000
_REQUESTS: Final = 24


@attrs.define
class Tally:
    """Counts of compared rows and states, and the time it took.

    Attributes:
        rows: rows that were read and compared.
        states: states that were read and compared.
        steps: forward passes.
        seconds: time in the ledger's calls of a step.
        violations: violations, which should not be.
    """

    rows: int = 0
    states: int = 0
    steps: int = 0
    seconds: float = 0.0
    violations: list[str] = attrs.Factory(list)

    def __str__(self) -> str:
        """Return one line."""
        each = self.seconds / max(1, self.steps) * 1e6
        return (
            f"{self.rows} row reads and {self.states} state reads in {self.steps} steps, "
            f"{len(self.violations)} violations, {each:.0f} us per step in the ledger"
        )


class TimedLedger(Ledger):
    """A ledger that adds up the time in the calls of a step."""

    seconds = 0.0

    def write(self, step: Step) -> None:
        """Call ``Ledger.write``, and add its time to ``seconds``."""
        begin = time.perf_counter()
        super().write(step)
        self.seconds += time.perf_counter() - begin

    def check(self, step: Step) -> None:
        """Call ``Ledger.check``, and add its time to ``seconds``."""
        begin = time.perf_counter()
        super().check(step)
        self.seconds += time.perf_counter() - begin

    def resolve(self, accepted: Any, sampled: Any = None, *, besides: int = 0) -> None:
        """Call ``Ledger.resolve``, and add its time to ``seconds``."""
        begin = time.perf_counter()
        super().resolve(accepted, sampled, besides=besides)
        self.seconds += time.perf_counter() - begin


class LongEngine(ConnectedEngine):
    """An engine with long contexts, and prompts that have long beginnings in common."""

    def __init__(self, groups: Sequence[Group], ledger: Ledger, seed: int) -> None:
        super().__init__(
            groups, [ledger], seed=seed, drafts=4, budget=512, vocabulary=40,
            max_length=_MAX_LENGTH,
        )  # fmt: skip
        self.beginnings = [[self.token() for _ in range(1000)] for _ in range(4)]

    def around(self) -> None:
        """Add, end, preempt, continue and store random requests, and run a step."""
        chance = self.random
        if len(self.running) + len(self.waiting) < _REQUESTS - 2 and chance.random() < 0.5:
            beginning = chance.choice(self.beginnings)[: chance.randint(0, 1000)]
            self.add([*beginning, *(self.token() for _ in range(chance.randint(1, 200)))])
        if self.running:
            request, what = chance.choice(self.running), chance.random()
            if what < 0.02:
                self.finish(request)
            elif what < 0.05:
                self.preempt(request)
            elif what < 0.10 and len(request.tokens) < _MAX_LENGTH - 300:
                more = [self.token() for _ in range(chance.randint(1, 200))]
                self.go_on(request, more, drop=chance.random() < 0.5)
            elif what < 0.12:
                self.store(request)
        if chance.random() < 0.01:
            for pool in self.pools.values():
                pool.forget()
            self.stored.clear()
            self.whole.clear()
        self.step()


def fuzz(reads: int, seed: int = 0, steps: int = 300) -> Tally:
    """Live engines without a fault.

    Args:
        reads: the number of row reads after which no further engine is begun.
        seed: the seed of the first engine.
        steps: forward passes of one engine.

    Returns:
        Counts of the rows compared, and the violations: there should be none.
    """
    tally = Tally()
    for number in itertools.count(seed):
        name = list(LONG)[number % len(LONG)]
        ledger = TimedLedger(LONG[name], max_requests=_REQUESTS, max_length=_MAX_LENGTH + 8)
        engine = LongEngine(LONG[name], ledger, number)
        for _ in range(steps):
            engine.around()
        counts = ledger.counters()
        tally.rows += counts["kvtxn_audit_rows_checked_total"]
        tally.states += counts["kvtxn_audit_states_checked_total"]
        tally.steps += counts["kvtxn_audit_steps_total"]
        tally.seconds += ledger.seconds
        tally.violations += [f"{name}, seed {number}: {each}" for each in ledger.violations()]
        if tally.rows >= reads or tally.violations:
            return tally
    raise AssertionError("an endless count has ended")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz, print what came of it, and return 1 if there was a violation."""
    parser = argparse.ArgumentParser(description="Live engines without a fault under a ledger.")
    parser.add_argument("reads", type=int, help="row reads, such as 10_000_000")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first engine")
    options = parser.parse_args(arguments)
    tally = fuzz(options.reads, options.seed)
    print(tally)
    for violation in tally.violations[:20]:
        print(violation)
    return int(bool(tally.violations))


if __name__ == "__main__":
    raise SystemExit(main())
