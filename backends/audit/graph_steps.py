"""``TritonGraphSteps``: steps that CUDA graphs write, which find what waits in a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from ...audit.graph_steps import GraphSteps, StepPasses
from ...audit.groups import Place
from ...audit.step import Step
from .pending_changes import PendingChanges
from .repeat import RecordRepeat


class RecordedPasses(StepPasses, Protocol):
    """Passes with launches that look for a record, as ``TritonPasses`` has them."""

    @property
    def pending(self) -> PendingChanges:
        """The changes that wait for the next step."""

    def settle(self) -> None:
        """Launch what waits for the next step."""

    def write_rows(self, step: Step) -> None:
        """Launch what notes the rows of a step, and nothing that waits."""


class TritonGraphSteps(GraphSteps):
    """The steps around CUDA graphs that begin with the passes.

    Args:
        passes: the passes of the ledger.
    """

    def __init__(self, passes: RecordedPasses) -> None:
        super().__init__(passes)
        self._recorded: Final = passes
        self._pending: Final = passes.pending

    def launch(self, step: Step) -> None:
        """Launch what a graph begins with, as ``GraphSteps.launch`` describes."""
        passes, pending = self._recorded, self._pending
        passes.settle()
        pending.use(step)
        pending.take()
        passes.write_rows(step)
        passes.check(step)
        if not (step.lines.is_cuda and torch.cuda.is_current_stream_capturing()):
            pending.next.launched()

    def replayed(self, step: Step | None) -> None:
        """Begin the step of a graph that is replayed next, as ``GraphSteps.replayed`` describes."""
        self._pending.replayed(step)

    def hand_out(self, blocks: Sequence[tuple[Place, Sequence[int]]]) -> bool:
        """Hand out blocks with the next step, as ``GraphSteps.hand_out`` describes."""
        return self._pending.next.add(blocks)

    def put(self, target: Tensor, numbers: Sequence[int]) -> bool:
        """Put numbers in place with the next step, as ``GraphSteps.put`` describes."""
        return self._pending.next.put_lines(target, numbers)

    def can_wait(self, step: Step, accepted: Tensor, sampled: Tensor) -> bool:
        """Tell whether an outcome can wait, as ``GraphSteps.can_wait`` describes."""
        return self._pending.can_wait(step, accepted, sampled)

    def resolve(self, step: Step, accepted: Any, sampled: Any, besides: int) -> bool:
        """Resolve the last step with the next one, as ``GraphSteps.resolve`` describes."""
        return self._pending.resolve_later(step, accepted, sampled, besides)

    def repeat(
        self, accepted: Tensor, sampled: Tensor, besides: int, places: Sequence[Place | None]
    ) -> RecordRepeat | None:
        """Return a call for steps like the last one, as ``GraphSteps.repeat`` describes."""
        pending = self._pending
        if not pending.graphs_save or pending.next.is_read():
            return None  # the outcome of the step that begins could not wait, or blocks could not
        return RecordRepeat(pending, accepted, sampled, besides, places)

    def settle(self) -> None:
        """Launch what waits, as ``GraphSteps.settle`` describes."""
        self._recorded.settle()

    @property
    def num_steps(self) -> int | None:
        """The number of steps that were launched, as ``GraphSteps.num_steps`` describes."""
        record = self._pending.next
        return record.steps if record.used else None

    def restart(self) -> None:
        """Begin anew, as ``GraphSteps.restart`` describes."""
        self._pending.restart()
