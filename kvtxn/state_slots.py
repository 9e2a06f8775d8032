"""``StateSlots``: the slots of states that are kept when a request crosses a block boundary.

A prefix cache of a hybrid model keeps a state at block boundaries: another request that begins
with the same tokens takes it from there. So the commit that crosses a boundary has to leave two
states: the state at the boundary, and the state with which the request continues.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs
import torch
from torch import Tensor

from .errors import SlotMappingError
from .host_values import described, ints, to_device

_Ints = Tensor | Sequence[int]


@attrs.frozen(eq=False)
class StateSlots:
    """The slots of a group of replayed layers, for requests that may cross a boundary.

    A request that takes in more than ``boundary`` rows leaves the state after exactly that many
    rows in its slot, and the state after all its rows in ``beyond``, where it continues. A request
    that takes in no more rows leaves its state in its slot, and ``beyond`` unchanged. With a
    boundary of 0 the state in the slot is unchanged, and the request continues in ``beyond``.

    Attributes:
        slots: int ``[num_requests]``, the state that is read; -1 is padding, whose rows go nowhere.
            Requests may share a state that all of them only read: with a boundary of 0, and a slot
            beyond.
        boundary: int ``[num_requests]``, rows of this window, settled ones included.
        beyond: int ``[num_requests]``; -1 if the request has no boundary in this window, or is
            padding. The slots are distinct, and no request's own: checked if they and ``slots``
            are on the host.
    """

    slots: _Ints
    boundary: _Ints
    beyond: _Ints


@attrs.frozen(eq=False)
class Crossings:
    """The boundaries of a window's requests, on the device; the window's own copies.

    Attributes:
        boundary: int64 ``[num_requests]``.
        beyond: int64 ``[num_requests]``.
    """

    boundary: Tensor
    beyond: Tensor

    @classmethod
    def of(
        cls,
        group: str,
        boundary: Tensor,
        beyond: Tensor,
        slots: Tensor | list[int],
        limit: int,
        device: torch.device,
    ) -> Crossings:
        """Check the boundaries given by the caller, as far as they are on the host; copy them.

        ``slots`` are the requests' own, checked; a list if they came from the host. The group's
        smallest cache has ``limit`` slots.

        Raises:
            SlotMappingError: on the host, a negative boundary, a slot outside the cache, a slot
                beyond that is named twice or that a request without a state has, or a state that
                several requests have and one of them writes.
        """
        if boundary.is_cpu and any(rows < 0 for rows in boundary.tolist()):
            raise _bad(group, "boundary", "rows of the window, 0 or more", boundary.tolist())
        if isinstance(slots, list):
            check_shared(group, slots, _readers(boundary, beyond))
        if beyond.is_cpu:
            used = [slot for slot in beyond.tolist() if slot != -1]
            taken = {*slots} - {-1} if isinstance(slots, list) else set()
            if any(not 0 <= slot < limit for slot in used):
                raise _bad(group, "beyond", f"-1, or 0 to {limit - 1}", beyond.tolist())
            if len({*used, *taken}) < len(used) + len(taken):
                raise _bad(group, "beyond", "distinct slots that no request has", beyond.tolist())
            if isinstance(slots, list) and any(
                slot == -1 and last != -1 for slot, last in zip(slots, beyond.tolist(), strict=True)
            ):
                expected = "-1 for a request whose own slot is -1: it has no state to begin from"
                raise _bad(
                    group, "beyond", expected, beyond.tolist(),
                    hint="to begin from zeros, give the request a slot whose state is zeros, and "
                    "a boundary of 0",
                )  # fmt: skip
        # Copies, as of slots: the commit reads them when the caller may have refilled its tensors.
        own = (value.to(torch.int64, copy=True) for value in (boundary, beyond))
        return cls(*(to_device(v, device, torch.int64) if v.is_cpu else v for v in own))

    def refuse_outside(self, slots: Tensor, limit: int) -> Tensor:
        """Return the slots, with one outside the cache for a request whose ``beyond`` is outside.

        The device's check of the slots, which refuses the whole window, then covers ``beyond``.
        """
        outside = (self.beyond < -1) | (self.beyond >= limit)
        return torch.where(outside, -2, slots)


def _readers(boundary: Tensor, beyond: Tensor) -> set[int]:
    """Return the requests that, as far as the host knows, only read the state in their slot."""
    if not (boundary.is_cpu and beyond.is_cpu):
        return set()
    pairs = enumerate(zip(boundary.tolist(), beyond.tolist(), strict=True))
    return {request for request, (rows, slot) in pairs if rows == 0 and slot != -1}


def check_shared(group: str, slots: Sequence[int], readers: Collection[int] = ()) -> None:
    """Refuse a state that several requests have, unless all of them are among ``readers``.

    Args:
        group: its name, for the error.
        slots: each request's; -1 is no state.
        readers: numbers of the requests that only read their state.

    Raises:
        SlotMappingError: two requests share a state, and one of them writes it.
    """
    first: dict[int, int] = {}
    for request, slot in enumerate(slots):
        other = first.setdefault(slot, request)
        if slot != -1 and other != request and not {other, request} <= {*readers}:
            raise SlotMappingError(
                "window",
                f"two requests have state {slot} of group {group!r}, and one of them writes it",
                expected="a state of its own for each request that writes it",
                got=f"slot {slot} for requests {other} and {request}",
                hint="to begin several requests from one replayed state, let them only read it: "
                "StateSlots with a boundary of 0, and a slot beyond for each",
            )


def bounds_of(
    group: str, given: StateSlots, count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the boundary and the slot beyond of each request as ints, on the host or the device.

    Raises:
        SlotMappingError: another shape, dtype or device.
    """
    return (
        _checked(group, "boundary", given.boundary, count, device),
        _checked(group, "beyond", given.beyond, count, device),
    )


def _checked(group: str, name: str, value: _Ints, count: int, device: torch.device) -> Tensor:
    """Return ``value`` as an int tensor ``[num_requests]``, of the host or of the device.

    Raises:
        SlotMappingError: another shape, dtype or device.
    """
    try:
        tensor = ints(value)
    except ValueError as error:
        raise _bad(group, name, "int [num_requests]", str(error)) from None
    if tensor.shape != (count,):
        raise _bad(group, name, f"int [{count}]", described(tensor))
    if not tensor.is_cpu and tensor.device != device:
        raise _bad(group, name, f"a tensor on {device} or the host", tensor.device)
    return tensor


def _bad(
    group: str,
    name: str,
    expected: str,
    got: object,
    hint: str = "one int per request; see StateSlots",
) -> SlotMappingError:
    """Return, not raise, the error of a boundary or slot beyond that is not valid."""
    return SlotMappingError(
        "window", f"{name} of group {group!r} is not valid", expected=expected, got=got, hint=hint
    )
