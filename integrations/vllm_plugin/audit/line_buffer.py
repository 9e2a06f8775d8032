"""``LineBuffer``: the lines of a batch's requests, where steps and captured forwards have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ....audit import Ledger


class LineBuffer:
    """Lines of requests that stay in one place; -1 behind those of the batch.

    Args:
        ledger: puts them there.
        number: the most lines.
        device: of the steps.

    Attributes:
        all: int64 ``[number]``, on the device.
        shown: the first so many are not all -1.
    """

    def __init__(self, ledger: Ledger, number: int, device: torch.device | str) -> None:
        self._ledger: Final = ledger
        with torch.inference_mode(False):  # steps write into it in inference mode or not
            self.all: Final = torch.full((number,), -1, device=device)
        self.shown = 0
        self._views: Final[dict[int, Tensor]] = {}

    def put(self, lines: Sequence[int], *, later: bool = False) -> Tensor:
        """Put the lines of a batch in place.

        Args:
            lines: one for each request.
            later: the step that comes next is a replayed graph, which may do it.

        Returns:
            int64 ``[len(lines)]``, their place; the same object for as many lines.
        """
        padded = self.padded(lines)
        if not (later and self._ledger.graphs.put(self.all, padded)):
            self._ledger.input.put(self.all[: len(padded)], padded)
        return self.holds(len(lines))

    def padded(self, lines: Sequence[int]) -> list[int]:
        """Return lines with as many of -1 behind them as the buffer has others there."""
        return [*lines, *[-1] * (self.shown - len(lines))]

    def holds(self, number: int) -> Tensor:
        """Note that so many lines, padded, were put in place; returns their place, as ``put``."""
        self.shown = number
        if number not in self._views:
            self._views[number] = self.all[:number]
        return self._views[number]

    def hide(self) -> None:
        """Put -1 everywhere."""
        if self.shown:
            self.put(())
