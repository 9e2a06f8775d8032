"""The storage of a cache's words: every layout that engines use, stated in plain integers.

With it the oracle finds the elements of a slot without asking the library.
"""

from __future__ import annotations

import random
from typing import Final

import attrs
import torch
from torch import Tensor

from .number_formats import FORMATS, NumberFormat

#: Words of noise before and after the memory of each cache; no test may change them.
GUARD: Final = 96

#: Layouts with keys and values; ``LATENT`` ones have one plane.
KEY_VALUE: Final = ("plain", "packed", "hnd", "gapped", "transposed", "interleaved", "offsets")
LATENT: Final = ("latent", "latent-gapped")
LAYOUTS: Final = (*KEY_VALUE, *LATENT)


@attrs.frozen
class LayerSpec:
    """The description of a layer under test.

    Attributes:
        layout: one of ``LAYOUTS``.
        fmt: the number format of its rows.
        group: its group.
        heads: KV heads; a latent has one.
        size: elements per head of a key.
        value_size: elements per head of a value; None is ``size``.
        block_size: slots per block.
        num_blocks: blocks of the cache.
        kind: ``"paged"``, ``"ring"`` or ``"recurrent"``. A state is ``[heads, size]``, and there
            is a second one of ``value_size`` unless the layout is a latent one; the layout
            ``"permuted"`` is for states alone, one of three dimensions that do not merge.
        ring_size: slots in each request's ring.
        window: tokens that a query of a ring layer sees; None is ``ring_size``.
    """

    layout: str = "plain"
    fmt: NumberFormat = FORMATS["bf16"]
    group: str = "default"
    heads: int = 2
    size: int = 5
    value_size: int | None = None
    block_size: int = 3
    num_blocks: int = 9
    kind: str = "paged"
    ring_size: int = 0
    window: int | None = None


@attrs.frozen
class PlaneMap:
    """The storage of a slot's words in the flat memory of a cache.

    Attributes:
        memory: the number of the layer's memory.
        base: the first word of block 0.
        strides: words from one block, slot, head and element to the next.
        heads: heads of a row.
        size: elements per head.
        block_size: slots per block.
        table: instead of the last three strides, the word in a block of each slot's
            elements: ``[block_size][heads x size]``.
    """

    memory: int
    base: int
    strides: tuple[int, int, int, int]
    heads: int
    size: int
    block_size: int
    table: tuple[tuple[int, ...], ...] | None = None

    def words(self, slot: int) -> list[int]:
        """Return the indices of a slot's words in the flat memory, in the row's order."""
        block, offset = divmod(slot, self.block_size)
        first = self.base + block * self.strides[0]
        if self.table is not None:
            return [first + place for place in self.table[offset]]
        first += offset * self.strides[1]
        return [
            first + head * self.strides[2] + element * self.strides[3]
            for head in range(self.heads)
            for element in range(self.size)
        ]


def place(spec: LayerSpec, rng: random.Random) -> tuple[list[int], tuple[PlaneMap, ...]]:
    """Lay a layer out: return the words per memory, and the storage of each plane in them.

    The words do not include guard pages, but the planes begin behind the first one.

    Raises:
        ValueError: no layout has the spec's name.
    """
    blocks, slots, heads, size = spec.num_blocks, spec.block_size, spec.heads, spec.size
    value = size if spec.value_size is None else spec.value_size

    def plane(
        memory: int, start: int, strides: tuple[int, int, int, int], width: int, rows: int = heads
    ) -> PlaneMap:
        """Describe a plane that begins ``start`` words behind the first guard page."""
        return PlaneMap(memory, GUARD + start, strides, rows, width, slots)

    def dense(memory: int, start: int, width: int) -> PlaneMap:
        """Describe a contiguous plane ``[blocks, slots, heads, width]``."""
        row = heads * width
        return plane(memory, start, (slots * row, row, width, 1), width)

    match spec.layout:
        case "plain":
            row = slots * heads
            return [blocks * row * size, blocks * row * value], (
                dense(0, 0, size),
                dense(1, 0, value),
            )
        case "packed":  # [2, blocks, slots, heads, size]
            half = blocks * slots * heads * size
            return [half + blocks * slots * heads * value], (
                dense(0, 0, size),
                dense(0, half, value),
            )
        case "hnd":  # [blocks, heads, slots, key and value side by side]
            both = size + value
            strides = (heads * slots * both, both, slots * both, 1)
            return [blocks * heads * slots * both], (
                plane(0, 0, strides, size),
                plane(0, size, strides, value),
            )
        case "gapped":  # a view into something larger in every dimension
            planes = []
            for memory, width in enumerate((size, value)):
                head = width + 3
                row = (heads + 1) * head
                planes.append(plane(memory, 2, ((slots + 1) * row, row, head, 1), width))
            return [blocks * p.strides[0] for p in planes], (planes[0], planes[1])
        case "transposed":  # [blocks, slots, size, heads]: head_size is not innermost
            planes = [
                plane(memory, 0, (slots * heads * width, heads * width, 1, heads), width)
                for memory, width in enumerate((size, value))
            ]
            return [blocks * p.strides[0] for p in planes], (planes[0], planes[1])
        case "interleaved":  # [blocks, slots, heads, max size, 2]: every second element
            width = max(size, value)
            strides = (slots * heads * width * 2, heads * width * 2, width * 2, 2)
            return [blocks * strides[0]], (plane(0, 0, strides, size), plane(0, 1, strides, value))
        case "offsets":  # elements of a block anywhere in it, with holes
            numel = slots * heads * (size + value) + 7
            places = rng.sample(range(numel), numel)
            tables = []
            for width in (size, value):
                row = heads * width
                taken = [places.pop() for _ in range(slots * row)]
                tables.append(tuple(tuple(taken[i * row : (i + 1) * row]) for i in range(slots)))
            strides = (numel, 0, 0, 0)
            return [blocks * numel], (
                PlaneMap(0, GUARD, strides, heads, size, slots, tables[0]),
                PlaneMap(0, GUARD, strides, heads, value, slots, tables[1]),
            )
        case "latent" | "latent-gapped":
            row = size + (3 if spec.layout == "latent-gapped" else 0)
            return [blocks * slots * row], (plane(0, 0, (slots * row, row, row, 1), size, 1),)
        case "permuted":  # [states, size, heads, 2], seen as [states, heads, size, 2]
            each = [
                2 * (step * heads + head) + last
                for head in range(heads)
                for step in range(size)
                for last in range(2)
            ]
            numel = 2 * heads * size
            strides = (numel, 0, 0, 0)
            return [blocks * numel], (
                PlaneMap(0, GUARD, strides, heads, 2 * size, 1, (tuple(each),)),
            )
    raise ValueError(f"no layout is called {spec.layout!r}; choose one of {LAYOUTS}")


