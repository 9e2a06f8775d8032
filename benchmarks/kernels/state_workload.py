"""States of recurrent layers, the steps that verify over them, and their replay by kvtxn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import attrs
import torch
from torch import Tensor

from ... import LayerRef, TxnConfig
from ...backends.triton_executor import TritonExecutor
from ...executor import StagedLayer, Txn
from ...layout import RowLayout
from ...recurrent import GatedDelta, Mamba2, Recurrence, replay
from ..common.model_shapes import StateCase
from .timer import COLD_BYTES

Step = Callable[[], object]

#: Bytes that a plain copy moves at once: torch gives larger ones to a slower copy engine.
_PIECE: Final = 128 * 2**20


@attrs.frozen(eq=False)
class Turn:
    """One verify step over requests of its own.

    Attributes:
        table: int32 ``[num_requests, drafts + 1]``, the blocks that stock has for each request.
            With one state per request, the first is the request's.
        before: int32 ``[num_requests]``: stock's state from before the step is in the column of
            this number, counted from 1.
        sampled: int32 ``[num_requests]``, tokens that this step samples, counted from 1.
        slots: int64 ``[1, num_rows]``, the request's block for each row.
    """

    table: Tensor
    before: Tensor
    sampled: Tensor
    slots: Tensor


class StateWorkload:
    """States of all layers, and enough steps that each finds its states cold.

    Args:
        case: the point of the benchmark to measure.
        device: where.
        turns: number of steps; None makes enough.

    Attributes:
        states: ``[layers, num_blocks, heads, value_size, key_size]``; block 0 belongs to no
            request.
        turns: steps over distinct blocks.
        starts: int32 ``[num_requests + 1]``, the first row of each request, and the end.
    """

    def __init__(self, case: StateCase, device: torch.device, turns: int | None = None) -> None:
        shape, width = case.shape, case.drafts + 1
        self.case, self.device = case, device
        dtype = getattr(torch, case.dtype)
        size = shape.heads, shape.value_size, shape.key_size
        self.step_bytes = (
            case.requests * shape.layers * size[0] * size[1] * size[2] * dtype.itemsize
        )
        count = turns or -(-COLD_BYTES // self.step_bytes)
        blocks = 1 + count * case.requests * width
        self.states = torch.empty(shape.layers, blocks, *size, dtype=dtype, device=device)
        for layer in self.states:
            layer.normal_(std=0.1)
        generator = torch.Generator().manual_seed(1)
        order = 1 + torch.randperm(blocks - 1, generator=generator)
        tables = order.view(count, case.requests, width).to(device, torch.int32)
        lots = torch.randint(1, width + 1, (2, count, case.requests), generator=generator)
        before, sampled = lots.to(device, torch.int32)
        slots = tables[:, :, 0].long().repeat_interleave(width, dim=1)[:, None]
        every = zip(tables, before, sampled, slots, strict=True)
        # Copies, each as well aligned as an engine's tensors: kernels are compiled for alignments.
        self.turns = [Turn(*(part.clone() for part in parts)) for parts in every]
        self.starts = torch.arange(case.requests + 1, device=device, dtype=torch.int32) * width

    def random(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Make numbers of the size of activations."""
        return torch.randn(*size, device=self.device).to(dtype)

    def allocated(self) -> int:
        """Return the bytes that torch has allocated on the GPU; 0 without one."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def copies(self) -> list[Step]:
        """Return one plain copy per step, of as many bytes as the states of a step have."""
        flat = self.states.view(-1).view(torch.uint8)
        size = self.step_bytes
        return [
            lambda at=2 * turn * size: _copy(flat[at : at + size], flat[at + size : at + 2 * size])  # type: ignore[misc]
            for turn in range(len(self.turns))
        ]


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy bytes in contiguous pieces."""
    for given, made in zip(source.split(_PIECE), target.split(_PIECE), strict=True):
        made.copy_(given)


class Replay:
    """kvtxn's own commit over staged rows: one launch for all layers.

    Args:
        load: the states and steps.
    """

    def __init__(self, load: StateWorkload) -> None:
        case, shape = load.case, load.case.shape
        self._load = load
        recurrence: Recurrence = GatedDelta(shape.key_heads, key_dtype=torch.bfloat16)
        if shape.kind == "mamba2":
            decays = -torch.ones(shape.heads, device=load.device)
            recurrence = Mamba2(decays, shape.key_heads, dtype=torch.bfloat16)
        self.refs = [
            LayerRef.recurrent(f"layer.{number}", state, replay=recurrence)
            for number, state in enumerate(load.states)
        ]
        self.executor = TritonExecutor(self.refs, TxnConfig(max_rows=case.rows))
        self._layout = RowLayout.build(
            (case.drafts,) * case.requests, (1,) * case.requests, load.device
        )
        self._counters = torch.zeros(1, 4, dtype=torch.int64, device=load.device)
        self._staged = {ref.name: StagedLayer(ref, self._rows()) for ref in self.refs}

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Make what one layer keeps of its rows: keys, values, and decays below 1."""
        load, shape, rows = self._load, self._load.case.shape, self._load.case.rows
        key = load.random(rows, shape.key_heads, shape.key_size) * shape.key_size**-0.5
        value = load.random(rows, shape.heads, shape.value_size, dtype=torch.float32)
        decay = torch.rand(rows, shape.heads, device=load.device)
        return key, 0.1 * value, decay

    @property
    def nbytes(self) -> int:
        """Bytes of the staged rows of all layers."""
        parts = [part for layer in self._staged.values() for part in layer.rows]
        return sum(part.numel() * part.element_size() for part in parts)

    def _txn(self, turn: Turn) -> Txn:
        slots = {"default": turn.slots[0]}
        where = tuple(self.refs), self._layout, self._counters
        return Txn("deferred", *where, slots=slots, staged=dict(self._staged))

    def steps(self) -> list[Step]:
        """Return one commit per step, with its addresses on the device already."""
        return [step for turn in self._load.turns for step in self._launches(turn)]

    def _launches(self, turn: Turn) -> Iterator[Step]:
        self.executor.use_slots(turn.slots)
        calls = self.executor.advance_calls(self._txn(turn), turn.sampled.long() - 1)
        yield lambda: [call.run() for call in calls]

    def eager(self) -> list[Step]:
        """Return commits as a window makes them."""
        self.executor.use_slots(self._load.turns[0].slots)
        txn, counts = self._txn(self._load.turns[0]), self._load.turns[0].sampled.long() - 1
        return [lambda: self.executor.advance(txn, counts)]

    def check(self) -> None:
        """Compare the first and the last layer after one commit with the reference.

        Raises:
            AssertionError: the bytes differ.
        """
        turn = self._load.turns[0]
        ends = self.refs[0], self.refs[-1]
        blocks = turn.table[:, 0].long()
        before = [ref.states[0][blocks] for ref in ends]
        self.steps()[0]()
        found = [ref.states[0][blocks] for ref in ends]
        for ref, state in zip(ends, before, strict=True):
            ref.states[0][blocks] = state
        txn = self._txn(turn)
        txn.staged = {ref.name: self._staged[ref.name] for ref in ends}
        replay.advance(txn, turn.sampled.long() - 1)
        for ref, state in zip(ends, found, strict=True):
            if not torch.equal(state, ref.states[0][blocks]):
                raise AssertionError(f"the replay differs from the reference: {self._load.case}")
