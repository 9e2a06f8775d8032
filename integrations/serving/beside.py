"""Recurrent states, which are committed in each step beside the rows of a runner's windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ...captured_window import CapturedWindow


class NotedStep(Protocol):
    """A step whose recurrent states are committed beside the rows.

    Attributes:
        metadata: None once there is nothing to commit. To hold the last object of a step longer
            than the engine does costs the next step the time in which the object's tensors go.
        batch: None likewise.
        replays: requests of the step's batch, if its forward is a captured graph over all of them
            and no more; else 0.
    """

    metadata: Any
    batch: Any
    replays: int


class Beside(Protocol):
    """An object that is committed in each step beside the rows: recurrent states."""

    @property
    def noted(self) -> NotedStep:
        """The step that is under way."""

    def commit(self, window: CapturedWindow | None, sampled: Tensor) -> Callable[[], None] | None:
        """Commit, before the step's rows are committed.

        Args:
            window: the step's, if it has one.
            sampled: as ``GraphSteps.commit`` got it.

        Returns:
            None: it is committed. Or a launch that commits both: once it has, ``noted`` is emptied.
            ``repeat`` comes if it fails, or is not made.
        """

    def repeat(self, sampled: Tensor) -> None:
        """Commit, after the launch failed or was not made: it wrote nothing."""


def forget(noted: NotedStep) -> None:
    """Empty a step that was committed, so that no launch commits it again."""
    noted.metadata = noted.batch = None
    noted.replays = 0


def lies_as_captured(sampled: Tensor, requests: int) -> bool:
    """Tell whether a launch over the counts at this address reads what the tensor says."""
    return (
        sampled.dtype is torch.int32
        and sampled.dim() == 1
        and sampled.numel() >= requests
        and sampled.is_contiguous()
    )


def failing(error: BaseException) -> Callable[[], None]:
    """Return a launch that raises ``error`` when it is called."""

    def launch() -> None:
        raise error

    return launch
