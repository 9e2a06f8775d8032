"""Ring and recurrent layers: how they are made, what they refuse, and what one window leaves."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch

from kvtxn import (
    BackendUnavailableError,
    CapacityError,
    LayerError,
    LayerRef,
    SlotMappingError,
    TransactionManager,
    TxnConfig,
)
from kvtxn.captured_rows import CapturedRows
from kvtxn.executor import Capabilities
from kvtxn.layers import PAGED
from kvtxn.layout import RowLayout
from kvtxn.manager import choose_policy
from kvtxn.recurrent import Mamba2
from kvtxn.testing import registered

sys.path.insert(0, str(Path(__file__).parent / "testing"))
from mutants_captured import Prepared


def make_ring(ring_size: int = 4, window: int = 3, name: str = "ring") -> LayerRef:
    """Two rings of ``ring_size`` slots in a cache of blocks of 4."""
    caches = torch.zeros(2, 2 * -(-ring_size // 4), 4, 1, 2)
    return LayerRef.ring(name, *caches, window=window, ring_size=ring_size, group=name)


def make_state(name: str = "state", num_states: int = 3) -> LayerRef:
    """A convolution's state and a permuted scan's."""
    conv, scan = torch.zeros(num_states, 2, 3), torch.zeros(num_states, 4, 2, 2)
    return LayerRef.recurrent(name, conv, scan.permute(0, 2, 1, 3), group=name)


def numbers(ref: LayerRef, count: int) -> list[torch.Tensor]:
    """Rows whose every element is 1, 2, 3, ..."""
    shapes = [plane.staged_shape for plane in ref.planes]
    return [
        torch.arange(1.0, count + 1).view(-1, *[1] * len(shape)).expand(count, *shape).clone()
        for shape in shapes
    ]


def manager(*layers: LayerRef, **config: object) -> TransactionManager:
    return TransactionManager(layers, TxnConfig(**{"policy": "deferred"} | config))


def stage(window, *layers: LayerRef) -> None:
    """Stage every layer: two tensors where two are enough, else a sequence."""
    for ref in layers:
        window.stage(ref, *numbers(ref, window.num_rows))


def held(ref: LayerRef) -> list[float]:
    """The first element of each slot, one number for all planes or it raises."""
    if ref.states:
        (one,) = {
            tuple(state.flatten(1).T.unique(dim=0).flatten().tolist()) for state in ref.states
        }
        return list(one)
    return ref.key_cache[:, :, 0, 0].flatten().tolist()


def test_what_they_are():
    """A ring is K and V, a state one plane per tensor; neither is latent, both overwrite."""
    ring, state = make_ring(), make_state()
    assert (ring.kind.name, ring.kind.reuse, ring.is_latent) == ("ring", 4, False)
    assert (state.kind.name, state.kind.reuse, state.is_latent) == ("recurrent", 1, False)
    single = LayerRef.recurrent("one", torch.zeros(3, 5))
    assert not single.is_latent
    assert LayerRef.latent("mla", torch.zeros(2, 4, 6)).kind is PAGED
    assert state.num_slots == 3
    assert state.row_bytes == 4 * (6 + 16)
    assert pickle.loads(pickle.dumps(state)).kind == state.kind
    assert pickle.loads(pickle.dumps(ring)).window == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_ring(4, 5), "window and ring_size"),
        (lambda: make_ring(4, 0), "window and ring_size"),
        (lambda: LayerRef.ring("r", *torch.zeros(2, 1, 4, 1, 2), window=5), "slots of the cache"),
        (lambda: LayerRef.ring("r", *torch.zeros(2, 1, 4, 1, 2), window=True), "window and ring"),
        (lambda: LayerRef.recurrent("s"), "at least one state"),
        (lambda: LayerRef.recurrent("s", torch.zeros(3)), "misshapen"),
        (lambda: LayerRef.recurrent("s", [1.0]), "misshapen"),
        (lambda: LayerRef.recurrent("s", torch.zeros(0, 3)), "empty"),
        (lambda: LayerRef.recurrent("s", torch.zeros(3, 1).expand(3, 4)), "overlapping elements"),
        (lambda: LayerRef.recurrent("s", torch.zeros(3, 2, dtype=torch.complex128)), "complex128"),
        (lambda: LayerRef.recurrent("s", torch.zeros(3, 2), torch.zeros(2, 2)), "differ in number"),
        (lambda: LayerRef.recurrent("s", *[torch.zeros(3, 2)] * 2), "same memory"),
    ],
)
def test_what_cannot_be_built(make, message):
    with pytest.raises(LayerError, match=message):
        make()


def test_kinds_have_groups_of_their_own():
    """One group, one kind, one size of ring."""
    ring = make_ring()
    larger = LayerRef.ring("b", *torch.zeros(2, 4, 4, 1, 2), window=3, ring_size=5, group="ring")
    with pytest.raises(LayerError, match="kinds of layers differ"):
        manager(ring, larger)


def test_slots_of_a_state_are_one_per_request():
    owner = manager(make_state())
    with pytest.raises(SlotMappingError, match="2 requests"):
        owner.window([1, 1], [0, 1, 2, 3])
    with pytest.raises(SlotMappingError, match="two requests have state 2"):
        owner.window([1, 1], [2, 2])
    with owner.window(3) as window:  # how many requests there are follows from the slots
        ref = next(iter(owner.layers.values()))
        with pytest.raises(LayerError, match="wrong shape"):
            window.stage(ref, *numbers(ref, 4), slots=[0, 1])
        assert window.num_rows is None
        window.stage(ref, *numbers(ref, 8), slots=[0, 1])
        window.commit(0)
    assert held(ref) == [1, 5, 0]


@pytest.mark.parametrize("slots", [[0, 1, 2, 0], [0, 1, 2, 3, 1], [0, 1, 2, 3, 0, 1, 2, 1]])
def test_a_slot_twice_is_a_mistake_unless_a_ring_apart(slots):
    with pytest.raises(SlotMappingError, match="4 rows apart"):
        manager(make_ring()).window([len(slots)], slots, settled=0)
    with pytest.raises(SlotMappingError, match="two rows to one slot"):
        manager(make_ring()).window([4, 4], [0, 1, 2, 3, 0, 5, 6, 7], settled=0)


def test_auto_has_nothing_for_states_beside_rows_that_nobody_can_read():
    """Written through, a rejected state would take the place of the live one."""
    problem = r"found no safe policy.*cannot read staged rows"
    with pytest.raises(BackendUnavailableError, match=problem):
        choose_policy("auto", Capabilities(attention=False), {"recurrent", "paged"})
    latent = LayerRef.latent("mla", torch.zeros(8, 4, 12), group="mla")
    with pytest.raises(BackendUnavailableError, match=r"latent rows.*use policy='deferred'"):
        TransactionManager([latent, make_state()])
    assert manager(latent, make_state(), policy="deferred").policy == "deferred"


def test_states_of_other_dtypes_come_as_they_are():
    """Whole numbers are not rounded into; any dtype is moved as bytes."""
    state = LayerRef.recurrent("s", torch.zeros(2, 3, dtype=torch.int64))
    with manager(state).window(1, [1], settled=0) as window:
        with pytest.raises(LayerError, match="dtype that cannot be stored"):
            window.stage(state, torch.ones(1, 3))
        with pytest.raises(LayerError, match="one tensor per state"):
            window.stage(state, torch.ones(1, 3), torch.ones(1, 3))
        window.stage(state, [torch.full((1, 3), -(2**40))])
        window.commit(1)
    assert state.states[0].tolist() == [[0] * 3, [-(2**40)] * 3]


@pytest.mark.parametrize(
    ("policy", "ring_size", "message"),
    [("deferred", 3, "settled rows of this window"), ("undo", 5, "drafts included")],
)
def test_attention_wants_what_was_evicted(policy, ring_size, message):
    """A query would need rows that the window's own writes took: refused, not approximated."""
    ring = make_ring(ring_size, 3)
    with manager(ring, policy=policy).window(2, [0, 1, 2, -1], settled=2) as window:
        stage(window, ring)
        with pytest.raises(LayerError, match=message):
            window.attend(ring, torch.zeros(4, 1, 2), torch.zeros(1, 2).int(), torch.tensor([9]))
        window.abort()


