"""The ledger's counters on the ``/metrics`` page of an SGLang server, with SGLang's own.

Each scheduler counts for itself, and prometheus_client brings the processes together, as it does
for SGLang. No step waits: the counters are copied beside the device's work, and shown some steps
later.
"""

from __future__ import annotations

import time
from typing import Final

from ...audit import Ledger
from ...audit.counter_copy import CounterCopy
from ...audit.findings import AUDIT_FAMILIES
from ...log import get_logger
from ..serving.metrics_page import MetricsPage

log = get_logger()

#: Seconds between two updates.
INTERVAL: Final = 5.0


class Metrics:
    """The metrics of one scheduler's audit.

    Args:
        model_name: a label of each metric.
        engine: the number of the scheduler's data-parallel group.
        rank: the scheduler's.
    """

    def __init__(self, model_name: str, engine: int, rank: int) -> None:
        self._page: Final = MetricsPage(model_name)
        self._engine: Final = engine
        self._rank: Final = rank
        self._copy: CounterCopy | None = None
        self._spare: CounterCopy | None = None
        self._next = 0.0
        self._failed = False

    def show(self, found: dict[str, float]) -> None:
        """Show the audit's counters among ``found``; a failure is logged and ends the showing."""
        if self._failed:
            return
        try:
            self._page.show(AUDIT_FAMILIES, self._engine, self._rank, found)
        except Exception as error:
            self._failed = True
            log.warning("kvtxn.no_metrics", why=repr(error), effect="the audit goes on")

    def update(self, ledger: Ledger, *, active: bool) -> None:
        """Show the ledger's counters every ``INTERVAL`` seconds; call it in each step.

        Args:
            ledger: has them.
            active: the audit goes on.
        """
        copy = self._copy
        if copy is not None and copy.ready:
            found = {**ledger.findings.counters(copy), "kvtxn_audit_active": int(active)}
            self._copy, self._spare = None, copy
            self.show(dict(found))
        now = time.monotonic()
        if now >= self._next and self._copy is None:
            self._next = now + INTERVAL
            self._copy = ledger.copy_counters(self._spare, prints=False)
