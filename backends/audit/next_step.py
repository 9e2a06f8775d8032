"""The host's account of the next step, on its way to the graph that the step replays.

Launches of their own would cost the host more than all else that a steady step asks of it. A graph
cannot be given numbers, so it looks for them: each step has a record in a ring of the host's
memory. A graph begins with kernels that look at the record of the step that it writes. A record
has three parts, each of which says of which step it is; a part that nobody filled is one of an
earlier step:

- the outcome of the step before: the addresses of what was sampled, by which its drafts are
  resolved;
- lines of requests, to be put into a tensor;
- blocks that are handed out.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ...audit.groups import Place
from ..launching.host_memory import memoryview_of

#: Columns of an outcome: the number of the next step, as ``Books.counters`` has it; the address of
#: the accepted counts, and 1 if they are of 64 bits, 0 if of 32; the same of the sampled ids; ids
#: of a request; requests; tokens that are counted beside drafts.
OUTCOME: Final = 0
ACCEPTED: Final = 1
LONG_COUNTS: Final = 2
SAMPLED: Final = 3
LONG_IDS: Final = 4
WIDTH: Final = 5
REQUESTS: Final = 6
BESIDES: Final = 7
#: Columns of lines: the number of the step, the address of their tensor, their count; the lines.
LINES: Final = 8
TARGET: Final = LINES + 1
NUM_LINES: Final = LINES + 2
FIRST_LINE: Final = LINES + 3
#: The most lines of a record.
MOST_LINES: Final = 256
#: Columns of blocks: the number of the step, and of its blocks; then, for each block, its first
#: word and the number of its words.
HANDED_OUT: Final = FIRST_LINE + MOST_LINES
COUNT: Final = HANDED_OUT + 1
BLOCKS: Final = HANDED_OUT + 2
#: The most blocks of a record.
MOST: Final = 128
COLUMNS: Final = BLOCKS + 2 * MOST
#: Records, in two halves.
RECORDS: Final = 256
_HALF: Final = RECORDS // 2
#: The step of a part that no step takes.
_NONE: Final = -1


def outcome_row(accepted: Tensor, sampled: Tensor | None, besides: int) -> array[int]:
    """Return the columns of an outcome, from ``OUTCOME`` on, without the step.

    Args:
        accepted: as for ``NextStep.resolve``.
        sampled: likewise.
        besides: likewise.
    """
    row = array("q", [0] * LINES)
    row[ACCEPTED], row[LONG_COUNTS] = accepted.data_ptr(), accepted.dtype is torch.int64
    row[REQUESTS], row[BESIDES] = accepted.shape[0], besides
    if sampled is not None:
        row[SAMPLED], row[LONG_IDS] = sampled.data_ptr(), sampled.dtype is torch.int64
        row[WIDTH] = sampled.shape[1]
    return row


class NextStep:
    """The records of the steps to come.

    A half of the ring is filled anew once an event has passed behind the steps that read it.

    Args:
        device: of the graphs.

    Attributes:
        records: int64 ``[RECORDS, COLUMNS]`` on the host, pinned if the device is a GPU.
        steps: the number of steps that were launched, as the device will count them.
        used: some graph looks for records.
        blocks: blocks in the record of the next step.
        lines: lines in it.
        resolves: it has the outcome of the last step.
        told: number of other calls than ``RecordRepeat.same``; one more makes a repeat invalid.
        free_until: the device has read what was in the records of the steps before this one.
        memory: the records, row by row.
        held: the tensors of the outcome that was put last.
        target: the tensor that lines were put into last.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu: Final = device.type == "cuda"
        with torch.inference_mode(False):
            records = torch.full((RECORDS, COLUMNS), _NONE, dtype=torch.int64, device="cpu")
            self.records: Final = records.pin_memory() if self._on_gpu else records
        self.memory: Final = memoryview_of(self.records.view(-1))
        self.steps = self.blocks = self.lines = 0
        self.used = self.resolves = False
        self.free_until = self.told = 0
        self._half = self._closed = -1
        self._behind: torch.cuda.Event | None = None
        self.held: tuple[Tensor | None, ...] = ()
        self.target: Tensor | None = None

    def restart(self) -> None:
        """Begin anew with the first step; records of earlier ones are nobody's."""
        self.records[:, [OUTCOME, LINES, HANDED_OUT]] = _NONE
        self.steps = self.blocks = self.lines = self.free_until = 0
        self.resolves = False
        self.told += 1
        self._half = self._closed = -1
        self._behind = None

    def resolve(self, accepted: Tensor, sampled: Tensor | None, besides: int) -> bool:
        """Put the outcome of the last step into the record of the next one.

        The tensors are held until another outcome takes their place.

        Args:
            accepted: int32 or int64 ``[num_requests]``, contiguous, on the device.
            sampled: int32 or int64 ``[num_requests, n]``, likewise.
            besides: as for ``Passes.resolve``.

        Returns:
            False if the device may not have read what it would replace; nothing was put then.
        """
        if not self.may_fill():
            return False
        step, row = self.steps + 1, outcome_row(accepted, sampled, besides)
        row[OUTCOME], begin = step, step % RECORDS * COLUMNS
        self.memory[begin : begin + len(row)] = row
        self.held = accepted, sampled
        self.resolves = True
        self.told += 1
        return True

    def put_lines(self, target: Tensor, lines: Sequence[int]) -> bool:
        """Let the next step put lines into a tensor.

        Args:
            target: int64 ``[n]`` at least, on the device; it lives as long as its ledger.
            lines: n numbers.

        Returns:
            As ``add``; False, too, if lines wait already.
        """
        if self.lines or len(lines) > MOST_LINES:
            return False
        if self.is_read() or not self.may_fill():
            return False
        step, memory = self.steps + 1, self.memory
        begin = step % RECORDS * COLUMNS
        for at, line in enumerate(lines, begin + FIRST_LINE):
            memory[at] = line
        memory[begin + TARGET] = target.data_ptr()
        memory[begin + NUM_LINES] = self.lines = len(lines)
        memory[begin + LINES] = step
        self.target = target
        self.told += 1
        return True

    def add(self, given: Sequence[tuple[Place, Sequence[int]]]) -> bool:
        """Put blocks into the record of the next step.

        Args:
            given: as for ``Change``.

        Returns:
            False if they do not fit, or if the device may not have read what they would replace;
            nothing was put then.
        """
        step, waiting = self.steps + 1, self.blocks
        if self.is_read() or not self.may_fill():
            return False
        memory, begin = self.memory, step % RECORDS * COLUMNS
        for place, blocks in given:
            if waiting + len(blocks) > MOST:
                return False
            base, stride = place.base, place.stride
            at = begin + BLOCKS + 2 * waiting
            for block in blocks:
                memory[at] = base + block * stride
                memory[at + 1] = stride
                at += 2
            waiting += len(blocks)
        memory[begin + COUNT] = self.blocks = waiting
        memory[begin + HANDED_OUT] = step
        self.told += 1
        return True

    def take_lines(self) -> tuple[Tensor, Tensor]:
        """Take the lines that wait out of the record, for a launch that comes now.

        No other lines or blocks wait for this step.

        Returns:
            Their tensor, and the lines, int64 ``[n]``.
        """
        record, count = self._close(LINES), self.lines
        self.lines = 0
        assert self.target is not None
        return self.target, record[FIRST_LINE : FIRST_LINE + count]

    def take(self) -> tuple[Tensor, int]:
        """Take the blocks that wait out of the record, for a launch that comes now.

        No other lines or blocks wait for this step.

        Returns:
            int64 ``[2 * count]``, the pairs of a record, and the count.
        """
        record, count = self._close(HANDED_OUT), self.blocks
        self.blocks = 0
        return record[BLOCKS : BLOCKS + 2 * count], count

    def launched(self) -> None:
        """Hear that a step's launch was made, or that a graph was replayed that has it."""
        self.steps += 1
        self.told += 1
        self.blocks = self.lines = 0
        self.resolves = False

    def _close(self, part: int) -> Tensor:
        """Empty a part of the next step's record, which a launch reads now."""
        step = self.steps + 1
        self.memory[step % RECORDS * COLUMNS + part] = _NONE
        self._closed = step
        self.told += 1
        return self.records[step % RECORDS]

    def is_read(self) -> bool:
        """Tell whether a launch reads the next step's record: lines and blocks stay there."""
        return self.steps + 1 == self._closed

    def may_fill(self) -> bool:
        """Tell whether the next step's record may be filled: graphs look for it, it was read."""
        step = self.steps + 1
        return self.used and (step < self.free_until or self._enter(step // _HALF))

    def _enter(self, half: int) -> bool:
        """Go on to a half of the ring; tells whether the device has read what was in it."""
        free = True
        if self._on_gpu and half == self._half:
            assert self._behind is not None
            free = self._behind.query()
        elif self._on_gpu:
            # The event lies behind all steps before the half that it was recorded in.
            behind = self._behind
            free = half == self._half + 1 and behind is not None and behind.query()
            behind = torch.cuda.Event() if behind is None else behind
            behind.record()
            self._behind = behind
        self._half, self.free_until = half, (half + 1) * _HALF if free else 0
        return free
