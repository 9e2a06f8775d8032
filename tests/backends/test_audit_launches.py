"""Launches of the audit's kernels that recur: the arguments that a compiled kernel is given."""

from __future__ import annotations

import inspect

import pytest
import torch
from kernels_here import importing_kernels
from ledger_kit.life import new_ledger

from kvtxn.audit import Step

with importing_kernels():
    from kvtxn.backends.audit import TritonPasses, compare_kernel, resolve_kernel, write_kernel
    from kvtxn.backends.audit.launches import Launches


class Kernel:
    """Stands for a Triton function: it notes its calls, and those of what it compiled."""

    def __init__(self):
        self.called, self.compiled = [], []

    def __getitem__(self, grid):
        def launch(*arguments):
            self.called.append((grid, arguments))
            return self.Compiled(self)

        return launch

    class Compiled:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *arguments: self.kernel.compiled.append((grid, arguments))


CPU = torch.device("cpu")


def numbers(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype)


def step_of(name="slots", dtype=torch.int64):
    return Step(numbers(2), numbers(3), numbers(2), numbers(4), {name: numbers(4, dtype=dtype)})


def addresses(arguments):
    return tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)


def test_a_launch_is_made_again_with_other_tensors_where_they_vary():
    kernel, step = Kernel(), step_of()
    launches = Launches(kernel, 1, CPU)
    fixed, one, other = numbers(3), numbers(2), numbers(2)
    assert not launches.again(step, (one,))
    launches.first(step, (2, 1, 1), (fixed, one, 7, True), (one,), at=1, recurs=True)
    assert launches.again(step, (other,))
    assert kernel.compiled == [((2, 1, 1), (fixed.data_ptr(), other.data_ptr(), 7, True))]


@pytest.mark.parametrize(
    "other",
    [numbers(2, dtype=torch.int32), numbers(3), numbers(3)[1:]],
    ids=["dtype", "length", "alignment"],
)
def test_another_form_is_another_launch(other):
    kernel, step, one = Kernel(), step_of(), numbers(2)
    launches = Launches(kernel, 1, CPU)
    launches.first(step, (2, 1, 1), (one, True), (one,), recurs=True)
    assert not launches.again(step, (other,))
    assert not launches.again(step_of(), (one,))


def test_what_needs_other_tensors_next_time_is_not_remembered():
    kernel, step = Kernel(), step_of()
    launches = Launches(kernel, 1, CPU)
    launches.first(step, (2, 1, 1), (numbers(1), True), recurs=False)
    assert not launches.again(step)


def test_each_launch_knows_how_many_constants_its_kernel_has():
    """With one less, a kernel compiled for one value of a constant would run for another."""
    books = new_ledger("plain", backend="torch").books
    passes = TritonPasses(books)
    parts = (*vars(passes).values(), *vars(passes.input()).values())
    launches = [each for each in parts if isinstance(each, Launches)]
    assert len(launches) > 6
    for each in launches:
        names = [name for name in each._kernel.arg_names if name.isupper()]
        assert each._constants == len(names), each._kernel


@pytest.fixture
def kernels(monkeypatch):
    """The kernels of a step, replaced, by name."""
    modules = {
        "write_rows": write_kernel, "compare_rows": compare_kernel, "resolve_rows": resolve_kernel
    }  # fmt: skip
    found = {name: Kernel() for name in modules}
    for name, kernel in found.items():
        module = modules[name]
        kernel.parameters = [*inspect.signature(getattr(module, name).fn).parameters]
        monkeypatch.setattr(module, name, kernel)
    return found


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_step_that_comes_again_has_the_same_arguments(kernels, dtype):
    """Each kernel gets all its arguments in order; converted slots are converted again."""
    ledger = new_ledger("plain", backend="torch")
    passes, [group] = TritonPasses(ledger.books), ledger.groups
    step = step_of(group.name, dtype)
    table = {group.name: numbers(2, 3, dtype=torch.int32)}
    step = Step(step.lines, step.starts, step.first, step.tokens, step.slots, table)
    counts = numbers(2), numbers(2)
    ids = numbers(2, 3), numbers(2, 3)
    for each in range(2):
        passes.write(step)
        passes.check(step)
        passes.resolve(step, counts[each], ids[each])
    for name, kernel in kernels.items():
        [(grid, first)], [(other, arguments)] = kernel.called, kernel.compiled
        assert grid == other
        assert len(first) == len(kernel.parameters)
        wanted = [*first]
        if name == "resolve_rows":
            wanted[kernel.parameters.index("accepted")] = counts[1]
            wanted[kernel.parameters.index("sampled")] = ids[1]
        same = dtype is torch.int64 or name == "compare_rows"
        if not same:  # the table of addresses may be another one
            table = kernel.parameters.index("slots")
            arguments = (*arguments[:table], first[table].data_ptr(), *arguments[table + 1 :])
        assert arguments == addresses(wanted)
