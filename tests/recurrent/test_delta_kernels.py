"""The kernels of gated delta nets against their specification, and the float64 recurrence."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from delta_cases import exact_step, make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_here import ON_GPU, importing_kernels
from kvtxn.backends.gated_delta import DeltaLayers, reference
from step_checks import LENGTHS, SOURCES, assert_graph_reads_anew, assert_near, verify_cases

from kvtxn import LayerError

with importing_kernels():
    from kvtxn.backends.gated_delta.launch import (
        Tile,
        launch_advance,
        launch_verify,
        verify_tile_for,
    )

#: Softplus of large numbers, which the kernel then leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if ON_GPU else "cpu"
ROWS = ("query", "key", "value", "a", "b", "A_log", "dt_bias")
#: Rounding to bfloat16: the interpreter cuts off instead.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}

TILES = {"few": None, "many": Tile(16, tiles=8, stages=3, registers=128)}


def verify(case, *, longest, normalise=True, tile=None):
    rows = tuple(case.given[name] for name in ROWS)
    where = (case.given[name] for name in ("state", "sources", "starts"))
    launch_verify(
        *(rows, *where, case.out, case.kept),
        **{"scale": case.scale, "normalise": normalise, "longest": longest, "tile": tile},
    )


@pytest.mark.parametrize(
    ("state", "rows", "sizes", "tile"),
    [
        pytest.param(*case.values, tile, id=f"{name}-{case.id}")
        for shift, (name, tile) in enumerate(TILES.items())
        for case in verify_cases(shift)
    ],
)
def test_verify_is_as_specified(state, rows, sizes, tile):
    """That holds for all dtypes, sizes and distances of rows; nothing else is written."""
    key_size, value_size, apart = sizes
    found, expected = (
        make_case(
            *(LENGTHS, SOURCES),
            device=DEVICE,
            key_size=key_size,
            value_size=value_size,
            apart=apart,
            dtype=state,
            rows_dtype=rows,
        )
        for _ in range(2)
    )
    verify(found, longest=5, tile=tile)
    reference.verify_gated_delta(
        **expected.given, out=expected.out, kept=expected.kept, scale=expected.scale
    )
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


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    seed=st.integers(0, 2**20),
    normalise=st.booleans(),
    tile=st.sampled_from([Tile(16), Tile(32), Tile(32, 2), Tile(16, tiles=2, stages=3)]),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4)]),
)
@settings(max_examples=10, deadline=None)
def test_a_verify_and_a_commit_are_the_recurrence(lengths, seed, normalise, tile, heads):
    """Outputs of all rows, and the state after any number of kept rows."""
    key_heads, value_heads = heads
    sources = torch.randperm(8, generator=torch.Generator().manual_seed(seed))[: len(lengths)] + 1
    case = make_case(
        *(lengths, sources.tolist()),
        device=DEVICE,
        key_heads=key_heads,
        heads=value_heads,
        value_size=32,
        rows_dtype=torch.float32,
        seed=seed,
    )
    if not normalise:
        case.given["key"].mul_(0.2)  # else the state grows without bound
    before = case.given["state"].clone()
    verify(case, longest=9, normalise=normalise, tile=tile)
    layers = DeltaLayers.build([case.given["state"]], [case.kept])
    count = torch.randint(0, 10, (len(lengths),), generator=torch.Generator().manual_seed(seed + 1))
    expected = before.double().cpu()
    for number, (length, kept) in enumerate(zip(lengths, count.tolist(), strict=True)):
        if length:
            outputs, _ = exact_step(case, number, length, normalise=normalise)
            first = sum(lengths[:number])
            assert_near(case.out[first : first + length].cpu(), outputs, 1e-5)
        if min(length, kept):
            rows = min(length, kept)
            expected[int(sources[number])] = exact_step(case, number, rows, normalise=normalise)[1]
    on_device = count.to(DEVICE, torch.int32)
    where = case.given["sources"][None], on_device, case.given["starts"]
    launch_advance(layers, *where, None, None, longest=9, tile=tile)
    assert_near(case.given["state"].cpu(), expected, 1e-5)
    untouched = torch.ones(9, dtype=torch.bool)
    untouched[sources] = torch.minimum(count, torch.tensor(lengths)) == 0
    assert torch.equal(case.given["state"].cpu()[untouched], before.cpu()[untouched])


@pytest.mark.parametrize("sizes", [(32, 16), (48, 20)], ids=str)
def test_a_commit_advances_all_layers_and_leaves_snapshots(sizes):
    """One launch; snapshots after the first row, in the middle, at the end, and after more."""
    lengths, starts = [4, 4, 4, 4, 3], [1, 2, 3, 4, 5]
    for dtype in (torch.float32, torch.bfloat16):
        cases = [
            make_case(
                *(lengths, starts),
                device=DEVICE,
                key_size=sizes[0],
                value_size=sizes[1],
                dtype=dtype,
                slots=16,
                seed=seed,
            )
            for seed in range(3)
        ]
        for case in cases:
            reference.verify_gated_delta(
                **case.given, out=case.out, kept=case.kept, scale=case.scale
            )
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


@pytest.mark.skipif(not ON_GPU, reason="graphs are a GPU's")
def test_a_step_in_a_graph_reads_what_is_there_at_each_replay():
    """Slots, counts and rows lie on the device; one capture serves steps that differ in them."""

    def verified(case, state):
        reference.verify_gated_delta(
            **(case.given | {"state": state}), out=case.out, kept=case.kept, scale=case.scale
        )

    launch = partial(verify, longest=3)
    given = make_case, ROWS, launch, verified, launch_advance
    assert_graph_reads_anew(*given, outputs_near=None)


def test_requests_with_too_many_rows_are_refused():
    """With the argument that helps."""
    case = make_case([17], [1], device=DEVICE, padding=0)
    with pytest.raises(LayerError, match="longest"):
        verify(case, longest=None)
    layers = DeltaLayers.build([case.given["state"]], [case.kept])
    where = case.given["sources"][None], case.given["starts"][1:], case.given["starts"]
    with pytest.raises(LayerError, match="longest"):
        launch_advance(layers, *where, None, None, longest=None)
