"""Slot mappings of one window: the slot of each row, one mapping per group, checked once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import attrs
import torch
from torch import Tensor

from .draft_tree import KnownParents
from .errors import CapacityError, SlotMappingError
from .host_values import ints, to_device
from .layers import SlotKind
from .layout import Lengths, RowLayout, parse_lengths, spread_lengths
from .state_slots import Crossings, StateSlots, bounds_of, check_shared

#: The slots of one group.
OneMapping = Tensor | Sequence[int] | StateSlots
#: The slots of a window: one mapping, or one per group; None if ``stage`` brings the mapping.
Slots = OneMapping | Mapping[str, OneMapping] | None


def _laps(slots: list[int], ring_size: int, layout: RowLayout) -> bool:
    """Return whether rows that share a slot are of one request, a multiple of the ring apart."""
    first: dict[int, tuple[int, int]] = {}
    for request, (start, end) in enumerate(pairwise(layout.starts)):
        for row in range(start, end):
            owner, before = first.setdefault(slots[row], (request, row))
            if slots[row] != -1 and (owner != request or (row - before) % ring_size):
                return False
    return True


def _reach(layout: RowLayout, slots: Tensor | list[int]) -> list[int]:
    """Count each request's rows up to its last one with a slot; all rows for slots on a device."""
    requests = pairwise(layout.starts)
    if isinstance(slots, Tensor):
        return [last - first for first, last in requests]
    return [
        max((row + 1 - first for row in range(first, last) if slots[row] != -1), default=0)
        for first, last in requests
    ]


def _content(slots: Tensor) -> Tensor | list[int]:
    """Return slots as numbers if they are on the host; else the tensor, which is not read."""
    return slots.tolist() if slots.is_cpu else slots


def _same(first: Tensor | list[int], second: Tensor) -> bool:
    """Return whether slots were given before: by content on the host, on a device by address."""
    if isinstance(first, list):
        return second.is_cpu and second.tolist() == first
    return (second.data_ptr(), second.shape, second.dtype) == (
        first.data_ptr(),
        first.shape,
        first.dtype,
    )


def count_of(slots: object) -> int | None:
    """Return the number of one group's slots; None for a dict by group, or if not 1-D."""
    slots = slots.slots if isinstance(slots, StateSlots) else slots
    if isinstance(slots, Tensor) and slots.is_nested:  # it has no shape
        return None
    shape = getattr(slots, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) == 1 else None
    return len(slots) if isinstance(slots, Sequence) and not isinstance(slots, str) else None


@attrs.frozen(eq=False, kw_only=True)
class SlotRules:
    """The rules that every slot mapping of one manager obeys.

    Attributes:
        limits: slots in the smallest cache of each group.
        kinds: the kind of the slots of each group.
        replayed: groups that have only replayed layers.
        device: the device of the caches.
        max_rows: the most rows that a window may have.
        check_range: True if slots on a device have to be checked here, not by the executor.
        may_share: True if two rows may map to one ring slot; False under ``undo``, which cannot
            restore both.
        layout: ``RowLayout.build(draft_len, settled, parents)`` on this device, which remembers
            recent layouts.
    """

    limits: Mapping[str, int]
    kinds: Mapping[str, SlotKind]
    replayed: Collection[str]
    device: torch.device
    max_rows: int
    check_range: bool
    may_share: bool
    layout: Callable[..., RowLayout] = attrs.field(init=False)

    @layout.default
    def _remembered(self) -> Callable[..., RowLayout]:
        """Return ``RowLayout.build`` on the device, which remembers the last 256 layouts."""
        device = self.device

        @lru_cache(maxsize=256)
        def layout(
            draft_len: tuple[int, ...], settled: tuple[int, ...], parents: KnownParents | None
        ) -> RowLayout:
            """Return the layout of these lengths and trees, the same object while remembered."""
            return RowLayout.build(draft_len, settled, device, parents)

        return layout


