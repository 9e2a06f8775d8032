"""Rows captured by reference: held, checked, and copied where the check fails."""

from __future__ import annotations

import pytest
import torch

from kvtxn import CapturedRows, LayerError, LayerRef, WindowStateError


def _layer(name="layer"):
    return LayerRef(name, torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8))


def _rows():
    return torch.randn(3, 1, 8), torch.randn(3, 1, 8)


def test_intact_rows_stay_by_reference():
    held, rows = CapturedRows(), _rows()
    assert held.stage(_layer(), *rows) == rows
    assert held.verify() == []
    assert held.by_reference
    assert held.rows["layer"][0].data_ptr() == rows[0].data_ptr()


def test_overwritten_rows_fail_over_to_copies():
    held, (key, value) = CapturedRows(), _rows()
    held.stage(_layer(), key, value)
    before = value.clone()
    value.fill_(7.0)
    assert held.verify() == ["layer"]
    assert not held.by_reference
    assert torch.equal(held.rows["layer"][1], before)


def test_nothing_is_trusted_before_the_check():
    held = CapturedRows()
    held.stage(_layer(), *_rows())
    with pytest.raises(WindowStateError, match="verify"):
        _ = held.rows
    trusting = CapturedRows(check=False)
    trusting.stage(_layer(), *_rows())
    assert list(trusting.rows) == ["layer"]


def test_a_layer_is_captured_once():
    held = CapturedRows()
    held.stage(_layer(), *_rows())
    with pytest.raises(WindowStateError, match="already"):
        held.stage(_layer(), *_rows())


@pytest.mark.parametrize("parts", [(), (0,), (0, 1, 0), (None, None), ("key", "value")])
def test_rows_that_are_none_are_refused(parts):
    """One tensor per plane; nothing is held of a call that is refused."""
    held, given = CapturedRows(), _rows()
    with pytest.raises(LayerError, match="expected 2 tensors: key, value"):
        held.stage(_layer(), *(given[p] if isinstance(p, int) else p for p in parts))
    held.stage(_layer(), *given)
    with pytest.raises(LayerError, match="not a LayerRef"):
        held.stage("layer", *given)
