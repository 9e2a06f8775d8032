"""``LayerRef``: one layer's place in the paged KV cache.

A layer is one or two *planes* (K and V, or one latent). A plane knows where
the row of a slot lies, and nothing else; everything that moves bytes speaks
of planes, so a new kind of cache is a new way to build one.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from torch import Tensor

from .errors import LayerError
from .formats import RowFormat, row_format, words


@attrs.frozen(eq=False)
class Plane:
    """One tensor that holds one part of a layer's rows.

    Attributes:
        part: ``"key"``, ``"value"`` or ``"latent"``.
        cells: integer view of the cache, any strides: ``[num_blocks, block_size, *row_shape]``,
            or ``[num_blocks, block_numel]`` with ``offsets``.
        row_shape: shape of one row, such as ``(num_kv_heads, head_size)``.
        block_size: slots per block.
        format: number format of the stored elements.
        offsets: int64 ``[block_size, *row_shape]``: where in its block each element
            of a row lies; None where rows are plain strided views.
    """

    part: str
    cells: Tensor
    row_shape: tuple[int, ...]
    block_size: int
    format: RowFormat
    offsets: Tensor | None = None

    @property
    def num_slots(self) -> int:
        """Slots in the whole cache: blocks x block size."""
        return self.cells.shape[0] * self.block_size

    @property
    def row_bytes(self) -> int:
        """Bytes one row takes."""
        return math.prod(self.row_shape) * self.cells.dtype.itemsize

    def index(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Index into ``cells`` that selects ``[num_rows, *row_shape]`` for int64 ``slots``."""
        block, offset = slots // self.block_size, slots % self.block_size
        if self.offsets is None:
            return block, offset
        return block.view(-1, *[1] * len(self.row_shape)), self.offsets[offset]


def _shape(cache: Tensor | None) -> str:
    return "None" if cache is None else f"{cache.dtype}{list(cache.shape)}"


@attrs.frozen(eq=False)
class LayerRef:
    """One layer: immutable, compared by identity, known to its manager by ``name``.

    Args:
        name: unique among the manager's layers.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``, any strides,
            fp16, bf16, fp32, fp64 or an 8-bit format. Written in place, never copied.
        value_cache: like ``key_cache``; its head size may differ. None for latent rows.
        group: layers of one group share one slot mapping.
        k_scale: for 8-bit caches, stored = value / scale: a number, or a tensor of one
            or ``num_kv_heads`` elements.
        v_scale: likewise for V.
        kv_dtype: ``"auto"``, ``"fp8"`` (= ``"fp8_e4m3"``), ``"fp8_e5m2"``, ``"int8"``, or the
            cache's own floating dtype by name.
        key_offsets: for a cache whose rows are no strided view, such as a CPU kernel's
            packing: int ``[block_size, num_kv_heads, head_size]``, the element of a block
            that holds each part of the row at each block offset. Both caches are then
            ``[num_blocks, block_numel]``, and may be the same tensor.
        value_offsets: likewise for V; the two come together.

    Attributes:
        planes: what the layer is made of: K and V, or one latent.

    Raises:
        LayerError: shapes, dtypes, devices, scales or offsets do not fit together.
    """

    name: str
    key_cache: Tensor = attrs.field(repr=_shape)
    value_cache: Tensor | None = attrs.field(repr=_shape)
    group: str = attrs.field(default="default", kw_only=True)
    k_scale: float | Tensor | None = attrs.field(default=None, kw_only=True, repr=False)
    v_scale: float | Tensor | None = attrs.field(default=None, kw_only=True, repr=False)
    kv_dtype: str = attrs.field(default="auto", kw_only=True)
    key_offsets: Tensor | None = attrs.field(default=None, kw_only=True, repr=False)
    value_offsets: Tensor | None = attrs.field(default=None, kw_only=True, repr=False)
    planes: tuple[Plane, ...] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        for what, value in (("name", self.name), ("group", self.group)):
            if not isinstance(value, str) or not value:
                raise LayerError("LayerRef", f"{what} must be a non-empty str", got=repr(value))
        planes = _build_planes(self)
        first = planes[0].cells
        for plane in planes[1:]:
            if (plane.cells.dtype, plane.cells.device) != (first.dtype, first.device):
                raise LayerError(
                    "LayerRef",
                    f"the caches of {self.name!r} differ in dtype or device",
                    expected=_shape(self.key_cache),
                    got=_shape(self.value_cache),
                )
            if plane.offsets is None and plane.cells.data_ptr() == first.data_ptr():
                raise LayerError(
                    "LayerRef",
                    f"key_cache and value_cache of {self.name!r} are the same memory",
                    expected="distinct memory for K and V",
                    got="one tensor twice",
                )
        object.__setattr__(self, "planes", planes)

    def __reduce__(self) -> tuple[object, ...]:
        # Planes are views of the caches; taken apart they would be memory of their own.
        fields = {f.name: getattr(self, f.name) for f in attrs.fields(LayerRef) if f.init}
        return (_rebuild, (fields,))

    @classmethod
    def latent(
        cls,
        name: str,
        cache: Tensor,
        *,
        group: str = "default",
        scale: float | Tensor | None = None,
        kv_dtype: str = "auto",
    ) -> LayerRef:
        """A multi-head-latent-attention layer: one latent per token.

        Args:
            name: unique among the manager's layers.
            cache: ``[num_blocks, block_size, latent_size]``, any strides.
            group: layers of one group share one slot mapping.
            scale: for 8-bit caches, one number.
            kv_dtype: as for ``LayerRef``.
        """
        return cls(name, cache, None, group=group, k_scale=scale, kv_dtype=kv_dtype)

    @property
    def device(self) -> torch.device:
        """Where the caches are."""
        return self.key_cache.device

    @property
    def is_latent(self) -> bool:
        """True for an MLA layer."""
        return len(self.planes) == 1

    @property
    def num_slots(self) -> int:
        """Slots in this layer's cache."""
        return self.planes[0].num_slots

    @property
    def row_bytes(self) -> int:
        """Bytes one token takes in this layer, K and V together."""
        return sum(plane.row_bytes for plane in self.planes)


