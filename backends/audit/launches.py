"""Launching a kernel for a step that recurs, without Triton's look at every argument."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...audit.step import Step
from ..launching.repeated_launch import ALIGNED, SCRATCH, RepeatedLaunch, address_of

#: Triton takes whole numbers from here on for longer ones.
_LONG: Final = 1 << 31


class Launches:
    """Launches one kernel, and remembers its launches by the ``Step`` that they are for.

    Triton looks at every argument of a launch to find the kernel that was compiled for such
    arguments, which takes longer than the launch. Here what was compiled is found by the form of
    the arguments. And an engine whose buffers stay where they are gives the same ``Step`` again:
    its tensors are the same then, so their addresses are packed once.

    Args:
        kernel: a Triton function, none of whose numbers is specialised.
        constants: the number of its last parameters that are constants.
        device: of its tensors.
    """

    def __init__(self, kernel: Any, constants: int, device: torch.device) -> None:
        self._kernel: Final = kernel
        self._constants: Final = constants
        self._device: Final = device
        self._compiled: dict[Hashable, RepeatedLaunch] = {}
        self._known: WeakKeyDictionary[Step, dict[int, list[_Launch]]] = WeakKeyDictionary()
        self._last: tuple[Step, dict[int, list[_Launch]]] | None = None  # the usual one

    def again(self, step: Step, given: Sequence[Any] = (), number: int = 0) -> bool:
        """Launch for a step as before.

        Args:
            step: the step.
            given: what replaces the tensors of the earlier launch.
            number: a number among the arguments that may differ.

        Returns:
            False if ``first`` was not called for this step and tensors of this form, device
            and shape included, or they are not contiguous; then nothing was launched.
        """
        last = self._last
        if last is None or last[0] is not step:
            known = self._known.get(step)
            if known is None:
                return False
            last = self._last = step, known
        launches = last[1].get(number)
        if launches is None:
            return False
        return launches[0].run(given) or any(launch.run(given) for launch in launches[1:])

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
        compiled = self.launch(grid, arguments)
        if recurs and compiled is not None:
            again = RepeatedLaunch(compiled, grid, arguments, self._constants, self._device)
            launch = _Launch(again, arguments, at, given)
            self._known.setdefault(step, {}).setdefault(number, []).append(launch)

    def launch(
        self,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        kind: Hashable = None,
        vary: Sequence[int] = (),
    ) -> Any:
        """Launch the kernel once.

        What was compiled for its ``kind`` before is launched by the driver. Such a launch with an
        empty grid does nothing.

        Args:
            grid: the sizes of the launch's grid.
            arguments: all arguments, constants included, in the order of the kernel's signature.
            kind: stands for all that the compiled kernel depends on; None finds that out, which
                takes a look at every argument.
            vary: indices of the arguments that may differ between launches of one ``kind``; empty:
                all may.

        Returns:
            What Triton compiled; None where nothing was compiled, as by the interpreter.
        """
        if kind is None:
            variable = len(arguments) - self._constants
            kind = (*map(_kind, arguments[:variable]), *arguments[variable:])
        found = self._compiled.get(kind)
        if found is not None:
            _set(found, grid, arguments, vary)
            if all(grid):  # the driver refuses to launch nothing
                found.run()
            return found.compiled
        compiled = self._kernel[grid](*arguments)
        if compiled is not None:
            whole = grid, arguments, self._constants, self._device
            self._compiled[kind] = RepeatedLaunch(compiled, *whole)
        return compiled


class _Launch:
    """A launch that recurs; it holds every tensor whose address is noted down.

    Args:
        again: the launch.
        arguments: all arguments, constants included.
        at: the number of the first argument that varies.
        given: the tensors that vary; only their form is kept.
    """

    __slots__ = ("_again", "_at", "_forms", "_held")

    def __init__(
        self, again: RepeatedLaunch, arguments: Sequence[Any], at: int, given: Sequence[Tensor]
    ) -> None:
        self._again: Final = again
        self._held: Final = (*arguments[:at], *arguments[at + len(given) :])
        self._at: Final = at
        self._forms: Final = tuple(map(_form, given))

    def run(self, given: Sequence[Any]) -> bool:
        """Launch with these in the place of the tensors that vary.

        Returns:
            False if these are no such tensors; then nothing was launched.
        """
        forms = self._forms
        if len(given) != len(forms):
            return False
        addresses = []
        for each, (dtype, shape, device, aligned) in zip(given, forms, strict=False):
            if type(each) is not Tensor or each.dtype is not dtype or each.shape != shape:
                return False
            address = each.data_ptr()
            if address % ALIGNED != aligned or each.get_device() != device:
                return False
            if not each.is_contiguous():
                return False
            addresses.append(address)
        again, at = self._again, self._at
        for address in addresses:
            again.words[at] = address
            at += 1
        again.run()
        return True


def _set(
    launch: RepeatedLaunch,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    vary: Sequence[int],
) -> None:
    """Set a launch's grid, and the arguments whose numbers are in ``vary``.

    All if that is empty.
    """
    words, programs = launch.words, launch.programs
    for index in vary or range(len(words) - SCRATCH):
        words[index] = address_of(arguments[index])
    programs[0].value, programs[1].value, programs[2].value = grid


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size, int, int]:
    """Return what a launch depends on in a contiguous tensor, besides its address."""
    return tensor.dtype, tensor.shape, tensor.get_device(), tensor.data_ptr() % ALIGNED


def _kind(argument: Any) -> Hashable:
    """Return all of an argument that the compiled kernel depends on, if it is no constant.

    The dtype and alignment of a tensor; of a number, True if 32 bits hold it.
    """
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNED
    return bool(-_LONG <= argument < _LONG)
