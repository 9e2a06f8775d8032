"""Prepared launches over fixed places, against plain indexing; the kit has all the rest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtxn import LayerRef, TransactionManager, TxnConfig
from kvtxn.cuda_graphs import GRAPH_BYTES
from kvtxn.layout import RowLayout
from kvtxn.testing import registered

pytest.importorskip("triton")

BLOCKS, BLOCK, HEADS, SIZE = 12, 4, 2, 16
MAX_ROWS = 24
SPARE = MAX_ROWS // BLOCK + 1  # one more, which nobody touches


class Rig:
    """Packed caches as vLLM has them, and the windows over a captured forward.

    With ``spare`` each cache has further blocks, of which its layer is not told: there rows wait.
    """

    def __init__(self, executor, device: str, *, undo: bool, spare: bool = False) -> None:
        self.device = device
        generator = torch.Generator().manual_seed(7)
        shape = (BLOCKS + SPARE * spare, BLOCK, HEADS, 2 * SIZE)
        memory = [
            torch.randn(shape, generator=generator).to(torch.float16).to(device) for _ in range(3)
        ]
        self.caches = [blocks[:BLOCKS].transpose(1, 2) for blocks in memory]
        if not spare:  # the other order in which caches lie
            self.caches = [cache.contiguous() for cache in self.caches]
        self.behind = [blocks[BLOCKS:] for blocks in memory]
        self.refs, rows = [], {}
        for i, cache in enumerate(self.caches):
            key, value = cache.transpose(1, 2).split(SIZE, -1)
            self.refs.append(LayerRef(f"layer.{i}", key, value))
            if spare:
                waiting = self.behind[i].flatten(0, 1)[:MAX_ROWS]
                rows[f"layer.{i}"] = waiting.split(SIZE, -1)
        with registered(executor) as name:
            policy = "undo" if undo else "deferred"
            config = TxnConfig(policy=policy, backend=name, max_rows=MAX_ROWS, on_error="raise")
            self.manager = TransactionManager(self.refs, config)
        self.slots = torch.full((1, 64), -1, dtype=torch.int64, device=device)
        self.windows = self.manager.captured_windows(self.slots, rows or None)

    @property
    def counters(self) -> list[int]:
        """Draft rows staged, committed and rejected, and refused commits."""
        return self.manager.metrics.rows.sum(0)[0].tolist()

    def rows(self, number: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Fresh keys and values for every layer."""
        generator = torch.Generator().manual_seed(seed)
        shape = (2, number, HEADS, SIZE)
        made = [torch.randn(shape, generator=generator).to(torch.float16) for _ in self.refs]
        return [(pair[0].to(self.device), pair[1].to(self.device)) for pair in made]

    def write(self, ref: LayerRef, row: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """One row, by plain indexing."""
        slot = int(self.slots[0, row])
        if slot >= 0:
            ref.key_cache[slot // BLOCK, slot % BLOCK] = key[row]
            ref.value_cache[slot // BLOCK, slot % BLOCK] = value[row]


@st.composite
def steps(draw):
    """Drafts, settled rows and sampled tokens per request, with padding among the slots."""
    lengths = draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), min_size=1, max_size=4)
    )
    drafts, settled = zip(*lengths, strict=True)
    sampled = [draw(st.integers(1, count + 1)) for count in drafts]
    rows = sum(drafts) + sum(settled)
    slots = draw(st.permutations(range(BLOCKS * BLOCK)))[:rows]
    slots = [-1 if draw(st.integers(0, 9)) == 0 else slot for slot in slots]
    return drafts, settled, sampled, slots


@pytest.mark.parametrize(("undo", "rows"), [(False, "own"), (False, "spare"), (True, "own")])
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=st.lists(steps(), min_size=1, max_size=2))
def test_commit_keeps_exactly_the_accepted_rows(triton_executor, kernel_device, undo, rows, steps):
    """One window after another over the same buffers; every byte of every cache compared."""
    device = kernel_device
    rig = Rig(triton_executor, device, undo=undo, spare=rows == "spare")
    totals = [0, 0, 0, 0]
    for number, (drafts, settled, sampled, slots) in enumerate(steps):
        layout = RowLayout.build(tuple(drafts), tuple(settled), torch.device(device))
        rig.slots.fill_(-1)
        rig.slots[0, : len(slots)] = torch.tensor(slots)
        fresh = rig.rows(layout.num_rows, number)
        before = [cache.clone() for cache in rig.caches]
        behind = [blocks.clone() for blocks in rig.behind]
        window = rig.windows.begin(rig.windows.plan(layout))
        marks = torch.full_like(rig.windows.position, -1)
        if not undo:
            marks[: layout.num_rows] = layout.position
        assert torch.equal(rig.windows.position, marks)
        if undo:
            for ref, (key, value) in zip(rig.refs, fresh, strict=True):
                for row in range(layout.num_rows):
                    rig.write(ref, row, key, value)
        else:
            for ref, pair in zip(rig.refs, fresh, strict=True):
                for plane, staged in enumerate(pair):
                    rig.windows.stored(layout.num_rows)[ref.name].rows[plane].copy_(staged)
            if rows == "spare":
                for blocks, (key, value) in zip(behind, fresh, strict=True):
                    blocks.view(-1, HEADS, 2 * SIZE)[: len(key)] = torch.cat([key, value], -1)
        window.commit_sampled(torch.tensor(sampled, dtype=torch.int32, device=device))
        got = [cache.clone() for cache in rig.caches]
        for cache, old in zip(rig.caches, before, strict=True):
            cache.copy_(old)
        for ref, (key, value) in zip(rig.refs, fresh, strict=True):
            for row in range(layout.num_rows):
                place, owner = int(layout.position[row]), int(layout.request[row])
                kept = 0 <= place < sampled[owner] - 1
                if kept or (undo and place < 0):
                    rig.write(ref, row, key, value)
                if place >= 0 and slots[row] >= 0 and ref is rig.refs[0]:
                    totals[0] += 1
                    totals[1 if kept else 2] += 1
        for cache, found in zip(rig.caches, got, strict=True):
            assert torch.equal(cache.view(torch.int16), found.view(torch.int16))
        for blocks, old in zip(rig.behind, behind, strict=True):
            assert torch.equal(blocks.view(torch.int16), old.view(torch.int16))
    assert rig.counters == totals


