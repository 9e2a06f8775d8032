"""``Marks``: the tensor that tells a captured forward which of its rows are drafts."""

from __future__ import annotations

from typing import Final
from weakref import WeakValueDictionary

from torch import Tensor

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


class MarksByAddress:
    """The ``Marks`` of one manager, so that each tensor has one, however many graphs read it."""

    def __init__(self) -> None:
        self._marks: WeakValueDictionary[int, Marks] = WeakValueDictionary()

    def of(self, tensor: Tensor) -> Marks:
        """Return the ``Marks`` of a tensor; all of the tensor becomes -1."""
        found = self._marks.get(tensor.data_ptr())
        if found is None:
            found = self._marks[tensor.data_ptr()] = Marks(tensor)
            return found
        tensor.fill_(-1)
        found.shown = None
        return found
