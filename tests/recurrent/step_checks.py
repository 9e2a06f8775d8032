"""Checks of verify steps that gated delta nets and Mamba-2 layers share: both commit alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from kernels_here import ON_GPU
from kvtxn.backends.gated_delta import DeltaLayers, reference
from torch import Tensor

#: A step of five requests: one has no rows, and one no state.
LENGTHS = [5, 1, 0, 3, 2]
SOURCES = [3, 1, 4, 0, 7]

#: Of a key, of a value, and how far apart rows lie.
SIZES = ((32, 16, 5), (64, 32, 64), (48, 20, 8), (48, 20, 5), (24, 40, 8))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def verify_cases(shift: int = 0) -> list[Any]:
    """Dtypes of states and of rows, and sizes: all on a GPU; interpreted, each two that there are.

    Args:
        shift: 0 to 2; another takes others.
    """
    numbered = [list(enumerate(each)) for each in (DTYPES, DTYPES, SIZES)]
    return [
        pytest.param(state, rows, sizes, id=f"{state}-{rows}-{sizes}")
        for (i, state), (j, rows), (k, sizes) in product(*numbered)
        if ON_GPU or (i + j + k) % 3 == shift
    ]


def assert_near(found: Tensor, expected: Tensor, error: float) -> None:
    """Assert that NaN stands at the same places, and that the rest is near.

    Args:
        found: any shape.
        expected: the same shape.
        error: the largest difference, as a part of the largest number expected.
    """
    assert torch.equal(found.isnan(), expected.isnan())
    largest = expected.nan_to_num().abs().max().item() + 1e-9
    off = (found.float() - expected.float()).nan_to_num().abs().max().item()
    assert off <= error * largest


def assert_each_count(
    case: Any,
    exact: Callable[[int, int], tuple[Tensor, Tensor]],
    *,
    outputs_near: dict[str, float],
    states_near: dict[str, float],
) -> None:
    """Assert that a verified case commits the recurrence's states, however many rows are kept.

    Args:
        case: the step of ``LENGTHS`` and ``SOURCES`` after its verify, of which no state changed.
        exact: the outputs and the state of a request's first rows, by its number and theirs.
        outputs_near: tolerances of ``torch.testing.assert_close``; empty for its own.
        states_near: likewise.
    """
    state, before = case.given["state"], case.given["state"].clone()
    layers = DeltaLayers.build([state], [case.kept])
    for kept in range(6):
        state.copy_(before)
        count = torch.tensor([kept] * len(LENGTHS), dtype=torch.int32)
        reference.advance_gated_delta(
            layers, case.given["sources"][None], count, case.given["starts"]
        )
        expected = before.clone()
        for number, (length, source) in enumerate(zip(LENGTHS, SOURCES, strict=True)):
            rows = min(kept, length)
            if source > 0 and rows:
                case.given["state"] = before
                outputs, after = exact(number, rows)
                case.given["state"] = state
                expected[source] = after.to(state.dtype)
                first = sum(LENGTHS[:number])
                found = case.out[first : first + rows]
                torch.testing.assert_close(found, outputs.float(), **outputs_near)
        torch.testing.assert_close(state, expected, **states_near)


def assert_graph_reads_anew(
    make_case: Callable[..., Any],
    names: Sequence[str],
    verify: Callable[[Any], None],
    verified: Callable[[Any, Tensor], None],
    launch_advance: Callable[..., None],
    *,
    outputs_near: float | None,
) -> None:
    """Assert that one capture serves steps that differ in slots, counts and rows.

    Args:
        make_case: makes a case on a GPU from lengths and sources.
        names: what of a case is copied into the one that was captured, beside the sources.
        verify: launches the verify kernel of a case.
        verified: verifies a case by the specification, with another state.
        launch_advance: the commit's launch.
        outputs_near: the error of the outputs; None where requests without a state get none.
    """
    lengths, sources = [3, 3, 3], [1, 2, 3]
    case = make_case(lengths, sources, device="cuda", padding=0)
    state, slots, starts = (case.given[name] for name in ("state", "sources", "starts"))
    count = torch.ones(3, dtype=torch.int32, device="cuda")
    layers = DeltaLayers.build([state], [case.kept])

    def step() -> None:
        verify(case)
        launch_advance(layers, slots[None], count, starts, None, None, longest=3)

    before = state.clone()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, (others, kept) in enumerate([([1, 2, 3], [3, 0, 2]), ([5, 0, 4], [1, 3, 3])]):
        fresh = make_case(lengths, others, device="cuda", padding=0, seed=seed + 1)
        for name in (*names, "sources"):
            case.given[name].copy_(fresh.given[name])
        count.copy_(torch.tensor(kept))
        state.copy_(before)
        graph.replay()
        expected = before.clone()
        verified(fresh, expected)
        other = DeltaLayers.build([expected], [fresh.kept])
        reference.advance_gated_delta(other, slots[None], count, starts)
        assert_near(state, expected, 1e-5)
        if outputs_near is not None:
            assert_near(case.out, fresh.out, outputs_near)
