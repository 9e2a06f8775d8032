"""Reading the steps of vLLM's runners on a GPU for the ledger: rows, and what was sampled.

Positions and counts stay on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_not
from typing import Any, Final

import attrs
import numpy
import torch
from torch import Tensor

from ....audit import RowGroup
from ....audit.step_input import StepInput
from ...serving.step import Array, Rows
from . import audited_requests
from .runner_protocols import (
    BlockTable,
    DraftCounts,
    InputBatchV2,
    Prepared,
    RunnerV1,
)

#: Sets of tensors that are remembered; beyond, all are forgotten.
_MAX_REMEMBERED: Final = 2048


class GpuStepReader:
    """The base of each ``StepReader``: its buffers, and what it remembers of steps it has read."""

    def __init__(self, runner: Any, step_input: StepInput) -> None:
        self._runner: Final = runner
        self._input: Final = step_input
        self._known: Final[dict[tuple[int, ...], Rows]] = {}
        self._lasting: tuple[object, ...] = ()
        number, device = int(runner.max_num_reqs), torch.device(runner.device)
        with torch.inference_mode(False):  # steps write into them in inference mode or not
            self._there: Final = torch.zeros(number, dtype=torch.int32, device=device)
        self._views: Final[dict[int, Tensor]] = {}  # beginnings of ``_there``, by length
        self._on_device: Final = numpy.zeros(number, numpy.int32)  # what ``_there`` has
        self._drafts = b""

    def _forget_unless(self, lasting: tuple[object, ...]) -> None:
        """Forget the remembered rows if the runner's buffers changed, or if there are too many.

        Args:
            lasting: the runner's buffers in this step, compared by identity with those of the last
                one.
        """
        changed = len(lasting) != len(self._lasting) or any(map(is_not, lasting, self._lasting))
        if changed or len(self._known) >= _MAX_REMEMBERED:
            self._known.clear()
        self._lasting = lasting

    def _put_drafts(self, there: Tensor, drafts: Array) -> None:
        """Write the drafts of each request into ``there``, unless they are there already.

        Args:
            there: the beginning of ``_there``, int32 ``[num_requests]``.
            drafts: numpy int ``[num_requests]``.
        """
        now = drafts.tobytes()
        if self._drafts == now:
            return
        self._drafts, known = now, self._on_device[: len(drafts)]
        if (known != drafts).any():  # while prompts come, there are more and more without drafts
            known[:] = drafts
            self._input.put(there, drafts.tolist())

    def _forget_drafts(self) -> None:
        """Forget which drafts are in place, because the device puts others there."""
        self._drafts = b""
        self._on_device.fill(-1)


def num_rows_v1(runner: RunnerV1) -> int:
    """Return the rows of the step that a V1 runner has prepared, without padding."""
    return int(runner.query_start_loc.np[len(runner.input_batch.req_ids)])


class StepReaderV1(GpuStepReader):
    """Reads the steps of a V1 runner on a GPU out of its buffers.

    The runner's buffers stay where they are, so the tensors of a step are made once for each number
    of requests.
    """

    def __init__(
        self, runner: RunnerV1, groups: Mapping[str, RowGroup], step_input: StepInput
    ) -> None:
        super().__init__(runner, step_input)
        self._groups: Final = dict(groups)
        number = int(runner.max_num_reqs)
        with torch.inference_mode(False):  # steps write into them in inference mode or not
            #: Tables whose kernels have smaller blocks than the scheduler.
            self._tables: Final = {
                name: torch.zeros_like(
                    audited_requests.own_blocks(table, number, groups[name].block_size)
                )
                for name, table in self._own_tables()
                if table.block_size != groups[name].block_size
            }

    def _own_tables(self) -> list[tuple[str, BlockTable]]:
        """Return the runner's table of each group, by name."""
        tables = self._runner.input_batch.block_table
        return [(name, tables[int(name.partition(".")[2])]) for name in self._groups]

    def rows(self, prepared: Prepared) -> Rows:
        """Return the rows of the forward that comes next, after ``_prepare_inputs``.

        The tensors are vLLM's own, which every step fills anew, but for tables in smaller blocks
        than the scheduler's, which are copied. Nothing waits for the device. ``first`` is None: the
        device has it.

        Args:
            prepared: what ``_prepare_inputs`` returned.
        """
        runner, own = self._runner, self._own_tables()
        names = runner.input_batch.req_ids
        number = len(names)
        starts = runner.query_start_loc.gpu
        lasting = (
            *(runner.positions, runner.input_ids.gpu, starts),
            *[tensor for _, t in own for tensor in (t.slot_mapping.gpu, t.block_table.gpu)],
        )
        self._forget_unless(lasting)
        for name, table in own:
            if name in self._tables:
                blocks = audited_requests.own_blocks(table, number, self._groups[name].block_size)
                self._tables[name][:number].copy_(blocks)
        drafts = self._drafts_of(prepared[1], number)
        key = number, drafts is None
        rows = self._known.get(key)
        if rows is None:
            rows = Rows(
                names=[*names],
                starts=starts[: number + 1],
                first=None,
                tokens=runner.input_ids.gpu,
                drafts=drafts,
                slots={name: table.slot_mapping.gpu for name, table in own},
                tables={
                    name: self._tables.get(name, table.block_table.gpu)[:number]
                    for name, table in own
                },
                positions=runner.positions,
                buffers=object(),
            )
        elif rows.names != names:
            rows = attrs.evolve(rows, names=[*names])
        self._known[key] = rows
        return rows

    def _drafts_of(self, metadata: DraftCounts | None, number: int) -> Tensor | None:
        """Return the drafts of each request, int32 ``[num_requests]``; None without drafts.

        No request has more than it has rows. The tensor is filled anew in each step.
        """
        if metadata is None or not any(metadata.num_draft_tokens):
            return None
        there = self._there[:number]
        lengths = numpy.diff(self._runner.query_start_loc.np[: number + 1])
        # A scheduler at fault may count drafts whose rows the step does not have.
        drafts = numpy.minimum(numpy.asarray(metadata.num_draft_tokens, numpy.int32), lengths)
        self._put_drafts(there, drafts)
        return there


