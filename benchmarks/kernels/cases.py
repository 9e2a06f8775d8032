"""The cases of a benchmark of kernels, one after another; one that fails is left out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch

from ..common import machine


def measure_all(
    found: dict[str, Any],
    cases: Iterable[Any],
    measure: Callable[[Any], dict[str, Any]],
    lines: Callable[[dict[str, Any]], list[str]],
    save: str | None,
) -> int:
    """Measure every case, print its lines, and write the result after each.

    Args:
        found: the result; its ``rows`` and ``left_out`` are filled here.
        cases: attrs objects.
        measure: returns the row of a case.
        lines: shows a row.
        save: name of the result's file; None writes none.

    Returns:
        The exit code: 1 if a case was left out.
    """
    found |= {"rows": [], "left_out": []}
    written = None
    for case in cases:
        try:
            row = measure(case)
        except Exception as error:  # earlier measurements are kept
            found["left_out"].append({**attrs.asdict(case), "why": repr(error)[:500]})
            print(f"{case} is left out: {error!r}"[:600], flush=True)
        else:
            found["rows"].append(row)
            print(*lines(row), sep="\n", flush=True)
        gc.collect()  # the next case needs the memory of this one
        torch.cuda.empty_cache()
        if save:
            written = machine.write(save, found)
    if written:
        print(written)
    return 1 if found["left_out"] else 0
