"""Rows by slot: planes of one layout share the places of their rows, other planes do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtxn import LayerRef
from kvtxn.cache_planes import Plane
from kvtxn.row_io import read, read_layers, write_layers

BLOCK, HEADS, SIZE = 4, 2, 3
ROW = BLOCK * HEADS * SIZE


def tables() -> tuple[Tensor, Tensor]:
    """Return offset tables of keys that are transposed, and of values behind them."""
    block, head, place = (torch.arange(n) for n in (BLOCK, HEADS, SIZE))
    keys = block[:, None, None] + head[None, :, None] * SIZE * BLOCK + place * BLOCK
    return keys, ROW + torch.arange(ROW).view(BLOCK, HEADS, SIZE)


def packed(name: str, blocks: int, numel: int, given: tuple[Tensor, Tensor]) -> LayerRef:
    cache = torch.randn(blocks, numel)
    return LayerRef(name, cache, cache, key_offsets=given[0], value_offsets=given[1])


def strided(name: str, blocks: int) -> LayerRef:
    keys, values = (torch.randn(blocks, BLOCK, HEADS, SIZE) for _ in range(2))
    return LayerRef(name, keys, values)


@pytest.fixture
def layers() -> list[LayerRef]:
    """Return layers that share tables, with more blocks, with longer ones, and without tables."""
    given = tables()
    return [
        packed("one", 5, 2 * ROW, given),
        packed("same", 5, 2 * ROW, given),
        packed("views", 5, 2 * ROW, (given[0][:], given[1][:])),
        packed("swapped", 5, 2 * ROW, (given[1], given[0])),
        packed("more", 7, 2 * ROW, given),
        packed("longer", 5, 2 * ROW + 6, given),
        strided("plain", 5),
        strided("plain and more", 9),
    ]


def test_reads_each_layers_own_rows(layers: list[LayerRef]) -> None:
    slots = torch.tensor([6, 0, -1, 19])
    found = read_layers(layers, {"default": slots})
    for ref in layers:
        for plane, rows in zip(ref.planes, found[ref.name], strict=True):
            index = plane.index(slots.clamp(min=0))
            assert torch.equal(rows, plane.cells[index])
            assert torch.equal(rows, read(plane, slots))


def test_writes_each_layers_own_rows(layers: list[LayerRef]) -> None:
    slots, mask = torch.tensor([6, 0, -1, 19]), torch.tensor([True, False, True, True])
    rows = {
        ref.name: tuple(
            torch.randint(1, 1 << 20, (4, *plane.row_shape), dtype=torch.int32)
            for plane in ref.planes
        )
        for ref in layers
    }
    wanted = {ref.name: [plane.cells.clone() for plane in ref.planes] for ref in layers}
    for ref in layers:
        for cells, plane, new in zip(wanted[ref.name], ref.planes, rows[ref.name], strict=True):
            shared = cells if plane.offsets is None else wanted[ref.name][0]
            for row in (0, 3):  # K and V of a packed layer are one tensor
                index = plane.index(slots[row : row + 1])
                shared[index] = new[row : row + 1]
    write_layers(layers, rows, {"default": slots}, mask)
    for ref in layers:
        for number, plane in enumerate(ref.planes):
            own = number if plane.offsets is None else 0
            assert torch.equal(plane.cells, wanted[ref.name][own])


def test_no_slot_beyond_the_cache_is_written(layers: list[LayerRef]) -> None:
    ref, slots = layers[0], torch.tensor([5 * BLOCK])
    before = ref.planes[0].cells.clone()
    rows = {"one": tuple(torch.ones(1, HEADS, SIZE, dtype=torch.int32) for _ in ref.planes)}
    with pytest.raises(IndexError):
        write_layers([ref], rows, {"default": slots}, torch.tensor([True]))
    assert torch.equal(ref.planes[0].cells, before)


def test_places_are_found_once_for_layers_with_views_of_one_table(
    layers: list[LayerRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Plane] = []
    places = Plane.places

    def counted(plane: Plane, slots: Tensor) -> tuple[Tensor, ...]:
        found.append(plane)
        return places(plane, slots)

    monkeypatch.setattr(Plane, "places", counted)
    alike = [ref for ref in layers if ref.name in ("one", "same", "views")]
    read_layers(alike, {"default": torch.tensor([3, 4])})
    assert len(found) == 2  # keys, values
