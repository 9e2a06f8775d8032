"""Launches that are looked up anew, and launches that are remembered."""

from __future__ import annotations

import inspect

import attrs
import pytest
import torch
from kvtxn.backends.move_rows.acceptance import acceptance_arg
from kvtxn.backends.move_rows.kernel import move_rows
from kvtxn.backends.move_rows.launch import MovePlan
from kvtxn.backends.move_rows.launcher import LAUNCH_BYTES, LaunchCache, MoveLauncher
from kvtxn.backends.move_rows.selection import Select

from kvtxn.executor import SampledIds
from kvtxn.layout import RowLayout

DEVICE = torch.device("cpu")


class Kernel:
    """Stands for the kernel: counts ordinary launches, and those of what was compiled."""

    def __init__(self) -> None:
        self.ordinary = self.again = 0

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            self.ordinary += 1
            return {grid: self.repeat}

        return launch

    def repeat(self, *arguments) -> None:
        self.again += 1


@pytest.fixture
def kernel(monkeypatch):
    """In the place of ``move_rows``."""
    from kvtxn.backends.move_rows import launcher

    stand_in = Kernel()
    monkeypatch.setattr(launcher.kernels, "move_rows", stand_in)
    return stand_in


@pytest.fixture
def facts():
    """The facts that a launch depends on."""
    limits = torch.tensor([8])
    return {
        "launcher": MoveLauncher(limits, torch.zeros_like(limits), overwrites=False),
        "plan": MovePlan(None, limits, Select.KEPT, known=1),
        "layout": RowLayout.build((2, 1), (1, 1), DEVICE),
        "counters": torch.zeros(1, 4, dtype=torch.int64),
        "accepted": torch.tensor([1, 0]),
        "slots": torch.arange(5).view(1, 5),
        "count": True,
    }


def make(facts, **changes) -> None:
    """Launch once."""
    now = {**facts, **changes}
    acceptance = acceptance_arg(now["accepted"], now["layout"])
    now["launcher"].launch(
        now["plan"], now["layout"], now["counters"], acceptance, now["slots"], count=now["count"]
    )


def test_arguments_are_in_the_order_of_the_kernels_signature(facts):
    """They are passed by position; all of them are named, once."""
    acceptance = acceptance_arg(facts["accepted"], facts["layout"])
    now = (facts["plan"], facts["layout"], facts["counters"], acceptance, facts["slots"])
    call = facts["launcher"].call(*now, count=True)
    assert list(call.arguments) == list(inspect.signature(move_rows.fn).parameters)


def test_what_recurs_is_looked_up_once(kernel, facts):
    """Whatever was accepted."""
    for accepted in ([1, 0], [2, 1], [0, 0]):
        make(facts, accepted=torch.tensor(accepted))
    assert (kernel.ordinary, kernel.again) == (1, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": RowLayout.build((2, 1), (1, 1), DEVICE)},
        {"counters": torch.zeros(1, 4, dtype=torch.int64)},
        {"slots": torch.arange(5).view(1, 5)},
        {"count": False},
        {"accepted": torch.tensor([1, 0], dtype=torch.int32)},
        {"accepted": torch.ones(5, dtype=torch.bool)},
        {"accepted": SampledIds(torch.ones(2, 3, dtype=torch.int64))},
        {"plan": MovePlan(None, torch.tensor([8]), Select.KEPT, known=1)},
        {"plan": MovePlan(None, torch.tensor([8]), Select.REJECTED, known=1)},
        {"plan": MovePlan(None, torch.tensor([8]), Select.KEPT, known=0)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_differs_is_looked_up(kernel, facts, change):
    """Addresses are compared by the objects that hold them; both stay remembered."""
    make(facts)
    make(facts, **change)
    assert (kernel.ordinary, kernel.again) == (2, 0)
    make(facts)
    make(facts, **change)
    assert (kernel.ordinary, kernel.again) == (2, 2)


def test_addresses_as_arguments_do_not_recur(kernel, facts):
    """A layer's settled rows lie elsewhere in every window."""
    direct = attrs.evolve(facts["plan"], direct=(16, 32))
    for _ in range(2):
        make(facts, plan=direct, accepted=None, count=False)
    assert (kernel.ordinary, kernel.again) == (2, 0)


def test_ids_say_where_nothing_is(kernel, facts):
    """The placeholder and the vocabulary are part of a launch."""
    ids = torch.ones(2, 3, dtype=torch.int64)
    for placeholder, vocabulary in ((-1, None), (-1, 9), (0, 9)):
        make(facts, accepted=SampledIds(ids, placeholder, vocabulary))
    assert (kernel.ordinary, kernel.again) == (3, 0)


def test_launches_are_bounded_in_bytes(kernel, facts):
    """Those that were added first are looked up again; tensors that they keep alive count."""
    make(facts)
    launches = facts["launcher"]._launches
    one = launches.nbytes
    assert one > LAUNCH_BYTES
    launches.most_bytes = 3 * one
    for _ in range(5):
        make(facts, layout=RowLayout.build((2, 1), (1, 1), DEVICE))
    assert (len(launches), launches.nbytes) == (3, 3 * one)
    before = kernel.ordinary
    make(facts)
    assert kernel.ordinary == before + 1


def test_a_launch_beyond_the_bound_is_kept_alone():
    """Else it would be prepared for each step."""
    launches = LaunchCache(1)
    launches.add("first", 1, [])
    launches.add("second", 2, [torch.zeros(8)])
    assert (launches.get("first"), launches.get("second"), len(launches)) == (None, 2, 1)
