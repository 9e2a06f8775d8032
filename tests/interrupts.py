"""Interrupts at any place of kvtxn's code, as of somebody who presses Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal


def interrupted_at(
    number: int,
    run: Callable[[], object],
    each: Literal["call", "line"] = "call",
    within: str = "kvtxn.",
) -> bool:
    """Interrupt a function at a call or line within kvtxn; tell whether it got so far.

    Args:
        number: which call or line, counted from 1.
        run: the function.
        each: what is counted.
        within: the beginning of the names of modules whose calls or lines count.
    """
    left = [number]

    def interrupt(frame, event, _):
        if not frame.f_globals["__name__"].startswith(within):
            return None
        if event == each:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left[0] <= 0
