"""``GraphSteps``: steps that captured graphs write and check, and what waits for such a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from .groups import Place
from .step import Step

#: For each request that gets blocks, the numbers of its new ones, by group.
NewBlocks = Sequence[Sequence[Sequence[int]]]

#: A tensor, int64 ``[n]`` at least, on the device, and the n lines of requests that it gets.
LinesInPlace = tuple[Tensor, Sequence[int]]


class StepPasses(Protocol):
    """The passes of a step, as ``Passes`` has them."""

    def write(self, step: Step) -> None:
        """Do what ``Passes.write`` says."""

    def check(self, step: Step) -> None:
        """Do what ``Passes.check`` says."""


class Repeat(Protocol):
    """Ends a step and begins one of the same layout, in one call; see ``Ledger.repeat``.

    Each call returns False and changes nothing if it does not apply: another call came between,
    shapes differ, a block is not one of the group's, or the device is too far behind.
    """

    def same(self, accepted: Tensor, sampled: Tensor, new_blocks: NewBlocks) -> bool:
        """End the last step; a graph writes a step of the same requests next.

        Args:
            accepted: int ``[num_requests]``, the last step's counts; they must not change until
                the step after this one.
            sampled: int ``[num_requests, n]``, its ids, likewise.
            new_blocks: the blocks that are handed out.
        """

    def fewer(
        self,
        step: Step,
        accepted: Tensor,
        sampled: Tensor,
        new_blocks: NewBlocks,
        lines: LinesInPlace,
    ) -> bool:
        """End the last step; a graph writes a step that lacks some of its requests next.

        From then on ``same`` is given outcomes of that step.

        Args:
            step: the step that begins, in the buffers of the last one.
            accepted: as for ``same``.
            sampled: likewise.
            new_blocks: likewise.
            lines: where the graph finds the lines of its requests, and these lines.
        """


class GraphSteps:
    """The steps of one ledger around captured graphs.

    A graph that begins with ``launch`` writes and checks a step each time it is replayed. What the
    host says between two steps can wait for that: the outcome of the last step, blocks that are
    handed out, and numbers that are put into a tensor. The graph does them in this order before it
    writes; any other pass and ``settle`` do them before anything else.

    This default lets nothing wait. A backend that can replaces it, see ``Passes.graph_steps``.

    Args:
        passes: the passes of the same ledger.
    """

    def __init__(self, passes: StepPasses) -> None:
        self._passes = passes

    def launch(self, step: Step) -> None:
        """Do what waits, ``write`` the step and ``check`` it, for a graph."""
        self._passes.write(step)
        self._passes.check(step)

    def replayed(self, step: Step | None) -> None:
        """Begin the step of a graph that is replayed next; call it once for each replay.

        Args:
            step: what the graph writes; None: padding alone.
        """

    def hand_out(self, blocks: Sequence[tuple[Place, Sequence[int]]]) -> bool:
        """Hand out blocks with the next step, as ``Passes.change`` does without ``seals``.

        Args:
            blocks: a group of their pool, and numbers of blocks.

        Returns:
            False if they cannot wait; ``Passes.change`` has to do it then.
        """
        return False

    def put(self, target: Tensor, numbers: Sequence[int]) -> bool:
        """Do ``StepInput.put`` with the next step.

        Args:
            target: int64 ``[n]`` or longer, contiguous; it lives as long as the books.
            numbers: n.

        Returns:
            False if they cannot wait; ``StepInput.put`` has to do it then.
        """
        return False

    def can_wait(self, step: Step, accepted: Tensor, sampled: Tensor) -> bool:
        """Tell whether ``resolve`` takes an outcome, as long as no other call comes before it.

        Ask when all launches of the step were made.

        Args:
            step: the last step.
            accepted: as for ``Passes.resolve``.
            sampled: likewise.
        """
        return False

    def resolve(self, step: Step, accepted: Any, sampled: Any, besides: int) -> bool:
        """Do ``Passes.resolve`` with the next step.

        Args:
            step: as for ``Passes.resolve``.
            accepted: anything; a tensor holds the same numbers until then.
            sampled: likewise.
            besides: an int.

        Returns:
            False if the outcome cannot wait, or has an unknown form; nothing was done.
        """
        return False

    def repeat(
        self, accepted: Tensor, sampled: Tensor, besides: int, places: Sequence[Place | None]
    ) -> Repeat | None:
        """Return a call that ends the last step and begins one of the same layout.

        Args:
            accepted: an outcome that can wait, of the form that the call will be given.
            sampled: likewise.
            besides: as for ``resolve``.
            places: for each group by which the call is given blocks its place; None for a group
                that the ledger does not watch.

        Returns:
            The call; None if ``resolve``, ``hand_out`` and ``replayed`` have to be called.
        """
        return None

    def settle(self) -> None:
        """Do now what waits for the next step."""

    @property
    def num_steps(self) -> int | None:
        """The number of steps written since ``restart``; None if the host does not count them."""
        return None

    def restart(self) -> None:
        """Forget what waits, and count steps from 0; the books have been cleared."""
