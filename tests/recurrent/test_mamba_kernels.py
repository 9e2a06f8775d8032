"""The kernel of Mamba-2 layers against its specification, and the float64 recurrence."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_here import ON_GPU, importing_kernels
from kvtxn.backends.gated_delta import DeltaLayers
from kvtxn.backends.gated_delta import reference as commits
from kvtxn.backends.mamba2 import reference
from mamba_cases import exact_step, make_case
from step_checks import LENGTHS, SOURCES, assert_graph_reads_anew, assert_near, verify_cases

from kvtxn import LayerError

with importing_kernels():
    from kvtxn.backends.gated_delta.launch import launch_advance
    from kvtxn.backends.mamba2.launch import launch_verify

#: Softplus of large numbers, which the kernel then leaves out.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if ON_GPU else "cpu"
ROWS = ("x", "dt", "B", "C", "A", "D", "dt_bias")
#: Rounding to bfloat16: the interpreter cuts off instead.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def verify(case, *, longest):
    rows = tuple(case.given[name] for name in ROWS)
    where = (case.given[name] for name in ("state", "sources", "starts"))
    launch_verify(rows, *where, case.out, case.kept, longest=longest)


@pytest.mark.parametrize(("state", "rows", "sizes"), verify_cases())
def test_verify_is_as_specified(state, rows, sizes):
    """Whatever the dtypes, sizes and distances of rows; nothing else is written."""
    state_size, head_size, apart = sizes
    found, expected = (
        make_case(
            *(LENGTHS, SOURCES),
            device=DEVICE,
            state_size=state_size,
            head_size=head_size,
            apart=apart,
            dtype=state,
            rows_dtype=rows,
        )
        for _ in range(2)
    )
    verify(found, longest=5)
    reference.verify_mamba2(**expected.given, out=expected.out, kept=expected.kept)
    assert torch.equal(found.given["state"], expected.given["state"])
    assert_near(found.out, expected.out, ERROR[rows])
    for name in ("key", "corrected", "decay"):
        assert_near(getattr(found.kept, name), getattr(expected.kept, name), 2e-6)


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    seed=st.integers(0, 2**20),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
)
@settings(max_examples=10, deadline=None)
def test_a_verify_and_a_commit_are_the_recurrence(lengths, seed, heads):
    """Outputs of all rows, and the state after any number of kept rows, in one group or several."""
    sources = torch.randperm(8, generator=torch.Generator().manual_seed(seed))[: len(lengths)] + 1
    case = make_case(
        *(lengths, sources.tolist()),
        device=DEVICE,
        groups=heads[0],
        heads=heads[1],
        head_size=32,
        rows_dtype=torch.float32,
        seed=seed,
    )
    before = case.given["state"].clone()
    verify(case, longest=9)
    layers = DeltaLayers.build([case.given["state"]], [case.kept])
    count = torch.randint(0, 10, (len(lengths),), generator=torch.Generator().manual_seed(seed + 1))
    expected = before.double().cpu()
    for number, (length, kept) in enumerate(zip(lengths, count.tolist(), strict=True)):
        if length:
            outputs, _ = exact_step(case, number, length)
            first = sum(lengths[:number])
            assert_near(case.out[first : first + length].cpu(), outputs, 1e-5)
        if min(length, kept):
            rows = min(length, kept)
            expected[int(sources[number])] = exact_step(case, number, rows)[1]
    on_device = count.to(DEVICE, torch.int32)
    where = case.given["sources"][None], on_device, case.given["starts"]
    launch_advance(layers, *where, None, None, longest=9)
    assert_near(case.given["state"].cpu(), expected, 1e-5)
    untouched = torch.ones(9, dtype=torch.bool)
    untouched[sources] = torch.minimum(count, torch.tensor(lengths)) == 0
    assert torch.equal(case.given["state"].cpu()[untouched], before.cpu()[untouched])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_steps_follow_each_other(dtype):
    """Requests that come, leave and keep other numbers of rows; each step rounds a state once."""
    found = make_case([3, 3, 3], [1, 2, 3], device=DEVICE, dtype=dtype, padding=0)
    state, expected = found.given["state"], found.given["state"].clone()
    kept = found.kept
    steps = [([3, 1, 2], [1, 2, 3]), ([1, 3], [3, 4]), ([2, 0, 3], [4, 5, 3])]
    for seed, (lengths, slots) in enumerate(steps):
        case = make_case(lengths, slots, device=DEVICE, dtype=dtype, padding=0, seed=seed + 1)
        count = torch.tensor([2, 1, 3][: len(lengths)], dtype=torch.int32, device=DEVICE)
        where = case.given["sources"][None], count, case.given["starts"]
        case.given["state"], case.kept = state, kept
        verify(case, longest=3)
        launch_advance(DeltaLayers.build([state], [kept]), *where, None, None, longest=3)
        reference.verify_mamba2(**case.given | {"state": expected}, out=case.out, kept=kept)
        commits.advance_gated_delta(DeltaLayers.build([expected], [kept]), *where)
        assert_near(state, expected, max(ERROR[dtype], 1e-5))


@pytest.mark.skipif(not ON_GPU, reason="graphs are a GPU's")
def test_a_step_in_a_graph_reads_what_is_there_at_each_replay():
    """Slots, counts and rows lie on the device; one capture serves steps that differ in them."""

    def verified(case, state):
        reference.verify_mamba2(**case.given | {"state": state}, out=case.out, kept=case.kept)

    launch = partial(verify, longest=3)
    given = make_case, ROWS, launch, verified, launch_advance
    assert_graph_reads_anew(*given, outputs_near=1e-2)


def test_requests_with_too_many_rows_are_refused():
    """With the argument that helps."""
    case = make_case([17], [1], device=DEVICE, padding=0)
    with pytest.raises(LayerError, match="longest"):
        verify(case, longest=None)
