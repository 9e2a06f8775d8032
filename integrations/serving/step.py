"""The record of one step, as an engine's adapter makes it for the parts.

Names, numbers, arrays and tensors: nothing here knows an engine. What costs time to read is read
when a part asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import attrs
from numpy.typing import NDArray
from torch import Tensor

from ...errors import KVTxnError

#: A numpy array; its dtype and shape are where it is made.
Array: TypeAlias = NDArray[Any]

#: The rows of a batch as the host knows them, numpy ``[num_requests]`` each: drafts per request, or
#: None if the batch has none; rows per request; and True for requests whose rows are still the
#: prompt's. A tuple, not a class: constructing an object here costs measurable microseconds per
#: step.
BatchRows: TypeAlias = tuple[Array | None, Array, Array]

#: Returns what a forward computed for the rows that are sampled, float ``[n, width]``, and the
#: numbers of these rows in the step, int ``[n]``; None for numbers that were in the step's plan.
Outputs: TypeAlias = Callable[[], tuple[Tensor | None, Tensor | None]]


class PlannedStep(Protocol):
    """A step whose requests and slots are in place, before its forward."""

    def rows(self) -> BatchRows:
        """Return the numbers of each request's drafts and rows, and who still has a prompt.

        Rows include drafts. The drafts are None in a step without any.
        """

    def alike(self, rows: int) -> int:
        """Return the number of requests if each has one settled row and ``rows - 1`` drafts.

        Else 0, as for a batch without drafts; an engine that cannot tell it quickly returns 0, too.
        """

    def name(self) -> object:
        """Return the object by which the engine knows the step once it has ended."""

    def outputs(self) -> Tensor:
        """Return the rows whose outputs are sampled, int ``[num_outputs]``."""


def known(outcome: Tensor | None) -> Tensor:
    """Return an outcome as it is; refuse None, with which a part cannot commit what waits.

    Raises:
        KVTxnError: it is None: the engine did not say what was sampled.
    """
    if outcome is None:
        raise KVTxnError(
            "sampled",
            "the engine does not say what was sampled",
            expected="sampled ids, or counts of them",
            got="none",
            hint="start the engine without a policy, and report this",
        )
    return outcome


def drafts_and_ends(rows: BatchRows) -> tuple[Sequence[int], Sequence[int]]:
    """Return the drafts of each request, and one past its last row; both are empty without drafts.

    Args:
        rows: those of the step.
    """
    drafts, lengths, _ = rows
    return ([], []) if drafts is None else (drafts.tolist(), lengths.cumsum().tolist())


@attrs.frozen(eq=False)
class Arrival:
    """A request that is new, resumed, or continued as a session.

    Attributes:
        name: the engine's name of the request.
        tokens: the request's token ids, from the first token on.
        extras: everything besides tokens that all K and V of the request depend on, such as a
            LoRA adapter.
        embedded: for positions with an embedded vector instead of a token, the vector's hash.
        computed: number of positions whose rows are in the cache already, by a prefix hit or from
            the session's last turn.
        tables: the request's blocks in each KV-cache group, groups in the engine's order. Where a
            connector brings rows, block 0 belongs to nobody.
        prompt: number of tokens of the prompt; None if that is not known.
        had: rows that the request had when the engine put it back, before it came again; None if it
            was not put back, or if that is not known.
    """

    name: str
    tokens: list[int] = attrs.field(repr=False)
    extras: list[int]
    embedded: dict[int, int] = attrs.field(repr=False)
    computed: int
    tables: Sequence[Sequence[int]]
    prompt: int | None = None
    had: int | None = None


@attrs.frozen
class EncodedPart:
    """Rows of a step that are computed of an encoder's output.

    Attributes:
        request: the engine's name of the request.
        item: the engine's name of the output.
        first: the first of the rows, counted within the request's rows of the step.
        end: one past the last.
    """

    request: str
    item: str
    first: int
    end: int


@attrs.frozen(eq=False)
class EncoderStep:
    """The outputs of an encoder, of images or audio, that a step makes, forgets and uses.

    Attributes:
        encoded: the engine's names of outputs that are computed before the forward.
        dropped: names of outputs that the engine forgets.
        parts: returns which rows of the step are computed of which output.
    """

    encoded: Sequence[str]
    dropped: Sequence[str]
    parts: Callable[[], Sequence[EncodedPart]] = attrs.field(repr=False)


@attrs.frozen(eq=False)
class Changes:
    """The changes that a step makes before its forward.

    Attributes:
        gone: names of the requests that ended.
        arrivals: requests that are new, resumed or continued.
        grown: blocks that running requests got, in one list per KV-cache group, in the engine's
            order; those of requests that arrive are in their ``Arrival``.
        copies: blocks that are copied before the forward: pairs of source and target, which hold in
            all groups of rows.
        unused: rows of the arrivals that the prefix cache has, and that are computed again all the
            same, by reason: one of ``audit.repeated_work.WHY_UNUSED``.
        encoder: what the step's encoder does; None without an encoder, or without its inputs.
    """

    gone: Sequence[str]
    arrivals: Sequence[Arrival]
    grown: Sequence[Sequence[int]]
    copies: Sequence[tuple[int, int]]
    unused: Mapping[str, int] = attrs.field(factory=dict)
    encoder: EncoderStep | None = None


#: Of a step that only goes on with its requests, within their blocks.
NO_CHANGES: Final = Changes((), (), (), ())


@attrs.frozen(eq=False)
class Rows:
    """The rows of a forward, requests in the order of the batch.

    Attributes:
        names: the engine's names of the requests; empty for one that is left out.
        starts: int ``[num_requests + 1]``, each request's first row in the batch, and the end.
        first: int64 ``[num_requests]``, the position of each request's first row; None where the
            device alone knows it, in ``positions``.
        tokens: int ``[num_rows]``, the token id of each row.
        drafts: int64 ``[num_requests]``, draft rows of each request; None without drafts.
        slots: int64 ``[num_rows]`` for each group, the slot that each row is written to.
        tables: int32 ``[num_requests, blocks]`` for each group, the blocks of each request.
        positions: int64 ``[num_rows]``, the position that each row is computed for. None: they are
            not looked at.
        buffers: stands for all of these tensors, if they are buffers that stay where they are:
            rows with the same object have the same tensors, with other values. None if they do not.
        lengths: by group, int ``[num_requests]``, the rows that each request's attention reads,
            where they are not those up to its last one; None if they are, or are not known.
        table_lines: int64 ``[num_requests]``, each request's line of the tables, where these have a
            line for each request that there can be; None if theirs are the batch's requests.
        parents: int64 ``[num_rows]``, where drafts are trees, the draft that each draft row
            follows, as in ``kvtxn.audit.Step``; None if each row follows the one before.
        block_maps: int64 ``[n]`` for each group whose table names numbers of another pool, the
            group's block that each number stands for.
    """

    names: list[str]
    starts: Tensor
    first: Tensor | None
    tokens: Tensor = attrs.field(repr=False)
    drafts: Tensor | None
    slots: dict[str, Tensor]
    tables: dict[str, Tensor]
    positions: Tensor | None = None
    buffers: object | None = None
    lengths: dict[str, Tensor] | None = None
    table_lines: Tensor | None = None
    parents: Tensor | None = None
    block_maps: Mapping[str, Tensor] = attrs.field(factory=dict)


@attrs.frozen(eq=False)
class States:
    """The states of a forward, requests in the order of the batch.

    Attributes:
        slots: int64 ``[num_rows]`` by group, the block that gets the state after each row; -1 for a
            state that is not kept.
        sources: int64 ``[num_requests]`` by group, the block whose state each request continues;
            -1 for a request that begins without a state.
        leaves: int64 ``[num_requests]`` by group, the block that gets the state after the last kept
            row of each request once that is known; -1 for a request whose kernels write all states.
        ends: int64 ``[num_requests]`` by group, likewise, the block that gets the state after
            ``end_at`` tokens, for the prefix cache, if these are kept.
        end_at: int64 ``[num_requests]``; None without ``ends``.
        told: int64 ``[num_requests]``, the number of drafts that the kernels take for accepted in
            the step before; -1 where they do not use it. None without any group of states.
        buffers: as for ``Rows``.
        cleared: int64 ``[num_requests]`` by group, the block that is cleared for each request
            before the forward; -1 for none.
        copies: by group, int ``[n]`` twice on the device, the blocks that states are copied from
            and to before the forward.
    """

    slots: dict[str, Tensor]
    sources: dict[str, Tensor]
    told: Tensor | None
    buffers: object | None = None
    leaves: dict[str, Tensor] = attrs.field(factory=dict)
    ends: dict[str, Tensor] = attrs.field(factory=dict)
    end_at: Tensor | None = None
    cleared: dict[str, Tensor] = attrs.field(factory=dict)
    copies: dict[str, tuple[Tensor, Tensor]] = attrs.field(factory=dict)


@attrs.frozen
class Room:
    """The sizes that a ledger needs.

    Attributes:
        requests: the most requests at once.
        length: the most tokens of a request.
        caches_prefixes: requests may share blocks, so each block that becomes full is compared.
    """

    requests: int
    length: int
    caches_prefixes: bool
