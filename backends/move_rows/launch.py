"""The plan of a move, and a move that recurs."""

from __future__ import annotations

from typing import Final

import attrs
from torch import Tensor

from ..launching.kernel_call import KernelCall
from ..launching.repeated_launch import RepeatedLaunch
from .plane_table import PlaneTable


@attrs.define(eq=False, on_setattr=attrs.setters.frozen)  # frozen, and cheaper to make
class MovePlan:
    """The rows that one launch moves, and the direction in which it moves them.

    Attributes:
        planes: the planes; None if the launch only counts.
        addresses: int64 ``[num_lines]`` on the device, addresses of the staged rows of each line of
            ``planes``; unread if ``direct``.
        select: the rows to move, a number of ``Select``.
        known: bit g is set if group g has slots in this window.
        to_cache: True writes the caches, False the staged rows.
        direct: the addresses themselves if there are one or two lines; else None.
    """

    planes: PlaneTable | None
    addresses: Tensor
    select: int
    known: int
    to_cache: bool = True
    direct: tuple[int, int] | None = None


class CachedLaunch:
    """A launch that recurs: only the acceptance, its argument ``accepted``, differs.

    Args:
        call: the first launch; it holds every tensor whose address is noted down.

    Attributes:
        again: launches what was compiled; None before the first launch, and under Triton's
            interpreter.
    """

    def __init__(self, call: KernelCall) -> None:
        self._call: Final = call
        self._dtype: Final = call.arguments["accepted"].dtype
        self._at: Final = call.at("accepted")
        self.again: RepeatedLaunch | None = None

    def run(self, accepted: Tensor) -> None:
        """Launch with another acceptance.

        The first launch goes through Triton and is noted in ``again``; later ones repeat it.

        Args:
            accepted: of the first launch's form, contiguous, on the device. One of another dtype is
                launched as an ordinary call.
        """
        again, same = self.again, accepted.dtype is self._dtype
        if again is not None and same:
            again.words[self._at] = accepted.data_ptr()
            again.run()
            return
        call = attrs.evolve(self._call, arguments=self._call.arguments | {"accepted": accepted})
        if same:
            self.again = call.run_to_repeat(accepted.device)
        else:
            call.run()
