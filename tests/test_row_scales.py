"""Scales that lie beside the rows: what a layer says of them, and what staging takes."""

from __future__ import annotations

import pickle

import pytest
import torch
from small_caches import BLOCK_SIZE, BLOCKS, HEAD_SIZE, HEADS, noise, rows

from kvtxn import LayerError, LayerRef, TransactionManager, TxnConfig
from kvtxn.captured_rows import CapturedRows
from kvtxn.layout import RowLayout

SLOTS = [4, 5, 6]


def scaled(kv_dtype: str = "fp8_e4m3", **changes) -> LayerRef:
    """A layer with a scale for each row and head, all of it zeros."""
    caches = torch.zeros(2, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE, dtype=torch.uint8)
    scales = torch.zeros(2, BLOCKS, BLOCK_SIZE, HEADS)
    given = {"k_scale": scales[0], "v_scale": scales[1], "kv_dtype": kv_dtype} | changes
    return LayerRef("layer", caches[0], caches[1], **given)


def test_one_side_may_have_a_static_scale():
    """Keys by the row, values by the tensor."""
    ref = scaled(v_scale=0.5)
    manager = TransactionManager([ref], TxnConfig(policy="deferred"))
    assert [plane.part for plane in ref.planes] == ["key", "value", "key scale"]
    with manager.window(2, SLOTS) as w:
        w.stage(ref, *rows(3))
        w.commit(2)
    assert ref.k_scale[1, :3].all()


def test_codes_come_with_their_scales():
    """As a pair they are bytes to move; alone, or the scales misshapen, they are refused."""
    ref = scaled()
    manager = TransactionManager([ref], TxnConfig(policy="deferred"))
    codes, scales = noise(3, HEADS, HEAD_SIZE).to(torch.float8_e4m3fn), noise(3, HEADS)
    with manager.window(2, SLOTS) as w:
        for wrong in (codes, (codes,), (codes, scales.double()), (codes, scales[1:]), "codes"):
            with pytest.raises(LayerError):
                w.stage(ref, wrong, wrong)
        w.stage(ref, (codes, scales), (codes.view(torch.uint8), scales))
        w.commit(2)
    assert torch.equal(ref.k_scale[1, :3], scales)
    assert torch.equal(ref.value_cache[1, :3], codes.view(torch.uint8))


def test_a_latent_has_one_scale_per_row():
    """``[num_blocks, block_size]``; its halves are joined before they are quantised."""
    cache, scale = torch.zeros(BLOCKS, BLOCK_SIZE, 6, dtype=torch.int8), torch.zeros(BLOCKS, 4)
    ref = LayerRef.latent("layer", cache, scale=scale)
    with TransactionManager([ref], TxnConfig(policy="deferred")).window(2, SLOTS) as w:
        w.stage(ref, torch.full((3, 4), 127.0), torch.full((3, 2), 254.0))
        w.commit(2)
    assert scale[1, :3].tolist() == [2.0, 2.0, 2.0]
    assert cache[1, 0].tolist() == [64, 64, 64, 64, 127, 127]


def test_captured_rows_are_quantised_in_the_graph():
    """Numbers alone, or codes with their scales, one tensor per plane."""
    ref = scaled()
    codes, scales = ref.planes[0].format.quantise(noise(3, HEADS, HEAD_SIZE))
    for parts in (rows(3), (codes, codes.clone(), scales, scales.clone())):
        held = CapturedRows(check=False)
        held.stage(ref, *parts)
        manager = TransactionManager([ref], TxnConfig(policy="deferred", max_rows=3))
        windows = manager.captured_windows(torch.tensor([SLOTS]), held.rows)
        layout = RowLayout.build((3,), (0,), torch.device("cpu"))
        windows.begin(windows.plan(layout)).commit(3)
    assert torch.equal(ref.v_scale[1, :3], scales)
    with pytest.raises(LayerError, match="without their scales"):
        CapturedRows(check=False).stage(ref, codes, codes)


def test_strides_and_pickling():
    """Scales packed behind each head's codes; a copy by pickle has planes of its own."""
    memory = torch.zeros(BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE + 8, dtype=torch.uint8)
    whole = memory.transpose(1, 2)
    numbers = whole.view(torch.float32)[..., -2:]
    ref = LayerRef(
        "layer",
        whole[..., :HEAD_SIZE],
        whole[..., HEAD_SIZE : 2 * HEAD_SIZE],
        k_scale=numbers[..., 0],
        v_scale=numbers[..., 1],
        kv_dtype="fp8",
    )
    assert ref.row_bytes == HEADS * (2 * HEAD_SIZE + 8)
    assert [p.row_shape for p in pickle.loads(pickle.dumps(ref)).planes[2:]] == [(HEADS,)] * 2
    with TransactionManager([ref], TxnConfig(policy="deferred")).window(2, SLOTS) as w:
        w.stage(ref, *rows(3))
        w.commit(2)
    assert memory[1, :, :3].any(-1).all()
    assert not memory[1, :, 3].any()


SHAPE = (BLOCKS, BLOCK_SIZE, HEADS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_scale": torch.ones(BLOCKS, BLOCK_SIZE, HEADS + 1)}, "wrong shape"),
        ({"k_scale": torch.ones(SHAPE, dtype=torch.float64)}, "must be float32"),
        ({"k_scale": torch.ones(1, 1, 1).expand(SHAPE)}, "overlapping elements"),
        ({"k_scale": (same := torch.ones(SHAPE)), "v_scale": same}, "same memory"),
    ],
)
def test_misfits_are_refused(changes, message):
    """With what was expected instead."""
    with pytest.raises(LayerError, match=message):
        scaled(**changes)


def test_floating_rows_have_no_scales_beside_them():
    """Nothing is quantised there."""
    cache = torch.zeros(*SHAPE, HEAD_SIZE)
    with pytest.raises(LayerError, match="not quantised"):
        LayerRef("layer", cache, cache.clone(), k_scale=torch.ones(SHAPE))