class SampledReader:
    """Reads what a V1 runner has sampled into buffers of its own, without waiting for a GPU.

    A request whose prompt goes on after its rows has no token: vLLM samples for it and forgets it.
    """

    def __init__(self, runner: RunnerV1, step_input: StepInput) -> None:
        self._runner: Final = runner
        self._input: Final = step_input
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def sampled(self, ids: Tensor, drafts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the number of sampled tokens of each request, and their ids.

        Shapes: int64 ``[num_requests]``, and int64 ``[num_requests, n]``, -1 where there is none.
        Both are buffers that the next call fills anew; no call waits for the device.

        Args:
            ids: that were sampled, int ``[num_requests, n]``.
            drafts: int64 ``[num_requests]``; a request has no more tokens than these and one.
        """
        runner = self._runner
        number, width = ids.shape
        found = self._known.get((number, width))
        if found is None:
            counts, kept = self._buffers_of(width, ids.device)
            found = self._known[number, width] = counts[:number], kept[:number]
        discarded = runner.discard_request_mask.gpu
        self._input.count(ids, discarded, int(runner.input_batch.vocab_size), *found, drafts)
        return found

    def _buffers_of(self, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return buffers for counts and ids of all requests, with ``width`` ids each; made once."""
        if width not in self._buffers:
            number = int(self._runner.max_num_reqs)
            with torch.inference_mode(False):
                counts = torch.zeros(number, dtype=torch.int64, device=device)
                kept = torch.zeros(number, width, dtype=torch.int64, device=device)
            self._buffers[width] = counts, kept
        return self._buffers[width]


def num_rows_v2(batch: InputBatchV2) -> int:
    """Return the rows of a V2 runner's step, without padding."""
    return int(batch.num_tokens)


def sampled_outputs(hidden_states: Tensor, batch: InputBatchV2) -> tuple[Tensor, Tensor]:
    """Return the outputs that a step samples from, ``[n, hidden]``, and their row numbers."""
    rows = batch.logits_indices
    return hidden_states[rows], rows


class StepReaderV2(GpuStepReader):
    """Reads the steps of a V2 runner out of its buffers.

    The runner's buffers stay where they are, so the tensors of a step are made once for each number
    of requests, and found again by the buffers' addresses.
    """

    def __init__(self, runner: Any, groups: Mapping[str, RowGroup], step_input: StepInput) -> None:
        super().__init__(runner, step_input)
        self._numbers: Final = {name: int(name.partition(".")[2]) for name in groups}

    def rows(
        self, batch: InputBatchV2, prepared: tuple[Sequence[Tensor], *tuple[object, ...]]
    ) -> Rows:
        """Return the rows of the forward that comes next.

        The tensors are vLLM's own, which every step fills anew; nothing waits for the device.
        ``first`` is None: the device has it.

        Args:
            batch: the step's.
            prepared: what ``prepare_attn`` returned; the block tables of all groups come first.
        """
        runner, number, tables = self._runner, int(batch.num_reqs), prepared[0]
        inputs, slots = runner.input_buffers, runner.block_tables.slot_mappings
        self._forget_unless((inputs.positions, inputs.input_ids, slots))
        drafts = self._drafts_of(batch, number)
        key = (
            *(number, drafts is None, batch.query_start_loc.data_ptr()),
            *[tables[group].data_ptr() for group in self._numbers.values()],
        )
        rows = self._known.get(key)
        if rows is None:
            rows = Rows(
                names=batch.req_ids,
                starts=batch.query_start_loc[: number + 1],
                first=None,
                tokens=inputs.input_ids,
                drafts=drafts,
                slots={name: slots[group] for name, group in self._numbers.items()},
                tables={name: tables[group] for name, group in self._numbers.items()},
                positions=inputs.positions,
                buffers=object(),
            )
        elif rows.names != batch.req_ids:
            rows = attrs.evolve(rows, names=batch.req_ids)
        self._known[key] = rows
        return rows

    def _drafts_of(self, batch: Any, number: int) -> Tensor | None:
        """Return the drafts of each request, int32 ``[num_requests]``; None without drafts.

        A request whose prompt goes on has none, whatever was drafted for it. With adaptive
        verification the device says how many each has. The tensor is filled anew in each step.
        """
        there = self._views.get(number)
        if there is None:
            there = self._views[number] = self._there[:number]
        if not batch.num_draft_tokens or batch.num_draft_tokens_per_req is None:
            return None
        if getattr(self._runner, "adaptive_verification", None) is not None:
            self._forget_drafts()  # how they are shared out is known there
            ends = batch.cu_num_logits[: number + 1]
            return there.copy_(ends[1:] - ends[:-1] - 1)
        drafts = batch.num_draft_tokens_per_req
        if batch.has_prefill:  # where a prompt goes on, vLLM computes the prompt's tokens
            end = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens
            drafts = numpy.where(batch.is_prefilling_np & (end <= batch.prefill_len_np), 0, drafts)
        self._put_drafts(there, drafts)
        return there
