"""Verify and commit in torch, against the recurrences in float64, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from kvtxn.backends.gated_delta import DeltaLayers, DeltaRows, advance_gated_delta
from verify_steps import DELTA, FAMILIES, LENGTHS, MAMBA2, SOURCES

from kvtxn import LayerError

#: Steps of some 95 make outputs of some hundred.
NEAR = {"rtol": 1e-5, "atol": 1e-4}


@pytest.mark.parametrize(
    ("family", "settings", "dtype"),
    [
        *((DELTA, {"normalise": on}, d) for on in (True, False) for d in ("float32", "bfloat16")),
        *((MAMBA2, {}, dtype) for dtype in ("float32", "bfloat16", "float16")),
    ],
)
def test_outputs_and_states_are_those_of_the_recurrence(family, settings, dtype):
    """For each number of kept rows; nothing else changes."""
    case = family.make(LENGTHS, SOURCES, dtype=getattr(torch, dtype), rows_dtype=torch.float32)
    state, before = case.given["state"], case.given["state"].clone()
    family.verify(case, **settings)
    assert torch.equal(state, before)
    outputs_near = NEAR if family is MAMBA2 else {}
    states_near = outputs_near if state.dtype == torch.float32 else {}
    layers = DeltaLayers.build([state], [case.kept])
    for kept in range(6):
        state.copy_(before)
        count = torch.tensor([kept] * len(LENGTHS), dtype=torch.int32)
        advance_gated_delta(layers, case.given["sources"][None], count, case.given["starts"])
        expected = before.clone()
        for number, (length, source) in enumerate(zip(LENGTHS, SOURCES, strict=True)):
            rows = min(kept, length)
            if source > 0 and rows:
                case.given["state"] = before
                outputs, after = family.exact(case, number, rows, **settings)
                expected[source] = after.to(state.dtype)
                first = sum(LENGTHS[:number])
                found = case.out[first : first + rows]
                torch.testing.assert_close(found, outputs.float(), **outputs_near)
        torch.testing.assert_close(state, expected, **states_near)
    assert case.out[11:].isnan().all()  # no request
    assert case.out[6:9].isnan().all() or (family is MAMBA2 and not case.out[6:9].any())  # no state
    assert case.kept.decay[6:9].isnan().all()


def test_a_layer_reads_the_sources_of_its_group():
    """One count for all layers."""
    cases = [DELTA.make([2, 2], [1, 2], seed=seed) for seed in range(3)]
    for case in cases:
        DELTA.verify(case)
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
    case, other = DELTA.make([1], [1]), DELTA.make([1], [1], dtype=torch.bfloat16)
    state = case.given["state"]
    with pytest.raises(LayerError, match="alike"):
        DeltaLayers.build([state, other.given["state"]], [case.kept, other.kept])
    with pytest.raises(LayerError, match="each slot dense"):
        DeltaLayers.build([state.transpose(2, 3)], [case.kept])
    with pytest.raises(LayerError, match="do not fit the state"):
        DeltaLayers.build([state[:, :, :8].contiguous()], [case.kept])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_do_not_fit_are_refused(family):
    """Rows of other sizes, rows with gaps between elements, and room for rows of other layers."""
    case = family.make([2], [1])
    family.verify(case)
    keys = ("key", "key") if family is DELTA else ("B", "C")
    key, last = case.given[keys[0]], family.rows[-2 if family is MAMBA2 else -1]
    wrong = {
        keys[0]: key[:, :1],
        keys[1] + " ": torch.cat([key, key], 2)[:, :, ::2],
        last: case.given[last][:1],
        "out": case.out.transpose(0, 1).contiguous().transpose(0, 1),
    }
    for name, part in wrong.items():
        with pytest.raises(LayerError, match=f"{name.strip()} does not fit"):
            family.verify(case, **{name.strip(): part})
    if family is MAMBA2:
        with pytest.raises(LayerError, match="staged rows do not fit"):
            family.verify(case, kept=DeltaRows.build(5, 2, 4, 16, 16, torch.device("cpu")))


def test_a_group_without_slots_is_refused():
    """No line of another group is read in its place."""
    case = DELTA.make([1], [1])
    layers = DeltaLayers.build([case.given["state"]], [case.kept], groups=[1])
    where = case.given["sources"][None], torch.ones(1, dtype=torch.int32), case.given["starts"]
    with pytest.raises(LayerError, match="2 groups"):
        advance_gated_delta(layers, *where)
