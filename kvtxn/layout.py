"""The rows of a window: which belong to which request, and which are drafts.

Rows lie request by request: ``settled`` rows first, then the request's draft
rows. A layout is a plan: built once per shape on the host, cached, and used
on the device without ever asking it anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import attrs
import torch
from torch import Tensor

from .errors import AcceptanceError, SlotMappingError

if TYPE_CHECKING:
    from .tree import Tree

#: One int for every request, or one per request.
Lengths = int | Sequence[int] | Tensor

#: dtypes of accepted counts, paths and token ids.
SIGNED: Final = (torch.int64, torch.int32, torch.int16, torch.int8)


def to_device(values: Sequence[int] | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of host values on ``device``, without waiting for the device.

    Pinned memory makes the copy asynchronous; torch's caching host allocator
    keeps it alive until the copy is done.
    """
    host = torch.as_tensor(values, dtype=dtype, device="cpu")  # whatever torch's default device
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


@attrs.frozen(eq=False)
class RowLayout:
    """A window's shape, on the host and on the device.

    Attributes:
        draft_len: draft rows per request.
        settled: settled rows per request.
        starts: the first row of each request, and one past the last: ``num_requests + 1``.
        num_rows: rows of the window.
        has_settled: whether any row is settled.
        request: int64 ``[num_rows]``, the request of each row.
        position: int64 ``[num_rows]``, 0, 1, ... for draft rows, -1 for settled rows.
        is_draft: bool ``[num_rows]``.
        tree: the draft trees; None where the drafts are plain sequences.
    """

    draft_len: tuple[int, ...]
    settled: tuple[int, ...]
    starts: tuple[int, ...]
    request: Tensor
    position: Tensor
    is_draft: Tensor
    tree: Tree | None = None
    num_rows: int = attrs.field(init=False)
    has_settled: bool = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "num_rows", self.starts[-1])
        object.__setattr__(self, "has_settled", any(self.settled))

    @classmethod
    def build(
        cls, draft_len: tuple[int, ...], settled: tuple[int, ...], device: torch.device
    ) -> RowLayout:
        """Lay out the rows of ``len(draft_len)`` requests."""
        lengths = [known + drafts for known, drafts in zip(settled, draft_len, strict=True)]
        request = [r for r, length in enumerate(lengths) for _ in range(length)]
        position = [
            max(-1, i - known)
            for known, length in zip(settled, lengths, strict=True)
            for i in range(length)
        ]
        where = to_device(position, device, torch.int64)
        return cls(
            draft_len,
            settled,
            tuple(accumulate(lengths, initial=0)),
            to_device(request, device, torch.int64),
            where,
            where >= 0,
        )

    @property
    def num_requests(self) -> int:
        """Requests of the window."""
        return len(self.draft_len)

    def sources(self, accepted: Tensor) -> Tensor | None:
        """By place, the row that a commit puts there, or -1; None where no row moves.

        Args:
            accepted: as for ``kept``; only paths move rows.
        """
        if accepted.ndim != 2:
            return None
        assert self.tree is not None  # whoever made a path of it has looked
        return self.tree.sources(self, accepted)

    def kept(self, accepted: Tensor) -> Tensor:
        """The draft places that ``accepted`` fills, bool ``[num_rows]``.

        Args:
            accepted: int ``[num_requests]`` counts, which clamp to ``[0, draft_len]`` by
                comparison, or bool ``[num_rows]``; what it says of settled rows is ignored. For
                a tree, int ``[num_requests, columns]``, paths.
        """
        sources = self.sources(accepted)
        if sources is not None:
            return sources >= 0
        if accepted.dtype is torch.bool:
            return accepted & self.is_draft
        return self.is_draft & (self.position < accepted[self.request])


