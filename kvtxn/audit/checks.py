"""Checks of what a ledger is given, on the host, before anything is changed.

Shapes, dtypes, names and host values are checked always. The values of a step's tensors are looked
at here on a CPU alone, since on a GPU that would wait: there the passes leave malformed requests
out and count them.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import AcceptanceError, ConfigError, KVTxnError
from ..host_values import described, to_device
from .arguments import invalid
from .books import Books
from .groups import Place
from .rows import Batch, fill_first, first_of
from .step import STRETCH_KINDS, Step, Stretch

#: The dtypes of ints that torch can count with.
INTS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_HOST: Final = torch.device("cpu")


def whole(operation: str, name: str, value: Any, low: int, high: int) -> int:
    """Return an int from ``low`` to ``high``, both included; a bool or a tensor is none.

    Raises:
        ConfigError: it is something else.
    """
    if hasattr(value, "__index__") and not isinstance(value, (bool, Tensor)):
        number: int = value.__index__()
        if low <= number <= high:
            return number
    raise invalid(operation, name, f"an int from {low} to {high}", repr(value))


def ints(
    operation: str,
    name: str,
    values: Any,
    shape: str = "[n]",
    error: type[KVTxnError] = ConfigError,
) -> Tensor:
    """Return ints as a tensor of the host, or the tensor itself, wherever it is, if they are one.

    Args:
        operation: the call, for the message.
        name: the argument's name, for the message.
        values: a tensor, an array, or a sequence.
        shape: the shape wanted, for the message; its commas say how many dimensions.
        error: the class of the error.

    Raises:
        KVTxnError: the values are no ints, or of another number of dimensions; of class ``error``.
    """
    try:
        given = values if isinstance(values, Tensor) else torch.as_tensor(values, device=_HOST)
        if not given.numel() and not isinstance(values, Tensor):
            given = given.to(torch.int64)  # torch's guess for an empty list is a float
        fits = given.ndim == shape.count(",") + 1 and given.dtype in INTS
        fits = fits and given.layout is torch.strided and not given.is_nested
    except (TypeError, ValueError, RuntimeError, OverflowError):
        fits = False
    if not fits:
        raise invalid(operation, name, f"int {shape}", described(values), error)
    return given


def bounded(operation: str, name: str, values: Any, end: int, *, distinct: bool = False) -> Tensor:
    """Return ints from 0 to ``end - 1``, int64 ``[n]`` on the host.

    Args:
        operation: the call, for the message.
        name: the argument's name, for the message.
        values: a tensor of the host, an array, or a sequence.
        end: one more than the largest.
        distinct: refuse a number that is named twice.

    Raises:
        ConfigError: the values are something else.
    """
    plain = type(values) is list and values and {*map(type, values)} == {int}
    if not distinct and (plain or (type(values) is array and values.typecode == "q" and values)):
        with contextlib.suppress(OverflowError):  # quicker than ``torch.tensor``
            given = array("q", values) if plain else values
            numbers = torch.frombuffer(given, dtype=torch.int64)
            low, high = (int(number) for number in numbers.aminmax())
            if low >= 0 and high < end:
                return numbers
    given = ints(operation, name, values)
    if not given.is_cpu:
        raise ConfigError(
            operation,
            f"{name} is on {given.device}",
            expected="values on the host",
            got=given.device,
            hint="pass the numbers that the scheduler has; nothing was changed",
        )
    if given.numel():
        low, high = (int(number) for number in given.aminmax())
        again = distinct and len(given.unique()) < len(given)
        if low < 0 or high >= end or again:
            expected = f"{'distinct ' * distinct}ints from 0 to {end - 1}"
            got = given.tolist() if again else low if low < 0 else high
            raise invalid(operation, name, expected, got)
    return given.long()


def place_of(operation: str, books: Books, group: str, *, states: bool | None = None) -> Place:
    """Return the ``Place`` of a group.

    Args:
        operation: the call, for the message.
        books: the ledger's books.
        group: the group's name.
        states: True wants a group of states, False a group of rows, None either.

    Raises:
        ConfigError: the ledger has no such group.
    """
    place = books.layout.places.get(group) if isinstance(group, str) else None
    if place is None or (states is not None and place.group.is_state != states):
        wanted = {None: "a group", True: "a group of states", False: "a group of rows"}[states]
        fitting = [
            name
            for name, other in books.layout.places.items()
            if states is None or other.group.is_state == states
        ]
        raise ConfigError(
            operation,
            f"{group!r} is not {wanted} of the ledger",
            expected=f"one of {fitting}",
            got=repr(group),
            hint="groups are named when the ledger is made; states have calls of their own",
        )
    return place


def check_step(operation: str, books: Books, step: Any, *, released: bool = False) -> None:
    """Refuse a step whose tensors do not fit the ledger or each other.

    On a CPU it also fills ``Books.first``, unless ``released`` is set.

    Args:
        operation: the call, for the message.
        books: the ledger's books.
        step: the step.
        released: requests of the step may have been released.

    Raises:
        ConfigError: ``step`` is no ``Step``, or does not say where requests begin; a group is
            unknown or not written; a tensor has another device, dtype or shape; on a CPU also: a
            request is malformed.
    """
    if not isinstance(step, Step):
        raise ConfigError(
            operation, "this is not a step", expected="a Step", got=type(step).__name__,
            hint="describe the forward pass as a kvtxn.audit.Step",
        )  # fmt: skip
    for name in ("slots", "tables", "sources", "block_maps"):
        _by_group(operation, name, getattr(step, name))
    number = len(_fits(operation, books, "lines", step.lines, 0))
    _fits(operation, books, "starts", step.starts, number + 1)
    _fits(operation, books, "tokens", step.tokens, 0)
    lengths = {"first": number, "drafts": number, "told": number, "positions": 0}
    lengths |= {"table_lines": number, "parents": 0}
    for name, length in lengths.items():
        tensor = getattr(step, name)
        if tensor is not None:
            _fits(operation, books, name, tensor, length)
    room = books.sizes.max_requests if step.positions is not None else -1
    if step.first is None and number > room:
        raise ConfigError(
            operation, "nothing says where the requests of the step begin",
            expected=f"first, or positions and at most {books.sizes.max_requests} requests",
            got=f"positions and {number} requests" if room >= 0 else "neither",
            hint="see kvtxn.audit.Step; nothing was changed",
        )  # fmt: skip
    for group, tensor in step.slots.items():
        place = place_of(operation, books, group)
        if place.group.reads is not None:
            raise ConfigError(
                operation, f"group {group!r} writes no rows", got=f"slots of {group!r}",
                hint=f"it reads those of {place.group.reads!r}: give slots for that group",
            )  # fmt: skip
        _fits(operation, books, f"slots[{group!r}]", tensor, 0)
    for group, tensor in step.tables.items():
        place_of(operation, books, group, states=False)
        lines = number if step.table_lines is None else 1
        _fits(operation, books, f"tables[{group!r}]", tensor, lines, dimensions=2)
    _check_maps(operation, books, step)
    for group, tensor in step.sources.items():
        place_of(operation, books, group, states=True)
        _fits(operation, books, f"sources[{group!r}]", tensor, number)
    if books.words.is_cpu:
        if not released:
            fill_first(books, step)
        _check_requests(operation, books, step, released)


def check_stretch(books: Books, stretch: Any) -> None:
    """Refuse a stretch whose tensors do not fit the ledger or each other.

    Raises:
        ConfigError: a group or the kind is unknown, or a tensor has another device or shape.
    """
    if not isinstance(stretch, Stretch) or stretch.kind not in STRETCH_KINDS:
        raise ConfigError(
            "inspect", "this is not a stretch", expected=f"a Stretch of a kind of {STRETCH_KINDS}",
            got=getattr(stretch, "kind", type(stretch).__name__),
            hint="describe the rows as a kvtxn.audit.Stretch",
        )  # fmt: skip
    _by_group("inspect", "tables", stretch.tables)
    number = len(_fits("inspect", books, "lines", stretch.lines, 0))
    _fits("inspect", books, "first", stretch.first, number)
    _fits("inspect", books, "end", stretch.end, number)
    _by_group("inspect", "block_maps", stretch.block_maps)
    _check_maps("inspect", books, stretch)
    lines = number
    if stretch.table_lines is not None:
        _fits("inspect", books, "table_lines", stretch.table_lines, number)
        lines = 1
    for group, tensor in stretch.tables.items():
        place_of("inspect", books, group)
        _fits("inspect", books, f"tables[{group!r}]", tensor, lines, dimensions=2)


def _check_maps(operation: str, books: Books, read: Step | Stretch) -> None:
    """Refuse, with a ConfigError, maps of blocks that are none, or of no group of rows."""
    for group, tensor in read.block_maps.items():
        place_of(operation, books, group, states=False)
        _fits(operation, books, f"block_maps[{group!r}]", tensor, 1)


def _by_group(operation: str, name: str, tensors: Any) -> None:
    """Raise a ConfigError if a step's field is no mapping."""
    if not isinstance(tensors, Mapping):
        raise ConfigError(
            operation, f"{name} is not valid", expected="by name of the group, a tensor",
            got=type(tensors).__name__, hint="see kvtxn.audit.Step and Stretch",
        )  # fmt: skip


