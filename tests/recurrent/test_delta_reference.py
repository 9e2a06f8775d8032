"""Verify and commit of gated delta nets in torch, against the recurrence in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from delta_cases import exact_step, make_case
from kvtxn.backends.gated_delta import (
    DeltaLayers,
    advance_gated_delta,
    verify_gated_delta,
)
from step_checks import LENGTHS, SOURCES, assert_each_count

from kvtxn import LayerError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalise", [True, False])
def test_outputs_and_states_are_those_of_the_recurrence(dtype, normalise):
    """For each number of kept rows; nothing else changes."""
    case = make_case(LENGTHS, SOURCES, dtype=dtype, rows_dtype=torch.float32)
    before = case.given["state"].clone()
    verify_gated_delta(
        **case.given, out=case.out, kept=case.kept, scale=case.scale, normalise=normalise
    )
    assert torch.equal(case.given["state"], before)
    exact = partial(exact_step, case, normalise=normalise)
    assert_each_count(case, exact, outputs_near={}, states_near={})
    unseen = case.out[6:9], case.out[11:]
    assert all(part.isnan().all() for part in unseen)


def test_a_layer_reads_the_sources_of_its_group():
    """One count for all layers."""
    cases = [make_case([2, 2], [1, 2], seed=seed) for seed in range(3)]
    for case in cases:
        verify_gated_delta(**case.given, out=case.out, kept=case.kept, scale=case.scale)
    states = [case.given["state"] for case in cases]
    before = [state.clone() for state in states]
    layers = DeltaLayers.build(states, [case.kept for case in cases], groups=[0, 1, 1])
    sources = torch.tensor([[1, 2], [2, 5]], dtype=torch.int32)
    count = torch.tensor([0, 2], dtype=torch.int32)
    advance_gated_delta(layers, sources, count, cases[0].given["starts"])
    for state, was, slot in zip(states, before, [2, 5, 5], strict=True):
        changed = (state != was).flatten(1).any(1)
        assert changed.nonzero().flatten().tolist() == [slot]


def test_layers_that_do_not_fit_are_refused():
    """With what was expected, and what came."""
    case, other = make_case([1], [1]), make_case([1], [1], dtype=torch.bfloat16)
    state = case.given["state"]
    with pytest.raises(LayerError, match="alike"):
        DeltaLayers.build([state, other.given["state"]], [case.kept, other.kept])
    with pytest.raises(LayerError, match="each slot dense"):
        DeltaLayers.build([state.transpose(2, 3)], [case.kept])
    with pytest.raises(LayerError, match="do not fit the state"):
        DeltaLayers.build([state[:, :, :8].contiguous()], [case.kept])


def test_rows_that_do_not_fit_are_refused():
    """Rows of other sizes, and rows with gaps between elements."""
    case = make_case([2], [1])

    def verify(**other):
        given = case.given | {"out": case.out, "kept": case.kept} | other
        verify_gated_delta(**given, scale=case.scale)

    verify()
    key = case.given["key"]
    with pytest.raises(LayerError, match="key does not fit"):
        verify(key=key[:, :1])
    with pytest.raises(LayerError, match="key does not fit"):
        verify(key=torch.cat([key, key], 2)[:, :, ::2])
    with pytest.raises(LayerError, match="dt_bias does not fit"):
        verify(dt_bias=case.given["dt_bias"][:1])
    with pytest.raises(LayerError, match="out does not fit"):
        verify(out=case.out.transpose(0, 1).contiguous().transpose(0, 1))


def test_a_group_without_slots_is_refused():
    """No line of another group is read in its place."""
    case = make_case([1], [1])
    layers = DeltaLayers.build([case.given["state"]], [case.kept], groups=[1])
    where = case.given["sources"][None], torch.ones(1, dtype=torch.int32), case.given["starts"]
    with pytest.raises(LayerError, match="2 groups"):
        advance_gated_delta(layers, *where)
