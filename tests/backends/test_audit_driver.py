"""Launches through CUDA's driver, with a function of the host in the driver's place."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from kernels_here import ON_GPU, importing_kernels

with importing_kernels():
    from kvtxn.backends.audit import (
        byte_lists,
        byte_work,
        change_kernel,
        compare_kernel,
        resolve_kernel,
        write_kernel,
    )
    from kvtxn.backends.audit.launches import Launches
    from kvtxn.backends.gated_delta.advance_kernel import advance_rows
    from kvtxn.backends.launching import repeated_launch as driver
    from kvtxn.backends.move_rows.kernel import move_rows
    from kvtxn.backends.state_tables.commit_table import names_of

STREAM, FUNCTION = 0x7F0000001000, 0x7F0000002000
SIGNATURE = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_void_p),
    *(ctypes.c_uint,) * 7,
    *(ctypes.c_void_p,) * 3,
)


class Compiled:
    """Stands for what Triton compiled; it notes Triton's own launches."""

    function = FUNCTION

    def __init__(self, **metadata):
        target = SimpleNamespace(backend="cuda", warp_size=32)
        self.metadata = SimpleNamespace(num_warps=4, shared=96, target=target, **metadata)
        self.launched = []

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append((grid, arguments))


class Kernel:
    """Stands for a Triton function."""

    def __init__(self, **metadata):
        self.compiled, self.called = Compiled(**metadata), []

    def __getitem__(self, grid):
        def launch(*arguments):
            self.called.append((grid, arguments))
            return self.compiled

        return launch


@pytest.fixture
def launched(monkeypatch):
    """A driver that keeps what it is given: sizes, stream and words; it may answer other than 0."""
    seen = SimpleNamespace(calls=[], says=0, words=4)

    def call(function, *given):
        *sizes, stream, at, extra = given
        assert (function, extra) == (FUNCTION, None)
        places = (ctypes.c_void_p * seen.words).from_address(at)
        words = [ctypes.c_int64.from_address(place).value for place in places]
        seen.calls.append((sizes, stream, words))
        return seen.says

    own = SIGNATURE(call)
    active = SimpleNamespace(get_current_stream=lambda device: STREAM + device)
    runtime = SimpleNamespace(driver=SimpleNamespace(active=active))
    monkeypatch.setattr(driver, "_launcher", lambda: own)
    monkeypatch.setattr(driver, "triton", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(driver, "works", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


GPU = torch.device("cuda", 3)


def test_nothing_is_packed_while_a_graph_is_captured(launched, monkeypatch):
    """The driver is tried first, which would spoil the capture."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not driver.RepeatedLaunch(Compiled(), (1, 1, 1), [1], 0, GPU).by_driver
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert driver.RepeatedLaunch(Compiled(), (1, 1, 1), [1], 0, GPU).by_driver


def test_a_launch_that_recurs_is_the_drivers(launched):
    """Sizes, stream and arguments are the kernel's; words that differ are written."""
    kernel, one = Kernel(), torch.zeros(4, dtype=torch.int64)
    launches = Launches(kernel, 1, GPU)
    for count, grid in ((5, (2, 1, 1)), (-1, (7, 3, 2)), (1 << 40, (1, 1, 1)), (6, (2, 2, 2))):
        launches.launch(grid, (one, count, one[2:], -9, True))
    short = (1 << 40, (1, 1, 1))
    assert [call[1][1] for call in kernel.called] == [5, short[0]]  # a longer number is another
    assert launched.calls == [
        ([7, 3, 2, 128, 1, 1, 96], STREAM + 3, [one.data_ptr(), -1, one[2:].data_ptr(), -9]),
        ([2, 2, 2, 128, 1, 1, 96], STREAM + 3, [one.data_ptr(), 6, one[2:].data_ptr(), -9]),
    ]
    assert not kernel.compiled.launched


def test_a_launch_that_the_driver_refuses_is_tritons_from_then_on(launched):
    """Triton knows what is wrong, and says it."""
    kernel, one = Kernel(), torch.zeros(4, dtype=torch.int64)
    launches, launched.says = Launches(kernel, 1, GPU), 201
    for count in range(4):
        launches.launch((2, 1, 1), (one, count, one, 8, True))
    assert len(kernel.called) == len(launched.calls) == 1
    given = [arguments[:4] for _, arguments in kernel.compiled.launched]
    assert given == [(one.data_ptr(), count, one.data_ptr(), 8) for count in (1, 2, 3)]


@pytest.mark.parametrize(
    "unusual",
    [{"num_ctas": 2}, {"global_scratch_size": 8}, {"launch_pdl": True}, {"gsan": True}],
    ids=lambda given: next(iter(given)),
)
def test_a_kernel_that_needs_more_is_launched_by_triton(launched, unusual):
    kernel, one = Kernel(**unusual), torch.zeros(4, dtype=torch.int64)
    launches = Launches(kernel, 1, GPU)
    for _ in range(2):
        launches.launch((2, 1, 1), (one, 1, one, 8, True))
    assert (len(kernel.compiled.launched), launched.calls) == (1, [])


def test_nothing_is_launched_for_an_empty_grid(launched):
    """The driver would refuse it."""
    kernel, one = Kernel(), torch.zeros(4, dtype=torch.int64)
    launches = Launches(kernel, 1, GPU)
    for grid in ((2, 1, 1), (0, 1, 1), (2, 1, 1)):
        launches.launch(grid, (one, 1, one, 8, True))
    assert kernel.compiled.launched == []
    assert len(launched.calls) == 1


KERNELS = [
    *(change_kernel.change_books, change_kernel.put_numbers, change_kernel.count_tokens),
    *(write_kernel.write_rows, resolve_kernel.resolve_rows),
    *(compare_kernel.compare_rows, compare_kernel.compare_states),
    *(byte_lists.list_reads, byte_lists.list_written, byte_work.do_work),
    *(move_rows, advance_rows, names_of),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_constants_come_last_and_no_other_number_is_specialised(kernel):
    """A number that Triton takes for a constant would not be among the kernel's parameters."""
    names = kernel.arg_names
    constants = [name for name in names if name.isupper()]
    assert names[-len(constants) :] == constants
    annotations = {name: str(kernel.fn.__annotations__[name]) for name in names}
    assert {annotations[name] for name in constants} == {"tl.constexpr"}
    numbers = {name for name in names if annotations[name].startswith("tl.int")}
    assert {annotations[name] for name in names} <= {
        "tl.constexpr",
        "tl.tensor",
        "tl.int32",
        "tl.int64",
    }
    if ON_GPU:
        plain = {p.name for p in kernel.params if p.do_not_specialize}
        assert numbers <= plain


@pytest.mark.skipif(not ON_GPU, reason="there is no driver")
def test_the_driver_takes_launches():
    """Else Triton launches, and a step costs the host several times as much."""
    assert driver.works(torch.cuda.current_device())
