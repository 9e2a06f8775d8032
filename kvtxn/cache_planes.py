"""``Plane``: the memory of one part of a layer's rows, and its construction from a cache tensor.

All code that moves bytes works on planes. A plane is K or V of a paged cache, a latent, the
scales that lie beside them, or one tensor of a recurrent state. Each is checked when it is built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from .errors import LayerError
from .formats import WORDS, RowFormat, row_format, words
from .host_values import described, is_dense, is_plain
from .memory_overlap import overlaps_itself

#: dtypes of offset tables.
_INTS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@attrs.frozen(eq=False)
class Plane:
    """A tensor that holds one part of a layer's rows.

    Attributes:
        part: ``"key"``, ``"value"``, ``"latent"``, ``"key scale"`` and so on, or ``"state 0"``.
        cells: integer view of the cache, any strides: ``[num_blocks, block_size, *row_shape]``,
            or ``[num_blocks, block_numel]`` with ``offsets``.
        row_shape: shape of one row, one or two dimensions, such as ``(num_kv_heads, head_size)``.
        block_size: slots per block.
        format: number format of the stored elements.
        offsets: int64 ``[block_size, *row_shape]``: the element of the block that holds each
            element of a row; None if rows are plain strided views.
        given_shape: shape of one row as it is staged; None if it is ``row_shape``.
        is_scale: True if the plane holds the scales of another plane's rows.
        layout: planes of equal layouts have their rows in the same places; the tables of offsets
            may be views of one.
    """

    part: str
    cells: Tensor
    row_shape: tuple[int, ...]
    block_size: int
    format: RowFormat
    offsets: Tensor | None = None
    given_shape: tuple[int, ...] | None = None
    is_scale: bool = False
    layout: tuple[object, ...] = attrs.field(init=False, repr=False)

    @layout.default
    def _layout(self) -> tuple[object, ...]:
        """Return the shape of blocks and rows, and address and strides of the offsets, if any."""
        table = self.offsets
        form = *self.cells.shape[:2], self.block_size, self.row_shape
        return form if table is None else (*form, table.data_ptr(), table.stride())

    @property
    def num_slots(self) -> int:
        """Slots in the whole cache: blocks x block size."""
        return self.cells.shape[0] * self.block_size

    @property
    def row_bytes(self) -> int:
        """Bytes one row takes."""
        return math.prod(self.row_shape) * self.cells.dtype.itemsize

    @property
    def staged_shape(self) -> tuple[int, ...]:
        """Shape of one row as the caller stages it."""
        return self.row_shape if self.given_shape is None else self.given_shape

    def index(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Return the index into ``cells`` that selects the rows of int64 ``slots``."""
        block, offset = slots // self.block_size, slots % self.block_size
        if self.offsets is None:
            return block, offset
        return block.view(-1, *[1] * len(self.row_shape)), self.offsets[offset]

    def places(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Return where the rows of int64 ``slots`` are in ``cells``.

        Returns:
            As ``index``; for rows that are no strided view, the number of each element of each row
            in the cells, int64 ``[num_rows, *row_shape]``, which torch finds more quickly.
        """
        block, offset = slots // self.block_size, slots % self.block_size
        if self.offsets is None:
            return block, offset
        first = block * self.cells.shape[1]
        return (first.view(-1, *[1] * len(self.row_shape)) + self.offsets[offset],)


@attrs.frozen(eq=False)
class PlaneSpec:
    """The arguments for one plane of a paged layer: K, V or a latent.

    Attributes:
        part: the plane's ``part``.
        cache: ``[num_blocks, block_size, *row_shape]``, or ``[num_blocks, block_numel]``.
        scale: as for ``LayerRef``.
        offsets: checked table of offsets, if ``cache`` has the second shape.
    """

    part: str
    cache: Tensor
    scale: float | Tensor | None
    offsets: Tensor | None = None

    @property
    def scales_rows(self) -> bool:
        """True if the scale is a tensor with one number per row and head, beside the rows."""
        if not isinstance(self.scale, Tensor):
            return False
        heads = self.cache.shape[1:-1]
        if self.offsets is not None:
            heads = self.offsets.shape[:2]
        return self.scale.shape == (self.cache.shape[0], *heads)


def paged_planes(layer: str, specs: Sequence[PlaneSpec], kv_dtype: str) -> tuple[Plane, ...]:
    """Build the planes of a paged layer: one per spec, then the scales beside their rows.

    Raises:
        LayerError: a scale or a number format does not fit its cache.
    """
    planes: list[Plane] = []
    scales: list[Plane] = []
    for spec in specs:
        _check_scale(spec.scale)
        number = None
        if spec.scales_rows:
            number = len(specs) + len(scales)
            scales.append(_scale_plane(layer, spec))
        planes.append(_paged_plane(layer, spec, kv_dtype, number))
    return (*planes, *scales)


def decoded(planes: Sequence[Plane], stored: Sequence[Tensor]) -> list[Tensor]:
    """Return rows as numbers, float32 ``[num_rows, *row_shape]``: K and V, or one latent.

    Scales that lie beside rows are applied to them, and not returned.

    Args:
        planes: all planes of a layer.
        stored: rows of each plane as the cache stores them, in its dtype or as words.
    """
    numbers = []
    for plane, rows in zip(planes, stored, strict=True):
        place = plane.format.scales_in
        scales = None if place is None else planes[place].format.decode(stored[place])
        if not plane.is_scale:
            numbers.append(plane.format.decode(rows, scales))
    return numbers


def _scale_plane(layer: str, spec: PlaneSpec) -> Plane:
    """Build the plane of the float32 scales, one per row and head, of another plane's rows.

    Raises:
        LayerError: the scales have another dtype, or no memory of their own.
    """
    scale = spec.scale
    assert isinstance(scale, Tensor)
    check_cache(layer, scale, scale.ndim, "one scale per row and head")
    if scale.dtype is not torch.float32:
        raise LayerError(
            "LayerRef",
            f"scales that lie beside the rows of {layer!r} must be float32",
            expected=torch.float32,
            got=scale.dtype,
        )
    block_size = spec.cache.shape[1] if spec.offsets is None else spec.offsets.shape[0]
    cells = words(scale if scale.ndim == 3 else scale.unsqueeze(-1))
    number = RowFormat(torch.float32)
    shape = tuple(cells.shape[2:])
    return Plane(f"{spec.part} scale", cells, shape, block_size, number, is_scale=True)


def _check_scale(scale: object) -> None:
    """Refuse, with a LayerError, what is no number, no dense tensor and not None."""
    known = scale is None or isinstance(scale, (int, float, Tensor))
    if isinstance(scale, Tensor):
        known = is_plain(scale) and not scale.is_meta
    if not known or isinstance(scale, bool):
        got = described(scale, where=True) if isinstance(scale, Tensor) else repr(scale)
        raise LayerError("LayerRef", "a scale must be a number or a dense tensor", got=got)


def _paged_plane(layer: str, spec: PlaneSpec, kv_dtype: str, scales_in: int | None) -> Plane:
    """Build a plane of K, V or latents; plane number ``scales_in`` holds their scales, if any.

    Raises:
        LayerError: the scale or the number format does not fit the cache.
    """
    part, cache, offsets = spec.part, spec.cache, spec.offsets
    scale = None if scales_in is not None else spec.scale
    scale = float(scale) if isinstance(scale, int) else scale
    shape = tuple((cache if offsets is None else offsets).shape)
    block_size, row_shape = (shape[1], shape[2:]) if offsets is None else (shape[0], shape[1:])
    heads = row_shape[0] if len(row_shape) == 2 else None
    number = row_format(layer, cache, kv_dtype, scale, heads, scales_in)
    return Plane(part, words(cache), row_shape, block_size, number, offsets)


def state_plane(part: str, layer: str, state: Tensor) -> Plane:
    """Build the plane of a recurrent state ``[num_states, *state_shape]``: a slot is a whole state.

    Dimensions that are contiguous with each other are merged. If more than two remain, as in a
    permuted state, the elements are found through a table of offsets.

    Raises:
        LayerError: it is no such tensor, or of a dtype whose words cannot be moved.
    """
    rank = max(2, state.ndim) if isinstance(state, Tensor) else 2
    check_cache(layer, state, rank, "[num_states, *state_shape]", "a state")
    if state.dtype.itemsize not in WORDS:
        raise LayerError("LayerRef", f"a state of {layer!r} cannot be {state.dtype}")
    cells, number = words(state), RowFormat(state.dtype)
    shape, strides = _together(tuple(state.shape[1:]), state.stride()[1:])
    given = tuple(state.shape[1:])
    start, count = cells.storage_offset(), state.shape[0]
    if len(shape) <= 2:
        view = cells.as_strided((count, 1, *shape), (state.stride(0), 0, *strides), start)
        return Plane(part, view, shape, 1, number, None, given)
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(shape, strides, strict=True):
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    table = places.reshape(1, -1).to(state.device)
    extent = int(places.max()) + 1
    view = cells.as_strided((count, extent), (state.stride(0), 1), start)
    return Plane(part, view, (table.shape[1],), 1, number, table, given)


def _together(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Drop dimensions of size 1 and merge adjacent ones; return shape and strides."""
    dims = [pair for pair in zip(shape, strides, strict=True) if pair[0] != 1]
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if merged and merged[-1][1] == size * stride:
            size *= merged.pop()[0]
        merged.append((size, stride))
    merged = merged or [(1, 1)]
    return tuple(size for size, _ in merged), tuple(stride for _, stride in merged)


def check_cache(name: str, cache: Tensor, ndim: int, shape: str, what: str = "a cache") -> None:
    """Refuse a cache of another rank, empty, without memory, or with elements that share memory.

    Args:
        name: the layer's.
        cache: the cache; anything.
        ndim: its rank.
        shape: its shape in words, for the error.
        what: what it is, for the error.

    Raises:
        LayerError: it is refused.
    """
    if not isinstance(cache, Tensor) or (is_plain(cache) and cache.ndim != ndim):
        got = list(cache.shape) if isinstance(cache, Tensor) else type(cache).__name__
        raise LayerError("LayerRef", f"{what} of {name!r} is misshapen", expected=shape, got=got)
    if not is_dense(cache) or cache.is_meta:
        raise LayerError(
            "LayerRef",
            f"{what} of {name!r} has no memory to write to",
            expected="a dense tensor on the CPU or a GPU",
            got=described(cache, where=True),
            hint="pass a dense tensor with its own memory; resolve_conj() and resolve_neg() "
            "make one",
        )
    if 0 in cache.shape or overlaps_itself(cache):
        shares = "has overlapping elements, for example from expand()"
        problem = "is empty" if 0 in cache.shape else shares
        raise LayerError(
            "LayerRef",
            f"{what} of {name!r} {problem}",
            expected="distinct memory for every row",
            got=f"shape {list(cache.shape)}, strides {list(cache.stride())}",
            hint="pass a tensor whose elements are distinct in memory",
        )


def check_offsets(layer: str, caches: list[Tensor], *tables: Tensor) -> list[Tensor]:
    """Return the tables of offsets as int64 on the caches' device, once they are checked.

    Args:
        layer: its name, for errors.
        caches: of keys and of values, ``[num_blocks, block_numel]`` each.
        tables: int ``[block_size, num_kv_heads, head_size]`` for each cache.

    Raises:
        LayerError: a cache or table is misshapen, or an offset is outside the block or named twice.
            Two caches that are one memory share its offsets.
    """
    for cache in caches:
        check_cache(layer, cache, 2, "[num_blocks, block_numel]")
        if cache.stride(1) != 1 and cache.shape[1] > 1:
            raise LayerError(
                "LayerRef",
                f"the elements of a block of {layer!r} are not contiguous",
                expected="stride 1 in the last dimension",
                got=list(cache.stride()),
            )
    if any(not _is_table(table) or table.shape[:2] != tables[0].shape[:2] for table in tables):
        raise LayerError(
            "LayerRef",
            f"the offset tables of {layer!r} are misshapen",
            expected="int [block_size, num_kv_heads, head_size] each",
            got=[described(table, where=True) for table in tables],
        )
    flat = [table.reshape(-1).to("cpu", torch.int64) for table in tables]
    inside = all(
        bool(((part >= 0) & (part < cache.shape[1])).all())
        for part, cache in zip(flat, caches, strict=True)
    )
    same = caches[0].data_ptr() == caches[1].data_ptr()
    together = [torch.cat(flat)] if same else flat
    if not inside or any(part.unique().numel() != part.numel() for part in together):
        raise LayerError(
            "LayerRef",
            f"the offset tables of {layer!r} leave the block or name an element twice",
            expected=f"distinct offsets in [0, {caches[0].shape[1]})",
            got=f"offsets up to {max(int(part.max()) for part in flat)}",
        )
    return [table.to(caches[0].device, torch.int64) for table in tables]


def _is_table(table: object) -> bool:
    """Return whether ``table`` is a dense tensor of ints in three dimensions."""
    if not isinstance(table, Tensor) or not is_plain(table) or table.is_meta:
        return False
    return table.ndim == 3 and table.dtype in _INTS
