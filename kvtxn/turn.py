"""``Turn``: lets a manager have one open window at a time."""

from __future__ import annotations

from .captured_marks import MarksByAddress
from .errors import WindowStateError
from .window import Window


class Turn:
    """The open window of one manager; shared by everything that begins the manager's windows.

    Attributes:
        window: the last window that was begun; None if it has let the next one begin.
        begun: number of windows begun so far, which is also the number of the next window.
        marks: the tensors that tell captured forwards which rows are drafts.
    """

    __slots__ = ("begun", "marks", "window")

    def __init__(self) -> None:
        self.window: Window | None = None
        self.begun = 0
        self.marks = MarksByAddress()

    def current(self) -> Window | None:
        """Return the window that is open, or whose hooks are being called; None without one."""
        if self.window is not None and self.window.has_ended:
            self.window = None  # an interrupt came between the window's end and ``end``
        return self.window

    def check_free(self) -> None:
        """Refuse to begin a window while another one is open or calls its hooks.

        Raises:
            WindowStateError: another window is open or calls its hooks.
        """
        window = self.current()
        if window is None:
            return
        state = window.state
        raise WindowStateError(
            "window",
            f"window {window.number} is still {state.name}",
            expected="no other window",
            got=f"window {window.number}",
            state=state.name,
            hint="a hook tried to open a window; open it after commit() or abort() has returned"
            if state.is_final
            else "commit it or call manager.current.abort(); one window at a time",
        )

    def end(self) -> None:
        """Release the manager, so that the next window may begin."""
        self.window = None