def _fits(
    operation: str, books: Books, name: str, tensor: Any, length: int, *, dimensions: int = 1
) -> Tensor:
    """Return a tensor of a step that is of ints, on the books' device, and long enough.

    Raises:
        ConfigError: it is something else.
    """
    if (
        isinstance(tensor, Tensor)
        and tensor.dtype in INTS
        and not tensor.is_nested
        and tensor.ndim == dimensions
        and tensor.device == books.words.device
        and len(tensor) >= length
        and tensor.layout is torch.strided
    ):
        return tensor
    rest = ", blocks" * (dimensions - 1)
    raise ConfigError(
        operation,
        f"{name} is not valid",
        expected=f"int [{length or 'n'}{rest}] on {books.words.device}",
        got=described(tensor, where=True),
        hint="see kvtxn.audit.Step and Stretch; nothing was changed",
    )


def _check_requests(operation: str, books: Books, step: Step, released: bool) -> None:
    """Refuse a step on a CPU with a malformed request, or with two entries for one request.

    Args:
        operation: names the call in messages.
        books: the ledger's.
        step: the step.
        released: the step may have requests that were released in the meantime.

    Raises:
        ConfigError: a line is taken twice or not admitted, or drafts, rows or positions are out
            of range.
    """
    batch = Batch.of(books, step, released=released)
    live = batch.lines[batch.live]
    again = len(live) != len(live.unique())
    if step.drafts is not None:
        given = step.drafts[: len(batch.lines)].long()
        wrong = batch.live & (given != batch.drafts)
        if bool(wrong.any()):
            index = int(wrong.nonzero()[0])
            raise ConfigError(
                operation, f"drafts of request {index} are not among its rows",
                expected=f"0 to {int(batch.counts[index])}", got=int(given[index]),
                hint="drafts are the last rows of a request; nothing was changed",
            )  # fmt: skip
    if not again and not bool(batch.refused.any()):
        return
    index = 0 if again else int(batch.refused.nonzero()[0])
    line, first = int(step.lines[index]), int(first_of(books, step)[index])
    begin, end = (int(n) for n in step.starts[index : index + 2])
    raise ConfigError(
        operation,
        "two requests have one line" if again else f"request {index} of the step is malformed",
        expected="lines of admitted requests, -1 for padding; rows inside the step's "
        f"{step.num_rows}; positions below {books.sizes.max_length}",
        got=f"lines {step.lines.tolist()}"
        if again
        else f"line {line}, rows {begin} to {end}, positions {first} to {first + end - begin}",
        hint="admit a request before its first step; nothing was changed",
    )