def _rebuild(fields: dict[str, Any]) -> LayerRef:
    return LayerRef(**fields)


def _build_planes(ref: LayerRef) -> tuple[Plane, ...]:
    """The planes of a layer that is being built; raises LayerError on any misfit."""
    if (ref.key_offsets is None) != (ref.value_offsets is None):
        raise LayerError("LayerRef", f"{ref.name!r} needs both offset tables or none")
    if ref.value_cache is None:
        if ref.v_scale is not None or ref.key_offsets is not None:
            raise LayerError("LayerRef", f"{ref.name!r} is latent: it has one plane, one scale")
        _check_cache(ref.name, ref.key_cache, 3, "[num_blocks, block_size, latent_size]")
        return (_plane("latent", ref, ref.key_cache, ref.k_scale),)
    if ref.key_offsets is not None and ref.value_offsets is not None:
        tables = _check_offsets(ref, ref.key_offsets, ref.value_offsets)
        return (
            _plane("key", ref, ref.key_cache, ref.k_scale, tables[0]),
            _plane("value", ref, ref.value_cache, ref.v_scale, tables[1]),
        )
    for cache in (ref.key_cache, ref.value_cache):
        shape = "[num_blocks, block_size, num_kv_heads, head_size]"
        _check_cache(ref.name, cache, 4, shape)
    if ref.key_cache.shape[:3] != ref.value_cache.shape[:3]:
        raise LayerError(
            "LayerRef",
            f"key_cache and value_cache of {ref.name!r} differ in blocks, block size or heads",
            expected=list(ref.key_cache.shape[:3]),
            got=list(ref.value_cache.shape[:3]),
        )
    return (
        _plane("key", ref, ref.key_cache, ref.k_scale),
        _plane("value", ref, ref.value_cache, ref.v_scale),
    )


def _plane(
    part: str,
    ref: LayerRef,
    cache: Tensor,
    scale: float | Tensor | None,
    offsets: Tensor | None = None,
) -> Plane:
    if scale is not None and (
        not isinstance(scale, (int, float, Tensor)) or isinstance(scale, bool)
    ):
        raise LayerError("LayerRef", "a scale must be a number or a tensor", got=repr(scale))
    shape = tuple((cache if offsets is None else offsets).shape)
    block_size, row_shape = (shape[1], shape[2:]) if offsets is None else (shape[0], shape[1:])
    heads = row_shape[0] if len(row_shape) == 2 else None
    number = row_format(ref.name, cache, ref.kv_dtype, scale, heads)
    return Plane(part, words(cache), row_shape, block_size, number, offsets)


def _check_cache(name: str, cache: Tensor, ndim: int, shape: str) -> None:
    if not isinstance(cache, Tensor) or cache.ndim != ndim:
        got = list(cache.shape) if isinstance(cache, Tensor) else type(cache).__name__
        raise LayerError("LayerRef", f"a cache of {name!r} is misshapen", expected=shape, got=got)
    strides = zip(cache.stride(), cache.shape, strict=True)
    aliased = any(stride == 0 and size > 1 for stride, size in strides)
    if aliased or 0 in cache.shape:
        raise LayerError(
            "LayerRef",
            f"a cache of {name!r} is {'an expanded view' if aliased else 'empty'}",
            expected="distinct memory for every row",
            got=f"shape {list(cache.shape)}, strides {list(cache.stride())}",
        )


def _check_offsets(ref: LayerRef, *tables: Tensor) -> list[Tensor]:
    """The tables as int64 on the caches' device, inside the block and one-to-one."""
    caches = [cache for cache in (ref.key_cache, ref.value_cache) if cache is not None]
    for cache in caches:
        _check_cache(ref.name, cache, 2, "[num_blocks, block_numel]")
        if cache.stride(1) != 1 and cache.shape[1] > 1:
            raise LayerError(
                "LayerRef",
                f"the elements of a block of {ref.name!r} are not contiguous",
                expected="stride 1 in the last dimension",
                got=list(cache.stride()),
            )
    if any(table.ndim != 3 or table.shape[:2] != tables[0].shape[:2] for table in tables):
        raise LayerError(
            "LayerRef",
            f"the offset tables of {ref.name!r} are misshapen",
            expected="[block_size, num_kv_heads, head_size] each",
            got=[list(table.shape) for table in tables],
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
            f"the offset tables of {ref.name!r} leave the block or name an element twice",
            expected=f"distinct offsets in [0, {caches[0].shape[1]})",
            got=f"offsets up to {max(int(part.max()) for part in flat)}",
        )
    return [table.to(ref.device, torch.int64) for table in tables]
