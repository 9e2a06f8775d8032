"""A launch that recurs: looked up once, then called with what was noted down."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from kvtxn.backends.launching import kernel_call
from kvtxn.backends.launching.kernel_call import KernelCall
from kvtxn.backends.move_rows.launch import CachedLaunch


class Kernel:
    """Stands for a Triton function: notes how it is launched; compiled, likewise."""

    def __init__(self, *, compiles: bool) -> None:
        self.compiles = compiles
        self.launched: list[tuple[object, ...]] = []
        self.again: list[tuple[object, ...]] = []

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            self.launched.append((grid, num_warps, *arguments))
            return Compiled(self) if self.compiles else None

        return launch


class Compiled:
    """Stands for what a launch returns."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.again.append((grid, *arguments))


def cached(*, compiles: bool) -> tuple[Kernel, dict[str, object], CachedLaunch]:
    """A kernel, the arguments of its first launch, and the launch."""
    kernel = Kernel(compiles=compiles)
    arguments: dict[str, object] = {
        "planes": torch.zeros(2),
        "first_address": 16,
        "accepted": torch.zeros(3, dtype=torch.int32),
        "counters": torch.ones(2),
        "num_rows": 7,
        "A": True,
        "B": 16,
    }
    return kernel, arguments, CachedLaunch(KernelCall(kernel, (2, 3, 1), arguments, 4))


def test_the_first_launch_is_an_ordinary_one():
    """It is what compiles; only the acceptance is another's."""
    kernel, arguments, again = cached(compiles=True)
    accepted = torch.ones(3, dtype=torch.int32)
    again.run(accepted)
    [(grid, warps, *given)] = kernel.launched
    assert (grid, warps) == ((2, 3, 1), 4)
    wanted = arguments | {"accepted": accepted}
    assert all(got is value for got, value in zip(given, wanted.values(), strict=True))


def test_later_ones_go_by_address():
    """Arguments and constants by position, tensors by address."""
    kernel, arguments, again = cached(compiles=True)
    again.run(torch.ones(3, dtype=torch.int32))
    accepted = torch.ones(5, dtype=torch.int32)
    again.run(accepted)
    assert len(kernel.launched) == 1
    [(grid, *given)] = kernel.again
    assert grid == (2, 3, 1)
    wanted = arguments | {"accepted": accepted}
    wanted = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in wanted.values()]
    assert given == wanted


def test_another_dtype_is_another_kernel():
    """A kernel that was compiled does not fit it, before or after."""
    kernel, _, again = cached(compiles=True)
    again.run(torch.ones(3, dtype=torch.int64))
    again.run(torch.ones(3, dtype=torch.int32))
    again.run(torch.ones(3, dtype=torch.int64))
    assert (len(kernel.launched), len(kernel.again)) == (3, 0)
    again.run(torch.ones(3, dtype=torch.int32))
    assert (len(kernel.launched), len(kernel.again)) == (3, 1)


def test_interpreted_kernels_have_nothing_compiled():
    """Each launch is an ordinary one."""
    kernel, _, again = cached(compiles=False)
    for _ in range(3):
        again.run(torch.ones(3, dtype=torch.int32))
    assert (len(kernel.launched), len(kernel.again)) == (3, 0)


class Again:
    """Stands for a ``RepeatedLaunch``."""

    def __init__(self, compiled, grid, arguments, constants, device):
        self.grid, self.device = grid, device
        self.words = [launch_address(each) for each in arguments[: len(arguments) - constants]]
        self.launched: list[list[int]] = []

    def run(self):
        self.launched.append(list(self.words))


def launch_address(argument):
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


@pytest.fixture
def repeated(monkeypatch):
    """A launch that the driver makes again, on a machine without one."""
    monkeypatch.setattr(kernel_call, "RepeatedLaunch", Again)


def test_the_driver_launches_with_packed_arguments(repeated):
    """Addresses and numbers, no constants, in the kernel's order; the acceptance's changes."""
    kernel, arguments, launch = cached(compiles=True)
    first, second = (torch.ones(count, dtype=torch.int32) for count in (3, 5))
    launch.run(first)
    assert (len(kernel.launched), launch.again.launched) == (1, [])
    launch.run(second)
    launch.run(first)
    before = [arguments["planes"].data_ptr(), 16]
    after = [arguments["counters"].data_ptr(), 7]
    assert launch.again.launched == [
        [*before, accepted.data_ptr(), *after] for accepted in (second, first)
    ]
    assert launch.again.grid == (2, 3, 1)
    assert (len(kernel.launched), kernel.again) == (1, [])


def test_another_dtype_is_an_ordinary_launch(repeated):
    kernel, _, launch = cached(compiles=True)
    launch.run(torch.ones(3, dtype=torch.int32))
    launch.run(torch.ones(3, dtype=torch.int64))
    assert (len(kernel.launched), launch.again.launched) == (2, [])


COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvtxn.backends.launching.repeated_launch import SCRATCH
from kvtxn.backends.move_rows.kernel import move_rows

FLAGS = dict.fromkeys(("TO_CACHE", "COUNT", "KEEP", "UNIFORM", "WIDE", "ONCE"), True)
SIZES = {"GROUPS": 1, "NARROW": 1, "UNITS": 64, "RUN": 64, "BLOCK": 16, "ROWS": 4, "COLS": 64}
KINDS = {"SELECT": 2, "ACCEPT": 3, "DIRECT": False, "OVERWRITES": False, "TAIL": 0, "CHUNK": 128}
constants = FLAGS | SIZES | KINDS
LONG = {"first_address", "second_address", "known", "placeholder", "vocabulary"}
SHORT = {"num_rows", "num_planes", "slot_stride", "kept_stride", "columns", "depth"}
SHORT |= {"per_request", "settled"}
kinds = {
    name: "i64" if name in LONG else "i32" if name in SHORT else "*i64"
    for name in move_rows.arg_names if not name.isupper()
} | {"accepted": "*i32"}
signature = {name: kinds.get(name, "constexpr") for name in move_rows.arg_names}
source = ASTSource(fn=move_rows, signature=signature, constexprs=constants)
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
words = re.findall(r"[.]param [.](\\w+)", ptx)
wanted = ["u32" if kind == "i32" else "u64" for kind in kinds.values()]
assert words[: len(wanted)] == wanted, words
assert len(words) <= len(wanted) + SCRATCH, words
print("compiled")
"""


def test_the_compiled_kernel_takes_what_is_packed(tmp_path):
    """Its parameters are its arguments without constants, in their order."""
    triton = pytest.importorskip("triton.backends")
    if "nvidia" not in triton.backends:
        pytest.skip("this Triton does not compile for NVIDIA's GPUs")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.stdout == "compiled\n", done.stderr
