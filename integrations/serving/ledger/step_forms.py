"""A step of a runner, described for the ledger: its requests, its rows, the blocks it fills."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ....audit import Admission, Ledger, RowGroup, Scrub, Step, Stretch
from ....audit.books import REFUSED
from ....audit.repeated_work import RepeatedWork
from ....audit.rows import first_of
from ....errors import ConfigError
from ....host_values import to_device
from ..step import Arrival, Changes, Rows, States


def fresh_blocks(
    changes: Changes, groups: Mapping[str, RowGroup], kept: Mapping[str, int] | None = None
) -> dict[str, list[int]]:
    """Return the blocks that a step hands out, by name of their KV-cache group.

    Of a request that arrives with computed rows, blocks that have them are left out; in a group
    that is in neither ``groups`` nor ``kept``, all of its blocks are.

    Args:
        changes: what the step changes.
        groups: the watched groups with a row per token, by name.
        kept: the tokens of a block in groups whose states the prefix cache keeps at their ends.
    """
    sizes = {**(kept or {}), **{name: group.block_size for name, group in groups.items()}}
    fresh = {f"group.{number}": [*blocks] for number, blocks in enumerate(changes.grown)}
    for arrival in changes.arrivals:
        for number, blocks in enumerate(arrival.tables):
            name = f"group.{number}"
            known, size = fresh.setdefault(name, []), sizes.get(name)
            if size is not None:  # those before are of a hit, or of the turn before
                known += blocks[-(-arrival.computed // size) :]
            elif not arrival.computed:
                known += blocks
    return fresh


def number_of_group(name: str) -> int:
    """Return the number of a group among all groups of an engine's caches, by its name.

    Raises:
        ConfigError: the name has none.
    """
    group, _, number = name.partition(".")
    if group != "group" or not (number.isascii() and number.isdigit()):
        raise ConfigError(
            "Watch", "the name of a group is not valid", expected="group.0, group.1 and so on",
            got=repr(name), hint="name each group by its number among all groups of the caches",
        )  # fmt: skip
    return int(number)


def one_of_each_pool(groups: Mapping[str, RowGroup]) -> list[str]:
    """Return the name of each pool's first group; a group without a pool is a pool of its own.

    The words of copied blocks are there once for all groups of a pool.

    Args:
        groups: the watched groups with a row per token, by name.
    """
    found: dict[str, str] = {}
    for name, group in groups.items():
        found.setdefault(group.pool or name, name)
    return [*found.values()]


def admissions(arrivals: Iterable[Arrival]) -> list[Admission]:
    """Describe arriving requests for the ledger, with their tokens in arrays.

    The ledger looks at an array quicker than at a list.

    Args:
        arrivals: the requests.
    """
    return [
        Admission(each.name, _in_array(each.tokens), each.extras, each.embedded)
        for each in arrivals
    ]


def count_repeated(work: RepeatedWork, changes: Changes) -> None:
    """Count the arriving requests that the engine had put back, and the cached rows left unused.

    Args:
        work: counts them.
        changes: those of a step.
    """
    work.leave_unused(changes.unused)
    for each in changes.arrivals:
        if each.had is not None:
            length = len(each.tokens)
            prompt = length if each.prompt is None else each.prompt
            work.begin_again(each.name, length, each.had, each.computed, prompt)


def _in_array(tokens: list[int]) -> array[int]:
    """Return token ids in an array: unsigned 32 bits, or 64 bits if one of them does not fit.

    Ids of 32 bits need no check for too large ones.
    """
    try:
        return array("I", tokens)
    except OverflowError:
        return array("q", tokens)


class LineBuffer:
    """Lines of requests that stay in one place, so that launches over them can be made again.

    Args:
        ledger: copies them to its device.
        number: the most lines.
        device: of the steps.
    """

    def __init__(self, ledger: Ledger, number: int, device: torch.device | str) -> None:
        self._ledger: Final = ledger
        with torch.inference_mode(False):  # steps write into it in inference mode or not
            self._all: Final = torch.full((number,), -1, device=device)
        self._views: Final[dict[int, Tensor]] = {}

    def put(self, lines: Sequence[int]) -> Tensor:
        """Put the lines of a batch in place; those of the last call are overwritten.

        Args:
            lines: one for each request.

        Returns:
            int64 ``[len(lines)]``, their place; the same object for as many lines.
        """
        view = self._views.get(len(lines))
        if view is None:
            view = self._views[len(lines)] = self._all[: len(lines)]
        self._ledger.input.put(view, lines)
        return view


def leave_out(ledger: Ledger, lines: Tensor, first: Tensor) -> bool:
    """Turn requests that begin before position 0 into padding, and count them as refused.

    vLLM computes such rows if a connector says that it brings fewer than no tokens, as
    ``ExampleConnector`` does for a prompt of one token that it has stored. Waits for the device.

    Args:
        ledger: the ledger.
        lines: int64 ``[num_requests]``, the lines of the step's requests; changed in place.
        first: int64 ``[num_requests]``, the positions of their first rows.

    Returns:
        True if there are such requests; ``lines`` is of no use for the next step then.
    """
    outside = first < 0
    if not bool(outside.any()):
        return False
    lines.masked_fill_(outside, -1)
    ledger.books.counters[REFUSED] += outside.sum()
    return True


def prepare_states(ledger: Ledger, lines: Tensor, states: States) -> None:
    """Tell the ledger which states the engine clears and copies in front of a forward, if any.

    Args:
        ledger: the ledger.
        lines: int64 ``[num_requests]``, the lines of the step's requests.
        states: those of the step.
    """
    if states.cleared:
        ledger.leave(lines, states.cleared, torch.zeros_like(lines))
    if states.copies:
        ledger.carry(states.copies)


def leave_states(ledger: Ledger, lines: Tensor, states: States, left: Mapping[str, Tensor]) -> None:
    """Tell the ledger which states the engine or a commit writes once drafts are decided, if any.

    Args:
        ledger: the ledger.
        lines: int64 ``[num_requests]``, the lines of the step's requests.
        states: those of the step.
        left: bool ``[num_requests]`` by group, the requests of whose states the ledger knows it
            from a window.
    """
    leaves = {
        name: blocks.masked_fill(left[name], -1) if name in left else blocks
        for name, blocks in states.leaves.items()
    }
    if leaves:
        ledger.leave(lines, leaves)
    if states.ends:
        ledger.leave(lines, states.ends, states.end_at)


#: Steps that are remembered; beyond, all are forgotten.
_MAX_REMEMBERED: Final = 2048

#: Pairs of a tensor of the runner's and the watch's own copy of it.
Copies = Sequence[tuple[Tensor, Tensor]]


class StepForms:
    """The steps of a runner; forwards out of the same buffers are one ``Step``.

    So the ledger examines its tensors once, and packs the arguments of its launches once.
    """

    def __init__(self) -> None:
        self._known: Final[dict[tuple[int, int], tuple[object, Step, Copies]]] = {}
        self._copies: Final[dict[tuple[int, int], Tensor]] = {}

    def step(self, rows: Rows, lines: Tensor, states: States | None, *, copies: bool) -> Step:
        """Return the step of a forward, the same object for the same ``buffers``.

        Rows or states without ``buffers`` make a new one each time.

        Args:
            rows: the batch's rows.
            lines: int64 ``[num_requests]``, the lines of its requests; not looked at in a known
                step, so they have to be in the same place each time.
            states: its states; None if the model has none.
            copies: copy the rows' starts and slots in each call, because the drafter writes into
                the runner's buffers before the step has ended.
        """
        recurs = rows.buffers is not None and (states is None or states.buffers is not None)
        key = id(rows.buffers), id(states and states.buffers)
        known = self._known.get(key) if recurs else None
        if known is None:
            own, pairs = self._copied(rows) if copies else (rows, ())
            known = (rows.buffers, states and states.buffers), _step(own, lines, states), pairs
            if recurs:
                if len(self._known) >= _MAX_REMEMBERED:
                    self._known.clear()
                self._known[key] = known
        for theirs, copy in known[2]:
            copy.copy_(theirs)
        return known[1]

    def _copied(self, rows: Rows) -> tuple[Rows, Copies]:
        """Return rows with starts and slots in tensors of their own, and each source with its copy.

        Nothing is copied yet.
        """
        copies = {theirs: self._copy_of(theirs) for theirs in (rows.starts, *rows.slots.values())}
        slots = {name: copies[each] for name, each in rows.slots.items()}
        own = attrs.evolve(rows, starts=copies[rows.starts], slots=slots)
        return own, tuple(copies.items())

    def _copy_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor for copies of a runner's buffer, the same for one address and length."""
        key = tensor.data_ptr(), len(tensor)
        if key not in self._copies:
            with torch.inference_mode(False):
                self._copies[key] = torch.empty_like(tensor)
        return self._copies[key]


