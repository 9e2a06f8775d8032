"""One piece of a soak: its engine and a stock engine, side by side, and their reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ...integrations.serving.engine_process import (
    EngineError,
    EngineProcess,
    calling,
)
from .client import Said
from .engine import Piece
from .reference import without_windows

#: Settings of the engines' processes, unless the user's own environment has them. The third lets a
#: function of this package be called in a worker. The last one keeps oneDNN, which multiplies
#: matrices on a CPU, from keeping a kernel for each number of rows: stock's memory grows by 60 KB
#: a step until it has a thousand of them, and would hide a leak.
_DEFAULTS: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
#: Seconds that an engine may take to start, and beyond a piece's own time to end a round.
_PATIENCE: Final = 900.0

_TEXTS: Final = ("texts", "same", "near", "other")


def run(
    piece: Piece,
    compared: bool,
    keep: Callable[[Mapping[str, Any]], None],
    stops: list[EngineProcess],
) -> dict[str, Any]:
    """Play one piece.

    Args:
        piece: the piece.
        compared: compare some texts with a stock engine's.
        keep: is given the report as it is so far, whenever it has changed.
        stops: gets the piece's processes; who stops them ends the piece.

    Returns:
        The report: ``engine`` in words; ``samples``, see ``engine``; ``texts``, see
        ``reference.judge``, summed up; ``error``: what ended an engine before its time, or None.
        The command adds ``cut`` if it was ended itself before the piece was over.
    """
    report: dict[str, Any] = {"engine": {}, "samples": [], "texts": _no_texts(), "error": None}
    soaked = _process("engine", "soaked")
    processes = [soaked]
    stock = None
    if compared:
        stock = _process("reference", "stock")
        processes.append(stock)
    stops += processes
    if stock is not None:
        stock.send(without_windows(piece.engine_args))
    soaked.send(piece)
    patience = 0.0
    try:
        _listen(report, soaked, stock, keep)
        patience = 30.0
    except EngineError as error:
        report["error"] = str(error)[-4000:]
    finally:
        for each in processes:
            each.stop(patience=patience)
    return report


def _listen(
    report: dict[str, Any],
    soaked: EngineProcess,
    stock: EngineProcess | None,
    keep: Callable[[Mapping[str, Any]], None],
) -> None:
    """Collect the engines' reports until the soaked one has ended, and stock has judged.

    ``report`` is filled in place, and given to ``keep`` after each change.

    Raises:
        EngineError: an engine failed, or took too long.
    """
    judge = None if stock is None else _Judge(stock, report["texts"])
    while told := soaked.answer("while it ran"):
        if "sample" in told:
            report["samples"].append(told["sample"])
        elif "said" not in told:
            report |= told
        elif judge is None:
            continue
        else:
            judge.take(told["said"])
        keep(report)
    while judge is not None and judge.waits:
        judge.hear()
        keep(report)


class _Judge:
    """The stock engine: it starts, and judges texts, beside the engine that is soaked.

    Args:
        stock: its process, which has been told to start.
        total: the findings are added to this.

    Attributes:
        waits: answers that it still owes, that to its start included.
    """

    def __init__(self, stock: EngineProcess, total: dict[str, Any]) -> None:
        self._stock, self._total = stock, total
        self._started, self.waits = False, 1

    def take(self, batch: Sequence[Said]) -> None:
        """Send some texts to be judged, and collect the findings that are ready."""
        self._stock.send(batch)
        self.waits += 1
        while self.waits and self._stock.has_answered():
            self.hear()

    def hear(self) -> None:
        """Wait for one answer, and add its findings to the total.

        The first one says that stock started.
        """
        self.waits -= 1
        found = self._stock.answer("while it was asked" if self._started else "while it started")
        if self._started:
            _add(self._total, found)
        self._started = True


def _process(module: str, name: str) -> EngineProcess:
    """Start the process of an engine, which runs a module of this package."""
    return EngineProcess(
        calling(f"{__package__}.{module}"),
        name=name,
        operation="bench soak",
        timeout=_PATIENCE,
        environment={key: os.environ.get(key, value) for key, value in _DEFAULTS.items()},
    )


def _no_texts() -> dict[str, Any]:
    """Return the findings before any text was judged."""
    return {**dict.fromkeys(_TEXTS, 0), "gap": 0.0, "wrong": []}


def _add(total: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Add findings to ``total`` in place: counts, the widest gap, the first three wrong texts."""
    for name in _TEXTS:
        total[name] += found[name]
    total["gap"] = max(total["gap"], found["gap"])
    total["wrong"] = (total["wrong"] + found["wrong"])[:3]