@pytest.mark.parametrize(("chunk", "stays"), [(5, True), (6, False)])
def test_an_aborted_chunk_evicts_what_its_repetition_reads_from_a_small_ring(chunk, stays):
    """``ring_size >= window + settled - 1``, since settled rows stay after an abort."""
    ring = make_ring(ring_size=8, window=4)
    windows, before = manager(ring), torch.arange(8, 14)
    with windows.window([0], before % 8, settled=[6]) as w:
        w.stage(ring, *(before.float().view(-1, 1, 1).expand(6, 1, 2),) * 2)
        w.commit(0)
    seen = ring.key_cache.flatten(0, 1)[before[-3:] % 8].clone()  # by the query at position 14
    w = windows.window([0], torch.arange(14, 14 + chunk) % 8, settled=[chunk])
    stage(w, ring)
    w.abort()
    assert torch.equal(ring.key_cache.flatten(0, 1)[before[-3:] % 8], seen) is stays


@pytest.mark.parametrize("end", ["commit", "abort"])
@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_a_window_that_the_caller_gives_up_keeps_the_live_rows_of_its_ring(policy, end):
    """The caller writes the rows after that; the end puts back what rejected drafts evicted."""
    ring = make_ring(4)
    for cache in (ring.key_cache, ring.value_cache):
        cache.view(-1, 2)[:4] = torch.arange(100.0, 104.0).view(4, 1)
    with manager(ring, policy=policy).window(3, [2, 3, 0, 1]) as window:
        window.fall_back("attend", RuntimeError("the engine's kernel failed"))
        for cache in (ring.key_cache, ring.value_cache):
            cache.view(-1, 2)[[2, 3, 0, 1]] = torch.arange(4.0).view(4, 1)
        window.commit(1) if end == "commit" else window.abort()
    assert held(ring)[:4] == [100, 101, 0, 1 if end == "commit" else 103]


