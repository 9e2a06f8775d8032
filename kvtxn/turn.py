"""``Turn``: lets a manager have one open window at a time, and holds its marks of draft rows."""

from __future__ import annotations

from typing import Final
from weakref import WeakValueDictionary

from torch import Tensor

from .errors import WindowStateError
from .window import Window

#: The value of ``Marks.shown`` after a failed copy, when the content of the tensor is not known.
_UNKNOWN: Final = object()


class Marks:
    """A tensor of marks and the plan that it shows; several graphs may read the same tensor.

    Args:
        tensor: int64 ``[n]``; all of it becomes -1.

    Attributes:
        tensor: as given.
        shown: the plan whose marks ``tensor`` has; None if no row is marked.
    """

    __slots__ = ("__weakref__", "shown", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shown: object = None
        tensor.fill_(-1)

    def show(self, plan: object, marks: Tensor, position: Tensor) -> None:
        """Copy the marks of ``plan``; without a copy if the tensor has them already.

        Args:
            plan: what is compared; None for marks that mark no row.
            marks: int64 ``[n]``.
            position: the first ``n`` elements of the tensor.
        """
        if plan is self.shown:
            return
        self.shown = _UNKNOWN  # if the copy below fails, the next call copies again
        position.copy_(marks)
        self.shown = plan


class Turn:
    """The open window of one manager; shared by everything that begins the manager's windows.

    Args:
        beside: the manager's own turn, beside whose windows those of this one may be open; both
            know the same marks. None for a turn of its own.

    Attributes:
        window: the last window that was begun; None if it has let the next one begin.
        begun: number of windows begun so far, which is also the number of the next window.
    """

    __slots__ = ("_marks", "begun", "window")

    def __init__(self, beside: Turn | None = None) -> None:
        self.window: Window | None = None
        self.begun = 0
        self._marks: WeakValueDictionary[int, Marks] = (
            WeakValueDictionary() if beside is None else beside._marks
        )

    def current(self) -> Window | None:
        """Return the window that is open, or whose hooks are being called; None without one."""
        if self.window is not None and self.window.has_ended:
            self.window = None  # an interrupt came between the window's end and ``end``
        return self.window

    def check_free(self) -> None:
        """Raise WindowStateError if a window is open or calls its hooks."""
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

    def marks_of(self, tensor: Tensor) -> Marks:
        """Return the ``Marks`` of a tensor, however many graphs read it; it becomes -1."""
        found = self._marks.get(tensor.data_ptr())
        if found is None:
            found = self._marks[tensor.data_ptr()] = Marks(tensor)
        else:
            tensor.fill_(-1)
            found.shown = None
        return found

    def end(self) -> None:
        """Release the manager, so that the next window may begin."""
        self.window = None
