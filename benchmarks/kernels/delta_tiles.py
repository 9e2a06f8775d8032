"""Tiles of the gated delta kernels: a result in which variants ran by turns, and its table.

The kernels take what was fastest there: ``backends.gated_delta.launch`` says which, and from how
many bytes of states on. A row of the result has the microseconds per layer of each variant; the
result itself says how variants are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..common.markdown import machine_line, table

#: By dtype of states: the variants that were taken: verify few requests, verify many, and commit.
TAKEN: Final = {
    "float32": ("vmain/16", "v16/1/8/3", "a8/1/2"),
    "bfloat16": ("vmain/32", "v16/1/8/3/128", "a16/2"),
}

#: Requests from which on many are verified, by dtype: 32 MiB of states of a layer.
MANY: Final = {"float32": 16, "bfloat16": 32}


def taken(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the microseconds of verify and commit by the tiles that were taken."""
    few, many, commit = TAKEN[row["dtype"]]
    us = row["us"]
    return us[many if row["requests"] >= MANY[row["dtype"]] else few], us[commit]


def report(found: Mapping[str, Any]) -> str:
    """Tabulate verify and commit beside stock's kernels, a copy, and one launch for both."""
    lines = []
    for row in found["rows"]:
        us = row["us"]
        verify, commit = taken(row)
        one = min(time for name, time in us.items() if name.startswith("z"))
        times = us["triton"], us["fused"], verify, commit, us["copy"]
        cells = [str(row["drafts"]), str(row["requests"]), *(f"{time:.1f}" for time in times)]
        cells += [f"{us['fused'] / (verify + commit):.2f}", f"{commit / us['copy']:.2f}"]
        lines.append([row["dtype"], *cells, f"{one / (verify + commit):.2f}"])
    header = [
        "states",
        "k",
        "requests",
        "stock, Triton",
        "stock, fused",
        "verify",
        "commit",
        "copy",
    ]
    header += ["times as fast as fused", "commit of a copy", "one launch of both"]
    return f"{table(header, lines)}\n\nMicroseconds per layer. {machine_line(found['machine'])}."