def place_scales(
    spec: LayerSpec, sizes: list[int], planes: tuple[PlaneMap, ...]
) -> tuple[list[int], tuple[PlaneMap, ...]]:
    """Make room for float32 scales beside the rows of ``planes``, counted in bytes.

    In a tensor of their own, of any strides; in the layout ``"hnd"`` behind each head's elements,
    in the same memory, whose rows move apart for them. Returns the sizes of all memories, and all
    planes, those of scales last.
    """
    blocks, slots, heads = spec.num_blocks, spec.block_size, planes[0].heads
    sides = len(planes)
    if spec.layout == "hnd":
        content = -(-(planes[0].size + planes[1].size) // 4) * 4
        each = content + 4 * sides
        strides = (heads * slots * each, each, slots * each, 1)
        moved = tuple(attrs.evolve(plane, strides=strides) for plane in planes)
        starts = [GUARD + content + 4 * side for side in range(sides)]
        scales = [PlaneMap(0, start, strides, heads, 4, slots) for start in starts]
        return [blocks * heads * slots * each], (*moved, *scales)
    row = 4 * heads
    strides = (slots * row, row, 4, 1)
    if spec.layout == "transposed":
        strides = (slots * row, 4, 4 * slots, 1)
    elif spec.layout in ("gapped", "latent-gapped"):
        strides = ((slots + 1) * (row + 4), row + 4, 4, 1)
    extent = blocks * strides[0]
    if spec.layout == "packed":  # both in one tensor
        starts = [GUARD + side * extent for side in range(sides)]
        both = [PlaneMap(len(sizes), start, strides, heads, 4, slots) for start in starts]
        return [*sizes, sides * extent], (*planes, *both)
    own = [PlaneMap(len(sizes) + side, GUARD, strides, heads, 4, slots) for side in range(sides)]
    return [*sizes, *[extent] * sides], (*planes, *own)


def view(spec: LayerSpec, plane: PlaneMap, memory: Tensor) -> Tensor:
    """Return a plane of the cache as an engine would hold it: a view of its memory.

    With an offset table it is ``[num_blocks, elements of a block]``.
    """
    if spec.layout == "permuted":
        half = plane.size // 2
        shape: tuple[int, ...] = (spec.num_blocks, 1, plane.heads, half, 2)
        strides = (plane.strides[0], 0, 2, 2 * plane.heads, 1)
        return memory.as_strided(shape, strides, plane.base)
    if plane.table is not None:
        shape = (spec.num_blocks, plane.strides[0])
        return memory.as_strided(shape, (plane.strides[0], 1), plane.base)
    shape = (spec.num_blocks, spec.block_size, plane.heads, plane.size)
    return memory.as_strided(shape, plane.strides, plane.base)


def scale_view(spec: LayerSpec, plane: PlaneMap, memory: Tensor) -> Tensor:
    """Return scales as ``LayerRef`` takes them: float32 ``[num_blocks, block_size(, heads)]``."""
    shape = (spec.num_blocks, spec.block_size, plane.heads)
    strides = [stride // 4 for stride in plane.strides[:3]]
    scales = memory.view(torch.float32).as_strided(shape, strides, plane.base // 4)
    return scales.squeeze(2) if spec.layout in LATENT else scales


def table(plane: PlaneMap) -> Tensor | None:
    """Return the table of offsets for ``LayerRef``, int64 ``[block_size, heads, size]``.

    None if rows are strided views.
    """
    if plane.table is None:
        return None
    return torch.tensor(plane.table).view(plane.block_size, plane.heads, plane.size)
