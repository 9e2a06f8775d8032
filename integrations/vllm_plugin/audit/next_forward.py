"""``NextForward``: a step that is about to run, as a runner on a GPU tells a watch of it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..internals.audited import Rows
from ..internals.audited_states import States


class NextForward(ABC):
    """A step that is about to run, as its runner's tensors describe it."""

    __slots__ = ()

    @abstractmethod
    def read(self) -> tuple[Rows, States | None]:
        """Read the batch's rows, and its states if any are watched."""

    def is_replay(self) -> bool:
        """Tell, once the rows were read, whether ``before_replay`` will be called."""
        return False

    def repeats(self) -> bool:
        """Tell whether the step has the requests and drafts of the one before, and is a replay.

        Asked where that is all that has to be known.
        """
        return False
