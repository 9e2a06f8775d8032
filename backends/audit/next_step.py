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
from .staging import memoryview_of

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
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu: Final = device.type == "cuda"
        with torch.inference_mode(False):
            records = torch.full((RECORDS, COLUMNS), _NONE, dtype=torch.int64, device="cpu")
            self.records: Final = records.pin_memory() if self._on_gpu else records
        self._memory: Final = memoryview_of(self.records.view(-1))
        self.steps = self.blocks = self.lines = 0
        self.used = self.resolves = False
        self._half = self._closed = -1
        self._behind: torch.cuda.Event | None = None
        self._is_free = True
        self._held: tuple[Tensor | None, ...] = ()
        self._target: Tensor | None = None

    def restart(self) -> None:
        """Begin anew with the first step; records of earlier ones are nobody's."""
        self.records[:, [OUTCOME, LINES, HANDED_OUT]] = _NONE
        self.steps = self.blocks = self.lines = 0
        self.resolves = False
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
        begin, step = (self.steps + 1) % RECORDS * COLUMNS, self.steps + 1
        memory = self._memory
        memory[begin + ACCEPTED] = accepted.data_ptr()
        memory[begin + LONG_COUNTS] = accepted.dtype is torch.int64
        memory[begin + REQUESTS] = accepted.shape[0]
        memory[begin + BESIDES] = besides
        if sampled is None:
            memory[begin + WIDTH] = 0
        else:
            memory[begin + SAMPLED] = sampled.data_ptr()
            memory[begin + LONG_IDS] = sampled.dtype is torch.int64
            memory[begin + WIDTH] = sampled.shape[1]
        memory[begin + OUTCOME] = step
        self._held = accepted, sampled
        self.resolves = True
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
        if self.steps + 1 == self._closed or not self.may_fill():
            return False
        step, memory = self.steps + 1, self._memory
        begin = step % RECORDS * COLUMNS
        for at, line in enumerate(lines, begin + FIRST_LINE):
            memory[at] = line
        memory[begin + TARGET] = target.data_ptr()
        memory[begin + NUM_LINES] = self.lines = len(lines)
        memory[begin + LINES] = step
        self._target = target
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
        if step == self._closed or not self.may_fill():
            return False
        memory, begin = self._memory, step % RECORDS * COLUMNS
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
        return True

    def take_lines(self) -> tuple[Tensor, Tensor]:
        """Take the lines that wait out of the record, for a launch that comes now.

        No other lines or blocks wait for this step.

        Returns:
            Their tensor, and the lines, int64 ``[n]``.
        """
        record, count = self._close(LINES), self.lines
        self.lines = 0
        assert self._target is not None
        return self._target, record[FIRST_LINE : FIRST_LINE + count]

    def take(self) -> tuple[Tensor, int]:
        """Take the blocks that wait out of the record, for a launch that comes now.

        No other lines or blocks wait for this step.

        Returns:
            int64 ``[2 * count]``, the pairs of a record, and the count.
        """
        record, count = self._close(HANDED_OUT), self.blocks
        self.blocks = 0
        return record[BLOCKS : BLOCKS + 2 * count], count

    def go_on(
        self,
        accepted: Tensor,
        sampled: Tensor,
        besides: int,
        given: Sequence[tuple[Place, Sequence[int]]],
    ) -> bool:
        """Do what ``resolve``, ``add`` and ``launched`` do, in one piece of code.

        Args:
            accepted: as for ``resolve``.
            sampled: likewise.
            besides: likewise.
            given: as for ``Change``.

        Returns:
            False if something waits already, if the blocks do not fit, or if the device may not
            have read what this would replace, or what the step after it will; nothing was put then.
        """
        step, memory = self.steps + 1, self._memory
        if self.resolves or self.blocks or self.lines or step == self._closed:
            return False
        if not self._is_free or step // _HALF != self._half or (step + 1) // _HALF != self._half:
            return False
        begin, count = step % RECORDS * COLUMNS, 0
        for place, blocks in given:
            base, stride, at = place.base, place.stride, begin + BLOCKS + 2 * count
            count += len(blocks)
            if count > MOST:
                return False
            for block in blocks:
                memory[at] = base + block * stride
                memory[at + 1] = stride
                at += 2
        if count:
            memory[begin + COUNT] = count
            memory[begin + HANDED_OUT] = step
        outcome = (
            *(step, accepted.data_ptr(), accepted.dtype is torch.int64),
            *(sampled.data_ptr(), sampled.dtype is torch.int64, sampled.shape[1]),
            *(accepted.shape[0], besides),
        )
        memory[begin : begin + LINES] = array("q", outcome)
        self._held, self.steps = (accepted, sampled), step
        return True

    def launched(self) -> None:
        """Hear that a step's launch was made, or that a graph was replayed that has it."""
        self.steps += 1
        self.blocks = self.lines = 0
        self.resolves = False

    def _close(self, part: int) -> Tensor:
        """Empty a part of the next step's record, which a launch reads now."""
        step = self.steps + 1
        self._memory[step % RECORDS * COLUMNS + part] = _NONE
        self._closed = step
        return self.records[step % RECORDS]

    def may_fill(self) -> bool:
        """Tell whether the next step's record may be filled: graphs look for it, it was read."""
        half = (self.steps + 1) // _HALF
        return self.used and ((self._is_free and half == self._half) or self._enter(half))

    def _enter(self, half: int) -> bool:
        """Go on to a half of the ring; tells whether the device has read what was in it."""
        if not self._on_gpu:
            self._half = half
            return True
        if half == self._half:
            assert self._behind is not None
            self._is_free = self._behind.query()
            return self._is_free
        # The event lies behind all steps before the half that it was recorded in.
        behind = self._behind
        self._is_free = half == self._half + 1 and behind is not None and behind.query()
        behind = torch.cuda.Event() if behind is None else behind
        behind.record()
        self._half, self._behind = half, behind
        return self._is_free
