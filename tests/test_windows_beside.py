"""Windows that are open at one time, or of which one is over, do nothing to each other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from small_caches import HEAD_SIZE, HEADS
from triton_here import InterpretedTriton

from kvtxn import LayerRef, TransactionManager, TxnConfig, WindowState, WindowStateError
from kvtxn.layout import RowLayout
from kvtxn.testing import registered

sys.path.insert(0, str(Path(__file__).parent / "testing"))
from mutants_captured import Prepared

CPU = torch.device("cpu")
ROWS = 40


class Caches:
    """A layer whose rows are -1, -2, -3, ..., and a manager over it."""

    def __init__(self, policy: str, backend: type, **settings) -> None:
        numbers = -1 - torch.arange(float(ROWS)).view(ROWS // 4, 4, 1, 1)
        self.planes = [numbers.expand(ROWS // 4, 4, HEADS, HEAD_SIZE).clone() for _ in range(2)]
        self.ref = LayerRef("layer", *self.planes)
        with registered(backend) as name:
            config = TxnConfig(policy=policy, backend=name, max_rows=8, **settings)
            self.manager = TransactionManager([self.ref], config)
        self.expected = (-1 - torch.arange(float(ROWS))).tolist()

    def windows(self, **more):
        return self.manager.captured_windows(torch.full((1, 8), -1), **more)

    def begin(self, windows, drafts: int, slots: list[int], base: float, settled: int = 1):
        """Begin a window over a captured forward, and run the forward; one draft is to be kept."""
        windows.slots[0, : len(slots)] = torch.tensor(slots)
        window = windows.begin(windows.plan(RowLayout.build((drafts,), (settled,), CPU)))
        for row, slot in enumerate(slots):
            for part, plane in enumerate(self.planes):
                if windows.deferred and windows.position[row] >= 0:
                    windows.rows["layer"][part][row] = base + row
                else:
                    plane.view(-1, HEADS, HEAD_SIZE)[slot] = base + row
        return window

    def rows(self, count: int, base: float, *, gaps: bool = False):
        """Rows to stage, with other numbers between them if they have ``gaps``."""
        wide = torch.full((count, 2, HEADS, HEAD_SIZE), 7.0)
        wide[:, 0] = base + torch.arange(float(count)).view(count, 1, 1)
        return wide[:, 0] if gaps else wide[:, 0].clone()

    def expect(self, slots: list[int], base: float) -> None:
        """Expect the rows of a step in these slots, its first ones."""
        for row, slot in enumerate(slots):
            self.expected[slot] = base + row

    def check(self) -> None:
        for plane in self.planes:
            found = plane.view(ROWS, -1)
            assert bool((found == found[:, :1]).all())
            assert found[:, 0].tolist() == self.expected


def sampled(tokens: int):
    return torch.tensor([tokens], dtype=torch.int32)


@pytest.fixture(params=[InterpretedTriton, Prepared], ids=["triton", "prepared"])
def backend(request):
    return request.param


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_two_steps_of_a_pipeline(backend, policy, debug):
    """Both are under way before the first is committed; each restores its own rows."""
    caches = Caches(policy, backend, debug=debug)
    lanes = [caches.windows(beside=True) for _ in range(2)]
    first = caches.begin(lanes[0], 2, [0, 1, 2], 100)
    second = caches.begin(lanes[1], 3, [8, 9, 10, 11], 200)
    assert first.commit_sampled(sampled(2)) is WindowState.COMMITTED
    second.abort()
    caches.expect([0, 1], 100)
    caches.expect([8], 200)
    caches.check()


@pytest.mark.parametrize("end", ["abort", "commit", "commit_sampled"])
@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_a_window_that_ends_beside_one_that_stages(backend, policy, end):
    caches = Caches(policy, backend)
    captured = caches.begin(caches.windows(beside=True), 2, [0, 1, 2], 100)
    with caches.manager.window(2, [8, 9, 10]) as window:
        window.stage(caches.ref, *[caches.rows(3, 200, gaps=True)] * 2)
        if end == "abort":
            captured.abort()
        else:
            captured.commit(1) if end == "commit" else captured.commit_sampled(sampled(2))
        window.commit(1)
    caches.expect([0, 1][: 1 + (end != "abort")], 100)
    caches.expect([8, 9], 200)
    caches.check()


def test_a_change_of_staged_rows_is_noticed_in_their_own_window(backend):
    caches = Caches("deferred", backend)
    captured = caches.begin(caches.windows(beside=True), 2, [0, 1, 2], 100)
    with caches.manager.window(2, [8, 9, 10]) as window:
        key = caches.rows(3, 200)
        window.stage(caches.ref, key, key)
        key.fill_(9)
        captured.commit(1)
        with pytest.raises(WindowStateError):
            window.commit(1)
        window.abort()
    caches.expect([0, 1], 100)
    caches.expect([8], 200)
    caches.check()


@pytest.mark.parametrize("gaps", [False, True])
def test_what_an_ended_window_refuses_leaves_the_open_one_alone(backend, gaps):
    caches = Caches("deferred", backend)
    windows = caches.windows()
    for base, spread in ((100, False), (200, gaps)):
        ended = caches.begin(windows, 2, [0, 1, 2], base)
        ended.commit_sampled(sampled(1))
        caches.expect([0], base)
        with caches.manager.window(4, [8, 9, 10, 11, 12]) as window:
            rows = caches.rows(5, base, gaps=spread)
            window.stage(caches.ref, rows, rows)
            with pytest.raises(WindowStateError):
                ended.abort()
            window.commit(4)
        caches.expect([8, 9, 10, 11, 12], base)
        caches.check()


def test_windows_beside_each_other_may_read_the_same_marks(backend):
    caches, position = Caches("deferred", backend), torch.full((8,), -1)
    one, other = (caches.windows(position=position, beside=True) for _ in range(2))
    for windows, drafts, slots, base in (
        *((one, 2, [0, 1, 2], 100), (other, 1, [4, 5, 6], 200), (one, 2, [8, 9, 10], 300)),
    ):
        window = caches.begin(windows, drafts, slots, base, settled=3 - drafts)
        window.commit_sampled(sampled(drafts + 1))
        caches.expect(slots, base)
        caches.check()


def test_attention_of_a_captured_window_reads_settled_rows_in_the_cache(backend):
    """The forward leaves drafts alone in the tensors where they wait."""
    caches = Caches("deferred", backend)
    windows = caches.windows()
    for parts in windows.rows["layer"]:
        parts.fill_(torch.nan)
    with caches.begin(windows, 2, [0, 1, 2], 100) as window:
        window.note_staged(caches.ref)
        query = torch.zeros(3, HEADS, HEAD_SIZE)
        found = window.attend(caches.ref, query, torch.tensor([[0]]), torch.tensor([3]))
        window.abort()
    means = [100.0, 100.5, 101.0]  # a query of zeros weighs all rows that it sees alike
    torch.testing.assert_close(found[:, 0, 0], torch.tensor(means))


def test_rows_of_a_ring_come_back_into_the_slots_of_their_own_step(backend):
    """A window that fell back is dropped after the next step's slots are there."""
    caches = Caches("deferred", backend)
    ring = LayerRef("ring", *caches.planes, ring_size=8, window=4)
    with registered(backend) as name:
        config = TxnConfig(policy="deferred", backend=name, max_rows=8)
        caches.manager, caches.ref = TransactionManager([ring], config), ring
    windows = caches.windows()
    windows.slots[0, :3] = torch.tensor([0, 1, 2])
    window = windows.begin(windows.plan(RowLayout.build((2,), (1,), CPU)))
    window.fall_back("attend", RuntimeError("the engine's"), replayed=False)
    for plane in caches.planes:
        plane.view(ROWS, -1)[:3] = torch.tensor([100.0, 101.0, 102.0]).view(3, 1)
    windows.slots[0, :3] = torch.tensor([16, 17, 18])
    window.abort()
    caches.expect([0], 100)
    caches.check()
