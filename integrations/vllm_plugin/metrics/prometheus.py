"""kvtxn's counters in the Prometheus registry of a process, beside vLLM's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from prometheus_client import Counter, Gauge

from ....audit.findings import AUDIT_FAMILIES
from ....metrics import FAMILIES, Family

ACTIVE: Final = Family(
    "kvtxn_active",
    "1 while kvtxn is active in this worker, 0 while vLLM runs without it.",
    per_rank=True,
)


@cache
def _metric(family: Family) -> Counter | Gauge:
    """Return this process's metric for a family; Prometheus takes each name once."""
    labels = ["model_name", "engine"]
    labels += ["rank"] if family.per_rank else []
    labels += [family.label] if family.label else []
    if family.is_counter:
        return Counter(family.name, family.help, labels)
    # If several processes serve the page, Prometheus adds their counters up; a gauge has one value.
    return Gauge(family.name, family.help, labels, multiprocess_mode="mostrecent")


class Page:
    """The metrics of a model on the ``/metrics`` page.

    Args:
        model_name: a label of each metric, as in vLLM's own.
        windows: the user asked for windows. Without them ``kvtxn_active`` is left out, since its 0
            means that windows were asked for and stay out.
    """

    def __init__(self, model_name: str, *, windows: bool) -> None:
        self._model_name = model_name
        self._windows = windows
        self._shown: dict[tuple[str, ...], float] = {}

    def show(self, engine: int, snapshots: Sequence[Mapping[str, float]]) -> None:
        """Bring the metrics of an engine up to date.

        Args:
            engine: the engine's number.
            snapshots: the counters of its workers, by rank.
        """
        lead = next((rank for rank, found in enumerate(snapshots) if found["kvtxn_active"]), None)
        for rank, found in enumerate(snapshots):
            if self._windows:
                self._show(ACTIVE, engine, rank, found)
            for family in FAMILIES if found["kvtxn_active"] else ():
                if family.per_rank or rank == lead:
                    self._show(family, engine, rank, found)
            for family in AUDIT_FAMILIES:
                if family.name in found:
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
            # A count that shrank began anew, with new caches and windows.
            series.inc(value - before if value >= before else value)
            self._shown[key] = value
