"""The rows of a window: the request of each row, and whether it is a draft.

Rows lie request by request: ``settled`` rows first, then the request's draft
rows. A layout is a plan: it is built once per shape on the host and cached; the
device uses it without a question from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import attrs
import torch
from torch import Tensor

from .draft_tree import KnownParents, Tree, check_fit, per_request
from .errors import SlotMappingError
from .host_values import is_plain
from .host_values import to_device as to_device

#: One int for every request, or one per request.
Lengths = int | Sequence[int] | Tensor


@attrs.frozen(eq=False)
class RowLayout:
    """A window's shape, on the host and on the device.

    Attributes:
        draft_len: draft rows per request.
        settled: settled rows per request.
        starts: the first row of each request, then the number of rows: ``num_requests + 1`` ints.
        request: int64 ``[num_rows]``, the request of each row.
        position: int64 ``[num_rows]``, row positions: 0, 1, ... for drafts, -1 for settled rows.
        is_draft: bool ``[num_rows]``.
        tree: the draft trees; None where the drafts are plain sequences.
        num_requests: requests of the window.
        num_rows: rows of the window.
        has_settled: True if any row is settled.
        shortest: draft rows of the request that has the fewest; 0 without requests.
    """

    draft_len: tuple[int, ...]
    settled: tuple[int, ...]
    starts: tuple[int, ...]
    request: Tensor
    position: Tensor
    is_draft: Tensor
    tree: Tree | None = None
    num_requests: int = attrs.field(init=False)
    num_rows: int = attrs.field(init=False)
    has_settled: bool = attrs.field(init=False)
    shortest: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "num_requests", len(self.draft_len))
        object.__setattr__(self, "num_rows", self.starts[-1])
        object.__setattr__(self, "has_settled", any(self.settled))
        object.__setattr__(self, "shortest", min(self.draft_len, default=0))

    @classmethod
    def build(
        cls,
        draft_len: Sequence[int],
        settled: Sequence[int] | int,
        device: torch.device,
        parents: KnownParents | None = None,
    ) -> RowLayout:
        """Lay out the rows of ``len(draft_len)`` requests.

        Args:
            draft_len: draft rows per request.
            settled: settled rows per request, or one int for all of them.
            device: the device of the caches.
            parents: for draft trees, from ``draft_tree.as_parents``.

        Raises:
            TreeError: not one parent per draft row.
        """
        draft_len = tuple(draft_len)
        settled = (settled,) * len(draft_len) if isinstance(settled, int) else tuple(settled)
        lengths = [known + drafts for known, drafts in zip(settled, draft_len, strict=True)]
        request = [r for r, length in enumerate(lengths) for _ in range(length)]
        position = [
            max(-1, i - known)
            for known, length in zip(settled, lengths, strict=True)
            for i in range(length)
        ]
        tree = None
        if parents is not None:
            forest = per_request(parents, len(draft_len))
            check_fit(forest, draft_len)
            tree = Tree.build(settled, forest, device)
        where = to_device(position, device, torch.int64)
        return cls(
            draft_len,
            settled,
            tuple(accumulate(lengths, initial=0)),
            to_device(request, device, torch.int64),
            where,
            where >= 0,
            tree,
        )

    def sources(self, accepted: Tensor) -> Tensor | None:
        """Return the row that a commit moves to each row position, or -1; None if no row moves.

        Only paths of a tree move rows.
        """
        if accepted.ndim != 2:
            return None
        assert self.tree is not None  # a path is accepted for a tree window only
        return self.tree.sources(self.request, self.position, accepted)

    def kept(self, accepted: Tensor) -> Tensor:
        """Return the row positions of drafts that ``accepted`` fills, bool ``[num_rows]``.

        Args:
            accepted: int ``[num_requests]`` counts, which clamp to ``[0, draft_len]`` by
                comparison, or bool ``[num_rows]``, whose elements for settled rows are ignored.
                For a tree, int ``[num_requests, columns]``, paths.
        """
        if accepted.ndim == 2:
            sources = self.sources(accepted)
            assert sources is not None
            return sources >= 0
        if accepted.dtype is torch.bool:
            return accepted & self.is_draft
        return self.is_draft & (self.position < accepted[self.request])


def parse_lengths(what: str, value: Lengths) -> int | tuple[int, ...]:
    """Return ``value`` as one int for every request, or as a tuple of one int per request.

    Raises:
        SlotMappingError: ``value`` is not an int or ints, or an int is negative.
    """
    if type(value) is int and value >= 0:  # the usual case, and the quick one
        return value
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        value = torch.as_tensor(value, device="cpu")  # numpy: its __index__ is not meant
    if isinstance(value, Tensor):
        wrong = value.is_floating_point() or value.dtype is torch.bool or not is_plain(value)
        if wrong or value.device.type != "cpu":
            raise SlotMappingError(
                "window",
                f"{what} is not a host tensor of ints",
                expected="ints on the host",
                got=f"{value.dtype} on {value.device}",
                hint=f"pass {what} as a list: the host needs it to lay out the window",
            )
        if value.ndim > 1:
            raise _bad_lengths(what, "an int or one int per request", value.tolist())
        value = int(value) if value.ndim == 0 else value.tolist()
    if hasattr(value, "__index__"):
        return _length(what, value)
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise _bad_lengths(what, "an int or one int per request", repr(value))
    return tuple(_length(what, item) for item in value)


def spread_lengths(what: str, lengths: int | tuple[int, ...], num_requests: int) -> tuple[int, ...]:
    """Return one length per request, from ``parse_lengths``; an int counts for every request.

    Raises:
        SlotMappingError: a tuple does not have one length per request.
    """
    if isinstance(lengths, int):
        return (lengths,) * num_requests
    if len(lengths) != num_requests:
        raise _bad_lengths(what, f"{num_requests} ints, one per request", len(lengths))
    return lengths


def _length(what: str, value: object) -> int:
    """Return an int of at least 0; a SlotMappingError for anything else, a bool included."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 0:
        raise _bad_lengths(what, "ints of at least 0", repr(value))
    return int(value.__index__())


def _bad_lengths(what: str, expected: str, got: object) -> SlotMappingError:
    """Return, not raise, the error of lengths that are not valid."""
    return SlotMappingError(
        "window",
        f"{what} is not valid",
        expected=expected,
        got=got,
        hint=f"pass {what} as one int for all requests, or as one per request",
    )
