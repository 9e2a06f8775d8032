"""Plots of the kernel results: ``python -m kvtxn.benchmarks.kernels.plot OUT.png``."""

from __future__ import annotations

import argparse
from typing import Any, Final

from ..documents import load

#: Result files whose 8B rows make the curve over rows.
_FILES: Final = ("h200-kernels", "h200-scaling")

#: Candidate -> label and colour.
_SHOWN: Final = {
    "stock": ("stock: 32 writes", "#888888"),
    "undo": ("undo: save and restore, on top of stock", "#c98a2b"),
    "commit": ("deferred commit", "#2563a8"),
    "floor": ("plain copy of the same bytes", "#2f8f5b"),
}


def main() -> None:
    """Draw GPU time against rows, everything accepted and 30 % accepted, side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="a PNG file")
    out = parser.parse_args().out

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    files = [load(name) for name in _FILES]
    rows = [row for file in files for row in file["rows"] if row["model"] == "llama3-8b"]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.8))
    for axis, accepted in zip(axes, (1.0, 0.3), strict=False):
        draw(axis, [row for row in rows if row["accepted"] == accepted])
        axis.set_title(f"{accepted:.0%} of the drafts accepted")
    axes[1].sharey(axes[0])
    axes[0].set_ylabel("GPU time, microseconds")
    axes[0].legend(frameon=False)
    per_row(axes[2], rows, load("h200-layers")["rows"])
    where = files[0]["machine"]
    figure.suptitle(f"Llama-3 8B, bf16, {where.get('gpu')}, cold L2, graph replay")
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    print(out)


def per_row(axis: Any, rows: list[dict[str, Any]], layers: list[dict[str, Any]]) -> None:
    """GPU time per kept row and layer: flat means that nothing but bytes counts."""
    for what, found, horizontal in (
        ("32 layers, over rows of the window", rows, "rows"),
        ("320 rows, over layers", [row for row in layers if row["rows"] == 320], "layers"),
    ):
        points = sorted(
            (row[horizontal], 1000 * row["us"]["commit"] / _kept(row))
            for row in found
            if row["accepted"] == 1.0
        )
        axis.plot(*zip(*points, strict=True), marker="o", ms=4, label=what)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_title("commit of all drafts, per kept row and layer")
    axis.set_ylabel("GPU time, nanoseconds")
    axis.set_xlabel("rows, or layers")
    axis.legend(frameon=False)
    axis.grid(alpha=0.25)


def _kept(row: dict[str, Any]) -> float:
    """Rows x layers that a commit of all drafts writes."""
    return float(row["requests"] * row["drafts"] * row["layers"])


def draw(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Draw a panel: each candidate over the rows of the window."""
    rows = sorted(rows, key=lambda row: row["rows"])
    for name, (label, colour) in _SHOWN.items():
        points = [(row["rows"], row["us"][name]) for row in rows if name in row["us"]]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", ms=4, label=label, color=colour)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks([5, 20, 80, 320, 1280, 5120], ["5", "20", "80", "320", "1280", "5120"])
    axis.minorticks_off()
    axis.set_xlabel("rows of the window (5 per request)")
    axis.grid(alpha=0.25)


if __name__ == "__main__":
    main()
