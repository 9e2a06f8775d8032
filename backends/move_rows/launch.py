"""Data of a launch: the plan of a move, the call of a kernel, and a call that recurs."""

from __future__ import annotations

from typing import Any, Final

import attrs
from torch import Tensor

from ..driver import PackedLaunch, pack
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


@attrs.define(eq=False, on_setattr=attrs.setters.frozen)
class KernelCall:
    """A launch of a kernel with all of its arguments.

    Attributes:
        kernel: a Triton function.
        grid: the three sizes of the launch's grid.
        arguments: all of them, constants included, by the kernel's own names and in the order of
            its signature.
        warps: warps per program.
        options: further options of Triton's compiler.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    warps: int
    options: dict[str, Any] = attrs.Factory(dict)

    def run(self) -> Any:
        """Launch the kernel; return the compiled kernel, or None under Triton's interpreter."""
        launch = self.kernel[self.grid]
        return launch(*self.arguments.values(), num_warps=self.warps, **self.options)


class CachedLaunch:
    """A launch that recurs: only the acceptance, its argument ``accepted``, differs.

    Triton inspects every argument of a launch to find the kernel compiled for their types and
    alignments, which takes longer than the launch. Here it does so once. Later runs call the
    compiled kernel with stored addresses.

    Args:
        call: the first launch; it keeps alive every tensor whose address is stored.
        packs: let the driver launch with packed arguments, if it can. Then Triton must not
            specialise any number among the kernel's arguments.

    Attributes:
        packed: the launch as the driver takes it; None before the first launch, or where Triton
            launches.
    """

    def __init__(self, call: KernelCall, *, packs: bool = False) -> None:
        self._call: Final = call
        self._dtype: Final = call.arguments["accepted"].dtype
        self._at: Final = list(call.arguments).index("accepted")
        values = call.arguments.values()
        fixed = [each.data_ptr() if isinstance(each, Tensor) else each for each in values]
        self._before, self._after = tuple(fixed[: self._at]), tuple(fixed[self._at + 1 :])
        self._compiled: Any = None
        self._packs: Final = packs
        self.packed: PackedLaunch | None = None

    def run(self, accepted: Tensor) -> None:
        """Launch with another acceptance.

        Args:
            accepted: of the first launch's form, contiguous, on the device. One of another dtype
                is launched as an ordinary call.
        """
        same = accepted.dtype is self._dtype
        packed = self.packed
        if packed is not None and same:
            packed.words[self._at] = accepted.data_ptr()
            if packed.run():
                return
            self.packed = None  # Triton raises the right error
        if self._compiled is not None and same:
            self._compiled(*self._before, accepted, *self._after)
            return
        arguments = self._call.arguments | {"accepted": accepted}
        compiled = attrs.evolve(self._call, arguments=arguments).run()
        if compiled is not None and same:
            self._compiled = compiled[self._call.grid]
            self.packed = self._pack(compiled, accepted)

    def _pack(self, compiled: Any, accepted: Tensor) -> PackedLaunch | None:
        """Pack the launch whose kernel was compiled now."""
        if not self._packs:
            return None
        arguments = self._call.arguments
        words = [*self._before, accepted.data_ptr(), *self._after]
        # A constant's name is in capitals, and no parameter of the compiled kernel.
        given = [word for name, word in zip(arguments, words, strict=True) if not name.isupper()]
        return pack(compiled, self._call.grid, given, accepted.device)
