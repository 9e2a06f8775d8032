"""Slot mappings of one window: where its rows go, one mapping per group, checked once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import attrs
import torch
from torch import Tensor

from .errors import CapacityError, SlotMappingError
from .layers import Kind
from .layout import Lengths, RowLayout, as_lengths, to_device

#: Where the rows of a window go: one mapping, or one per group; None where ``stage`` brings it.
Slots = Tensor | Sequence[int] | Mapping[str, Tensor | Sequence[int]] | None


def _laps(slots: list[int], ring_size: int, layout: RowLayout) -> bool:
    """Whether rows that share a slot are of one request, a whole number of rings apart."""
    first: dict[int, tuple[int, int]] = {}
    for request, (start, end) in enumerate(pairwise(layout.starts)):
        for row in range(start, end):
            owner, before = first.setdefault(slots[row], (request, row))
            if slots[row] != -1 and (owner != request or (row - before) % ring_size):
                return False
    return True


def count_of(slots: object) -> int | None:
    """The number of slots in a mapping; None if it is not a mapping of slots."""
    shape = getattr(slots, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) == 1 else None
    return len(slots) if isinstance(slots, Sequence) else None


@attrs.frozen(eq=False, kw_only=True)
class SlotRules:
    """What every slot mapping of one manager has to obey.

    Attributes:
        limits: slots in the smallest cache of each group.
        kinds: what the slots of each group are.
        device: where the caches are.
        max_rows: most rows a window may have.
        check_range: whether slots on a device have to be checked here, not by the executor.
        may_share: whether rows of a ring may share a slot; where they are taken back, they
            must not.
    """

    limits: Mapping[str, int]
    kinds: Mapping[str, Kind]
    device: torch.device
    max_rows: int
    check_range: bool
    may_share: bool


class SlotMappings:
    """The slots of a window, by group, and the row layout that follows from them.

    Args:
        rules: the manager's.
        draft_len: an int for every request, or one per request.
        settled: likewise.
        build: makes (or remembers) a layout from lengths.
        keep: makes the window's own int64 copy of a group's slots, on the device.

    Attributes:
        in_range: bool scalar on the device, whether every slot lies inside its cache; None where
            nothing had to be checked there.
        failure: what ``keep`` raised, if it did.
    """

    def __init__(
        self,
        rules: SlotRules,
        draft_len: Lengths,
        settled: Lengths,
        build: Callable[[tuple[int, ...], tuple[int, ...]], RowLayout],
        keep: Callable[[str, Tensor], Tensor],
    ) -> None:
        self._rules = rules
        self._lengths = (draft_len, settled)
        self._build = build
        self._keep = keep
        self._given: dict[str, Tensor | list[int]] = {}
        self._own: dict[str, Tensor] = {}
        self._layout: RowLayout | None = None
        self.in_range: Tensor | None = None
        self.failure: Exception | None = None
        as_lengths("draft_len", draft_len, None)  # refuse what can never fit, at once
        as_lengths("settled", settled, None)
        fixed = [n for n in (self._count(draft_len), self._count(settled)) if n is not None]
        if fixed:
            self._layout = self._resolve(fixed[0])

    @staticmethod
    def _count(lengths: Lengths) -> int | None:
        """The number of requests, if there is one length per request; None for one int for all."""
        if hasattr(lengths, "__len__") and not (isinstance(lengths, Tensor) and not lengths.ndim):
            return len(lengths)
        return None

    def _resolve(self, num_requests: int) -> RowLayout:
        draft_len = as_lengths("draft_len", self._lengths[0], num_requests)
        settled = as_lengths("settled", self._lengths[1], num_requests)
        rows = sum(draft_len) + sum(settled)
        if rows > self._rules.max_rows:
            raise CapacityError(
                "window",
                "more rows than the manager has room for",
                expected=f"at most max_rows={self._rules.max_rows}",
                got=rows,
                hint="raise TxnConfig.max_rows, or split the batch",
            )
        return self._build(draft_len, settled)

    @property
    def layout(self) -> RowLayout:
        """The row layout; known once a mapping is."""
        assert self._layout is not None
        return self._layout

    @property
    def num_rows(self) -> int | None:
        """Rows of the window, as soon as they are known."""
        return None if self._layout is None else self._layout.num_rows

    def __contains__(self, group: str) -> bool:
        return group in self._own

    def by_group(self, slots: Slots) -> Mapping[str, Tensor | Sequence[int]]:
        """What ``window`` was given, by group. Raises SlotMappingError for unknown groups."""
        if slots is None:
            return {}
        if isinstance(slots, Mapping):
            return slots
        if len(self._rules.limits) > 1:
            raise SlotMappingError(
                "window",
                "one slot mapping for several groups",
                expected=f"a mapping with {', '.join(map(repr, self._rules.limits))}",
                got="a single tensor",
                hint="groups have block tables of their own: pass {group: slots}",
            )
        return {next(iter(self._rules.limits)): slots}

    def add(self, group: str, slots: Tensor | Sequence[int]) -> Tensor:
        """Check a group's mapping; returns the window's own int64 copy, one slot per row.

        Raises:
            SlotMappingError: unknown group, wrong shape or dtype, or, on the host, out of
                range or a slot named twice.
            CapacityError: more rows than ``max_rows``, or than a ring that cannot be lapped.
        """
        if group not in self._rules.limits:
            raise SlotMappingError(
                "window",
                f"no layer is in group {group!r}",
                expected=f"one of {', '.join(map(repr, self._rules.limits))}",
                got=repr(group),
            )
        tensor = self._as_tensor(group, slots)
        kind = self._rules.kinds[group]
        count = tensor.numel()
        layout = self._layout or self._resolve(
            count if kind.name == "recurrent" else self._requests_in(count)
        )
        self._check_fit(group, kind, layout, count)
        given: Tensor | list[int] = tensor
        if tensor.is_cpu:
            given = host = tensor.tolist()
            self._check_host(group, host, kind, layout)
            tensor = to_device(tensor, self._rules.device, torch.int64)
        if kind.name == "recurrent":
            tensor = tensor[layout.request]
        own = self._copy(group, tensor)
        if self._rules.check_range and not isinstance(given, list):
            inside = ((own >= -1) & (own < self._rules.limits[group])).all()
            self.in_range = inside if self.in_range is None else self.in_range & inside
        self._layout = layout
        self._given[group] = given
        self._own[group] = own
        return own

    def rows_in(self, group: str, slots: object) -> int | None:
        """Rows of a window with this mapping for a group; None if it is not a mapping of slots."""
        count = count_of(slots)
        if count is None or self._rules.kinds[group].name != "recurrent":
            return count
        return (self._layout or self._resolve(count)).num_rows

    def _check_fit(self, group: str, kind: Kind, layout: RowLayout, count: int) -> None:
        """Refuse a mapping of another length, and laps of a ring that must not be lapped."""
        expected = layout.num_requests if kind.name == "recurrent" else layout.num_rows
        if count != expected:
            per = (
                "requests" if kind.name == "recurrent" else "rows (draft_len + settled per request)"
            )
            one = "request" if kind.name == "recurrent" else "row"
            raise SlotMappingError(
                "window",
                f"slots of group {group!r} do not fit the rows of the window",
                expected=f"{expected} {per}",
                got=count,
                hint=f"one slot per {one}, -1 for padding",
            )
        longest = max((b - a for a, b in pairwise(layout.starts)), default=0)
        if kind.overwrites and not self._rules.may_share and longest > kind.reuse:
            raise CapacityError(
                "window",
                f"a request has more rows than its ring in group {group!r} has slots",
                expected=f"at most {kind.reuse} rows under policy 'undo'",
                got=longest,
                hint="use policy='deferred', where rows of one slot wait side by side",
            )

    def _copy(self, group: str, slots: Tensor) -> Tensor:
        """The window's own copy; where the executor cannot make it, a plain one."""
        try:
            return self._keep(group, slots)
        except Exception as error:
            self.failure = error
            return slots.to(torch.int64, copy=True)

    def _as_tensor(self, group: str, slots: Tensor | Sequence[int]) -> Tensor:
        try:
            tensor = slots if isinstance(slots, Tensor) else torch.as_tensor(slots, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise SlotMappingError(
                "window",
                f"slots of group {group!r} are malformed",
                expected="int32 or int64 [num_rows]",
                got=type(slots).__name__,
            ) from None
        if tensor.shape == (0,) and not isinstance(slots, Tensor):
            tensor = tensor.to(torch.int64)  # torch's guess for an empty list is a float
        if tensor.ndim != 1 or tensor.dtype not in (torch.int64, torch.int32):
            raise SlotMappingError(
                "window",
                f"slots of group {group!r} are malformed",
                expected="int32 or int64 [num_rows]",
                got=f"{tensor.dtype} {list(tensor.shape)}",
            )
        if not tensor.is_cpu and tensor.device != self._rules.device:
            raise SlotMappingError(
                "window",
                f"slots of group {group!r} are on another device",
                expected=f"{self._rules.device} or the host",
                got=tensor.device,
            )
        return tensor

    def _requests_in(self, num_rows: int) -> int:
        """How many requests ``num_rows`` rows are, where draft_len and settled are ints."""
        draft_len = as_lengths("draft_len", self._lengths[0], None)[0]
        settled = as_lengths("settled", self._lengths[1], None)[0]
        per_request = draft_len + settled
        if (num_rows % per_request if per_request else num_rows) != 0:
            raise SlotMappingError(
                "window",
                "the number of slots is not a whole number of requests",
                expected=f"a multiple of {per_request} (draft_len {draft_len} + settled {settled})",
                got=num_rows,
                hint="pass draft_len as one int per request if they differ",
            )
        return num_rows // per_request if per_request else 0

    def _check_host(self, group: str, values: list[int], kind: Kind, layout: RowLayout) -> None:
        used = [slot for slot in values if slot != -1]
        limit = self._rules.limits[group]
        if used and (min(used) < 0 or max(used) >= limit):
            bad = next(slot for slot in used if not 0 <= slot < limit)
            raise SlotMappingError(
                "window",
                f"a slot of group {group!r} is outside its cache",
                expected=f"-1 (padding) or 0 to {limit - 1}",
                got=bad,
            )
        if len(set(used)) != len(used) and not (
            kind.name == "ring" and _laps(values, kind.reuse, layout)
        ):
            twice, times = Counter(used).most_common(1)[0]
            raise SlotMappingError(
                "window",
                f"group {group!r} maps two rows to one slot",
                expected="distinct slots",
                got=f"slot {twice} {times} times",
                hint=f"rows of one request may share a slot {kind.reuse} rows apart"
                if kind.name == "ring"
                else "",
            )

    def check_same(self, group: str, slots: Tensor | Sequence[int]) -> None:
        """Refuse a second mapping that differs from the first; never merge.

        Device mappings are compared by memory, not content: comparing would wait.
        """
        first, second = self._given[group], self._as_tensor(group, slots)
        if isinstance(first, list):  # came from the host, so its numbers are known here
            same = second.device.type == "cpu" and second.tolist() == first
        else:
            same = (second.data_ptr(), second.shape, second.dtype) == (
                first.data_ptr(),
                first.shape,
                first.dtype,
            )
        if not same:
            raise SlotMappingError(
                "stage",
                f"a second, different slot mapping for group {group!r}",
                expected="the mapping given before",
                got="another one",
                hint="layers with block tables of their own belong in a group of their own",
            )

    def missing(self, group: str) -> SlotMappingError:
        """The error for a group without slots."""
        return SlotMappingError(
            "stage",
            f"group {group!r} has no slot mapping",
            hint="give slots to window(), or to the first stage() of the group",
        )
