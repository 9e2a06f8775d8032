"""Recurrent states that an engine's own kernels advance: a recurrence in torch, and its reference.

A state takes a row in as ``state / 2 + row``, so that order and number of rows show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import cuda_graphs
from ..state_supplier import Capture, StateSupplier

SLOTS, WIDTH, MOST_ROWS = 8, 4, 32


class ToyStates(StateSupplier):
    """Supplies the commits of some layers, launched one after the other.

    All tensors are fixed, and launches read them in place, so that a CUDA graph can hold them.

    Args:
        layers: number of layers.
        device: where their states are.

    Attributes:
        memory: by layer, float32 ``[slots, width]``.
        rows: by layer, float32 ``[rows, width]``: rows that the present step may take in.
        fails: by the name of a method, the layers that it commits before it raises ``error``.
        error: what is raised.
        calls: the methods that were called and had work to do.
        captured: number of captures of states and rows together.
        replayed: number of their launches.
    """

    def __init__(self, layers: int = 3, device: torch.device | str = "cpu") -> None:
        self.names = tuple(f"mixer.{number}" for number in range(layers))
        self.memory = [torch.randn(SLOTS, WIDTH).to(device) for _ in self.names]
        self.rows = [torch.zeros(MOST_ROWS, WIDTH, device=device) for _ in self.names]
        self.replays = 0
        self.fails: dict[str, int] = {}
        self.error: BaseException = RuntimeError("no launch")
        self.calls: list[str] = []
        self.captured = self.replayed = 0
        self._step: tuple[list[int], list[int]] | None = None
        #: Slot of the state, first row, and number of rows of each request.
        self._plan = torch.zeros(3, SLOTS, dtype=torch.int64, device=device)
        self._done = 0

    def begin(
        self, slots: Sequence[int], lengths: Sequence[int], *, replayed: bool = False
    ) -> None:
        """Note a step: the slot of each request's state, and its rows, which get new numbers.

        ``replayed``: a captured forward makes the step, so that ``replays`` is the number of
        requests.
        """
        self._step = list(slots), list(lengths)
        self._done, self.replays = 0, len(slots) if replayed else 0
        first = [sum(lengths[:request]) for request in range(len(lengths))]
        plan = torch.tensor([self._step[0], first, self._step[1]], dtype=torch.int64)
        self._plan[:, : len(slots)] = plan
        for rows in self.rows:
            rows.copy_(torch.randn(MOST_ROWS, WIDTH))

    def expected(self, sampled: Sequence[int] | None) -> list[Tensor]:
        """Return copies of the states after these counts of sampled tokens; None: after an abort.

        The memories themselves stay as they are.
        """
        found = [memory.clone() for memory in self.memory]
        if sampled is not None and self._step is not None:
            for memory, rows in zip(found, self.rows, strict=True):
                self._reference(memory, rows, sampled)
        return found

    def _reference(self, memory: Tensor, rows: Tensor, sampled: Sequence[int]) -> None:
        """Take each request's kept rows into ``memory``, at least one row each, on the host."""
        assert self._step is not None
        row = 0
        for slot, length, count in zip(*self._step, sampled, strict=False):
            for kept in range(max(1, min(count, length))):
                memory[slot] = memory[slot] / 2 + rows[row + kept]
            row += length

    def _advance(self, number: int, sampled: Tensor, longest: int) -> None:
        """Launch the commit of one layer: its states take in kept rows, at least one per request.

        The launches wait for nothing.
        """
        memory, rows = self.memory[number], self.rows[number]
        slots, first, lengths = self._plan[:, : sampled.shape[0]]
        kept = torch.minimum(sampled.clamp(min=1).long(), lengths)
        for row in range(longest):
            old = memory[slots]
            new = old / 2 + rows[torch.where(row < kept, first + row, first)]
            memory[slots] = torch.where((row < kept).unsqueeze(1), new, old)

    @property
    def waits(self) -> bool:
        """True if a step is under way."""
        return self._step is not None

    def commit(self, sampled: Tensor) -> None:
        """Launch the commits of all layers; nothing without a step.

        Raises ``error`` where ``fails`` says.
        """
        if self.waits:
            self.calls.append("commit")
            self._run("commit", sampled)

    def repeat(self, sampled: Tensor) -> None:
        """Launch the commits of the layers that ``commit`` did not reach.

        It may fail like ``commit``.
        """
        self.calls.append("repeat")
        self._run("repeat", sampled)

    def _run(self, name: str, sampled: Tensor) -> None:
        """Commit the layers that are not done, one after the other.

        Raise where ``fails`` says, once.
        """
        assert self._step is not None
        for number in range(self._done, len(self.names)):
            if self.fails.get(name) == number:
                del self.fails[name]
                raise self.error
            self._advance(number, sampled, max(self._step[1]))
            self._done += 1

    def abandon(self) -> None:
        """Forget the step."""
        self._step, self._done, self.replays = None, 0, 0

    def launches(self, sampled: Tensor, num_requests: int) -> Callable[[], None] | None:
        """Return the commits of all layers as one function; never None.

        It notes nothing as done.
        """
        assert self._step is not None
        longest = max(self._step[1])

        def run() -> None:
            """Launch the commits of all layers."""
            for number in range(len(self.names)):
                self._advance(number, sampled[:num_requests], longest)

        return run

    @property
    def capture(self) -> Capture:
        """A function that captures a CUDA graph; on a CPU a replay makes the same calls again."""
        return self._capture

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Count a capture and make it; return its replay, which counts itself, and may fail."""
        self.captured += 1
        again = run
        if self.memory[0].is_cuda:
            again = cuda_graphs.capture(run).replay

        def replay() -> None:
            """Replay, or raise ``error`` if ``fails`` has "replay", once."""
            if "replay" in self.fails:
                del self.fails["replay"]
                raise self.error
            self.replayed += 1
            again()

        return replay
