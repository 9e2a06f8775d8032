"""``LineBuffer``: the lines of a batch's requests, in the same place in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ....audit import Ledger


class LineBuffer:
    """Lines of requests that stay in one place, so that launches over them can be made again.

    Args:
        ledger: copies them to its device.
        number: the most lines.
        device: of the steps.
    """

    def __init__(self, ledger: Ledger, number: int, device: torch.device | str) -> None:
        self._ledger: Final = ledger
        with torch.inference_mode(False):  # steps write into it in inference mode or not
            self._all: Final = torch.full((number,), -1, device=device)
        self._views: Final[dict[int, Tensor]] = {}

    def put(self, lines: Sequence[int]) -> Tensor:
        """Put the lines of a batch in place.

        Args:
            lines: one for each request.

        Returns:
            int64 ``[len(lines)]``, their place; the same object for as many lines.
        """
        view = self._views.get(len(lines))
        if view is None:
            view = self._views[len(lines)] = self._all[: len(lines)]
        self._ledger.input.put(view, lines)
        return view
