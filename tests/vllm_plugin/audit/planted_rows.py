"""Faults in what a forward reads and writes: slots, block tables, positions, tokens, counts."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from model_files import VOCAB
from planting import Batch, Rig, around, prepared


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


# -- the slot mapping ---------------------------------------------------------------------


def lost_write(rig: Rig) -> Any:
    """The slot of one row of a prompt is -1, so the row is not written."""

    def tamper(batch: Batch) -> None:
        if (index := _prompt(batch)) is not None:
            row = batch.starts[index] + 3
            slot = int(batch.slots[row])
            batch.slots[row] = -1
            rig.strike(batch.names[index], batch.first[index] + 3, slot)

    return prepared(rig, tamper)


def slot_off_by_one(rig: Rig) -> Any:
    """One row of a prompt goes one slot too far."""

    def tamper(batch: Batch) -> None:
        if (index := _prompt(batch)) is not None:
            row = batch.starts[index] + 3
            slot = int(batch.slots[row])
            batch.slots[row] += 1
            rig.strike(batch.names[index], batch.first[index] + 3, slot)

    return prepared(rig, tamper)


def slots_swapped(rig: Rig) -> Any:
    """Two neighbouring rows of a prompt change places."""

    def tamper(batch: Batch) -> None:
        if (index := _prompt(batch)) is not None:
            row = batch.starts[index] + 3
            slot = int(batch.slots[row])
            batch.slots[row : row + 2] = batch.slots[row : row + 2].flip(0).clone()
            rig.strike(batch.names[index], batch.first[index] + 3, slot)

    return prepared(rig, tamper)


def slot_outside(rig: Rig) -> Any:
    """A row of a prompt goes to a block that the cache does not have."""

    def tamper(batch: Batch) -> None:
        if (index := _prompt(batch)) is not None:
            row = batch.starts[index] + 5
            slot = int(batch.slots[row])
            batch.slots[row] = 32 * (rig.pool.num_gpu_blocks + 7)
            rig.strike(batch.names[index], batch.first[index] + 5, slot)

    stack = ExitStack()
    stack.enter_context(prepared(rig, tamper))
    # The kernel would write there: it is told not to, once the audit has been told.
    stack.enter_context(_masked(rig))
    return stack


@contextmanager
def _masked(rig: Rig) -> Any:
    real = rig.runner.model.forward
    table = rig.runner.input_batch.block_table[0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        table.slot_mapping.gpu[table.slot_mapping.gpu >= 32 * rig.pool.num_gpu_blocks] = -1
        return real(*args, **kwargs)

    with mock.patch.object(rig.runner.model, "forward", forward):
        yield


def write_into_anothers_block(rig: Rig) -> Any:
    """A decoded row goes to a slot of another request, whose row is lost."""

    def tamper(batch: Batch) -> None:
        writer, victim = _running(batch, 0), _running(batch, 1)
        if writer is None or victim is None or len(batch) < 2:
            return
        writer = next(index for index in range(len(batch)) if index != victim)
        slot = int(batch.tables[victim, 0]) * 32 + 7
        batch.slots[batch.starts[writer]] = slot
        rig.strike(batch.names[victim], 7, slot)

    return prepared(rig, tamper)


# -- the block table ----------------------------------------------------------------------


def columns_swapped(rig: Rig) -> Any:
    """The first two blocks of a request change places in its table."""

    def tamper(batch: Batch) -> None:
        if (index := _running(batch)) is not None:
            row = batch.tables[index].clone()
            row[:2] = row[:2].flip(0).clone()
            batch.put_table(index, row)
            rig.strike(batch.names[index], 0, int(row[0]) * 32)

    return prepared(rig, tamper)


def table_shifted(rig: Rig) -> Any:
    """A table begins with the second block."""

    def tamper(batch: Batch) -> None:
        if (index := _running(batch)) is not None:
            row = batch.tables[index].roll(-1)
            batch.put_table(index, row)
            rig.strike(batch.names[index], 0, int(row[0]) * 32)

    return prepared(rig, tamper)


def anothers_table(rig: Rig) -> Any:
    """A request reads through the table of another one."""

    def tamper(batch: Batch) -> None:
        index = _running(batch)
        if index is None or len(batch) < 2:
            return
        other = batch.tables[(index + 1) % len(batch)].clone()
        batch.put_table(index, other)
        rig.strike(batch.names[index], 0, int(other[0]) * 32)

    return prepared(rig, tamper)


def anothers_last_block(rig: Rig) -> Any:
    """The second block of a table is that of another request."""

    def tamper(batch: Batch) -> None:
        index = _running(batch)
        others = [n for n in range(len(batch)) if n != index and batch.first[n] >= 64]
        if index is None or not others:
            return
        row = batch.tables[index].clone()
        row[1] = batch.tables[others[0], 1]
        batch.put_table(index, row)
        rig.strike(batch.names[index], 32, int(row[1]) * 32)

    return prepared(rig, tamper)


def one_block_in_two_tables(rig: Rig) -> Any:
    """Two requests read a block of a third one; the second of them has to be found, too."""

    def tamper(batch: Batch) -> None:
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

    return prepared(rig, tamper)


def nobodys_block(rig: Rig) -> Any:
    """A table names a block that belongs to nobody."""

    def tamper(batch: Batch) -> None:
        if (index := _running(batch)) is not None:
            row = batch.tables[index].clone()
            row[1] = 0
            batch.put_table(index, row)
            rig.strike(batch.names[index], 32, 0)

    return prepared(rig, tamper)


# -- positions and tokens -----------------------------------------------------------------


def positions_off_by_one(rig: Rig) -> Any:
    """The rows of a decode are computed for the positions behind theirs."""

    def tamper(batch: Batch) -> None:
        if (index := _running(batch)) is not None:
            low, high = batch.starts[index], batch.starts[index + 1]
            slot = int(batch.slots[low])
            batch.positions[low:high] += 1
            rig.strike(batch.names[index], batch.first[index], slot)

    return prepared(rig, tamper)


def positions_after_the_first(rig: Rig) -> Any:
    """The later rows of a prompt are computed for other positions, its first ones for theirs."""

    def tamper(batch: Batch) -> None:
        if (index := _prompt(batch)) is not None:
            row, end = batch.starts[index] + 5, batch.starts[index + 1]
            batch.positions[row:end] += 7
            rig.strike(batch.names[index], batch.first[index] + 5, int(batch.slots[row]))

    return prepared(rig, tamper)


def positions_of_drafts(rig: Rig) -> Any:
    """The drafts of a decode are verified at the positions behind theirs."""

    def tamper(batch: Batch) -> None:
        found = (n for n in range(len(batch)) if batch.drafts[n] and batch.settled(n) == 1)
        if (index := next(found, None)) is not None:
            row, end = batch.starts[index] + 1, batch.starts[index + 1]
            batch.positions[row:end] += 3
            rig.strike(batch.names[index], batch.first[index] + 1, int(batch.slots[row]))

    return prepared(rig, tamper)


def wrong_prompt_token(rig: Rig) -> Any:
    """The forward gets another token in the middle of a prompt."""

    def tamper(batch: Batch) -> None:
        if (index := _prompt(batch)) is not None:
            row = batch.starts[index] + 4
            batch.tokens[row] = (int(batch.tokens[row]) + 1) % VOCAB
            rig.strike(batch.names[index], batch.first[index] + 4, int(batch.slots[row]))

    return prepared(rig, tamper)


def wrong_last_token(rig: Rig) -> Any:
    """The forward gets another token than the one sampled last."""

    def tamper(batch: Batch) -> None:
        if (index := _running(batch, 1)) is not None:
            row = batch.starts[index]
            batch.tokens[row] = (int(batch.tokens[row]) + 1) % VOCAB
            rig.strike(batch.names[index], batch.first[index], int(batch.slots[row]))

    return prepared(rig, tamper)


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
