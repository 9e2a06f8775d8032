"""Launching a kernel for a step that recurs, without Triton's look at every argument."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import Tensor

from ...audit.step import Step

#: Triton compiles a kernel for addresses that are multiples of this, and one for others.
ALIGNED: Final = 16


class Launches:
    """Launches one kernel, and remembers its launches by the ``Step`` that they are for.

    Triton looks at every argument of a launch to find the kernel that was compiled for such
    arguments, which takes longer than the launch. An engine whose buffers stay where they are
    gives the same ``Step`` again. Its tensors are the same then, so their addresses are noted down
    once, and the compiled kernel is called with them.

    Args:
        kernel: a Triton function.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel: Final = kernel
        self._known: WeakKeyDictionary[Step, dict[Hashable, _Launch]] = WeakKeyDictionary()

    def again(self, step: Step, given: Sequence[Tensor] = (), number: int = 0) -> bool:
        """Launch for a step as before.

        Args:
            step: the step.
            given: contiguous tensors that replace those of the earlier launch.
            number: a number among the arguments that may differ.

        Returns:
            False if ``first`` was not called for this step and tensors of this form; then nothing
            was launched.
        """
        known = self._known.get(step)
        found = None if known is None else known.get((number, *map(_form, given)))
        if found is None:
            return False
        found.run(given)
        return True

    def first(
        self,
        step: Step,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        given: Sequence[Tensor] = (),
        number: int = 0,
        *,
        at: int = 0,
        recurs: bool,
    ) -> None:
        """Launch, and remember how.

        Args:
            step: the step.
            grid: the sizes of the launch's grid.
            arguments: all arguments, constants included, in the order of the kernel's signature.
            given: the arguments from number ``at`` on, which may be others in the next launch.
            number: as for ``again``.
            at: the number of the first of them.
            recurs: False remembers nothing, because another launch needs other tensors.
        """
        compiled = self._kernel[grid](*arguments)
        if recurs and compiled is not None:  # the interpreter compiles nothing
            launch = _Launch(compiled[grid], arguments, at, len(given))
            self._known.setdefault(step, {})[number, *map(_form, given)] = launch


class _Launch:
    """A launch that recurs; it holds every tensor whose address is noted down."""

    def __init__(self, run: Any, arguments: Sequence[Any], at: int, varying: int) -> None:
        fixed = [*map(address_of, arguments)]
        self._run: Final = run
        self._before: Final = tuple(fixed[:at])
        self._after: Final = tuple(fixed[at + varying :])
        self._held: Final = (*arguments[:at], *arguments[at + varying :])

    def run(self, given: Sequence[Tensor]) -> None:
        """Launch with these tensors in the place of those that vary."""
        self._run(*self._before, *[each.data_ptr() for each in given], *self._after)


def address_of(argument: Any) -> Any:
    """Return the address of a tensor, and anything else as it is."""
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


def _form(given: Tensor) -> Hashable:
    """Return all of a tensor that the compiled kernel and its other arguments depend on."""
    return given.dtype, given.shape[-1], given.data_ptr() % ALIGNED
