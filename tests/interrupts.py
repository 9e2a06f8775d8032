"""Interrupts at any place of kvtxn's code, as of somebody who presses Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal


def interrupted_at(
    number: int, run: Callable[[], object], each: Literal["call", "line"] = "call"
) -> bool:
    """Interrupt a function at its call or line of that number within kvtxn; tell whether it was."""
    left = [number]

    def interrupt(frame, event, _):
        if not frame.f_globals["__name__"].startswith("kvtxn."):
            return None
        if event == each:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return interrupt

    sys.settrace(interrupt)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
