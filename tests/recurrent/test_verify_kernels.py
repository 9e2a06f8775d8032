"""The kernels of recurrent layers against their specification, and the float64 recurrence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_here import ON_GPU, importing_kernels
from kvtxn.backends.gated_delta import DeltaLayers, reference
from verify_steps import DELTA, FAMILIES, LENGTHS, MAMBA2, SOURCES, assert_near, verify_cases

from kvtxn import LayerError

with importing_kernels():
    from kvtxn.backends.gated_delta.launch import launch_advance, launch_verify
    from kvtxn.backends.gated_delta.tile_sizes import Tile, verify_tile_for
    from kvtxn.backends.mamba2.launch import launch_verify as launch_mamba2

#: Softplus of large numbers, which the kernel then leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if ON_GPU else "cpu"
#: Rounding to bfloat16: the interpreter cuts off instead.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}

MANY = Tile(16, tiles=8, stages=3, registers=128)
EVERY_CASE = {
    "delta-few": (DELTA, None, 0),
    "delta-many": (DELTA, MANY, 1),
    "mamba2": (MAMBA2, None, 0),
}


def verify(family, case, *, longest, normalise=True, tile=None):
    """Launch the verify kernel of a case."""
    rows = tuple(case.given[name] for name in family.rows)
    where = (case.given[name] for name in ("state", "sources", "starts"))
    if family is MAMBA2:
        launch_mamba2(rows, *where, case.out, case.kept, longest=longest)
        return
    settings = {"normalise": normalise, "longest": longest, "tile": tile}
    launch_verify(rows, *where, case.out, case.kept, **case.more, **settings)


@pytest.mark.parametrize(
    ("family", "tile", "state", "rows", "sizes"),
    [
        pytest.param(family, tile, *case.values, id=f"{name}-{case.id}")
        for name, (family, tile, shift) in EVERY_CASE.items()
        for case in verify_cases(shift)
    ],
)
def test_verify_is_as_specified(family, tile, state, rows, sizes):
    """That holds for all dtypes, sizes and distances of rows; nothing else is written."""
    key_size, value_size, apart = sizes
    kinds = {"dtype": state, "rows_dtype": rows, "apart": apart}
    size = {"key_size": key_size, "value_size": value_size}
    found, expected = (
        family.make(LENGTHS, SOURCES, device=DEVICE, **size, **kinds) for _ in range(2)
    )
    verify(family, found, longest=5, tile=tile)
    family.verify(expected)
    assert torch.equal(found.given["state"], expected.given["state"])
    assert_near(found.out, expected.out, ERROR[rows])
    for name in ("key", "corrected", "decay"):
        assert_near(getattr(found.kept, name), getattr(expected.kept, name), 2e-6)


def test_programs_take_several_tiles_where_launches_are_large():
    """The bytes of all requests' states decide, whatever their dtype."""
    for dtype, requests in ((torch.float32, 16), (torch.bfloat16, 32)):
        state = torch.empty(1, 32, 128, 128, dtype=dtype, device="meta")
        assert verify_tile_for(state, requests - 1).tiles == 1
        assert verify_tile_for(state, requests).tiles > 1


@pytest.mark.parametrize("family", FAMILIES)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    seed=st.integers(0, 2**20),
    normalise=st.booleans(),
    tile=st.sampled_from([Tile(16), Tile(32), Tile(32, 2), Tile(16, tiles=2, stages=3)]),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
)
@settings(max_examples=10, deadline=None)
def test_a_verify_and_a_commit_are_the_recurrence(family, lengths, seed, normalise, tile, heads):
    """Outputs of all rows, and the state after any number of kept rows."""
    sources = torch.randperm(8, generator=torch.Generator().manual_seed(seed))[: len(lengths)] + 1
    sizes = {"key_heads": heads[0], "heads": heads[1], "value_size": 32, "seed": seed}
    case = family.make(lengths, sources.tolist(), device=DEVICE, rows_dtype=torch.float32, **sizes)
    more = {} if family is MAMBA2 else {"normalise": normalise}
    if not more.get("normalise", True):
        case.given["key"].mul_(0.2)  # else the state grows without bound
    before = case.given["state"].clone()
    verify(family, case, longest=9, normalise=normalise, tile=tile)
    layers = DeltaLayers.build([case.given["state"]], [case.kept])
    count = torch.randint(0, 10, (len(lengths),), generator=torch.Generator().manual_seed(seed + 1))
    expected = before.double().cpu()
    for number, (length, kept) in enumerate(zip(lengths, count.tolist(), strict=True)):
        if length:
            outputs, _ = family.exact(case, number, length, **more)
            first = sum(lengths[:number])
            assert_near(case.out[first : first + length].cpu(), outputs, 1e-5)
        if rows := min(length, kept):
            expected[int(sources[number])] = family.exact(case, number, rows, **more)[1]
    on_device = count.to(DEVICE, torch.int32)
    where = case.given["sources"][None], on_device, case.given["starts"]
    launch_advance(layers, *where, None, None, longest=9, tile=None if family is MAMBA2 else tile)
    assert_near(case.given["state"].cpu(), expected, 1e-5)
    untouched = torch.ones(9, dtype=torch.bool)
    untouched[sources] = torch.minimum(count, torch.tensor(lengths)) == 0
    assert torch.equal(case.given["state"].cpu()[untouched], before.cpu()[untouched])


