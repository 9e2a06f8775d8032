"""A plot of a ``kvtxn bench vllm`` result: speed beside stock, and time per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

from .cell import by_policy
from .load import load, name

_COLOURS: Final = ("#2563a8", "#c98a2b", "#2f8f5b", "#8a4fa3", "#b23b3b", "#4a9aa5")
_STOCK: Final = "#888888"

#: Inches of paper per engine of a cell, and around.
_PER_ENGINE: Final = 0.14
_AROUND: Final = 1.6


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Two panels with a row per cell; whiskers are the interval, and the 95th percentile.

    Args:
        result: as in the JSON file.
        path: a PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = result["cells"]
    engines = list(cells[0]["engines"])
    height = _AROUND + _PER_ENGINE * (len(engines) + 1) * len(cells)
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(10, height), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, sharey=True)
        _speed(left, cells)
        _per_token(right, cells, engines)
        left.set_yticks(range(len(cells)), [_load(cell) for cell in cells])
        left.set_ylim(len(cells) - 0.5, -0.5)
        where = result["machine"].get("gpu") or result["machine"]["processor"]
        settings = result["settings"]
        figure.suptitle(
            f"{settings['model']}, {settings['drafter']}, {settings['drafts']} drafts; {where}"
        )
        handles, labels = right.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
        figure.savefig(path, dpi=100)


def _load(cell: Mapping[str, Any]) -> str:
    scenario, context, _, drafts = name(cell)
    return f"{scenario}, {context} tokens\n{load(cell)[1]}, {drafts}"


def _speed(axis: Any, cells: Sequence[Mapping[str, Any]]) -> None:
    """Ratios to stock with their intervals; absolute speed where there is no stock."""
    policies = by_policy(cells[0])
    compared = "stock" in cells[0]["engines"]
    for number, policy in enumerate(policies or ["stock"]):
        for place, cell in enumerate(cells):
            engine = cell["engines"][policy]
            if compared and policies:
                found = engine["of_stock"]["tokens_per_s"]
                middle, low, high = found["median"], found["low"], found["high"]
            else:
                found = engine["tokens_per_s"]
                middle, low, high = found["median"], found["lowest"], found["highest"]
            whiskers = [[middle - low], [high - middle]]
            at = place + _offset(number, len(policies))
            colour = _COLOURS[number % len(_COLOURS)] if policies else _STOCK
            axis.errorbar(middle, at, xerr=whiskers, fmt="o", ms=4, capsize=2, color=colour)
    if compared and policies:
        axis.axvline(1.0, color=_STOCK, lw=1)
    what = "tokens/s, of stock in the same round: median and interval"
    axis.set_xlabel(what if compared else "tokens/s: median, lowest and highest")
    axis.grid(axis="x", alpha=0.25)


def _per_token(axis: Any, cells: Sequence[Mapping[str, Any]], engines: Sequence[str]) -> None:
    """Median time per token, and the 95th percentile."""
    policies = [label for label in engines if label != "stock"]
    for number, label in enumerate(engines):
        colour = _STOCK if label == "stock" else _COLOURS[policies.index(label) % len(_COLOURS)]
        points = [
            (place + _offset(number, len(engines)), cell["engines"][label]["per_token_ms"])
            for place, cell in enumerate(cells)
        ]
        known = [(at, found) for at, found in points if found]
        axis.barh(
            [at for at, _ in known],
            [found["p50"] for _, found in known],
            height=0.8 / (len(engines) + 1),
            xerr=[[0.0] * len(known), [found["p95"] - found["p50"] for _, found in known]],
            error_kw={"lw": 0.8, "capsize": 2},
            color=colour,
            label=label,
        )
    axis.set_xlabel("ms per token: median, whisker to p95")
    axis.grid(axis="x", alpha=0.25)


def _offset(number: int, count: int) -> float:
    """Find the place of one of ``count`` engines in a cell's row, which is 1 high."""
    return (number - (count - 1) / 2) * 0.8 / (count + 1)
