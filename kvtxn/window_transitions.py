"""The window's state machine, as data.

Rules, on top of the table they explain:

1. A window is single-use: COMMITTED, ABORTED, FELL_BACK and FAILED are final.
2. Validate, act, then label. A label never claims more than happened.
3. COMMITTED and ABORTED are claims about bytes: exactly the accepted rows are
   durable; no draft row is. A window that ends any other way is FELL_BACK
   (every accepted row is in the cache, rejected ones may be too, as in stock)
   or FAILED (the bytes are unknown). The policy ``direct`` is the control: it
   holds nothing back, so there the two labels only say how the window ended.
4. DIRECT is where every fallback goes: rows are written straight through from
   there on. It can only end in FELL_BACK or FAILED.

This file knows no tensors. A pair of state and event that is not in the table is not allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final


class WindowState(Enum):
    """The state of a window."""

    __hash__ = object.__hash__  # members are unique; Enum hashes their names, slowly

    OPEN = "open"
    STAGED = "staged"
    DIRECT = "direct"
    COMMITTED = "committed"
    ABORTED = "aborted"
    FELL_BACK = "fell_back"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """True if no event is allowed any more."""
        return self in FINAL


class Event(Enum):
    """An event in the life of a window."""

    __hash__ = object.__hash__

    STAGE = "stage"  # a layer was staged, others are missing
    STAGE_LAST = "stage_last"  # the last missing layer was staged
    COMMIT = "commit"
    ABORT = "abort"
    FALL_BACK = "fall_back"  # the executor failed; rows go straight through from here on
    FAIL = "fail"  # nothing can be promised about the bytes any more


FINAL: Final = frozenset(
    {WindowState.COMMITTED, WindowState.ABORTED, WindowState.FELL_BACK, WindowState.FAILED}
)

TRANSITIONS: Final[Mapping[tuple[WindowState, Event], WindowState]] = MappingProxyType(
    {
        (WindowState.OPEN, Event.STAGE): WindowState.OPEN,
        (WindowState.OPEN, Event.STAGE_LAST): WindowState.STAGED,
        (WindowState.OPEN, Event.ABORT): WindowState.ABORTED,
        (WindowState.OPEN, Event.FALL_BACK): WindowState.DIRECT,
        (WindowState.OPEN, Event.FAIL): WindowState.FAILED,
        (WindowState.STAGED, Event.COMMIT): WindowState.COMMITTED,
        (WindowState.STAGED, Event.ABORT): WindowState.ABORTED,
        (WindowState.STAGED, Event.FALL_BACK): WindowState.DIRECT,
        (WindowState.STAGED, Event.FAIL): WindowState.FAILED,
        (WindowState.DIRECT, Event.STAGE): WindowState.DIRECT,
        (WindowState.DIRECT, Event.STAGE_LAST): WindowState.DIRECT,
        (WindowState.DIRECT, Event.COMMIT): WindowState.FELL_BACK,
        (WindowState.DIRECT, Event.ABORT): WindowState.FELL_BACK,
        (WindowState.DIRECT, Event.FAIL): WindowState.FAILED,
    }
)


def allowed(state: WindowState, event: Event) -> bool:
    """Return whether ``event`` may happen in ``state``."""
    return (state, event) in TRANSITIONS


def after(state: WindowState, event: Event) -> WindowState:
    """Return the state that follows; raise KeyError if the event is not allowed."""
    return TRANSITIONS[state, event]


def as_markdown() -> str:
    """Render the table as Markdown for ``docs/windows.md``; a test compares the two."""
    events = list(Event)
    lines = [
        "| state | " + " | ".join(f"`{event.value}`" for event in events) + " |",
        "|---" * (len(events) + 1) + "|",
    ]
    for state in WindowState:
        cells = [TRANSITIONS.get((state, event)) for event in events]
        names = [cell.name if cell else "-" for cell in cells]
        lines.append(f"| {state.name} | " + " | ".join(names) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown())