@pytest.mark.parametrize("undo", [False, True])
def test_an_acceptance_that_stays_where_it_is(triton_executor, kernel_device, undo):
    """After some windows a graph reads it there; what lies elsewhere is read elsewhere."""
    rig = Rig(triton_executor, kernel_device, undo=undo)
    layout = RowLayout.build((3, 3), (1, 1), torch.device(kernel_device))
    rig.slots[0, :8] = torch.arange(8)
    here, there = torch.zeros(2, 2, dtype=torch.int32, device=kernel_device)
    plan, expected = rig.windows.plan(layout), [0, 0, 0, 0]
    for number in range(40):
        sampled = there if number % 7 == 6 else here
        counts = [1 + number % 4, 1 + number % 3]
        sampled.copy_(torch.tensor(counts))
        kept = sum(counts) - 2
        window = rig.windows.begin(plan)
        [fresh, *_] = rig.rows(8, number)
        before = rig.refs[0].key_cache.clone()
        if undo:
            for row in range(8):
                rig.write(rig.refs[0], row, *fresh)
        else:
            rig.windows.stored(8)[rig.refs[0].name].rows[0].copy_(fresh[0])
        window.commit_sampled(sampled)
        for row, place in enumerate(layout.position.tolist()):
            settled = undo and place < 0
            wanted = fresh[0] if settled or 0 <= place < counts[row // 4] - 1 else None
            got = rig.refs[0].key_cache[row // BLOCK, row % BLOCK]
            old = before[row // BLOCK, row % BLOCK]
            assert torch.equal(got, old if wanted is None else wanted[row])
        expected = [expected[0] + 6, expected[1] + kept, expected[2] + 6 - kept, 0]
    assert rig.counters == expected


@pytest.mark.parametrize("form", ["sampled", "counts"])
def test_windows_over_two_forwards(triton_executor, kernel_device, form):
    """Each reads its own slots and rows, whichever was made last, and writes to no slots."""
    rig = Rig(triton_executor, kernel_device, undo=False)
    slots = torch.full((1, 64), -1, dtype=torch.int64, device=kernel_device)
    other = rig.manager.captured_windows(slots)
    layout = RowLayout.build((2,), (0,), torch.device(kernel_device))
    rig.slots[0, :2], slots[0, :2] = torch.tensor([3, 4]), torch.tensor([8, 9])
    given = rig.slots.clone(), slots.clone()
    for windows, places in ((rig.windows, (3, 4)), (other, (8, 9))):
        before = rig.refs[0].key_cache.clone()
        [(key, _), *_] = fresh = rig.rows(2, places[0])
        window = windows.begin(windows.plan(layout))
        for ref, pair in zip(rig.refs, fresh, strict=True):
            for part, staged in enumerate(pair):
                windows.rows[ref.name][part][:2] = staged
        if form == "sampled":
            window.commit_sampled(torch.tensor([3], dtype=torch.int32, device=kernel_device))
        else:
            window.commit(torch.tensor([2], device=kernel_device))
        for row, slot in enumerate(places):
            before[slot // BLOCK, slot % BLOCK] = key[row]
        assert torch.equal(rig.refs[0].key_cache, before)
        assert torch.equal(rig.slots, given[0])
        assert torch.equal(slots, given[1])


@pytest.mark.parametrize("undo", [False, True])
def test_a_layout_whose_graph_had_to_go_launches_and_captures_again(
    triton_executor, kernel_device, undo, monkeypatch
):
    """The graphs of all layouts share one bound, those of saves included."""
    rig = Rig(triton_executor, kernel_device, undo=undo)
    graphs = rig.manager.executor.graphs
    graphs.most_bytes = GRAPH_BYTES
    counts = torch.ones(2, dtype=torch.int32, device=kernel_device)
    rig.slots[0, :8] = torch.arange(8)
    layouts = [RowLayout.build(drafts, (1, 1), torch.device(kernel_device))
               for drafts in ((3, 3), (1, 2))]  # fmt: skip
    one, other = (rig.windows.plan(layout) for layout in layouts)
    monkeypatch.setattr(type(rig.windows._launches), "captured", lambda _, launch: launch)

    def recur(plan, times=16):
        for _ in range(times):
            rig.windows.begin(plan).commit_sampled(counts)
            if not counts.is_cuda:  # where graphs are, it is called by itself
                if plan.launches.replays:
                    continue
                plan.launches._note_place(counts)

    place = counts.data_ptr()
    recur(one, 15)
    assert not one.launches.replays
    recur(one, 1)
    assert list(one.launches.replays) == [place]
    recur(other)
    assert (list(one.launches.replays), list(other.launches.replays)) == ([], [place])
    recur(one, 15)
    assert (list(one.launches.replays), list(other.launches.replays)) == ([], [place])
    recur(one, 1)
    assert (list(one.launches.replays), list(other.launches.replays)) == ([place], [])
    if undo:
        arranged = other.launches.save
        other.launches.warm_up(counts)
        assert not one.launches.replays
        recur(one)
        assert other.launches.save == arranged
    assert len(graphs) == 1
    assert rig.manager.snapshot()["kvtxn_fallbacks_total"] == 0
