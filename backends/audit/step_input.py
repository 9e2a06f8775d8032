"""``TritonStepInput``: an engine's numbers, put in place and counted by kernels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from ...audit.books import Books
from ...audit.step_input import StepInput
from ..launching.repeated_launch import ALIGNED
from . import change_kernel
from .launches import Launches
from .staging import Staging

#: Numbers that a program puts in place.
_NUMBERS: Final = 512
#: Sampled tokens that a program counts at a time.
_IDS: Final = 16


class TritonStepInput(StepInput):
    """An engine's numbers on a GPU.

    Args:
        books: the ledger's.
        staging: memory by which numbers come to the device.
    """

    def __init__(self, books: Books, staging: Staging) -> None:
        super().__init__(books)
        self._staging: Final = staging
        device = books.words.device
        self._putting: Final = Launches(change_kernel.put_numbers, 1, device)
        self._counting: Final = Launches(change_kernel.count_tokens, 1, device)

    def put(self, target: Tensor, numbers: Sequence[int] | Tensor) -> None:
        """Copy ints of the host into ``target``, int ``[n]`` on the GPU, in one launch.

        Never waits.
        """
        count = target.shape[0]
        if not count:
            return
        given = numbers if isinstance(numbers, Tensor) else memoryview(array("q", numbers))
        packed = self._staging.put([given])
        kind = target.dtype, packed.data_ptr() % ALIGNED, target.data_ptr() % ALIGNED
        grid = (-(-count // _NUMBERS), 1, 1)
        self._putting.launch(grid, (packed, target, count, _NUMBERS), kind)

    def count(
        self,
        ids: Tensor,
        left_out: Tensor,
        end: int,
        counts: Tensor,
        kept: Tensor,
        drafts: Tensor | None = None,
    ) -> None:
        """Count the sampled tokens of each request into ``counts``; ``kept`` gets them.

        And -1 for an id that is no token. Arguments are those of ``StepInput.count``; with
        ``drafts`` counts are clamped to these and one.
        """
        ids = ids.contiguous()
        number, width = ids.shape
        tensors = (ids, left_out, counts, kept)
        kind = tuple([(each.dtype, each.data_ptr() % ALIGNED) for each in tensors])
        self._counting.launch((number, 1, 1), (*tensors, width, end, _IDS), kind)
        if drafts is not None:
            counts.clamp_(max=drafts + 1)