@pytest.mark.parametrize("sizes", [(32, 16), (48, 20)], ids=str)
def test_a_commit_advances_all_layers_and_leaves_snapshots(sizes):
    """One launch; snapshots after the first row, in the middle, at the end, and after more."""
    lengths, starts = [4, 4, 4, 4, 3], [1, 2, 3, 4, 5]
    size = {"key_size": sizes[0], "value_size": sizes[1]}
    for dtype in (torch.float32, torch.bfloat16):
        cases = [
            DELTA.make(lengths, starts, device=DEVICE, dtype=dtype, slots=16, seed=seed, **size)
            for seed in range(3)
        ]
        for case in cases:
            DELTA.verify(case, longest=4)
        found = [case.given["state"].clone() for case in cases]
        kept, groups = [case.kept for case in cases], [0, 1, 0]
        sources = torch.tensor([starts, [5, 4, 0, 2, 1]], dtype=torch.int32, device=DEVICE)
        boundary = torch.tensor([1, 2, 3, 6, 2], dtype=torch.int32, device=DEVICE)
        # A line of a larger table, as engines have it.
        snapshots = torch.tensor(
            [[9, 10, 11, 12, 0, 99], [9, 0, 11, 12, 13, 99]], dtype=torch.int32
        )
        crossing = boundary, snapshots.to(DEVICE)[:, :5]
        count = torch.tensor([3, 4, 3, 4, 3], dtype=torch.int32, device=DEVICE)
        given = sources, count, cases[0].given["starts"]
        expected = [case.given["state"] for case in cases]
        launch_advance(DeltaLayers.build(found, kept, groups), *given, *crossing, longest=4)
        reference.advance_gated_delta(DeltaLayers.build(expected, kept, groups), *given, *crossing)
        for state, wanted in zip(found, expected, strict=True):
            assert_near(state, wanted, ERROR[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_steps_follow_each_other(dtype):
    """Requests that come, leave and keep other numbers of rows; each step rounds a state once."""
    found = MAMBA2.make([3, 3, 3], [1, 2, 3], device=DEVICE, dtype=dtype, padding=0)
    state, expected = found.given["state"], found.given["state"].clone()
    kept = found.kept
    steps = [([3, 1, 2], [1, 2, 3]), ([1, 3], [3, 4]), ([2, 0, 3], [4, 5, 3])]
    for seed, (lengths, slots) in enumerate(steps):
        case = MAMBA2.make(lengths, slots, device=DEVICE, dtype=dtype, padding=0, seed=seed + 1)
        count = torch.tensor([2, 1, 3][: len(lengths)], dtype=torch.int32, device=DEVICE)
        where = case.given["sources"][None], count, case.given["starts"]
        case.given["state"], case.kept = state, kept
        verify(MAMBA2, case, longest=3)
        launch_advance(DeltaLayers.build([state], [kept]), *where, None, None, longest=3)
        MAMBA2.verify(case, state=expected)
        reference.advance_gated_delta(DeltaLayers.build([expected], [kept]), *where)
        assert_near(state, expected, max(ERROR[dtype], 1e-5))


@pytest.mark.skipif(not ON_GPU, reason="graphs are a GPU's")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_in_a_graph_reads_what_is_there_at_each_replay(family):
    """Slots, counts and rows lie on the device; one capture serves steps that differ in them."""
    lengths = [3, 3, 3]
    case = family.make(lengths, [1, 2, 3], device="cuda", padding=0)
    state, slots, starts = (case.given[name] for name in ("state", "sources", "starts"))
    count = torch.ones(3, dtype=torch.int32, device="cuda")
    layers = DeltaLayers.build([state], [case.kept])

    def step() -> None:
        verify(family, case, longest=3)
        launch_advance(layers, slots[None], count, starts, None, None, longest=3)

    before = state.clone()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, (others, kept) in enumerate([([1, 2, 3], [3, 0, 2]), ([5, 0, 4], [1, 3, 3])]):
        fresh = family.make(lengths, others, device="cuda", padding=0, seed=seed + 1)
        for name in (*family.rows, "sources"):
            case.given[name].copy_(fresh.given[name])
        count.copy_(torch.tensor(kept))
        state.copy_(before)
        graph.replay()
        expected = before.clone()
        family.verify(fresh, state=expected)
        other = DeltaLayers.build([expected], [fresh.kept])
        reference.advance_gated_delta(other, slots[None], count, starts)
        assert_near(state, expected, 1e-5)
        if family is MAMBA2:  # of a gated delta net, requests without a state get no outputs
            assert_near(case.out, fresh.out, 1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_with_too_many_rows_are_refused(family):
    """With the argument that helps."""
    case = family.make([17], [1], device=DEVICE, padding=0)
    with pytest.raises(LayerError, match="longest"):
        verify(family, case, longest=None)
    layers = DeltaLayers.build([case.given["state"]], [case.kept])
    where = case.given["sources"][None], case.given["starts"][1:], case.given["starts"]
    with pytest.raises(LayerError, match="longest"):
        launch_advance(layers, *where, None, None, longest=None)
