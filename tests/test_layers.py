"""LayerRef: what it accepts, what it refuses, and where its rows lie."""

from __future__ import annotations

import attrs
import pytest
import torch
from small_caches import noise

from kvtxn import LayerError, LayerRef
from kvtxn.row_io import read


def overlapping(count: int, *shape: int) -> list[torch.Tensor]:
    """Tensors of one memory, each a block further than the one before."""
    memory = noise(shape[0] + count - 1, *shape[1:])
    return [memory[i : i + shape[0]] for i in range(count)]


def overlapping_rows() -> torch.Tensor:
    """Each row begins in the middle of the one before."""
    return noise(100).as_strided((2, 4, 2, 8), (32, 8, 8, 1))


def test_fields_are_kept():
    """All that was given can be read back."""
    key, value = noise(2, 4, 2, 8), noise(2, 4, 2, 8)
    ref = LayerRef(name="a", key_cache=key, value_cache=value, group="full")
    assert ref.key_cache is key
    assert ref.value_cache is value
    assert (ref.name, ref.group, ref.kv_dtype, ref.num_slots) == ("a", "full", "auto", 8)
    assert ref.row_bytes == 2 * 2 * 8 * 4


def test_immutable_and_compared_by_identity():
    """Two references to equal caches are two layers."""
    key, value = noise(2, 4, 2, 8), noise(2, 4, 2, 8)
    one, two = LayerRef("a", key, value), LayerRef("a", key, value)
    assert one != two
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        one.name = "b"  # type: ignore[misc]


def test_repr_shows_shapes_and_no_numbers():
    """A cache of gigabytes must not print itself."""
    text = repr(LayerRef("a", noise(2, 4, 2, 8), noise(2, 4, 2, 8)))
    assert "torch.float32[2, 4, 2, 8]" in text
    assert "tensor(" not in text


def test_any_strides_are_views_of_the_callers_memory():
    """K and V packed in one permuted tensor are written in place."""
    packed = noise(3, 2, 4, 2, 8)  # [blocks, k/v, block_size, heads, head_size]
    ref = LayerRef("a", packed[:, 0], packed[:, 1])
    assert ref.planes[0].cells.data_ptr() == packed.data_ptr()
    row = read(ref.planes[1], torch.tensor([9]))
    assert torch.equal(row.view(torch.float32)[0], packed[2, 1, 1])


def test_latent_has_one_plane():
    """MLA stores one latent per token."""
    ref = LayerRef.latent("mla", noise(2, 4, 12))
    assert ref.is_latent
    assert ref.row_bytes == 12 * 4


def test_value_heads_may_have_another_size():
    """Only blocks, block size and heads must agree."""
    ref = LayerRef("a", noise(2, 4, 2, 8), noise(2, 4, 2, 16))
    assert [plane.row_shape for plane in ref.planes] == [(2, 8), (2, 16)]


def transposed_offsets(block: int, heads: int, size: int) -> torch.Tensor:
    """K stored as [head, size, block], as vectorising CPU kernels do."""
    return torch.arange(heads * size * block).view(heads, size, block).permute(2, 0, 1)


def test_offset_table_addresses_single_elements():
    """A row that is no strided view is found element by element."""
    cache = noise(3, 2 * 2 * 8 * 4)
    table = transposed_offsets(4, 2, 8)
    ref = LayerRef("a", cache, cache, key_offsets=table, value_offsets=table + 64)
    row = read(ref.planes[0], torch.tensor([6])).view(torch.float32)[0]
    assert torch.equal(row, cache[1, :64].view(2, 8, 4)[:, :, 2])
    assert ref.num_slots == 12


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LayerRef("a", noise(2, 4, 8), noise(2, 4, 8)), "misshapen"),
        (lambda: LayerRef("a", noise(2, 4, 2, 8), noise(3, 4, 2, 8)), "differ in blocks"),
        (lambda: LayerRef("a", noise(2, 4, 2, 8), noise(2, 4, 2, 8).half()), "dtype or device"),
        (
            lambda: LayerRef("a", noise(1, 1, 1, 8).expand(2, 4, 2, 8), noise(2, 4, 2, 8)),
            "overlapping elements",
        ),
        (lambda: LayerRef("a", noise(0, 4, 2, 8), noise(0, 4, 2, 8)), "empty"),
        (lambda: LayerRef("a", *torch.ones(2, 2, 4, 2, 8, device="meta")), "no memory to write to"),
        (lambda: LayerRef.latent("a", noise(2, 4, 8).to_sparse()), "no memory to write to"),
        (lambda: LayerRef("a", *torch._neg_view(noise(2, 2, 4, 2, 8))), "view that negates"),
        (lambda: LayerRef("a", overlapping_rows(), noise(2, 4, 2, 8)), "has overlapping elements"),
        (lambda: LayerRef("a", *overlapping(2, 2, 4, 2, 8)), "in part or whole, the same memory"),
        (lambda: LayerRef("a", *torch.ones(2, 2, 4, 2, 8).long()), "that kvtxn does not know"),
        (lambda: LayerRef("", noise(2, 4, 2, 8), noise(2, 4, 2, 8)), "name"),
        (lambda: LayerRef("a", noise(2, 4, 2, 8), noise(2, 4, 2, 8), group=""), "group"),
        (lambda: LayerRef("a", noise(2, 4, 2, 8), noise(2, 4, 2, 8), k_scale=2.0), "not quantised"),
        (lambda: LayerRef("a", noise(2, 4, 2, 8), noise(2, 4, 2, 8), kv_dtype="fp4"), "unknown"),
        (lambda: LayerRef("a", noise(2, 4, 2, 8), noise(2, 4, 2, 8), kv_dtype="fp8"), "not fit"),
        (lambda: LayerRef("a", None, noise(2, 4, 2, 8)), "misshapen"),
        (lambda: LayerRef.latent("a", noise(2, 4, 2, 8)), "misshapen"),
        # uint8 alone does not say what it holds
        (lambda: LayerRef("a", *torch.zeros(2, 2, 4, 2, 8).byte()), "could be any 8-bit format"),
        # neither one scale nor one per head
        (lambda: LayerRef("a", *torch.zeros(2, 2, 4, 2, 8).char(), k_scale=torch.ones(3)), "scale"),
    ],
)
def test_misfits_are_refused(build, message):
    """Each with a sentence that says what does not fit."""
    with pytest.raises(LayerError, match=message):
        build()


def test_a_format_and_scales_may_be_said():
    """What bytes hold; one scale, or one per head."""
    cache = torch.zeros(2, 4, 2, 8, dtype=torch.uint8)
    assert LayerRef("a", cache, cache.clone(), kv_dtype="fp8").planes[0].format.quantised
    LayerRef("a", *torch.zeros(2, 2, 4, 2, 8).char(), k_scale=torch.tensor([1.0, 2.0]), v_scale=0.5)


@pytest.mark.parametrize(
    "other",
    [lambda table: table + 65, lambda table: table, lambda table: table[0], lambda table: None],
    ids=["outside", "twice", "misshapen", "single"],
)
def test_bad_offset_tables_are_refused(other):
    """A table that is not one-to-one would corrupt a neighbour."""
    cache, table = noise(3, 128), transposed_offsets(4, 2, 8)
    with pytest.raises(LayerError, match="offset"):
        LayerRef("a", cache, cache, key_offsets=table, value_offsets=other(table))
