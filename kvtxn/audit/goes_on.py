"""``GoesOn``: a call by which a step that follows one like it is told at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .step import Step

#: For each request that gets blocks, the numbers of its new ones, by group.
Grown = Sequence[Sequence[Sequence[int]]]

#: A tensor, int64 ``[n]`` at least, on the device, and the n lines of requests that it gets.
Put = tuple[Tensor, Sequence[int]]


class GoesOn(Protocol):
    """Ends a step of a ledger and begins one like it; see ``Ledger.going_on``.

    Each call is False if anything else was told since, if the outcome or the blocks are others, or
    if the device is far behind; nothing was done then.
    """

    def tell(self, accepted: Tensor, sampled: Tensor, grown: Grown) -> bool:
        """Tell that the last step ended, and that a graph writes the same one again.

        Args:
            accepted: the last step's counts, as they are now until the step after this one.
            sampled: its ids, likewise.
            grown: the blocks that are handed out.
        """

    def tell_fewer(
        self, step: Step, accepted: Tensor, sampled: Tensor, grown: Grown, put: Put
    ) -> bool:
        """Tell the same, and that the step that begins lacks requests of the last one.

        From then on ``tell`` is given outcomes of that step.

        Args:
            step: the step that begins, in the buffers of the last one.
            accepted: as for ``tell``.
            sampled: likewise.
            grown: likewise.
            put: lines that the graph finds.
        """
