"""Planned launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
from torch import Tensor

from .pointer_table import Plan


@attrs.frozen(eq=False)
class Job:
    """One launch, planned: which rows go where.

    Attributes:
        plan: the planes; None where the launch only counts.
        table: int64 ``[num_planes]``, addresses of the staged rows; unused if ``direct``.
        select: which rows, as ``triton_select`` numbers them.
        to_cache: the direction.
        direct: the addresses themselves, for at most two planes.
    """

    plan: Plan | None
    table: Tensor
    select: int
    to_cache: bool = True
    direct: tuple[int, int] | None = None


@attrs.frozen(eq=False)
class Launch:
    """One launch of a kernel, down to its last argument.

    Attributes:
        kernel: a Triton function.
        grid: its three sizes.
        arguments: by position.
        constants: the constants that follow them in its signature, in that order.
        warps: per program.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    warps: int

    def run(self) -> Any:
        """Launch it; returns the compiled kernel, or None where it is interpreted."""
        return self.kernel[self.grid](*self.arguments, **self.constants, num_warps=self.warps)


#: Where ``move_rows`` takes the acceptance, which alone changes when a launch is repeated.
ACCEPTED: Final = 8


class Repeated:
    """A launch of ``move_rows`` that recurs: everything but the acceptance stays.

    Triton looks at every argument of a launch to find the kernel that was compiled for such
    arguments, which takes longer than the launch. Here that is done once; from then on the
    compiled kernel is called with addresses that were written down.

    Args:
        launch: the first one.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch: Final = launch  # holds what the addresses point to
        self._dtype: Final = launch.arguments[ACCEPTED].dtype
        addresses = (a.data_ptr() if isinstance(a, Tensor) else a for a in launch.arguments)
        fixed = [*addresses, *launch.constants.values()]
        self._before, self._after = tuple(fixed[:ACCEPTED]), tuple(fixed[ACCEPTED + 1 :])
        self._compiled: Any = None

    def run(self, accepted: Tensor) -> None:
        """Launch with another acceptance.

        Args:
            accepted: as in the first launch: of its dtype, contiguous, on the device.
        """
        if self._compiled is not None and accepted.dtype is self._dtype:
            self._compiled(*self._before, accepted, *self._after)
            return
        first, rest = self._launch.arguments[:ACCEPTED], self._launch.arguments[ACCEPTED + 1 :]
        compiled = attrs.evolve(self._launch, arguments=(*first, accepted, *rest)).run()
        if compiled is not None and accepted.dtype is self._dtype:
            self._compiled = compiled[self._launch.grid]