def _step(rows: Rows, lines: Tensor, states: States | None) -> Step:
    """Return the ledger's step of a forward; its tensors are those of ``rows`` and ``states``."""
    return Step(
        lines=lines,
        starts=rows.starts,
        first=rows.first,
        tokens=rows.tokens,
        drafts=rows.drafts,
        slots=rows.slots if states is None else {**rows.slots, **states.slots},
        tables=rows.tables,
        table_lines=rows.table_lines,
        parents=rows.parents,
        block_maps=rows.block_maps,
        positions=rows.positions,
        sources={} if states is None else states.sources,
        told=None if states is None else states.told,
    )


class PublishedBlocks:
    """The blocks of each request that are full, and so can be found by other requests.

    On a GPU those are checked whose rows may have left the window of the step that fills the block.
    All other rows of a published block are rows that its step has read.

    Args:
        ledger: the ledger.
        groups: all watched groups with a row per token.
        drafts: the most drafts of a request in one step; None on a CPU, where the host knows which
            steps fill a block, and all blocks are checked.

    Attributes:
        groups: those whose blocks are checked.
    """

    def __init__(self, ledger: Ledger, groups: Iterable[RowGroup], drafts: int | None) -> None:
        self._ledger: Final = ledger
        self.groups: Final = [
            group
            for group in groups
            if drafts is None
            or group.chunk is not None
            or (group.window is not None and group.window < group.block_size + drafts + 1)
        ]
        self._on_host: Final = drafts is None
        number = ledger.books.sizes.max_requests
        with torch.inference_mode(False):  # steps write into them in inference mode or not
            zeros = [
                torch.zeros(number, dtype=torch.int64, device=ledger.device) for _ in self.groups
            ]
        # By line, the position after the last block that is known to be right; on a CPU after the
        # block that is filled next.
        self._ends: Final = [*zip(self.groups, zeros, strict=True)]

    def begin(self, lines: Sequence[int], arrivals: Sequence[Arrival]) -> None:
        """Note how far requests that came have full blocks, which are not checked once more.

        Nothing is noted without arrivals, or without groups whose blocks are checked.

        Args:
            lines: the line of each.
            arrivals: the requests.
        """
        if not (arrivals and self._ends):
            return
        device = self._ledger.device
        there = to_device(lines, device, torch.int64)
        for group, ends in self._ends:
            size = group.block_size
            full = [(each.computed // size + self._on_host) * size for each in arrivals]
            ends.index_copy_(0, there, to_device(full, device, torch.int64))

    def publish(self, step: Step) -> None:
        """Compare the rows of blocks that are newly full, as kind "published".

        A block is full if all its positions come before the step's drafts. Each is checked once for
        each request, before the step's own outcome is known. Blocks that left the request's window
        are left out.

        Args:
            step: the step last given to ``Ledger.write``; a block whose last row was a draft is
                checked with a later step.
        """
        for group, ends in self._ends:
            if self._on_host and not self._ledger.input.reaches(step, ends):
                continue
            number, size = len(step.lines), group.block_size
            first = first_of(self._ledger.books, step)[:number].long()
            settled = first + step.starts[: number + 1].diff()
            if step.drafts is not None:
                settled = settled - step.drafts[:number]
            lines = step.lines.clamp(min=0)
            before = ends.index_select(0, lines)
            before = before - size if self._on_host else before
            end = (settled // size * size).maximum(before)
            begin = not_left(group, first, before)
            self._ledger.inspect(_published(step, group, begin, end.maximum(begin)))
            ends.index_copy_(0, lines, end + size if self._on_host else end)


def _published(step: Step, group: RowGroup, begin: Tensor, end: Tensor) -> Stretch:
    """Return rows ``begin`` to ``end`` of each request in a group, to be checked as "published"."""
    tables = {group.name: step.tables[group.name]}
    maps = {name: each for name, each in step.block_maps.items() if name == group.name}
    return Stretch(step.lines, begin, end, tables, "published", step.table_lines, maps)


def not_left(group: RowGroup, first: Tensor, begin: Tensor) -> Tensor:
    """Return the later of ``begin`` and the first block that a request's next row still needs.

    A block that leaves the window or the chunk of a request's next row goes back to the pool before
    it is published, if only that row's step says that its last row was an accepted draft's. In a
    group with neither, ``begin`` itself is returned.

    Args:
        group: the group.
        first: int64 ``[num_requests]``, the position of each request's first row in the step.
        begin: int64 ``[num_requests]``, positions at which blocks begin.

    Returns:
        int64 ``[num_requests]``, positions at which blocks begin.
    """
    if group.chunk is not None:
        first = first // group.chunk * group.chunk
    elif group.window is not None:
        first = (first - group.window + 1).clamp(min=0)
    else:
        return begin
    return begin.maximum(first // group.block_size * group.block_size)


def launch_all(
    ledger: Ledger,
    groups: Collection[str],
    states: Collection[str],
    scrub: Scrub | None,
    published: PublishedBlocks,
) -> None:
    """Launch every pass of the ledger and the scrub once, over a step of padding.

    A request of the warm-up stays in the ledger.

    Args:
        ledger: on a GPU, without requests; it has to be restarted afterwards.
        groups: the names of its groups of rows.
        states: the names of its groups of states.
        scrub: compares bytes beside it; None without one.
        published: checks its blocks.
    """
    device = ledger.device
    ledger.admit("of the warm-up", [0])
    one = torch.zeros(1, dtype=torch.int64, device=device)
    starts = torch.zeros(2, dtype=torch.int32, device=device)
    tokens = torch.zeros(1, dtype=torch.int32, device=device)
    tables = dict.fromkeys(groups, tokens[None])
    slots = dict.fromkeys((*groups, *states), one - 1)
    sources = dict.fromkeys(states, one - 1)
    told = one - 1 if states else None
    step_input = ledger.input
    for target in (one.clone(), tokens.clone()):
        step_input.put(target, [0])
    step_input.count(tokens[None], tokens.bool(), 1, one.clone(), one[None].clone())
    # Counts as the two runners have them, with drafts and without.
    for drafts, counts in ((None, tokens), (tokens, tokens), (None, one), (tokens, one)):
        step = Step(
            *(one - 1, starts, None, tokens, slots, tables, drafts, sources, told), positions=one
        )
        if scrub is not None:
            scrub.compare(step)
        ledger.write(step)
        ledger.check(step)
        ledger.resolve(counts, one[None], besides=1)
        if scrub is not None:
            scrub.trace(step, one[None].float(), one - 1)
            scrub.seal(step, counts, besides=1)
    published.publish(step)
