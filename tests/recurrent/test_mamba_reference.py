"""Verify of Mamba-2 layers in torch, and the commit, against the recurrence in float64."""

from __future__ import annotations

import pytest
import torch
from kvtxn.backends.gated_delta import DeltaLayers, DeltaRows, advance_gated_delta
from kvtxn.backends.mamba2 import verify_mamba2
from mamba_cases import exact_step, make_case

from kvtxn import LayerError

LENGTHS = [5, 1, 0, 3, 2]
SOURCES = [3, 1, 4, 0, 7]
#: Steps of some 95 make outputs of some hundred.
NEAR = {"rtol": 1e-5, "atol": 1e-4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_and_states_are_those_of_the_recurrence(dtype):
    """For each number of kept rows; nothing else changes."""
    case = make_case(LENGTHS, SOURCES, dtype=dtype, rows_dtype=torch.float32)
    before = case.given["state"].clone()
    verify_mamba2(**case.given, out=case.out, kept=case.kept)
    assert torch.equal(case.given["state"], before)
    layers = DeltaLayers.build([case.given["state"]], [case.kept])
    for kept in range(6):
        case.given["state"].copy_(before)
        count = torch.tensor([kept] * len(LENGTHS), dtype=torch.int32)
        advance_gated_delta(layers, case.given["sources"][None], count, case.given["starts"])
        expected = before.clone()
        for number, (length, source) in enumerate(zip(LENGTHS, SOURCES, strict=True)):
            rows = min(kept, length)
            if source > 0 and rows:
                given = case.given["state"]
                case.given["state"] = before
                outputs, state = exact_step(case, number, rows)
                case.given["state"] = given
                expected[source] = state.to(dtype)
                first = sum(LENGTHS[:number])
                torch.testing.assert_close(case.out[first : first + rows], outputs.float(), **NEAR)
        near = NEAR if dtype == torch.float32 else {}
        torch.testing.assert_close(case.given["state"], expected, **near)
    assert (case.out[6:9] == 0).all()  # no state
    assert case.out[11:].isnan().all()  # no request
    assert case.kept.decay[6:9].isnan().all()


def test_rows_that_do_not_fit_are_refused():
    """Rows of other sizes, rows with gaps between elements, and room for rows of other layers."""
    case = make_case([2], [1])

    def verify(**other):
        verify_mamba2(**case.given | {"out": case.out, "kept": case.kept} | other)

    verify()
    b = case.given["B"]
    with pytest.raises(LayerError, match="B does not fit"):
        verify(B=b[:, :1])
    with pytest.raises(LayerError, match="C does not fit"):
        verify(C=torch.cat([b, b], 2)[:, :, ::2])
    with pytest.raises(LayerError, match="D does not fit"):
        verify(D=case.given["D"][:1])
    with pytest.raises(LayerError, match="out does not fit"):
        verify(out=case.out.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(LayerError, match="staged rows do not fit"):
        verify(kept=DeltaRows.build(5, 2, 4, 16, 16, torch.device("cpu")))
