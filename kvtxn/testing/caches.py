"""Caches to test on: every layout engines use, full of noise, between guard pages.

Where the element of a slot lies is stated here in plain integers, so that the
oracle can find it without asking the library.
"""

from __future__ import annotations

import random
from typing import Final

import attrs
import torch
from torch import Tensor

from ..layers import LayerRef
from .number_formats import FORMATS, NumberFormat

#: Words of noise before and after the memory of each cache; nobody may touch them.
GUARD: Final = 96

#: Layouts with keys and values; ``LATENT`` ones have one plane.
KEY_VALUE: Final = ("plain", "packed", "hnd", "gapped", "transposed", "interleaved", "offsets")
LATENT: Final = ("latent", "latent-gapped")
LAYOUTS: Final = (*KEY_VALUE, *LATENT)


@attrs.frozen
class LayerSpec:
    """What a layer is like.

    Attributes:
        layout: one of ``LAYOUTS``.
        fmt: how its numbers are stored.
        group: its group.
        heads: KV heads; a latent has one.
        size: elements per head of a key.
        value_size: elements per head of a value; ``size`` where None.
        block_size: slots per block.
        num_blocks: blocks of the cache.
        kind: ``"paged"``, ``"ring"`` or ``"recurrent"``. A state is ``[heads, size]``, and there
            is a second one of ``value_size`` unless the layout is a latent one; the layout
            ``"permuted"`` is for states alone, one of three dimensions that do not merge.
        ring_size: slots in each request's ring.
        window: tokens a query of a ring layer sees; ``ring_size`` where None.
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
    """Where the words of a slot lie in the flat memory of a cache.

    Attributes:
        memory: which of the layer's memories.
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
        """The flat places of a slot's row, in the row's order."""
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


@attrs.frozen(eq=False)
class TestCache:
    """One layer under test.

    Attributes:
        spec: what it is like.
        ref: what the library gets.
        memories: flat integer tensors, guard pages included; the caches are views of them.
        planes: where rows lie in them.
        scales: per plane, one scale per head.
    """

    __test__ = False  # the name is no test class, whatever pytest thinks

    spec: LayerSpec
    ref: LayerRef
    memories: tuple[Tensor, ...]
    planes: tuple[PlaneMap, ...]
    scales: tuple[tuple[float, ...], ...]

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.ref.name

    @property
    def num_slots(self) -> int:
        """Slots of the cache."""
        return self.spec.block_size * self.spec.num_blocks


def noise(count: int, word: torch.dtype, rng: random.Random) -> Tensor:
    """Every bit pattern alike, NaN and infinities included; int ``[count]`` on the host."""
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    octets = torch.randint(0, 256, (count * word.itemsize,), dtype=torch.uint8, generator=generator)
    return octets.view(word)


def build_cache(name: str, spec: LayerSpec, device: torch.device, rng: random.Random) -> TestCache:
    """A layer over fresh noise."""
    sizes, planes = _place(spec, rng)
    memories = tuple(
        noise(size + 2 * GUARD, spec.fmt.word, rng).to(device).clone() for size in sizes
    )
    held = torch.uint8 if spec.fmt.raw else spec.fmt.dtype
    views = [_view(spec, plane, memories[plane.memory].view(held)) for plane in planes]
    given, scales = zip(*(_scale(spec, plane.heads, device, rng) for plane in planes), strict=True)
    if spec.kind == "recurrent":
        ref = LayerRef.recurrent(name, *(view.squeeze(1) for view in views), group=spec.group)
    elif spec.kind == "ring":
        ref = LayerRef.ring(
            name,
            views[0].squeeze(2) if spec.layout in LATENT else views[0],
            None if spec.layout in LATENT else views[1],
            window=spec.window or spec.ring_size,
            ring_size=spec.ring_size,
            group=spec.group,
            k_scale=given[0],
            v_scale=None if spec.layout in LATENT else given[1],
            kv_dtype=spec.fmt.kv_dtype,
        )
    elif spec.layout in LATENT:
        ref = LayerRef.latent(
            name,
            views[0].squeeze(2),
            group=spec.group,
            scale=given[0],
            kv_dtype=spec.fmt.kv_dtype,
        )
    else:
        tables = [_table(plane) for plane in planes]
        ref = LayerRef(
            name,
            views[0],
            views[1],
            group=spec.group,
            k_scale=given[0],
            v_scale=given[1],
            kv_dtype=spec.fmt.kv_dtype,
            key_offsets=tables[0],
            value_offsets=tables[1],
        )
    return TestCache(spec, ref, memories, planes, scales)


def _place(spec: LayerSpec, rng: random.Random) -> tuple[list[int], tuple[PlaneMap, ...]]:
    """Words per memory, and where in them the planes are."""
    blocks, slots, heads, size = spec.num_blocks, spec.block_size, spec.heads, spec.size
    value = size if spec.value_size is None else spec.value_size

    def plane(
        memory: int, start: int, strides: tuple[int, int, int, int], width: int, rows: int = heads
    ) -> PlaneMap:
        return PlaneMap(memory, GUARD + start, strides, rows, width, slots)

    def dense(memory: int, start: int, width: int) -> PlaneMap:
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


def _view(spec: LayerSpec, plane: PlaneMap, memory: Tensor) -> Tensor:
    """The cache as an engine would hold it: a view of its memory."""
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


def _table(plane: PlaneMap) -> Tensor | None:
    if plane.table is None:
        return None
    return torch.tensor(plane.table).view(plane.block_size, plane.heads, plane.size)


def _scale(
    spec: LayerSpec, heads: int, device: torch.device, rng: random.Random
) -> tuple[float | Tensor | None, tuple[float, ...]]:
    """What the library is told of a plane's scale, and one float32 number per head."""
    if spec.fmt.scaling == "none":
        return None, (1.0,) * heads
    if spec.fmt.scaling == "tensor" or spec.layout in LATENT:
        scale = rng.randint(1, 63) / 64
        return scale, (scale,) * heads
    scales = torch.tensor([rng.randint(1, 999) / 500 for _ in range(heads)])
    return scales.to(device), tuple(scales.tolist())
