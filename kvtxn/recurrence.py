"""``Recurrence``: how one state of a layer takes rows in, and which numbers of a row it needs.

A layer that is *replayed* stages no states. It stages, for each row, the few numbers that its
recurrence consumes; the commit reads the one state, takes the kept rows in, one after another,
and writes the state back. A description of the recurrence says which numbers these are, in which
shapes, and how a state takes in one row.
"""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import attrs
import torch
from torch import Tensor

from .draft_tree import Parents, as_parents, check_fit, per_request, ways_of
from .errors import LayerError
from .formats import RowFormat
from .host_values import described, is_dense

#: dtypes in which numbers may be stored or staged.
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


@attrs.frozen(eq=False)
class RowPart:
    """A tensor that holds one part of a layer's staged rows.

    A row part has the attributes of a ``Plane`` that concern rows, and none that concern a cache.

    Attributes:
        part: the part's name in messages, such as ``"key"``.
        row_shape: shape of the part of one row.
        format: the number format of the part.
    """

    part: str
    row_shape: tuple[int, ...]
    format: RowFormat
    is_scale: bool = attrs.field(default=False, init=False)
    given_shape: None = attrs.field(default=None, init=False)

    @classmethod
    def of(cls, part: str, dtype: torch.dtype, *row_shape: int) -> RowPart:
        """Make a part with a row of these sizes, in a dtype without scales."""
        return cls(part, row_shape, RowFormat(dtype))

    @property
    def staged_shape(self) -> tuple[int, ...]:
        """Shape of the part of one row, as the caller stages it."""
        return self.row_shape

    @property
    def row_bytes(self) -> int:
        """Bytes that the part of one row takes."""
        return math.prod(self.row_shape) * self.format.dtype.itemsize


class Recurrence(abc.ABC):
    """A description of the way in which one state takes rows in.

    Attributes:
        moves_bytes: True if the state is made of rows unchanged, and no number is computed: the
            reference then works on words, so that every bit pattern survives.
    """

    moves_bytes: ClassVar[bool] = False

    @abc.abstractmethod
    def check(self, layer: str, state: Tensor) -> None:
        """Refuse a state that does not fit this recurrence.

        Args:
            layer: the layer's name, for the message.
            state: ``[num_states, *state_shape]``.

        Raises:
            LayerError: rank, sizes or dtype do not fit.
        """

    @abc.abstractmethod
    def given(self, state: Tensor) -> tuple[RowPart, ...]:
        """List the parts of a row that ``stage`` takes, in their order."""

    def kept(self, state: Tensor) -> tuple[RowPart, ...]:
        """List the parts of a row that wait for the commit; by default those of ``given``."""
        return self.given(state)

    def prepare(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Turn ``given`` parts into ``kept`` parts; by default they are the same.

        Args:
            parts: ``[num_rows, *row_shape]`` each, of any dtype that may be staged.
        """
        return tuple(parts)

    @abc.abstractmethod
    def step(self, state: Tensor, row: Sequence[Tensor]) -> Tensor:
        """Return the states after one more row each.

        Args:
            state: ``[num_requests, *state_shape]``, float32; words if ``moves_bytes``.
            row: the ``kept`` parts of one row per request, ``[num_requests, *row_shape]`` each,
                float32; words if ``moves_bytes``.
        """


def check_replay(layer: str, replay: object, states: Sequence[Tensor]) -> None:
    """Refuse, with a LayerError, a ``replay`` that is not one fitting recurrence per state.

    An empty tuple is fine: a commit selects states then.
    """
    if not isinstance(replay, tuple) or not all(isinstance(each, Recurrence) for each in replay):
        raise LayerError(
            "LayerRef",
            f"replay of {layer!r} is not valid",
            expected="one recurrence per state, such as kvtxn.recurrent.GatedDelta",
            got=repr(replay),
        )
    if replay and len(replay) != len(states):
        raise LayerError(
            "LayerRef",
            f"{layer!r} needs a recurrence for each state, or for none",
            expected=f"{len(states)} recurrences",
            got=len(replay),
            hint="make two layers where some states are selected and others replayed",
        )
    for recurrence, state in zip(replay, states, strict=False):
        recurrence.check(layer, state)


def check_state(layer: str, state: Tensor, shape: str, dtypes: Sequence[torch.dtype]) -> None:
    """Refuse, with a LayerError, a state of another rank than ``shape`` or not of ``dtypes``."""
    if state.ndim != shape.count(",") + 1 or state.dtype not in dtypes:
        raise LayerError(
            "LayerRef",
            f"a state of {layer!r} does not fit its recurrence",
            expected=f"{shape}, {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}",
            got=f"{state.dtype}{list(state.shape)}",
            hint="pass a view of these dimensions; any strides will do",
        )


def check_heads(layer: str, what: str, heads: int, of_state: int) -> None:
    """Refuse, with a LayerError, key heads or groups that do not divide the heads of the state.

    Args:
        layer: its name.
        what: what is counted, for the error.
        heads: how many there are.
        of_state: heads of the state.
    """
    if of_state % heads:
        raise LayerError(
            "LayerRef",
            f"{what} of {layer!r} do not fit its state",
            expected=f"a divisor of the state's {of_state} heads",
            got=heads,
        )


def positive(recurrence: object, attribute: attrs.Attribute[int], value: object) -> None:
    """Validate an attribute that is a positive int; raise LayerError for another value."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayerError(
            type(recurrence).__name__,
            f"{attribute.name} is not valid",
            expected="a positive int",
            got=repr(value),
        )


