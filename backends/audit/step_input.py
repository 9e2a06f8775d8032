"""``TritonStepInput``: an engine's numbers, put in place and counted by kernels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, Protocol

from torch import Tensor

from ...audit.step_input import OverBooks, StepInput
from ..launching.repeated_launch import ALIGNED
from . import change_kernel
from .launches import Launches
from .staging import Staging

#: Sampled tokens that a program counts at a time.
_IDS: Final = 16


class InputPasses(OverBooks, Protocol):
    """Passes that can put numbers in place, as ``TritonPasses`` has them."""

    @property
    def staging(self) -> Staging:
        """Memory by which numbers come to the device."""

    def put_numbers(self, target: Tensor, packed: Tensor) -> None:
        """Launch a copy of int64 ``[n]`` that the device can read into int ``[n]``."""


class TritonStepInput(StepInput):
    """An engine's numbers on a GPU.

    Args:
        passes: the passes of the ledger.
    """

    def __init__(self, passes: InputPasses) -> None:
        super().__init__(passes)
        self._passes: Final = passes
        device = passes.books.words.device
        self._counting: Final = Launches(change_kernel.count_tokens, 1, device)

    def put(self, target: Tensor, numbers: Sequence[int] | Tensor) -> None:
        """Copy numbers of the host, as ``StepInput.put`` describes."""
        if not len(target):
            return
        given = numbers if isinstance(numbers, Tensor) else memoryview(array("q", numbers))
        self._passes.put_numbers(target, self._passes.staging.put([given]))

    def count(
        self,
        ids: Tensor,
        left_out: Tensor,
        end: int,
        counts: Tensor,
        kept: Tensor,
        drafts: Tensor | None = None,
    ) -> None:
        """Count sampled tokens, as ``StepInput.count`` describes."""
        ids = ids.contiguous()
        number, width = ids.shape
        tensors = (ids, left_out, counts, kept)
        kind = tuple([(each.dtype, each.data_ptr() % ALIGNED) for each in tensors])
        self._counting.launch((number, 1, 1), (*tensors, width, end, _IDS), kind)
        if drafts is not None:
            counts.clamp_(max=drafts + 1)
