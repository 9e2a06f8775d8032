"""kvtxn's counters in the Prometheus registry of a process, beside vLLM's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from prometheus_client import Counter, Gauge

from ..metrics import FAMILIES, Family

ACTIVE: Final = Family(
    "kvtxn_active", "1 where kvtxn is at work, 0 where it stays out.", per_rank=True
)


@cache
def _metric(family: Family) -> Counter | Gauge:
    """The one metric of this family in this process; a name can be registered once."""
    labels = ["model_name", "engine"]
    labels += ["rank"] if family.per_rank else []
    labels += [family.label] if family.label else []
    if family.is_counter:
        return Counter(family.name, family.help, labels)
    # Where several processes serve the page, they add counters up; of a gauge there is one.
    return Gauge(family.name, family.help, labels, multiprocess_mode="mostrecent")


class Page:
    """One model's metrics.

    Args:
        model_name: a label of each, as in vLLM's own metrics.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._shown: dict[tuple[str, ...], float] = {}

    def show(self, engine: int, snapshots: Sequence[Mapping[str, float]]) -> None:
        """Bring the metrics of an engine up to date.

        Args:
            engine: its number.
            snapshots: of its workers, by rank.
        """
        lead = next((rank for rank, found in enumerate(snapshots) if found["kvtxn_active"]), None)
        for rank, found in enumerate(snapshots):
            self._show(ACTIVE, engine, rank, found)
            for family in FAMILIES if found["kvtxn_active"] else ():
                if family.per_rank or rank == lead:
                    self._show(family, engine, rank, found)

    def _show(self, family: Family, engine: int, rank: int, found: Mapping[str, float]) -> None:
        metric = _metric(family)
        for label, value in family.values(found):
            labels = [self._model_name, str(engine)]
            labels += [str(rank)] if family.per_rank else []
            labels += [label] if label is not None else []
            series = metric.labels(*labels)
            if isinstance(series, Gauge):
                series.set(value)
                continue
            key = (family.name, *labels)
            before = self._shown.get(key, 0)
            # Counts that shrank began anew: the engine's caches, and with them its windows, did.
            series.inc(value - before if value >= before else value)
            self._shown[key] = value
