"""States of recurrent layers, and the steps that verify over them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import torch
from torch import Tensor

from ..common.model_shapes import StateCase
from .timer import COLD_BYTES, plain_copy

Step = Callable[[], object]


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
        """Draw random numbers of the size of activations, on the workload's device."""
        return torch.randn(*size, device=self.device).to(dtype)

    def allocated(self) -> int:
        """Return the bytes that torch has allocated on the GPU; 0 without one."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def copies(self) -> list[Step]:
        """Return one plain copy per step, of as many bytes as the states of a step have."""
        parts = self.states.view(-1).view(torch.uint8).split(self.step_bytes)
        turns = range(len(self.turns))
        return [partial(plain_copy, parts[2 * turn], parts[2 * turn + 1]) for turn in turns]
