"""Number formats of caches, worked out without the library.

The oracle must not depend on the code under test: 8-bit codes are found here by searching a
table that is built from the format's definition, not by torch's cast.
"""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Sequence
from functools import cache
from typing import Final

import attrs
import torch
from torch import Tensor

#: Exponent bits, mantissa bits, bias, and the first code that is no finite number.
_FP8: Final = {
    torch.float8_e4m3fn: (4, 3, 7, 0x7F),
    torch.float8_e5m2: (5, 2, 15, 0x7C),
}

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen
class NumberFormat:
    """The number format of a layer's rows.

    Attributes:
        name: for test ids.
        dtype: the dtype of stored elements.
        kv_dtype: the argument of ``LayerRef``.
        scaling: ``"none"``, ``"tensor"`` (one number), ``"head"`` (one per KV head) or ``"row"``
            (one per row and KV head, which lie beside the rows).
        raw: True if the cache tensor is plain uint8, as engines allocate 8-bit caches.
    """

    name: str
    dtype: torch.dtype
    kv_dtype: str = "auto"
    scaling: str = "none"
    raw: bool = False

    @property
    def word(self) -> torch.dtype:
        """The integer dtype of one stored element."""
        return _WORDS[self.dtype.itemsize]

    @property
    def quantised(self) -> bool:
        """True for 8-bit formats."""
        return self.dtype.itemsize == 1

    def encode(self, rows: Tensor, scales: Sequence[float]) -> list[list[int]]:
        """Return the words that a cache holds after ``rows`` were written: one list per row.

        Rows in the format's own dtype are stored as they are; for an 8-bit format others are
        divided by the scale of their head, and rounded to the nearest code.

        Args:
            rows: ``[num_rows, num_heads, size]`` on the host, any dtype that may be staged.
            scales: one number per head.
        """
        if rows.dtype is self.dtype or not self.quantised:
            stored = rows.to(self.dtype).contiguous().view(self.word)
            return [row.reshape(-1).tolist() for row in stored]
        code = encode_int8 if self.dtype is torch.int8 else _fp8_encoder(self.dtype)
        return [
            [code(float32(x / scales[head])) for head, values in enumerate(row) for x in values]
            for row in rows.to(torch.float32).tolist()
        ]

    def encode_scaled(self, rows: Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """Return codes and scales of ``rows`` with their own scales: one list per row each.

        A head's scale is its largest finite magnitude over the format's largest number, at least
        1e-6.

        Args:
            rows: ``[num_rows, num_heads, size]`` on the host, floating.
        """
        limit = 127.0 if self.dtype is torch.int8 else _fp8_encoder(self.dtype).largest
        code = encode_int8 if self.dtype is torch.int8 else _fp8_encoder(self.dtype)
        codes, scales = [], []
        for row in rows.to(torch.float32).tolist():
            largest = [max((abs(x) for x in h if math.isfinite(x)), default=0.0) for h in row]
            scales.append([max(float32(top / limit), float32(1e-6)) for top in largest])
            heads = zip(row, scales[-1], strict=True)
            codes.append([code(float32(x / scale)) for values, scale in heads for x in values])
        return codes, scales

    def decode(self, words: Sequence[int], scales: Sequence[float]) -> list[list[float]]:
        """Decode stored words to the numbers that they mean: ``[num_heads][size]`` floats.

        ``scales``, one per head, count for 8-bit formats alone.
        """
        size = len(words) // len(scales)
        if self.dtype in _FP8:
            flat = [_fp8_value(self.dtype, word) for word in words]
        else:
            flat = torch.tensor(words, dtype=self.word).view(self.dtype).double().tolist()
        heads = [flat[head * size : (head + 1) * size] for head in range(len(scales))]
        if not self.quantised:
            return heads
        return [[x * scale for x in head] for head, scale in zip(heads, scales, strict=True)]


#: Rows of double precision. They are moved like all others; attention over them is not promised.
WIDE: Final = NumberFormat("fp64", torch.float64)

FORMATS: Final[dict[str, NumberFormat]] = {
    fmt.name: fmt
    for fmt in (
        NumberFormat("fp16", torch.float16),
        NumberFormat("bf16", torch.bfloat16),
        NumberFormat("fp32", torch.float32),
        NumberFormat("fp8_e4m3", torch.float8_e4m3fn, "auto", "none"),
        NumberFormat("fp8_e4m3-tensor", torch.float8_e4m3fn, "fp8_e4m3", "tensor", raw=True),
        NumberFormat("fp8_e4m3-head", torch.float8_e4m3fn, "fp8", "head"),
        NumberFormat("fp8_e5m2-tensor", torch.float8_e5m2, "fp8_e5m2", "tensor"),
        NumberFormat("fp8_e5m2-head", torch.float8_e5m2, "fp8_e5m2", "head", raw=True),
        NumberFormat("int8-tensor", torch.int8, "int8", "tensor"),
        NumberFormat("int8-head", torch.int8, "int8", "head", raw=True),
        NumberFormat("fp8_e4m3-row", torch.float8_e4m3fn, "fp8_e4m3", "row", raw=True),
        NumberFormat("int8-row", torch.int8, "auto", "row"),
    )
}


def float32(value: float) -> float:
    """Round to the nearest float32: the one rounding of a sum, product or quotient of two.

    A number that is too large becomes an infinity of its sign.
    """
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def encode_int8(value: float) -> int:
    """Return the byte of the nearest int8, ties to even, saturating, infinities included.

    Raises:
        ValueError: the number is NaN.
    """
    if math.isinf(value):
        return 127 if value > 0 else 128
    return max(-128, min(127, round(value))) & 0xFF


def _fp8_value(dtype: torch.dtype, code: int) -> float:
    """Compute a number from its code, 0 to 255, by the definition of the format.

    NaN, infinity included.
    """
    _, mantissa_bits, bias, limit = _FP8[dtype]
    magnitude = code & 0x7F
    sign = -1.0 if code & 0x80 else 1.0
    if magnitude >= limit:
        infinite = dtype is torch.float8_e5m2 and magnitude == limit
        return sign * math.inf if infinite else math.nan
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


@cache
def _fp8_encoder(dtype: torch.dtype) -> _Fp8Encoder:
    """Return the encoder of a format, made once."""
    return _Fp8Encoder(dtype)


class _Fp8Encoder:
    """Encoder to the nearest code: ties to even, saturating; NaN stays NaN."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._values = [_fp8_value(dtype, code) for code in range(_FP8[dtype][3])]
        self.largest = self._values[-1]

    def __call__(self, value: float) -> int:
        if math.isnan(value):
            return 0x7F
        sign = 0x80 if math.copysign(1.0, value) < 0 else 0
        magnitude, values = abs(value), self._values
        if magnitude >= values[-1]:
            return sign | (len(values) - 1)
        above = bisect.bisect_right(values, magnitude)
        below = above - 1
        gap = (magnitude - values[below]) - (values[above] - magnitude)
        up = gap > 0 or (gap == 0 and above % 2 == 0)
        return sign | (above if up else below)
