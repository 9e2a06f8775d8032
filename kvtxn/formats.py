"""``RowFormat``: the number format of a cache's rows, with encoding and decoding.

A row is quantised exactly once, when it is staged. From there on only bytes
move, as integer views, so NaN payloads, negative zero and 8-bit codes survive.
"""

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import Tensor

from .errors import LayerError

#: Integer dtype of the same width: byte-exact views of any cache dtype.
WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FP8: Final = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_PLAIN: Final = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATS}
KV_DTYPES: Final = ("auto", *_PLAIN, *_FP8, "int8")

#: The least scale that ``quantise`` computes, so that a head of zeros has a scale above 0.
_LEAST_SCALE: Final = 1e-6


def words(tensor: Tensor) -> Tensor:
    """Return the same memory as integers of the same width, with the same strides."""
    return tensor.view(WORDS[tensor.dtype.itemsize])


@attrs.frozen(eq=False)
class RowFormat:
    """The number format of one plane.

    Attributes:
        dtype: the dtype of stored elements; caches may hold it as uint8.
        scale: stored = value / scale, as a float32 tensor that broadcasts against
            ``[num_rows, *row_shape]``; None for formats that are not quantised.
        scales_in: set instead of ``scale`` if every row has its own scale per head: the number
            of the layer's plane that holds them.
    """

    dtype: torch.dtype
    scale: Tensor | None = None
    scales_in: int | None = None

    @property
    def quantised(self) -> bool:
        """True for the 8-bit formats."""
        return self.scale is not None or self.scales_in is not None

    def encode(self, rows: Tensor) -> Tensor:
        """Return rows as the cache stores them, in ``dtype``; for per-row scales see ``quantise``.

        Rows that have the cache's dtype already are returned as they are, by reference, 8-bit
        codes included; quantising saturates (NaN stays NaN in fp8).
        """
        if rows.dtype is self.dtype:
            return rows
        if self.scale is None:
            return rows.to(self.dtype)
        return self._codes(rows.to(torch.float32) / self.scale)

    def quantise(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Compute a scale for each row and head, and return the codes and the scales.

        The largest finite magnitude of a head becomes the largest code; infinities and NaN do
        not change a scale, and saturate as in ``encode``.

        Args:
            rows: ``[num_rows, num_kv_heads, head_size]`` or, of latents, ``[num_rows, size]``.

        Returns:
            Codes of that shape, and float32 ``[num_rows, num_kv_heads]`` (latents: ``[num_rows,
            1]``).
        """
        numbers = rows.to(torch.float32)
        largest = torch.where(numbers.isfinite(), numbers.abs(), 0.0).amax(-1, keepdim=True)
        # Divide by a tensor: by a Python number, GPUs multiply by its reciprocal, rounding twice.
        scales = (largest / torch.full_like(largest, self._limit)).clamp(min=_LEAST_SCALE)
        return self._codes(numbers / scales), scales if rows.ndim == 2 else scales.squeeze(-1)

    @property
    def _limit(self) -> float:
        """The largest finite number of the 8-bit format."""
        return 127.0 if self.dtype is torch.int8 else torch.finfo(self.dtype).max

    def _codes(self, scaled: Tensor) -> Tensor:
        """Round scaled numbers to 8-bit codes: nearest, ties to even, saturating."""
        if self.dtype is torch.int8:
            return scaled.round().clamp(-128, 127).to(torch.int8)
        return scaled.clamp(-self._limit, self._limit).to(self.dtype)

    def decode(self, stored: Tensor, scales: Tensor | None = None) -> Tensor:
        """Return the numbers that stored rows mean, in float32; undoes ``encode`` up to rounding.

        Args:
            stored: ``[num_rows, *row_shape]``, codes or words.
            scales: for rows with their own scales, float32 ``[num_rows, num_kv_heads]``.
        """
        values = stored.view(self.dtype).to(torch.float32)
        if scales is not None:
            return values * scales.view(*values.shape[:-1], 1)
        return values if self.scale is None else values * self.scale


def row_format(
    layer: str,
    cache: Tensor,
    kv_dtype: str,
    scale: float | Tensor | None,
    heads: int | None,
    scales_in: int | None = None,
) -> RowFormat:
    """Return the format of a cache tensor.

    Args:
        layer: the layer's name, for messages.
        cache: the cache; 8-bit caches may come as uint8 or as their own dtype.
        kv_dtype: ``"auto"`` (the tensor's own dtype), or one of ``KV_DTYPES``.
        scale: a number or one number per KV head, for 8-bit formats only; None is 1.
        heads: number of KV heads, None for latent rows.
        scales_in: the plane with the scales, if every row has its own; ``scale`` is None then.

    Raises:
        LayerError: dtype, ``kv_dtype`` and scale do not go together.
    """
    dtype = _stored_dtype(layer, cache, kv_dtype)
    where = scale.device if isinstance(scale, Tensor) else "cpu"  # whatever torch's default is
    if dtype in _FLOATS:
        given = scale is not None and not bool((torch.as_tensor(scale, device=where) == 1).all())
        if given or scales_in is not None:
            raise LayerError(
                "LayerRef",
                f"{layer!r} has a scale, but {dtype} rows are not quantised",
                expected="no scale",
                got=scale if given else "one of each row",
                hint="leave the scale out, or set kv_dtype to the 8-bit format of the cache",
            )
        return RowFormat(dtype)
    if scales_in is not None:
        return RowFormat(dtype, None, scales_in)
    factor = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=where)
    if not bool((factor.isfinite() & (factor > 0)).all()):
        raise LayerError(
            "LayerRef",
            f"a scale of {layer!r} is not valid",
            expected="positive, finite numbers",
            got=factor.tolist(),
        )
    factor = factor.to(cache.device)
    if factor.numel() == 1:
        return RowFormat(dtype, factor.reshape(()))
    if heads is None or factor.numel() != heads:
        raise LayerError(
            "LayerRef",
            f"the scale of {layer!r} has the wrong shape",
            expected="one number"
            + (f", [{heads}]" if heads else "")
            + ", or one of each row: the cache's shape without its last dimension",
            got=list(factor.shape),
        )
    return RowFormat(dtype, factor.reshape(heads, 1))


def _stored_dtype(layer: str, cache: Tensor, kv_dtype: str) -> torch.dtype:
    """Return the dtype that ``kv_dtype`` gives the elements of ``cache``.

    Raises:
        LayerError: ``kv_dtype`` is unknown, or the cache has another dtype or one not known.
    """
    if not isinstance(kv_dtype, str) or kv_dtype not in KV_DTYPES:
        raise LayerError(
            "LayerRef",
            f"kv_dtype of {layer!r} is unknown",
            expected=f"one of {', '.join(map(repr, KV_DTYPES))}",
            got=repr(kv_dtype),
        )
    known = (*_FLOATS, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    if kv_dtype == "auto":
        if cache.dtype not in (*known, torch.uint8):
            raise LayerError(
                "LayerRef",
                f"the cache of {layer!r} has a dtype that kvtxn does not know",
                expected=f"one of {', '.join(map(str, (*known, torch.uint8)))}",
                got=cache.dtype,
            )
        if cache.dtype is torch.uint8:
            raise LayerError(
                "LayerRef",
                f"the cache of {layer!r} is {cache.dtype}, which could be any 8-bit format",
                expected="kv_dtype of the format",
                got="auto",
                hint="name the format: kv_dtype='fp8_e4m3', 'fp8_e5m2' or 'int8'",
            )
        return cache.dtype
    dtype = _PLAIN.get(kv_dtype) or _FP8.get(kv_dtype, torch.int8)
    if cache.dtype not in ((dtype,) if kv_dtype in _PLAIN else (dtype, torch.uint8)):
        raise LayerError(
            "LayerRef",
            f"kv_dtype {kv_dtype!r} of {layer!r} does not fit its cache",
            expected=dtype if kv_dtype in _PLAIN else f"{dtype} or torch.uint8",
            got=cache.dtype,
        )
    return dtype
