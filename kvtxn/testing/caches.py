"""Caches to test on: every layout that engines use, full of noise, between guard pages."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from ..layers import LayerRef
from .placement import GUARD as GUARD
from .placement import KEY_VALUE as KEY_VALUE
from .placement import LATENT as LATENT
from .placement import LAYOUTS as LAYOUTS
from .placement import LayerSpec as LayerSpec
from .placement import PlaneMap as PlaneMap
from .placement import place, place_scales, scale_view, table, view


@attrs.frozen(eq=False)
class TestCache:
    """A layer under test.

    Attributes:
        spec: the description of the layer.
        ref: the ``LayerRef`` for the library.
        memories: flat integer tensors, guard pages included; the caches are views of them.
        planes: the storage of the rows in the memories; then of the scales that lie beside rows.
        scales: per plane of rows, one scale per head; meaningless if scales lie beside rows.
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

    @property
    def sides(self) -> tuple[PlaneMap, ...]:
        """The planes of rows: keys and values, one latent, or states."""
        return self.planes[: len(self.scales)]

    def rows(self, parts: Sequence[Tensor]) -> list[list[list[int]]]:
        """Return, by row, the words that each plane holds once ``parts`` were written.

        Args:
            parts: for each of ``sides`` ``[num_rows, heads, size]``; if scales lie beside
                the rows, numbers alone, or codes and then scales ``[num_rows, heads]``.
        """
        fmt, words = self.spec.fmt, []
        if len(self.planes) == len(self.scales):
            words = [fmt.encode(*each) for each in zip(parts, self.scales, strict=True)]
        elif len(parts) == len(self.planes):
            words = [fmt.encode(part, ()) for part in parts[: len(self.scales)]]
            for part in parts[len(self.scales) :]:
                words.append(part.contiguous().view(torch.uint8).flatten(1).tolist())
        else:
            scaled = [fmt.encode_scaled(part) for part in parts]
            words = [codes for codes, _ in scaled] + [_octets(scales) for _, scales in scaled]
        return [list(row) for row in zip(*words, strict=True)]

    def numbers(self, row: Sequence[Sequence[int]], side: int) -> list[list[float]]:
        """Decode a stored row to floats ``[heads][head_size]``.

        Args:
            row: the row's bytes, by plane.
            side: the plane: 0 has the keys, 1 the values.
        """
        scales: Sequence[float] = self.scales[side]
        if len(self.planes) > len(self.scales):
            octets = bytes(row[len(self.scales) + side])
            scales = struct.unpack(f"{len(octets) // 4}f", octets)
        return self.spec.fmt.decode(row[side], scales)


def _octets(rows: Sequence[Sequence[float]]) -> list[list[int]]:
    """Split float32 numbers into bytes, since memories of 8-bit caches are compared by byte."""
    return [list(struct.pack(f"{len(row)}f", *row)) for row in rows]


def noise(count: int, word: torch.dtype, rng: random.Random) -> Tensor:
    """Draw random bit patterns, NaN and infinities included; int ``[count]`` on the host."""
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    octets = torch.randint(0, 256, (count * word.itemsize,), dtype=torch.uint8, generator=generator)
    return octets.view(word)


def build_cache(name: str, spec: LayerSpec, device: torch.device, rng: random.Random) -> TestCache:
    """Build a layer whose caches, and guard pages, are filled with random bytes.

    Args:
        name: the layer's name.
        spec: its kind, sizes and number format.
        device: where the caches are.
        rng: gives the bytes.
    """
    sizes, planes = place(spec, rng)
    sides = len(planes)
    if spec.fmt.scaling == "row" and spec.kind != "recurrent":
        sizes, planes = place_scales(spec, sizes, planes)
    memories = tuple(
        noise(size + 2 * GUARD, spec.fmt.word, rng).to(device).clone() for size in sizes
    )
    for memory in memories:  # by chance few words of 16 bits or more are a zero with a sign
        memory[::11] = -(2 ** (8 * memory.itemsize - 1)) if memory.dtype.is_signed else 0x80
    held = torch.uint8 if spec.fmt.raw else spec.fmt.dtype
    views = [view(spec, plane, memories[plane.memory].view(held)) for plane in planes[:sides]]
    made = (_scale(spec, plane.heads, device, rng) for plane in planes[:sides])
    given, scales = zip(*made, strict=True)
    if sides < len(planes):
        given = tuple(scale_view(spec, plane, memories[plane.memory]) for plane in planes[sides:])
    if spec.layout in LATENT and spec.kind != "recurrent":
        views[0] = views[0].squeeze(2)
    key, value = views[0], views[1] if len(views) > 1 else None
    k_scale, v_scale = given[0], given[1] if len(given) > 1 else None
    named: dict[str, Any] = {"group": spec.group, "kv_dtype": spec.fmt.kv_dtype}
    if spec.kind == "recurrent":
        ref = LayerRef.recurrent(name, *(view.squeeze(1) for view in views), group=spec.group)
    elif spec.kind == "ring":
        named |= {"window": spec.window or spec.ring_size, "ring_size": spec.ring_size}
        ref = LayerRef.ring(name, key, value, k_scale=k_scale, v_scale=v_scale, **named)
    elif spec.layout in LATENT:
        ref = LayerRef.latent(name, key, scale=k_scale, **named)
    else:
        named["key_offsets"], named["value_offsets"] = map(table, planes[:2])
        ref = LayerRef(name, key, value, k_scale=k_scale, v_scale=v_scale, **named)
    return TestCache(spec, ref, memories, planes, scales)


def _scale(
    spec: LayerSpec, heads: int, device: torch.device, rng: random.Random
) -> tuple[float | Tensor | None, tuple[float, ...]]:
    """Return a plane's scale as an argument of ``LayerRef``, and one float32 number per head.

    Random ones; None and 1.0 for formats without static scales.
    """
    if spec.fmt.scaling in ("none", "row"):
        return None, (1.0,) * heads
    if spec.fmt.scaling == "tensor" or spec.layout in LATENT:
        scale = rng.randint(1, 63) / 64
        return scale, (scale,) * heads
    scales = torch.tensor([rng.randint(1, 999) / 500 for _ in range(heads)])
    return scales.to(device), tuple(scales.tolist())
