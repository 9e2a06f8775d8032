"""Encoding: once, exactly, and never touching bytes that are stored already."""

from __future__ import annotations

import pytest
import torch
from small_caches import noise

from kvtxn.formats import row_format, words


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_same_dtype_is_taken_by_reference(dtype):
    """No copy, no arithmetic: the words are the caller's memory."""
    rows = noise(3, 2, 8, dtype=dtype)
    stored = row_format("a", noise(1, 1, 2, 8, dtype=dtype), "auto", None, 2).encode(rows)
    assert stored.data_ptr() == rows.data_ptr()


def test_words_keep_every_bit():
    """NaN payloads and negative zero come through."""
    bits = torch.tensor([0x7FC01234, -0x80000000, 0x7F800001], dtype=torch.int32)
    assert torch.equal(words(bits.view(torch.float32)), bits)


def test_int8_rounds_and_saturates():
    """stored = round(value / scale), clamped."""
    number = row_format("a", torch.zeros(1, 1, 1, 4, dtype=torch.int8), "auto", 0.5, 1)
    stored = number.encode(torch.tensor([[[0.24, 0.3, 1000.0, -1000.0]]]))
    assert stored.view(torch.int8).flatten().tolist() == [0, 1, 127, -128]
    assert number.decode(stored).flatten().tolist() == [0.0, 0.5, 63.5, -64.0]


@pytest.mark.parametrize(
    ("kv_dtype", "limit"), [("fp8", 448.0), ("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)]
)
def test_fp8_saturates_and_keeps_nan(kv_dtype, limit):
    """Infinity becomes the largest number, NaN stays NaN."""
    number = row_format("a", torch.zeros(1, 1, 1, 3, dtype=torch.uint8), kv_dtype, None, 1)
    seen = number.decode(number.encode(torch.tensor([[[torch.inf, -1e9, torch.nan]]]))).flatten()
    assert seen[:2].tolist() == [limit, -limit]
    assert seen[2].isnan()


def test_scale_per_head():
    """Each KV head has its own scale."""
    cache = torch.zeros(1, 1, 2, 1, dtype=torch.int8)
    number = row_format("a", cache, "auto", torch.tensor([1.0, 10.0]), 2)
    stored = number.encode(torch.tensor([[[20.0], [20.0]]])).view(torch.int8)
    assert stored.flatten().tolist() == [20, 2]


def test_stored_codes_are_not_quantised_again():
    """Rows that have the cache's 8-bit dtype already are bytes to move."""
    number = row_format("a", torch.zeros(1, 1, 1, 2, dtype=torch.int8), "auto", 0.5, 1)
    codes = torch.tensor([[[100, -7]]], dtype=torch.int8)
    assert number.encode(codes) is codes