def check_outcome(
    operation: str, books: Books, step: Step, accepted: Any, sampled: Any = None, besides: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Return the arguments of ``Ledger.resolve`` as contiguous tensors on the ledger's device.

    They have one line per request of the step; ``sampled`` stays None. The range of ``accepted`` is
    checked for a ledger on a CPU alone, since on a GPU that would wait.

    Raises:
        AcceptanceError: they do not fit the step; the call can be made again.
    """
    number, device = len(step.lines), books.words.device
    counts = ints(operation, "accepted", accepted, error=AcceptanceError)
    ids = None
    if sampled is not None:
        shape = f"[{number}, n]"
        ids = ints(operation, "sampled", sampled, shape, AcceptanceError)
    for name, tensor in (("accepted", counts), ("sampled", ids)):
        if tensor is None:
            continue
        if len(tensor) < number or (not tensor.is_cpu and tensor.device != device):
            raise AcceptanceError(
                operation,
                f"{name} does not fit the step",
                expected=f"{number} requests, on {device} or the host",
                got=f"{list(tensor.shape)} on {tensor.device}",
                hint="give one count per request of the step, padding included; nothing changed",
            )
    counts = _there(counts, number, device)
    if counts.is_cpu:
        _check_counts(operation, books, step, counts, besides)
    return counts, None if ids is None else _there(ids, number, device)


def are_there(accepted: Any, sampled: Any, number: int, device: torch.device) -> bool:
    """Tell whether an outcome has the form in which ``check_outcome`` returns it, as usual.

    If not, it may have to be copied to the device, or to be refused.
    """
    if type(accepted) is not Tensor or accepted.dtype not in INTS or accepted.ndim != 1:
        return False
    # Quicker than ``len`` and than comparing devices.
    where = _number_of(device)
    if accepted.shape[0] != number or not _is_on(accepted, where):
        return False
    if sampled is None or not accepted.is_contiguous():
        return accepted.is_contiguous()
    right = type(sampled) is Tensor and sampled.dtype in INTS and sampled.ndim == 2
    return right and sampled.shape[0] == number and _is_on(sampled, where)


def _is_on(tensor: Tensor, where: int) -> bool:
    """Tell whether a tensor is on the device of this number; -1 is the host."""
    return tensor.is_cpu if where < 0 else tensor.get_device() == where


@cache
def _number_of(device: torch.device) -> int:
    """Return a device's number, as its tensors say it; -1 for a CPU."""
    return torch.empty(0, device=device).get_device()


def _check_counts(operation: str, books: Books, step: Step, counts: Tensor, besides: int) -> None:
    """Raise an AcceptanceError for a count that is above a request's drafts, or below -1; for CPUs.

    A count less ``besides`` is -1 where it is not known.
    """
    batch = Batch.of(books, step, released=True)
    counts = counts.long() - besides
    wrong = batch.live & ((counts < -1) | (counts > batch.drafts))
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise AcceptanceError(
            operation, f"accepted is out of range for request {index}",
            expected=f"0 to {int(batch.drafts[index])} accepted drafts", got=int(counts[index]),
            hint="count drafts, not the token sampled after them; nothing was changed",
        )  # fmt: skip


def _there(tensor: Tensor, number: int, device: torch.device) -> Tensor:
    """Return the first lines of a tensor, contiguous, on the device; itself if it is that."""
    if len(tensor) != number:
        tensor = tensor[:number]
    if tensor.device != device:
        tensor = to_device(tensor, device, tensor.dtype)
    return tensor.contiguous()  # kernels count elements from its address


def check_names(operation: str, names: Sequence[Any], *, distinct: bool = False) -> None:
    """Raise a ConfigError for a name that is not text or, with ``distinct``, comes twice."""
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                operation, "a name is not a str", expected="a str", got=repr(name),
                hint="name requests, groups and pools by text",
            )  # fmt: skip
    if distinct and len({*names}) < len(names):
        raise ConfigError(
            operation, "a request is named twice", expected="each request once",
            got=list(names), hint="nothing was changed",
        )  # fmt: skip
