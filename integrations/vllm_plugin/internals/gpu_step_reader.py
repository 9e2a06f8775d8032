"""A base of the readers of both GPU runners: tensors that last from step to step."""

from __future__ import annotations

from operator import is_not
from typing import Any, Final, Generic, TypeVar

import numpy
import torch
from torch import Tensor

from ....audit.step_input import StepInput

#: Sets of tensors that are remembered; beyond, all are forgotten.
_MAX_REMEMBERED: Final = 2048

Known = TypeVar("Known")


class GpuStepReader(Generic[Known]):
    """The base of each ``StepReader``: its buffers, and what it remembers of steps it has read.

    Args:
        runner: the runner.
        step_input: puts numbers of the host into buffers.
    """

    def __init__(self, runner: Any, step_input: StepInput) -> None:
        self._runner: Final = runner
        self._input: Final = step_input
        self._known: Final[dict[tuple[int, ...], Known]] = {}
        self._lasting: tuple[Any, ...] = ()
        number, device = int(runner.max_num_reqs), torch.device(runner.device)
        with torch.inference_mode(False):  # steps write into them in inference mode or not
            self._there: Final = torch.zeros(number, dtype=torch.int32, device=device)
        self._views: Final[dict[int, Tensor]] = {}  # beginnings of ``_there``, by length
        self._on_device: Final = numpy.zeros(number, numpy.int32)  # what ``_there`` has
        self._drafts = b""

    def _forget_unless(self, lasting: tuple[Any, ...]) -> None:
        """Forget what is remembered, unless the runner's buffers are those of the last step."""
        changed = len(lasting) != len(self._lasting) or any(map(is_not, lasting, self._lasting))
        if changed or len(self._known) >= _MAX_REMEMBERED:
            self._known.clear()
        self._lasting = lasting

    def _put_drafts(self, there: Tensor, drafts: Any) -> None:
        """Put the drafts of each request in place, unless they are there.

        Args:
            there: the beginning of ``_there``, int32 ``[num_requests]``.
            drafts: numpy int ``[num_requests]``.
        """
        now = drafts.tobytes()
        if self._drafts == now:
            return
        self._drafts, known = now, self._on_device[: len(drafts)]
        if (known != drafts).any():  # while prompts come, there are more and more without drafts
            known[:] = drafts
            self._input.put(there, drafts.tolist())

    def _forget_drafts(self) -> None:
        """Forget which drafts are in place, because the device puts others there."""
        self._drafts = b""
        self._on_device.fill(-1)