def one_of(*choices: object) -> Any:
    """Make a validator of an attribute that is one of ``choices``; it raises LayerError."""

    def validate(recurrence: object, attribute: attrs.Attribute[object], value: object) -> None:
        """Refuse, with a LayerError, a value that is none of the choices."""
        if not any(value is choice or value == choice for choice in choices):
            raise LayerError(
                type(recurrence).__name__,
                f"{attribute.name} is not valid",
                expected=f"one of {', '.join(map(str, choices))}",
                got=repr(value),
            )

    return validate


def check_rows(lengths: Sequence[int], **parts: tuple[object, tuple[int, ...]]) -> list[int]:
    """Return the lengths as ints; refuse, with a LayerError, others, and rows that do not fit.

    Args:
        lengths: the rows of each request.
        **parts: by name, the tensor ``[num_rows, *row_shape]``, and that ``row_shape``.
    """
    try:
        whole = [operator.index(length) for length in lengths]
    except TypeError:
        whole = [-1]
    if min(whole, default=0) < 0:
        raise LayerError(
            "outputs",
            "the lengths are not valid",
            expected="the number of rows of each request, a list of ints",
            got=repr(lengths),
        )
    rows = sum(whole)
    for name, (part, row_shape) in parts.items():
        if not isinstance(part, Tensor) or not is_dense(part) or part.shape != (rows, *row_shape):
            raise LayerError(
                "outputs",
                f"{name} does not fit the lengths or the state",
                expected=f"a tensor {[rows, *row_shape]}",
                got=described(part),
                hint="give the rows of every request, one request after another",
            )
    return whole


def by_request(tensor: Tensor, lengths: list[int]) -> list[Tensor]:
    """Split rows that lie request by request into one tensor per request."""
    return list(tensor.split(lengths))


def states_of(
    state: Tensor, slots: Tensor | Sequence[int], lengths: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Read the states of the requests, in ``dtype``; zeros where a request has no slot.

    Args:
        state: ``[num_states, *state_shape]``.
        slots: int ``[num_requests]``, -1 for a request without a state.
        lengths: the rows of each request.
        dtype: the dtype of the result.

    Raises:
        LayerError: ``slots`` is not one slot per request, or, if on the host, names no state.
    """
    empty = not isinstance(slots, Tensor) and not len(slots)  # torch takes an empty list as floats
    where = torch.as_tensor(slots, dtype=torch.int64 if empty else None, device=state.device)
    inside = True
    if not isinstance(slots, Tensor) or slots.is_cpu:
        inside = all(-1 <= int(slot) < state.shape[0] for slot in slots)
    whole = not (where.is_floating_point() or where.is_complex() or where.dtype is torch.bool)
    if where.shape != (len(lengths),) or not whole or not inside:
        raise LayerError(
            "outputs",
            "slots is not valid",
            expected=f"int [{len(lengths)}], -1 to {state.shape[0] - 1}",
            got=f"{where.dtype} {list(where.shape)}" if inside else f"{where.tolist()}",
            hint="name the state of each request; -1 starts from zeros",
        )
    where = where.long()
    taken = state[where.clamp(min=0)].to(dtype)
    there = (where >= 0).view(-1, *[1] * (state.ndim - 1))
    return torch.where(there, taken, torch.zeros_like(taken))


@attrs.frozen
class Paths:
    """The draft trees of a window's requests, as sequences: one from the root to each leaf.

    Attributes:
        slots: the state of each path, which is its request's.
        lengths: rows of each path, the request's settled rows included.
        rows: for each row of the paths, the row of the window.
        first: for each row of the window, a row of the paths that computes it.
    """

    slots: list[int]
    lengths: list[int]
    rows: list[int]
    first: list[int]

    @classmethod
    def of(cls, slots: Tensor | Sequence[int], lengths: Sequence[int], parents: Parents) -> Paths:
        """Find the paths of trees; ``parents`` as for ``TransactionManager.window``.

        Raises:
            LayerError: there are not as many slots as requests.
            TreeError: the trees are malformed, or one has more drafts than its request has rows.
        """
        known = slots.tolist() if isinstance(slots, Tensor) else [*slots]
        if len(known) != len(lengths):
            raise LayerError(
                "outputs",
                "slots is not valid",
                expected=f"{len(lengths)} slots",
                got=len(known),
                hint="name the state of each request; -1 starts from zeros",
            )
        paths = cls([], [], [], [])
        forest = per_request(as_parents(parents), len(lengths))
        check_fit(forest, [min(*each) for each in zip(map(len, forest), lengths, strict=False)])
        start = 0
        for slot, length, tree in zip(known, lengths, forest, strict=True):
            settled, where = length - len(tree), dict[int, int]()
            ways = [way for node, way in enumerate(ways_of(tree)) if node not in tree]
            for way in ways or [[]]:
                path = [*range(settled), *(settled + node for node in way)]
                for row in path:
                    where.setdefault(row, len(paths.rows))
                    paths.rows.append(start + row)
                paths.slots.append(slot)
                paths.lengths.append(len(path))
            paths.first.extend(where[row] for row in range(length))
            start += length
        return paths

    def take(self, rows: Tensor) -> Tensor:
        """Return the rows of the paths, of the rows of the window."""
        return rows[self.rows]
