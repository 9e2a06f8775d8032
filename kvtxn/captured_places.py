"""Make the fixed tensors of windows over a captured forward, or check those that a caller gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from .errors import LayerError, SlotMappingError
from .host_values import described, is_dense, is_plain
from .layers import LayerRef, Plane
from .memory_overlap import begin, end, near_pairs, overlap, overlaps_itself
from .recurrence import RowPart
from .row_io import LayerRows

#: Bytes between the starts of two planes' rows are a multiple of this.
_ALIGNED: Final = 256


def check_slots(slots: object, groups: int, device: torch.device) -> None:
    """Refuse, with a SlotMappingError, slot mappings that launches could not read in place.

    They are int64 ``[groups, n]`` on the device, the last dimension contiguous.
    """
    if (
        isinstance(slots, Tensor)
        and slots.dtype is torch.int64
        and slots.ndim == 2
        and slots.shape[0] == groups
        and slots.stride(1) == 1
        and slots.device == device
    ):
        return
    got = described(slots, where=True)
    if isinstance(slots, Tensor) and is_plain(slots):
        got += f", strides {slots.stride()}"
    raise SlotMappingError(
        "captured_windows",
        "the slot mappings cannot be read in place",
        expected=f"int64 [{groups}, n] on {device}, one contiguous line for each group",
        got=got,
        hint="pass the buffer that the engine fills before each forward",
    )


def check_rows(refs: Sequence[LayerRef], rows: LayerRows, max_rows: int) -> None:
    """Refuse row storage that does not fit the layers.

    A layer has at least ``[max_rows, *row_shape]`` per part of ``LayerRef.kept``, in the part's
    dtype; of planes also its bits as integers of the same width.

    Raises:
        LayerError: a layer has no tensors, or tensors of another shape, dtype or device; or two
            rows share memory.
    """
    if not isinstance(rows, Mapping):
        raise LayerError(
            "captured_windows",
            "rows is not a mapping",
            expected="the tensors of each layer, by its name",
            got=type(rows).__name__,
            hint="pass CapturedRows.rows, or leave rows out",
        )
    for ref in refs:
        parts = rows.get(ref.name, ())
        if (
            not isinstance(parts, Sequence)
            or len(parts) != len(ref.kept)
            or not all(
                _fits(kept, part, max_rows, ref.device)
                for part, kept in zip(parts, ref.kept, strict=True)
            )
        ):
            shapes = ", ".join(
                f"{kept.format.dtype} {[max_rows, *kept.row_shape]}" for kept in ref.kept
            )
            raise LayerError(
                "captured_windows",
                f"the tensors given to hold the rows of layer {ref.name!r} do not fit the layer",
                expected=f"one tensor per {'part of a row' if ref.replay else 'plane'}: {shapes} "
                f"or more rows, on {ref.device}",
                got=[described(part, where=True) for part in parts]
                if isinstance(parts, Sequence)
                else described(parts, where=True),
                hint="size them by max_rows, in the dtype of the cache",
            )

    _check_distinct({name: rows[name] for name in (ref.name for ref in refs)}, max_rows)


def _check_distinct(rows: LayerRows, max_rows: int) -> None:
    """Refuse, with a LayerError, tensors in which two rows, or elements of a row, share memory.

    Rows behind the first ``max_rows`` are not looked at.
    """
    parts = [(part[:max_rows], name) for name, each in rows.items() for part in each]
    shared = next((name for part, name in parts if overlaps_itself(part)), None)
    if shared is None:
        pairs = near_pairs(parts)
        shared = next((f"{o} and {n}" for (one, o), (two, n) in pairs if overlap(one, two)), None)
    if shared is not None:
        raise LayerError(
            "captured_windows",
            f"rows given for layer {shared} share memory",
            expected="memory of its own for each row of each plane and layer",
            got="tensors that overlap, or that repeat an element",
            hint="materialise expanded tensors, and give each layer tensors of its own",
        )


def _fits(kept: Plane | RowPart, part: object, max_rows: int, device: torch.device) -> bool:
    """Tell whether a tensor has room for ``max_rows`` rows of a part, in its dtype and place."""
    dtypes = [kept.format.dtype]
    if isinstance(kept, Plane):
        dtypes.append(kept.cells.dtype)
    return (
        isinstance(part, Tensor)
        and is_dense(part)
        and part.ndim == 1 + len(kept.row_shape)
        and part.shape[0] >= max_rows
        and part.shape[1:] == kept.row_shape
        and part.dtype in dtypes
        and part.device == device
    )


def check_position(position: object, slots: Tensor, max_rows: int, device: torch.device) -> None:
    """Refuse, with a LayerError, a tensor of marks that windows could not fill.

    It is int64 ``[max_rows or more]``, contiguous, on the device, and shares no memory with the
    slots.
    """
    if (
        isinstance(position, Tensor)
        and is_plain(position)
        and position.dtype is torch.int64
        and position.ndim == 1
        and position.shape[0] >= max_rows
        and position.stride(0) == 1
        and position.device == device
        and (begin(position) >= end(slots) or begin(slots) >= end(position))
    ):
        return
    raise LayerError(
        "captured_windows",
        "position cannot hold the marks of draft rows",
        expected=f"int64, contiguous, [{max_rows}] or longer, on {device}, beside the slots",
        got=described(position, where=True),
        hint="pass the tensor that the captured forward reads, or leave position out",
    )


def rows_for(refs: Sequence[LayerRef], max_rows: int) -> LayerRows:
    """Allocate ``max_rows`` rows of every part of ``LayerRef.kept``, in one allocation.

    Returns:
        By layer, ``[max_rows, *row_shape]`` for each part, with any content.
    """
    every = [kept for ref in refs for kept in ref.kept]
    sizes = [-(-max_rows * kept.row_bytes // _ALIGNED) * _ALIGNED for kept in every]
    room = torch.empty(sum(sizes), dtype=torch.uint8, device=refs[0].device)
    parts = iter(room.split(sizes))
    return {
        ref.name: tuple(
            next(parts)[: max_rows * kept.row_bytes]
            .view(kept.format.dtype)
            .view(max_rows, *kept.row_shape)
            for kept in ref.kept
        )
        for ref in refs
    }
