"""A launch of a kernel with all of its arguments."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from .repeated_launch import RepeatedLaunch


@attrs.define(eq=False, on_setattr=attrs.setters.frozen)  # frozen, and cheaper to make
class KernelCall:
    """A launch of a kernel with all of its arguments.

    Attributes:
        kernel: a Triton function.
        grid: the three sizes of the launch's grid.
        arguments: by the kernel's own names, all of them and in the order of its signature; names
            in capitals are constants, and come last.
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

    def run_to_repeat(self, device: torch.device) -> RepeatedLaunch | None:
        """Launch the kernel; return what launches it again, or None under Triton's interpreter.

        Triton looks at every argument of a launch to find the kernel that was compiled for such
        arguments, which takes longer than the launch. Here it does so once. Triton must specialise
        none of the kernel's numbers.

        Args:
            device: of the launch.
        """
        compiled = self.run()
        if compiled is None:
            return None
        constants = sum(map(str.isupper, self.arguments))
        return RepeatedLaunch(compiled, self.grid, [*self.arguments.values()], constants, device)

    def at(self, name: str) -> int:
        """Return the number of an argument, which is that of its word in a ``RepeatedLaunch``.

        Raises:
            ValueError: the kernel has no argument of this name.
        """
        return [*self.arguments].index(name)
