"""``StateSupplier``: recurrent states that an engine's own kernels advance, as part of a window.

A layer that the manager knows by ``LayerRef.recurrent`` leaves its rows with the window, and the
executor advances its states. An engine may have kernels of its own instead: they verify without
writing a state, keep what they need, and are launched once more by the commit. Windows made by
``manager.captured_windows(slots, states=supplier)`` take these states in: one life cycle, one
recovery, the same hooks and counters, whoever supplies the launches.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

#: Captures what a function launches; returns a function that launches it again.
Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]


class StateSupplier(abc.ABC):
    """The launches that commit the states of one step, whichever kernels they are of.

    A step's states are as they were before it until ``commit``: its forward writes none. They are
    committed before the rows of the window, or by one launch with them. Nothing here waits for the
    device. A supplier is for the windows over one forward: the end of any of them forgets the step.

    Attributes:
        names: the layers whose states these are; hooks are told of them, and each counts in
            ``kvtxn_stage_operations_total``.
        replays: number of requests in the step's batch, if the forward is a captured graph over all
            of them and no others, so that commits of such steps read the same addresses; else 0.
    """

    names: tuple[str, ...] = ()
    replays: int = 0

    @property
    @abc.abstractmethod
    def waits(self) -> bool:
        """True if the step that is under way has states to commit."""

    @abc.abstractmethod
    def commit(self, sampled: Tensor) -> None:
        """Launch the commit of all states; without a step that waits, do nothing.

        Args:
            sampled: int ``[num_requests]`` of the step's batch, on the device: the number of tokens
                sampled for each request, its accepted drafts plus one.

        Raises:
            Exception: a launch's own. Some states may be committed by then; ``repeat`` follows.
        """

    @abc.abstractmethod
    def repeat(self, sampled: Tensor) -> None:
        """Commit the states that a ``commit`` which raised has not committed, and no others.

        Args:
            sampled: as for ``commit``.

        Raises:
            Exception: a state cannot be committed. The window ends in FAILED.
        """

    @abc.abstractmethod
    def abandon(self) -> None:
        """Forget the step; states that were not committed stay as they were before it.

        Called at the end of every window, committed or not.
        """

    def launches(self, sampled: Tensor, num_requests: int) -> Callable[[], None] | None:
        """Return the launches of the step's commit, to be captured with those of its rows.

        Args:
            sampled: as for ``commit``. The launches read it where it lies now.
            num_requests: requests of the window.

        Returns:
            One function that makes them; if it raises, it has committed nothing. None, as here, if
            they cannot be captured.
        """
        return None

    @property
    def capture(self) -> Capture | None:
        """The capture that knows where memory is for what ``launches`` allocates.

        None, as here, leaves the capture to the executor: ``launches`` allocates nothing.
        """
        return None
