"""Verify of Mamba-2 layers in torch, and the commit, against the recurrence in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kvtxn.backends.gated_delta import DeltaRows
from kvtxn.backends.mamba2 import verify_mamba2
from mamba_cases import exact_step, make_case
from step_checks import LENGTHS, SOURCES, assert_each_count

from kvtxn import LayerError

#: Steps of some 95 make outputs of some hundred.
NEAR = {"rtol": 1e-5, "atol": 1e-4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_and_states_are_those_of_the_recurrence(dtype):
    """For each number of kept rows; nothing else changes."""
    case = make_case(LENGTHS, SOURCES, dtype=dtype, rows_dtype=torch.float32)
    before = case.given["state"].clone()
    verify_mamba2(**case.given, out=case.out, kept=case.kept)
    assert torch.equal(case.given["state"], before)
    near = NEAR if dtype == torch.float32 else {}
    assert_each_count(case, partial(exact_step, case), outputs_near=NEAR, states_near=near)
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
