"""Faults in what a forward reads and writes: slots, block tables, positions, tokens, counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

from model_files import VOCAB
from planting import Batch, Fault, Rig, around, prepared


def _prompt(batch: Batch, least: int = 8) -> int | None:
    """Find a request of which many settled rows are computed."""
    found = (index for index in range(len(batch)) if batch.settled(index) >= least)
    return next(found, None)


def _running(batch: Batch, blocks: int = 2) -> int | None:
    """Find a request that decodes, with so many full blocks behind it."""
    found = (
        index
        for index in range(len(batch))
        if batch.settled(index) == 1 and batch.first[index] >= 32 * blocks
    )
    return next(found, None)


def _of_forward(tamper: Callable[[Rig, Batch], None]) -> Fault:
    """Make a fault of a function that tampers with the inputs of a forward."""

    @wraps(tamper)
    def fault(rig: Rig) -> Any:
        return prepared(rig, partial(tamper, rig))

    return fault


def _of_prompt(after: int) -> Callable[[Callable[[Batch, int], None]], Fault]:
    """Make a fault of a function that gets a batch and a row of a prompt, so many after the first.

    The row in the slot that the batch had for it is wrong from then on.
    """

    def made(change: Callable[[Batch, int], None]) -> Fault:
        @wraps(change)
        def tamper(rig: Rig, batch: Batch) -> None:
            if (index := _prompt(batch)) is not None:
                row = batch.starts[index] + after
                slot = int(batch.slots[row])
                change(batch, row)
                rig.strike(batch.names[index], batch.first[index] + after, slot)

        return _of_forward(tamper)

    return made


def _of_table(column: int) -> Callable[[Callable[[Any], Any]], Fault]:
    """Make a fault of a function that returns another table for that of a request that decodes.

    The rows of the block in this column are the first wrong ones.
    """

    def made(change: Callable[[Any], Any]) -> Fault:
        @wraps(change)
        def tamper(rig: Rig, batch: Batch) -> None:
            if (index := _running(batch)) is not None:
                table = change(batch.tables[index].clone())
                batch.put_table(index, table)
                rig.strike(batch.names[index], 32 * column, int(table[column]) * 32)

        return _of_forward(tamper)

    return made


# -- the slot mapping ---------------------------------------------------------------------


@_of_prompt(3)
def lost_write(batch: Batch, row: int) -> None:
    """The slot of one row of a prompt is -1, so the row is not written."""
    batch.slots[row] = -1


@_of_prompt(3)
def slot_off_by_one(batch: Batch, row: int) -> None:
    """One row of a prompt goes one slot too far."""
    batch.slots[row] += 1


@_of_prompt(3)
def slots_swapped(batch: Batch, row: int) -> None:
    """Two neighbouring rows of a prompt change places."""
    batch.slots[row : row + 2] = batch.slots[row : row + 2].flip(0).clone()


@contextmanager
def slot_outside(rig: Rig) -> Any:
    """A row of a prompt goes to a block that the cache does not have."""

    @_of_prompt(5)
    def outside(batch: Batch, row: int) -> None:
        batch.slots[row] = 32 * (rig.pool.num_gpu_blocks + 7)

    # The kernel would write there: it is told not to, once the audit has been told.
    with outside(rig), _masked(rig):
        yield


@contextmanager
def _masked(rig: Rig) -> Any:
    real = rig.runner.model.forward
    table = rig.runner.input_batch.block_table[0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        table.slot_mapping.gpu[table.slot_mapping.gpu >= 32 * rig.pool.num_gpu_blocks] = -1
        return real(*args, **kwargs)

    with mock.patch.object(rig.runner.model, "forward", forward):
        yield


@_of_forward
def write_into_anothers_block(rig: Rig, batch: Batch) -> None:
    """A decoded row goes to a slot of another request, whose row is lost."""
    writer, victim = _running(batch, 0), _running(batch, 1)
    if writer is None or victim is None or len(batch) < 2:
        return
    writer = next(index for index in range(len(batch)) if index != victim)
    slot = int(batch.tables[victim, 0]) * 32 + 7
    batch.slots[batch.starts[writer]] = slot
    rig.strike(batch.names[victim], 7, slot)


# -- the block table ----------------------------------------------------------------------


@_of_table(0)
def columns_swapped(table: Any) -> Any:
    """The first two blocks of a request change places in its table."""
    table[:2] = table[:2].flip(0).clone()
    return table


@_of_table(0)
def table_shifted(table: Any) -> Any:
    """A table begins with the second block."""
    return table.roll(-1)


@_of_table(1)
def nobodys_block(table: Any) -> Any:
    """A table names a block that belongs to nobody."""
    table[1] = 0
    return table


@_of_forward
def anothers_table(rig: Rig, batch: Batch) -> None:
    """A request reads through the table of another one."""
    index = _running(batch)
    if index is None or len(batch) < 2:
        return
    other = batch.tables[(index + 1) % len(batch)].clone()
    batch.put_table(index, other)
    rig.strike(batch.names[index], 0, int(other[0]) * 32)


@_of_forward
def anothers_last_block(rig: Rig, batch: Batch) -> None:
    """The second block of a table is that of another request."""
    index = _running(batch)
    others = [n for n in range(len(batch)) if n != index and batch.first[n] >= 64]
    if index is None or not others:
        return
    row = batch.tables[index].clone()
    row[1] = batch.tables[others[0], 1]
    batch.put_table(index, row)
    rig.strike(batch.names[index], 32, int(row[1]) * 32)


@_of_forward
def one_block_in_two_tables(rig: Rig, batch: Batch) -> None:
    """Two requests read a block of a third one; the second of them has to be found, too."""
    running = [n for n in range(len(batch)) if batch.settled(n) == 1 and batch.first[n] >= 64]
    if len(running) < 3:
        return
    owner, *readers = running[:3]
    block = int(batch.tables[owner, 1])
    for index in readers:
        row = batch.tables[index].clone()
        row[1] = block
        batch.put_table(index, row)
    rig.strike(batch.names[readers[1]], 32, block * 32)


# -- positions and tokens -----------------------------------------------------------------


@_of_forward
def positions_off_by_one(rig: Rig, batch: Batch) -> None:
    """The rows of a decode are computed for the positions behind theirs."""
    if (index := _running(batch)) is not None:
        low, high = batch.starts[index], batch.starts[index + 1]
        slot = int(batch.slots[low])
        batch.positions[low:high] += 1
        rig.strike(batch.names[index], batch.first[index], slot)


@_of_prompt(5)
def positions_after_the_first(batch: Batch, row: int) -> None:
    """The later rows of a prompt are computed for other positions, its first ones for theirs."""
    end = next(start for start in batch.starts if start > row)
    batch.positions[row:end] += 7


@_of_forward
def positions_of_drafts(rig: Rig, batch: Batch) -> None:
    """The drafts of a decode are verified at the positions behind theirs."""
    found = (n for n in range(len(batch)) if batch.drafts[n] and batch.settled(n) == 1)
    if (index := next(found, None)) is not None:
        row, end = batch.starts[index] + 1, batch.starts[index + 1]
        batch.positions[row:end] += 3
        rig.strike(batch.names[index], batch.first[index] + 1, int(batch.slots[row]))


@_of_prompt(4)
def wrong_prompt_token(batch: Batch, row: int) -> None:
    """The forward gets another token in the middle of a prompt."""
    batch.tokens[row] = (int(batch.tokens[row]) + 1) % VOCAB


@_of_forward
def wrong_last_token(rig: Rig, batch: Batch) -> None:
    """The forward gets another token than the one sampled last."""
    if (index := _running(batch, 1)) is not None:
        row = batch.starts[index]
        batch.tokens[row] = (int(batch.tokens[row]) + 1) % VOCAB
        rig.strike(batch.names[index], batch.first[index], int(batch.slots[row]))


def other_drafts_verified(rig: Rig) -> Any:
    """The forward gets other drafts than those compared with the samples, one of which is kept."""
    changed: dict[str, tuple[int, int]] = {}

    def tamper(batch: Batch) -> None:
        changed.clear()
        for index, name in enumerate(batch.names):
            if batch.drafts[index]:
                row = batch.starts[index] + batch.settled(index)
                batch.tokens[row] = (int(batch.tokens[row]) + 1) % VOCAB
                changed[name] = (batch.first[index] + batch.settled(index), int(batch.slots[row]))

    def after(output: Any, *args: Any) -> None:
        kept = (output.sampled_token_ids >= 0).sum(1) - 1
        for index, name in enumerate(rig.runner.input_batch.req_ids):
            if rig.struck is None and name in changed and int(kept[index]) > 0:
                rig.strike(name, *changed[name])

    stack = ExitStack()
    stack.enter_context(prepared(rig, tamper))
    stack.enter_context(around(rig.runner, "_sample", after=after))
    return stack


# -- accepted counts ----------------------------------------------------------------------


def _bookkeeping(rig: Rig, change: Any) -> Any:
    """Change the tokens that the runner keeps of a step, after they were sampled."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    real = RejectionSampler.parse_output

    def parse_output(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if rig.struck is None:
            change(result[0])
        return result

    return mock.patch.object(RejectionSampler, "parse_output", staticmethod(parse_output))


def _next_position(rig: Rig, index: int, kept: int) -> int:
    """Return the position of the token sampled after so many accepted drafts."""
    starts = rig.runner.query_start_loc.np
    settled = int(starts[index + 1] - starts[index]) - _drafts(rig, index)
    return int(rig.runner.positions[starts[index]]) + settled + kept


def _drafts(rig: Rig, index: int) -> int:
    return max(int(rig.runner.num_decode_draft_tokens.np[index]), 0)


def one_more_kept(rig: Rig) -> Any:
    """A rejected draft's row counts as that of a token that the bookkeeping adds."""

    def change(kept: list[list[int]]) -> None:
        for index, tokens in enumerate(kept):
            name = rig.runner.input_batch.req_ids[index]
            if 0 < len(tokens) <= _drafts(rig, index):
                position = _next_position(rig, index, len(tokens) - 1)
                tokens.append((tokens[-1] + 1) % VOCAB)
                rig.strike(name, position, rig.slot(name, position))
                return

    return _bookkeeping(rig, change)


def another_token_kept(rig: Rig) -> Any:
    """The bookkeeping keeps another token than was sampled."""

    def change(kept: list[list[int]]) -> None:
        for index, tokens in enumerate(kept):
            name = rig.runner.input_batch.req_ids[index]
            if tokens and _drafts(rig, index):
                position = _next_position(rig, index, len(tokens) - 1)
                tokens[-1] = (tokens[-1] + 1) % VOCAB
                rig.strike(name, position, rig.slot(name, position))
                return

    return _bookkeeping(rig, change)


FAULTS = (
    *(nobodys_block, one_block_in_two_tables),
    *(lost_write, slot_off_by_one, slots_swapped, slot_outside, write_into_anothers_block),
    *(columns_swapped, table_shifted, anothers_table, anothers_last_block),
    *(positions_after_the_first, positions_of_drafts),
    *(positions_off_by_one, wrong_prompt_token, wrong_last_token, other_drafts_verified),
    *(one_more_kept, another_token_kept),
)