class SlotMappings:
    """The slots of a window, by group, and the row layout that follows from them.

    Args:
        rules: the manager's rules.
        draft_len: draft rows: an int for every request, or one int per request.
        settled: settled rows: an int for every request, or one int per request.
        parents: the draft trees, from ``draft_tree.as_parents``; None without trees.
        keep: makes the window's own int64 copy of a group's slots, on the device.

    Attributes:
        in_range: bool scalar on the device, True if every slot lies inside its cache; None if
            no slot had to be checked on the device.
        failure: the error that ``keep`` raised; None if it raised none.
        crossings: by group, the boundaries that requests may cross, where any were given.
        operation: the call that brings slots now, ``"window"`` or ``"stage"``, for messages.
    """

    def __init__(
        self,
        rules: SlotRules,
        draft_len: Lengths,
        settled: Lengths,
        parents: KnownParents | None,
        keep: Callable[[str, Tensor], Tensor],
    ) -> None:
        self._rules = rules
        self._draft_len = parse_lengths("draft_len", draft_len)
        self._settled = parse_lengths("settled", settled)
        self._parents = parents
        self._keep = keep
        #: By group the slots; after them, of ``StateSlots``, the boundaries and slots beyond.
        self._given: dict[str, list[Tensor | list[int]]] = {}
        self._own: dict[str, Tensor] = {}
        self._layout: RowLayout | None = None
        self.in_range: Tensor | None = None
        self.failure: Exception | None = None
        self.crossings: dict[str, Crossings] = {}
        self.operation = "window"
        for lengths in (self._draft_len, self._settled):
            if isinstance(lengths, tuple):
                self._layout = self._resolve(len(lengths))
                break

    def _resolve(self, num_requests: int) -> RowLayout:
        """Return the layout of ``num_requests`` requests.

        Raises:
            CapacityError: it has more than ``max_rows`` rows.
            SlotMappingError: the lengths are of another number of requests.
            TreeError: the trees do not fit the lengths.
        """
        draft_len = spread_lengths("draft_len", self._draft_len, num_requests)
        settled = spread_lengths("settled", self._settled, num_requests)
        rows = sum(draft_len) + sum(settled)
        if rows > self._rules.max_rows:
            raise CapacityError(
                self.operation,
                "more rows than the manager has room for",
                expected=f"at most max_rows={self._rules.max_rows}",
                got=rows,
                hint="raise TxnConfig.max_rows, or split the batch",
            )
        return self._rules.layout(draft_len, settled, self._parents)

    @property
    def layout(self) -> RowLayout:
        """The row layout; known once the first group has a mapping."""
        assert self._layout is not None
        return self._layout

    @property
    def num_rows(self) -> int | None:
        """Rows of the window; None until they are known."""
        return None if self._layout is None else self._layout.num_rows

    def __contains__(self, group: str) -> bool:
        return group in self._own

    def by_group(self, slots: Slots) -> Mapping[str, OneMapping]:
        """Return the ``slots`` argument of ``window`` by group; empty for None.

        Raises:
            SlotMappingError: it is one mapping, and there are several groups.
        """
        if slots is None:
            return {}
        if isinstance(slots, Mapping):
            return slots
        if len(self._rules.limits) > 1:
            raise SlotMappingError(
                self.operation,
                "one slot mapping for several groups",
                expected=f"a mapping with {', '.join(map(repr, self._rules.limits))}",
                got="a single tensor",
                hint="groups have block tables of their own: pass {group: slots}",
            )
        return {next(iter(self._rules.limits)): slots}

    def add(self, group: str, slots: OneMapping) -> Tensor:
        """Check a group's mapping, and return the window's own int64 copy, one slot per row.

        The copy is kept. The first mapping settles the window's layout, if the lengths did not.

        Raises:
            SlotMappingError: unknown group, wrong shape or dtype, or, on the host, out of
                range or a slot named twice.
            CapacityError: more rows than ``max_rows``; or, under ``undo``, a request with more
                rows than its ring has slots.
        """
        if group not in self._rules.limits:
            raise SlotMappingError(
                self.operation,
                f"no layer is in group {group!r}",
                expected=f"one of {', '.join(map(repr, self._rules.limits))}",
                got=repr(group),
            )
        tensor = self._as_tensor(group, slots)
        kind = self._rules.kinds[group]
        count = tensor.numel()
        layout = self._layout or self._resolve(
            count if kind.per_request else self._requests_in(count)
        )
        self._check_fit(group, kind, layout, count)
        given = _content(tensor)
        known = isinstance(given, list)
        if isinstance(given, list):
            self._check_host(group, given, kind, layout)
            if kind.per_request and not isinstance(slots, StateSlots):
                check_shared(group, given)
            tensor = to_device(tensor, self._rules.device, torch.int64)
        if kind.overwrites and not self._rules.may_share:
            self._check_laps(group, kind, _reach(layout, given))
        bounds = self._bounds(group, slots, count)
        if bounds:
            limit = self._rules.limits[group]
            made = Crossings.of(group, *bounds, given, limit, self._rules.device)
            self.crossings[group] = made
            if not (tensor.is_cpu and known):
                tensor, known = made.refuse_outside(tensor, limit), False
        if kind.per_request:
            tensor = tensor[layout.request]
        own = self._copy(group, tensor)
        if self._rules.check_range and not known:
            inside = ((own >= -1) & (own < self._rules.limits[group])).all()
            self.in_range = inside if self.in_range is None else self.in_range & inside
        self._layout = layout
        self._given[group] = [given, *map(_content, bounds)]
        self._own[group] = own
        return own

    def forget(self, group: str) -> None:
        """Forget a group's mapping, so that it may be given anew; unknown groups are ignored."""
        for known in (self._own, self._given, self.crossings):
            known.pop(group, None)

    def reach(self, group: str) -> list[int]:
        """Count each request's rows up to its last one with a slot, for a group with slots.

        All rows count where the slots are on a device, which is not asked.
        """
        return _reach(self.layout, self._given[group][0])

    def rows_in(self, group: str, slots: object) -> int | None:
        """Return the rows of a window with this mapping; None if ``slots`` is not a mapping.

        A mapping of states has a slot per request, from which the rows follow by the lengths.
        """
        count = count_of(slots)
        if count is None or not self._rules.kinds[group].per_request:
            return count
        return (self._layout or self._resolve(count)).num_rows

    def _check_fit(self, group: str, kind: SlotKind, layout: RowLayout, count: int) -> None:
        """Refuse, with a SlotMappingError, a mapping of another length."""
        expected = layout.num_requests if kind.per_request else layout.num_rows
        if count != expected:
            per = "requests" if kind.per_request else "rows (draft_len + settled per request)"
            one = "request" if kind.per_request else "row"
            raise SlotMappingError(
                self.operation,
                f"slots of group {group!r} do not fit the rows of the window",
                expected=f"{expected} {per}",
                got=count,
                hint=f"one slot per {one}, -1 for padding",
            )

    def _check_laps(self, group: str, kind: SlotKind, reach: list[int]) -> None:
        """Refuse, with a CapacityError, rows that may share a slot of their ring, for ``undo``.

        It could not restore both.
        """
        longest = max(reach, default=0)
        if longest > kind.reuse:
            raise CapacityError(
                self.operation,
                f"a request has more rows than its ring in group {group!r} has slots",
                expected=f"at most {kind.reuse} rows with slots under policy 'undo'",
                got=longest,
                hint="use policy='deferred', where rows of one slot wait side by side",
            )

    def _copy(self, group: str, slots: Tensor) -> Tensor:
        """Return the executor's copy of the slots, or a plain copy if the executor fails.

        The executor's error is kept in ``failure``.
        """
        try:
            return self._keep(group, slots)
        except Exception as error:
            self.failure = error
            return slots.to(torch.int64, copy=True)

    def _bounds(
        self, group: str, slots: OneMapping, count: int
    ) -> tuple[Tensor, Tensor] | tuple[()]:
        """Return the boundaries and slots beyond of ``StateSlots``; nothing for plain slots.

        Raises:
            SlotMappingError: another shape, dtype or device.
        """
        if not isinstance(slots, StateSlots):
            return ()
        return bounds_of(group, slots, count, self._rules.device)

    def _as_tensor(self, group: str, slots: OneMapping) -> Tensor:
        """Return the slots of a mapping as int32 or int64 in one dimension, wherever they are.

        Raises:
            SlotMappingError: they are something else, or on another device than the caches', or
                ``StateSlots`` for layers without replay.
        """
        if isinstance(slots, StateSlots):
            if group not in self._rules.replayed:
                raise SlotMappingError(
                    self.operation,
                    f"layers of group {group!r} do not replay rows",
                    expected="int [num_rows], or [num_requests] for states that are selected",
                    got="StateSlots",
                )
            slots = slots.slots
        try:
            tensor = ints(slots)
        except ValueError as error:
            raise SlotMappingError(
                self.operation,
                f"slots of group {group!r} are malformed",
                expected="int32 or int64 [num_rows]",
                got=str(error),
            ) from None
        if not tensor.is_cpu and tensor.device != self._rules.device:
            raise SlotMappingError(
                self.operation,
                f"slots of group {group!r} are on another device",
                expected=f"{self._rules.device} or the host",
                got=tensor.device,
            )
        return tensor

    def _requests_in(self, num_rows: int) -> int:
        """Return the number of requests in ``num_rows`` rows, if the lengths are ints.

        Raises:
            SlotMappingError: the rows are not of a whole number of requests.
        """
        draft_len, settled = self._draft_len, self._settled
        assert isinstance(draft_len, int)
        assert isinstance(settled, int)  # else the layout is known already
        per_request = draft_len + settled
        if (num_rows % per_request if per_request else num_rows) != 0:
            raise SlotMappingError(
                self.operation,
                "the number of slots is not a whole number of requests",
                expected=f"a multiple of {per_request} (draft_len {draft_len} + settled {settled})",
                got=num_rows,
                hint="pass draft_len as one int per request if they differ",
            )
        return num_rows // per_request if per_request else 0

    def _check_host(self, group: str, values: list[int], kind: SlotKind, layout: RowLayout) -> None:
        """Refuse, with a SlotMappingError, slots outside the cache, and a slot that two rows have.

        Rows of one request may share a slot of a ring, and requests share states: see
        ``check_shared``.
        """
        used = [slot for slot in values if slot != -1]
        limit = self._rules.limits[group]
        if used and (min(used) < 0 or max(used) >= limit):
            bad = next(slot for slot in used if not 0 <= slot < limit)
            raise SlotMappingError(
                self.operation,
                f"a slot of group {group!r} is outside its cache",
                expected=f"-1 (padding) or 0 to {limit - 1}",
                got=bad,
            )
        if kind.per_request:
            return
        if len(set(used)) != len(used) and not (
            kind.name == "ring" and _laps(values, kind.reuse, layout)
        ):
            twice, times = Counter(used).most_common(1)[0]
            raise SlotMappingError(
                self.operation,
                f"group {group!r} maps two rows to one slot",
                expected="distinct slots",
                got=f"slot {twice} {times} times",
                hint=f"rows of one request may share a slot {kind.reuse} rows apart"
                if kind.name == "ring"
                else "",
            )

    def check_same(self, group: str, slots: OneMapping) -> None:
        """Refuse a second mapping of a group that differs from the first; mappings never merge.

        Device mappings are compared by address, not content: reading them would wait.

        Raises:
            SlotMappingError: it differs.
        """
        first, tensor = self._given[group], self._as_tensor(group, slots)
        second = [tensor, *self._bounds(group, slots, tensor.numel())]
        same = len(first) == len(second) and all(map(_same, first, second))
        if not same:
            raise SlotMappingError(
                "stage",
                f"a second, different slot mapping for group {group!r}",
                expected="the mapping given before",
                got="another one",
                hint="put layers with block tables of their own into a group of their own",
            )

    def missing(self, group: str, *, staged: bool = True) -> SlotMappingError:
        """Build the error for a group without slots; ``staged`` is False if no layer is staged."""
        hint = "give slots to window(), or to the first stage() of the group"
        return SlotMappingError(
            self.operation,
            f"group {group!r} has no slot mapping",
            expected="int32 or int64 [num_rows]",
            got="none",
            hint=hint
            if staged
            else "give slots to window(): where the caller writes the rows, no "
            "other call takes slots",
        )
