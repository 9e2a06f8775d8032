"""Blocks that are handed out, on their way to the graph that the next step replays.

A launch of its own would cost the host more than all else that a steady step asks of it. A graph
cannot be given numbers, so it looks for them: each step has a record in a ring of the host's
memory, which says of which step it is. A graph begins with a kernel that looks at the record of the
step that it writes. A record that nobody filled is one of an earlier step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ...audit.groups import Place
from .staging import memoryview_of

#: Columns of a record: the number of its step, as ``Books.counters`` has it, and of its blocks;
#: then, for each block, its first word and the number of its words.
STEP: Final = 0
COUNT: Final = 1
BLOCKS: Final = 2
#: The most blocks of a record.
MOST: Final = 128
COLUMNS: Final = BLOCKS + 2 * MOST
#: Records, in two halves.
RECORDS: Final = 256
_HALF: Final = RECORDS // 2
#: The step of a record that no step takes.
_NONE: Final = -1


class HandedOut:
    """The records of the steps to come.

    A half of the ring is filled anew once an event has passed behind the steps that read it.

    Args:
        device: of the graphs.

    Attributes:
        records: int64 ``[RECORDS, COLUMNS]`` on the host, pinned if the device is a GPU.
        steps: the number of steps that were launched, as the device will count them.
        used: some graph looks for records.
        waiting: blocks in the record of the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu: Final = device.type == "cuda"
        with torch.inference_mode(False):
            records = torch.full((RECORDS, COLUMNS), _NONE, dtype=torch.int64, device="cpu")
            self.records: Final = records.pin_memory() if self._on_gpu else records
        self._memory: Final = memoryview_of(self.records.view(-1))
        self.steps = self.waiting = 0
        self.used = False
        self._half = self._closed = -1
        self._behind: torch.cuda.Event | None = None
        self._is_free = True

    def restart(self) -> None:
        """Begin anew with the first step; records of earlier ones are nobody's."""
        self.records[:, STEP] = _NONE
        self.steps = self.waiting = 0
        self._half = self._closed = -1
        self._behind = None

    def add(self, given: Sequence[tuple[Place, Sequence[int]]]) -> bool:
        """Put blocks into the record of the next step.

        Args:
            given: as for ``Change``.

        Returns:
            False if they do not fit, or if the device may not have read what they would replace;
            nothing was put then.
        """
        step, waiting = self.steps + 1, self.waiting
        if not self.used or step == self._closed:
            return False
        known = self._is_free and step // _HALF == self._half
        if not known and not self._enter(step // _HALF):
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
        memory[begin + COUNT] = self.waiting = waiting
        memory[begin + STEP] = step
        return True

    def take(self) -> tuple[Tensor, int]:
        """Take the blocks that wait out of the record, for a launch that comes now.

        Returns:
            int64 ``[2 * count]``, the pairs of a record, and the count.
        """
        step, count = self.steps + 1, self.waiting
        self._memory[step % RECORDS * COLUMNS + STEP] = _NONE
        self._closed, self.waiting = step, 0
        return self.records[step % RECORDS, BLOCKS : BLOCKS + 2 * count], count

    def launched(self) -> None:
        """Hear that a step's launch was made, or that a graph was replayed that has it."""
        self.steps += 1
        self.waiting = 0

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