def as_lengths(what: str, value: Lengths, num_requests: int | None) -> tuple[int, ...]:
    """``value`` as one non-negative int per request; an int counts for every request.

    Raises:
        SlotMappingError: not ints, negative, or not one per request.
    """
    if type(value) is int and value >= 0:  # the usual case, and the quick one
        return (value,) * (1 if num_requests is None else num_requests)
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        value = torch.as_tensor(value, device="cpu")  # numpy: its __index__ is not meant
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.is_floating_point() or value.dtype is torch.bool:
            raise SlotMappingError(
                "window",
                f"{what} is not a host tensor of ints",
                expected="ints on the host",
                got=f"{value.dtype} on {value.device}",
                hint=f"pass {what} as a list: the shape of a window is the host's to know",
            )
        if value.ndim > 1:
            raise _bad_lengths(what, "an int or one int per request", value.tolist())
        value = int(value) if value.ndim == 0 else value.tolist()
    if isinstance(value, bool):
        value = (value,)
    if hasattr(value, "__index__"):
        count = num_requests if num_requests is not None else 1
        return (_length(what, value.__index__()),) * count
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise _bad_lengths(what, "an int or one int per request", repr(value))
    lengths = tuple(_length(what, item) for item in value)
    if num_requests is not None and len(lengths) != num_requests:
        raise _bad_lengths(what, f"{num_requests} ints, one per request", len(lengths))
    return lengths


def _length(what: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 0:
        raise _bad_lengths(what, "ints of at least 0", repr(value))
    return int(value.__index__())


def _bad_lengths(what: str, expected: str, got: object) -> SlotMappingError:
    return SlotMappingError(
        "window",
        f"{what} is not valid",
        expected=expected,
        got=got,
        hint=f"pass {what} as one int for all requests, or as one per request",
    )


def as_accepted(accepted: object, layout: RowLayout, device: torch.device) -> Tensor:
    """What ``commit`` was given, as counts ``[num_requests]`` or a bool mask ``[num_rows]``.

    Host values (ints, sequences, CPU tensors) are checked and
    refused when out of range. Device tensors are checked by shape and pass unread: comparing a
    count with draft positions, as ``RowLayout.kept`` does, clamps it.

    Raises:
        AcceptanceError: wrong shape, dtype or, on the host, range.
    """
    if isinstance(accepted, Tensor) and not accepted.is_cpu:
        if (
            accepted.dtype in SIGNED
            and accepted.shape == (layout.num_requests,)
            and accepted.device == device
        ):
            return accepted
        _check_shape(accepted, layout)
        if accepted.device != device:
            raise AcceptanceError(
                "commit", "accepted is on another device", expected=device, got=accepted.device
            )
        return accepted
    return to_device(host := _host_accepted(accepted, layout), device, host.dtype)


def _host_accepted(accepted: object, layout: RowLayout) -> Tensor:
    """Counts or a mask on the host, in range; an int counts for every request."""
    if hasattr(accepted, "__array__") and not isinstance(accepted, Tensor):
        accepted = torch.as_tensor(accepted, device="cpu")
    if hasattr(accepted, "__index__") and not isinstance(accepted, (bool, Tensor)):
        accepted = [accepted.__index__()] * layout.num_requests
    try:
        host = torch.as_tensor(accepted, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        host = None
    if host is None or host.layout is not torch.strided or isinstance(accepted, (bool, str)):
        raise AcceptanceError(
            "commit",
            "accepted is not valid",
            expected="an int, one int per request, or bool [num_rows]",
            got=repr(accepted),
        )
    if host.numel() == 0 and host.is_floating_point():  # torch's guess for an empty list
        host = host.to(torch.int64)
    if host.ndim == 0 and isinstance(accepted, Tensor) and host.dtype is not torch.bool:
        host = host.expand(layout.num_requests)
    _check_shape(host, layout)
    if host.dtype is torch.bool:
        return host
    counts = [int(count) for count in host.tolist()]
    for request, (count, drafts) in enumerate(zip(counts, layout.draft_len, strict=True)):
        if not 0 <= count <= drafts:
            raise AcceptanceError(
                "commit",
                f"accepted count of request {request} is out of range",
                expected=f"0 to {drafts}",
                got=count,
                hint="count accepted draft rows only, without the bonus token",
            )
    return torch.tensor(counts, dtype=torch.int64, device="cpu")


def _check_shape(accepted: Tensor, layout: RowLayout) -> None:
    mask = accepted.dtype is torch.bool
    expected = [layout.num_rows] if mask else [layout.num_requests]
    if accepted.is_floating_point() or accepted.is_complex() or list(accepted.shape) != expected:
        raise AcceptanceError(
            "commit",
            "accepted has the wrong shape or dtype",
            expected=f"int [{layout.num_requests}] or bool [{layout.num_rows}]",
            got=f"{accepted.dtype} {list(accepted.shape)}",
            hint="one count of accepted draft rows per request, or one bool per row",
        )
