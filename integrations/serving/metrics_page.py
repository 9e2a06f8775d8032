"""kvtxn's counters as metrics of this process, for the page that an engine serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Final

from ...metrics import Family

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge


@cache
def _metric(family: Family) -> Counter | Gauge:
    """Return this process's counter or gauge for a family, the same one each time.

    Prometheus takes each name once.
    """
    from prometheus_client import Counter, Gauge  # reads its environment, which the engine has set

    labels = ["model_name", "engine"]
    labels += ["rank"] if family.per_rank else []
    labels += [family.label] if family.label else []
    if family.is_counter:
        return Counter(family.name, family.help, labels)
    # If several processes serve the page, Prometheus adds their counters up; a gauge has one value.
    return Gauge(family.name, family.help, labels, multiprocess_mode="mostrecent")


class MetricsPage:
    """The metrics of a model.

    Args:
        model_name: a label of each metric, as in the engine's own.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name: Final = model_name
        self._shown: Final[dict[tuple[str, ...], float]] = {}

    def show(
        self, families: Iterable[Family], engine: int, rank: int, found: Mapping[str, float]
    ) -> None:
        """Bring families up to date: gauges are set, counters rise by what was added since.

        Args:
            families: the families; those that ``found`` has nothing of are left out.
            engine: the engine's number.
            rank: the number of the worker that has counted.
            found: its counters by name.
        """
        from prometheus_client import Gauge

        given = (each for each in families if each.label is not None or each.name in found)
        values = ((family, *each) for family in given for each in family.values(found))
        for family, label, value in values:
            labels = [self._model_name, str(engine)]
            labels += [str(rank)] if family.per_rank else []
            labels += [label] if label is not None else []
            series = _metric(family).labels(*labels)
            if isinstance(series, Gauge):
                series.set(value)
                continue
            key = (family.name, *labels)
            before = self._shown.get(key, 0)
            # A count that shrank began anew, with new caches and windows.
            series.inc(value - before if value >= before else value)
            self._shown[key] = value
