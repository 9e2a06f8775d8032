"""Outcomes of steps that wait until a CUDA graph writes the next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from ..errors import WindowStateError
from . import arguments, checks
from .arguments import listed
from .graph_steps import Repeat
from .ledger_state import LedgerState
from .step import Step


class WaitingOutcomes:
    """The outcomes of a ledger's steps that can wait for the next step.

    Args:
        state: the ledger's state.
    """

    def __init__(self, state: LedgerState) -> None:
        self._state: Final = state
        self._books: Final = state.books

    def can_wait(self, accepted: Tensor, sampled: Tensor) -> bool:
        """Do what ``Ledger.can_wait`` says."""
        step = self._waits(accepted, sampled)
        return step is not None and self._state.graphs.can_wait(step, accepted, sampled)

    def _waits(self, accepted: object, sampled: object) -> Step | None:
        """Return the step that these end, if nothing but the passes speaks against waiting."""
        if self._state.later or self._state.unread or self._state.bytes is not None:
            return None
        given = isinstance(accepted, Tensor) and isinstance(sampled, Tensor)
        return self._state.step if given else None

    def resolve_waiting(self, accepted: Tensor, sampled: Tensor, besides: int) -> None:
        """Do what ``Ledger.resolve_waiting`` says."""
        besides = arguments.tokens_besides("resolve_waiting", besides)
        step, told = self._waits(accepted, sampled), False
        if step is not None:
            given = accepted.contiguous(), sampled.contiguous()
            told = self._state.graphs.resolve(step, *given, besides)
        if not told:
            got = f"{type(accepted).__name__} and {type(sampled).__name__}"
            if step is not None:
                got = f"{accepted.dtype} and {sampled.dtype}"
            raise WindowStateError(
                "resolve_waiting",
                "an outcome has waited that cannot be told later",
                expected="an outcome of the last step, told before anything else",
                got=f"{got}, or one of another step, or one that was told too late",
                hint="call resolve at once where can_wait says False",
            )
        self._state.step = None

    def repeat(
        self,
        step: Step,
        accepted: Tensor,
        sampled: Tensor,
        besides: int,
        groups: Sequence[str | None],
    ) -> Repeat | None:
        """Do what ``Ledger.repeat`` says."""
        besides = arguments.tokens_besides("repeat", besides)
        groups = listed("repeat", "groups", groups, "a list of names")
        if step is not self._state.step or not self.can_wait(accepted, sampled):
            return None
        places = [
            None if name is None else checks.place_of("repeat", self._books, name)
            for name in groups
        ]
        return self._state.graphs.repeat(accepted, sampled, besides, places)
