"""Verify operators over recurrent states: their common interface, and a stand-in for engines'.

Each one verifies as vLLM does, writing a state per row; and as a window does: without a write, then
with a commit of one state per request. Both take the same kernel.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from ...backends.move_rows.stage_rows import stage_rows
from ...integrations.vllm_plugin.internals.state_commits import StateTables
from .state_kernels import verify_rows
from .state_workload import StateWorkload, Step, Turn


class VerifyOps(abc.ABC):
    """The verify step of all layers by one kind of kernel.

    Args:
        load: the states and steps.

    Attributes:
        name: of the kernel.
        exact: whether the kernel can verify without writing a state; if not, only stock uses it.
        nbytes: bytes that were allocated for the rows that wait for a commit, and for the tables.
        formula: the same by formula; None if the kernel is not vLLM's.
    """

    name: str
    exact: bool = True
    formula: int | None = None

    def __init__(self, load: StateWorkload) -> None:
        self._load = load
        self._make_rows()
        before = load.allocated()
        self._tables = StateTables.build(1, load.case.requests, load.case.drafts + 1, load.device)
        self._make_buffers()
        self.nbytes = load.allocated() - before

    def stock(self, turn: Turn) -> None:
        """Verify, and write the state after each row."""
        self._launch(turn.table, turn.before)

    def stage(self, turn: Turn) -> None:
        """Store the rows for later calls, and set the states that the kernels work on."""
        self._tables.name_sources(0, turn.table)
        self._keep()

    def read(self, turn: Turn) -> None:
        """Verify without writing a state."""
        sources = self._tables.sources[0]
        self._launch(sources, self._tables.whole[: sources.shape[0]])

    def commit(self, turn: Turn) -> None:
        """Write one state per request: the one after its last kept row, layer after layer."""
        self._tables.name_commits(turn.sampled, self._load.starts)
        self._write()

    def together(self, turn: Turn) -> None:
        """Commit as a captured commit does, several layers side by side."""
        self.commit(turn)

    def captured(self) -> Step | None:
        """Return a commit of the first step as the plug-in launches it, if it captures commits."""
        return None

    @abc.abstractmethod
    def _make_rows(self) -> None:
        """Make the rows of all layers."""

    @abc.abstractmethod
    def _make_buffers(self) -> None:
        """Make what holds the rows until the commit."""

    @abc.abstractmethod
    def _launch(self, table: Tensor, column: Tensor) -> None:
        """Verify; the table and column say which states are read and written."""

    @abc.abstractmethod
    def _keep(self) -> None:
        """Copy the rows to where they wait."""

    @abc.abstractmethod
    def _write(self) -> None:
        """Write the states that the tables name, from the rows that waited."""


class OwnOps(VerifyOps):
    """A stand-in for an engine's operator: kvtxn's own kernel, by the tables of the plug-in."""

    name = "stand-in"

    def _make_rows(self) -> None:
        load, shape, rows = self._load, self._load.case.shape, self._load.case.rows
        sizes = [(shape.key_heads, shape.key_size)] * 2 + [(shape.heads, shape.value_size)]
        self._rows = []
        for _ in range(shape.layers):
            parts = [load.random(rows, heads * size) * size**-0.5 for heads, size in sizes]
            parts += [torch.rand(rows, shape.heads, device=load.device) for _ in range(2)]
            self._rows.append(parts)

    def _make_buffers(self) -> None:
        self._kept = [[torch.zeros_like(part) for part in parts] for parts in self._rows]
        self._out = torch.zeros_like(self._rows[0][2])

    def _launch(self, table: Tensor, column: Tensor) -> None:
        self._verify(self._rows, table, column, self._load.starts)

    def _verify(
        self, rows: Sequence[Sequence[Tensor]], table: Tensor, column: Tensor, starts: Tensor
    ) -> None:
        load, shape = self._load, self._load.case.shape
        block = min(32, shape.value_size)
        grid = shape.value_size // block, table.shape[0] * shape.heads
        for state, parts in zip(load.states, rows, strict=True):
            verify_rows[grid](
                *(state, table, column, starts, *parts, self._out, table.shape[1]),
                HEADS=shape.heads,
                KEY_HEADS=shape.key_heads,
                VALUES=shape.value_size,
                KEYS=shape.key_size,
                BLOCK=block,
                CORRECTS=shape.kind == "gated_delta",
            )

    def _keep(self) -> None:
        for parts, kept in zip(self._rows, self._kept, strict=True):
            stage_rows(parts, kept)

    def _write(self) -> None:
        tables = self._tables
        self._verify(self._kept, tables.commits[0], tables.whole, tables.kept)
