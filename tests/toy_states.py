"""Recurrent states that an engine's own kernels advance: a recurrence in torch, and its reference.

A state takes a row in as ``state / 2 + row``, so that order and number of rows show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvtxn.state_supplier import StateSupplier

SLOTS, WIDTH = 8, 4


class ToyStates(StateSupplier):
    """Supplies the commits of some layers, launched one after the other.

    Attributes:
        memory: by layer, float32 ``[slots, width]``.
        fails: by the name of a method, the layers that it commits before it raises ``error``.
        error: what is raised.
        calls: the methods that were called and had work to do.
    """

    def __init__(self, layers: int = 3, device: str = "cpu") -> None:
        self.names = tuple(f"mixer.{number}" for number in range(layers))
        self.memory = [torch.randn(SLOTS, WIDTH, device=device) for _ in self.names]
        self.replays = 0
        self.fails: dict[str, int] = {}
        self.error: BaseException = RuntimeError("no launch")
        self.calls: list[str] = []
        self.captured = self.replayed = 0
        self._step: tuple[list[int], list[int]] | None = None
        self._done = 0

    def begin(
        self, slots: Sequence[int], lengths: Sequence[int], *, replayed: bool = False
    ) -> None:
        """Note a step: the slot of each request's state, and its rows, which get new numbers."""
        self._step = list(slots), list(lengths)
        self._done, self.replays = 0, len(slots) if replayed else 0
        device = self.memory[0].device
        self.rows = [torch.randn(sum(lengths), WIDTH, device=device) for _ in self.names]

    def expected(self, sampled: Sequence[int] | None) -> list[Tensor]:
        """Return what the states are after these counts; None: after an abort."""
        found = [memory.clone() for memory in self.memory]
        if sampled is not None and self._step is not None:
            for memory, rows in zip(found, self.rows, strict=True):
                self._advance(memory, rows, sampled)
        return found

    def _advance(self, memory: Tensor, rows: Tensor, sampled: Sequence[int]) -> None:
        assert self._step is not None
        row = 0
        for slot, length, count in zip(*self._step, sampled, strict=False):
            for kept in range(max(1, min(count, length))):
                memory[slot] = memory[slot] / 2 + rows[row + kept]
            row += length

    @property
    def waits(self) -> bool:
        return self._step is not None

    def commit(self, sampled: Tensor) -> None:
        if self.waits:
            self.calls.append("commit")
            self._run("commit", sampled)

    def repeat(self, sampled: Tensor) -> None:
        self.calls.append("repeat")
        self._run("repeat", sampled)

    def _run(self, name: str, sampled: Tensor) -> None:
        for number in range(self._done, len(self.names)):
            if self.fails.get(name) == number:
                del self.fails[name]
                raise self.error
            self._advance(self.memory[number], self.rows[number], sampled.tolist())
            self._done += 1

    def abandon(self) -> None:
        self._step, self._done, self.replays = None, 0, 0

    def launches(self, sampled: Tensor, num_requests: int) -> Callable[[], None] | None:
        def run() -> None:
            assert self._step is not None
            assert len(self._step[0]) == num_requests
            for memory, rows in zip(self.memory, self.rows, strict=True):
                self._advance(memory, rows, sampled.tolist())

        return run

    @property
    def capture(self) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Stands for a captured graph: a replay makes the same calls again."""
        return self._capture

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def replay() -> None:
            if "replay" in self.fails:
                del self.fails["replay"]
                raise self.error
            self.replayed += 1
            run()

        return replay
