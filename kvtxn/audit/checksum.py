"""Checksums of rows and states: 64 bits, keyed, over all bytes of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache_planes import Plane
from .digest import RESERVED, Key
from .groups import WORD_BYTES


def checksum(key: Key, rows: Tensor, part: int) -> Tensor:
    """Return a keyed sum over the bytes of rows, int64 ``[num_rows]``.

    Each 8 bytes are permuted with the key and their offset. A change within 8 bytes is always
    seen; another one is missed with a chance of about 2^-64.

    Args:
        key: the engine's key.
        rows: ``[num_rows, ...]``, any dtype.
        part: the number of the plane; equal bytes in different planes have different checksums.
    """
    raw = rows.reshape(len(rows), -1).contiguous().view(torch.uint8)
    padded = torch.nn.functional.pad(raw, (0, -raw.shape[1] % WORD_BYTES))
    words = padded.view(torch.int64)
    places = torch.arange(words.shape[1], device=words.device) * RESERVED + part
    return key.permute(words + key.permute(places)).sum(1)


def has_nan(plane: Plane) -> bool:
    """Tell whether the format of a plane has a NaN with which dead rows can be filled."""
    return plane.format.dtype.is_floating_point