def test_attention_wider_than_the_rings_window_is_named():
    ring = make_ring(4, window=3)
    with manager(ring).window(1, [0, 1]) as window:
        stage(window, ring)
        query, table, lengths = torch.zeros(2, 1, 2), torch.tensor([[0]]), torch.tensor([2])
        with pytest.raises(LayerError, match="pass the layer's own sliding_window, 3"):
            window.attend(ring, query, table, lengths, sliding_window=5)
        window.abort()


def test_attention_wants_the_whole_ring_in_the_table():
    ring = make_ring(6, 3)
    with manager(ring).window(1, [0, 1]) as window:
        stage(window, ring)
        with pytest.raises(LayerError, match="whole ring"):
            window.attend(ring, torch.zeros(2, 1, 2), torch.zeros(1, 1).int(), torch.tensor([9]))
        window.abort()


def test_captured_layouts_that_lap_a_ring():
    """A forward writes its rows in no order, so they are refused, but for ``direct``."""
    slots = torch.full((1, 9), -1, dtype=torch.int64)
    layout = RowLayout.build((2, 4), (1, 1), torch.device("cpu"))
    for policy in ("deferred", "undo"):
        with pytest.raises(CapacityError, match="at most 4 rows: a captured forward writes them"):
            manager(make_ring(), policy=policy).captured_windows(slots).plan(layout)
    assert manager(make_ring(), policy="direct").captured_windows(slots).plan(layout)


def test_captured_rows_of_rings_and_states():
    """Rows are held in the shape of a slot, and prepared where a state replays them."""
    ring, state = make_ring(), make_state()
    scan = torch.zeros(3, 2, 4, 5)
    replayed = LayerRef.recurrent("scan", scan, replay=Mamba2(-torch.ones(2)), group="scan")
    captured = CapturedRows(check=False)
    x, dt, b = torch.ones(6, 2, 4), torch.full((6, 2), 0.5), torch.ones(6, 1, 5)
    for ref, parts in (
        (ring, numbers(ring, 6)),
        (state, numbers(state, 6)),
        (replayed, (x, dt, b)),
    ):
        held_parts = captured.stage(ref, *parts)
        shapes = [(6, *kept.row_shape) for kept in ref.kept]
        assert [tuple(part.shape) for part in held_parts] == shapes
    key, value, decay = captured.rows["scan"]
    assert torch.equal(key, b)
    assert torch.equal(value, x * 0.5)
    assert torch.equal(decay, torch.exp(-dt))
    slots = torch.full((3, 6), -1, dtype=torch.int64)
    manager(ring, state, replayed, max_rows=6).captured_windows(slots, captured.rows)


class LapsToCompile(Prepared):
    """Its launches have a variant for more rows of a request than its ring has."""

    def captured_launches(self, places):
        launches = super().captured_launches(places)
        launches.variants = lambda: iter([RowLayout.build((6,), (0,), torch.device("cpu"))])
        return launches


def test_warming_up_over_a_ring():
    """Kernels compile for layouts that no window may have; all slots are padding."""
    ring = make_ring()
    with registered(LapsToCompile) as name:
        owner = manager(ring, backend=name, max_rows=6)
    slots = torch.zeros((1, 6), dtype=torch.int64)
    owner.captured_windows(slots).warm_up([RowLayout.build((2,), (1,), torch.device("cpu"))])
    assert owner.snapshot()["kvtxn_rows_staged_total"] == 0
    assert not ring.key_cache.any()
