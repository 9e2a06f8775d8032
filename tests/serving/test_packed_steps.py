"""Steps of the V1 runner on a GPU: requests with drafts anywhere in the batch, several groups.

The kernels run on the GPU where there is one, else through Triton's interpreter.
"""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from kernels_here import importing_kernels
from step_rig import DEVICE, Rig, anywhere  # noqa: F401

from kvtxn import LayerRef, TransactionManager, TxnConfig

with importing_kernels():
    from kvtxn.integrations.serving.graph_steps import PackedGraphSteps

HEADS, SIZE, BLOCK, BLOCKS, VOCAB = 2, 8, 8, 16, 50


class Runner:
    """Two groups with slots in buffers of their own, and latent rows in one of them."""

    def __init__(self, policy="undo", on_error="raise") -> None:
        packed = torch.randn(BLOCKS, HEADS, BLOCK, 2 * SIZE, device=DEVICE)
        # as FlexAttention and FlashInfer's NHD have it: the heads of a row together
        heads_last = torch.randn(BLOCKS, BLOCK, HEADS, 2 * SIZE, device=DEVICE).transpose(1, 2)
        latent = torch.randn(BLOCKS, BLOCK, 3 * SIZE, device=DEVICE)
        self.caches = [packed, heads_last, latent]
        refs = [LayerRef.latent("latent", latent, group="group.1")]
        for name, cache in (("packed", packed), ("heads_last", heads_last)):
            key, value = cache.transpose(1, 2).split(SIZE, -1)
            refs.insert(0, LayerRef(name, key, value, group="group.0"))
        config = TxnConfig(policy=policy, backend="triton", max_rows=20, on_error=on_error)
        self.manager = TransactionManager(refs, config)
        self.steps = PackedGraphSteps(self.manager, 5, VOCAB)
        self.slots = [torch.full((64,), -1, dtype=torch.int64, device=DEVICE) for _ in range(2)]

    def begin(self, drafts, lengths, prefilling=None) -> list[list[int]]:
        """Plan a step; returns each request's slots in group 0, those of group 1 are shifted."""
        found = []
        row = 0
        for request, length in enumerate(lengths):
            slots = [request * BLOCK + i for i in range(length)]
            found.append(slots)
            there = torch.tensor(slots, device=DEVICE)
            self.slots[0][row : row + length] = there
            self.slots[1][row : row + length] = (there + BLOCK) % (BLOCK * BLOCKS)
            row += length
        late = prefilling or [False] * len(lengths)
        parts = (numpy.array(each) for each in (drafts, lengths, late))
        self.steps.begin_among(*parts, self.slots)
        return found

    def write(self, slots, shift=0) -> None:
        """The forward: new bytes in these slots of every layer."""
        for slot in slots:
            block, offset = slot // BLOCK, slot % BLOCK
            for cache in self.caches[:2]:
                cache[block, :, offset] += 1
            shifted = (slot + BLOCK) % (BLOCK * BLOCKS)
            self.caches[2][shifted // BLOCK, shifted % BLOCK] += 1

    def count(self, name: str) -> float:
        """A counter."""
        return self.manager.snapshot().get(f"kvtxn_{name}", 0)


def sampled_ids(sampled, drafts) -> torch.Tensor:
    """The V1 sampler's output: ids, then -1; now and then an id that is no token."""
    width = max(drafts, default=0) + 1
    rows = [[7] * count + [-1] * (width - count) for count in sampled]
    for row, count in zip(rows, sampled, strict=True):
        if count < width:
            row[-1] = VOCAB
    return torch.tensor(rows, device=DEVICE)


def step(runner, drafts, lengths, sampled) -> None:
    """One step, and every byte afterwards."""
    before = [cache.clone() for cache in runner.caches]
    slots = runner.begin(drafts, lengths)
    runner.write(slot for request in slots for slot in request)
    runner.steps.commit_ids(sampled_ids(sampled, drafts))
    got = [cache.clone() for cache in runner.caches]
    for cache, old in zip(runner.caches, before, strict=True):
        cache.copy_(old)
    for request, length in enumerate(lengths):
        kept = length - drafts[request] + (sampled[request] - 1 if drafts[request] else 0)
        runner.write(slots[request][:kept])
    for cache, found in zip(runner.caches, got, strict=True):
        assert torch.equal(cache, found)


def test_requests_with_drafts_anywhere():
    """Leading, in the middle, at the end; every rejected row is as it was, in both groups."""
    runner = Runner()
    chance = random.Random(3)
    for _ in range(12):
        drafts = [chance.choice([0, 0, 1, 2, 4]) for _ in range(4)]
        lengths = [count + 1 if count else chance.choice([1, 3]) for count in drafts]
        sampled = [chance.randint(1, count + 1) for count in drafts]
        step(runner, drafts, lengths, sampled)
    for drafts in ([4, 4], [0, 2, 0, 4], [0, 0, 0, 1]):
        step(runner, drafts, [count + 1 for count in drafts], [1] * len(drafts))
    assert runner.count("bypassed_windows_total") == 0
    assert runner.count("fallbacks_total") == 0


def test_without_drafts_there_is_no_window():
    runner = Runner()
    step(runner, [0, 0], [1, 6], [1, 1])
    runner.steps.begin_among(None, None, None, runner.slots)
    runner.steps.commit_ids(sampled_ids([1, 1], [0, 0]))
    assert runner.count("windows_total") == 0


def test_more_rows_than_there_is_room_for():
    """Said, and as stock: everything is written."""
    runner = Runner()
    for drafts in ([4] * 5, [0, *[4] * 5]):
        slots = runner.begin(drafts, [count + 1 for count in drafts])
        assert runner.steps.window is None
        runner.write(slot for request in slots for slot in request)
        runner.steps.commit_ids(sampled_ids([1] * len(drafts), drafts))
    assert runner.count("bypassed_windows_total_max_rows") == 2


class WaitingRig(Rig):
    """Steps whose drafts wait, over slots in a buffer of the runner's."""

    def __init__(self) -> None:
        super().__init__("deferred", "raise")

    def make(self, rows) -> PackedGraphSteps:
        return PackedGraphSteps(self.manager, 4, VOCAB, rows)

    def plan(self, *batch) -> None:
        self.steps.begin_among(*batch, [self.slots[0]])

    def step(self, drafts, lengths, sampled) -> None:
        """One step, and every byte afterwards."""
        before = [cache.clone() for cache in self.caches]
        self.begin(drafts, lengths)
        made = self.forward()
        waiting = int((self.steps.windows.position >= 0).sum())
        assert waiting == sum(drafts)
        self.steps.commit_ids(sampled_ids(sampled, drafts))
        self.expect(before, made, drafts, lengths, sampled)


def test_drafts_wait_wherever_their_requests_lie():
    """Requests without drafts before the last one with drafts are in the window, all settled."""
    rig, chance = WaitingRig(), random.Random(5)
    for _ in range(12):
        drafts = [chance.choice([0, 0, 1, 2, 3]) for _ in range(4)]
        lengths = [count + 1 if count else chance.choice([1, 1, 4]) for count in drafts]
        rig.step(drafts, lengths, [chance.randint(1, count + 1) for count in drafts])
    for drafts in ([0, 3], [3, 0, 3, 0], [0, 0, 0, 1]):
        rig.step(drafts, [count + 1 for count in drafts], [1] * len(drafts))
    assert rig.count("bypassed_windows_total") == 0
    assert rig.count("fallbacks_total") == 0
    assert rig.count("rows_staged_total") > rig.count("rows_committed_total") > 0


def test_requests_after_the_last_draft_are_not_in_the_window():
    rig = WaitingRig()
    rig.begin([0, 2, 0], [1, 3, 4])
    assert rig.steps.window.layout.num_requests == 2
    assert rig.steps.windows.position[:6].tolist() == [-1, -1, 0, 1, -1, -1]


@pytest.mark.parametrize(
    ("drafts", "lengths", "prefilling", "reason"),
    [
        ([0, 2], [5, 3], [True, False], "order"),
        ([0, 4], [1, 5], None, "long_query"),
        ([0, 0, 0, 0, 3], [4, 4, 4, 4, 4], None, "max_rows"),
        ([0, 2], [1, 3], [False, True], "prompt_with_drafts"),
    ],
)
def test_a_batch_in_which_drafts_cannot_wait_says_why(drafts, lengths, prefilling, reason):
    """No row is marked as a draft, so all are written as stock writes them."""
    rig = WaitingRig()
    rig.begin(drafts, lengths, prefilling)
    assert rig.steps.window is None
    assert bool((rig.steps.windows.position == -1).all())
    assert rig.count(f"bypassed_windows_total_{reason}") == 1


def test_slots_that_cannot_be_gathered_are_a_fallback(monkeypatch):
    """Counted, and the step is stock's."""
    runner = Runner(on_error="fallback")

    def broken(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(torch, "index_select", broken)
    runner.begin([0, 2], [1, 3])
    assert runner.steps.window is None
    assert runner.count("fallbacks_total_begin") == 1


def test_a_step_that_was_left_open_is_taken_back_in_its_own_slots():
    """Before the next step's slots take their place."""
    runner = Runner()
    before = [cache.clone() for cache in runner.caches]
    slots = runner.begin([3, 2], [4, 3])
    runner.write([slot for each, drafts in zip(slots, (3, 2), strict=True)
                  for slot in each[-drafts:]])  # fmt: skip
    runner.slots = [each.roll(-1) for each in runner.slots]
    parts = (numpy.array(each) for each in ([1, 1], [2, 2], [False, False]))
    runner.steps.begin_among(*parts, runner.slots)
    assert all(map(torch.equal, runner.caches, before))
