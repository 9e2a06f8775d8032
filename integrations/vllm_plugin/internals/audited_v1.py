"""Reading the V1 runner on a GPU for the ledger; what it sampled stays on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import numpy
import torch
from torch import Tensor

from ....audit import RowGroup
from ....audit.step_input import StepInput
from ...serving.step import Rows
from . import audited
from .gpu_step_reader import GpuStepReader
from .protocols.runners import BlockTable, DraftCounts, Prepared, RunnerV1


def num_rows(runner: RunnerV1) -> int:
    """Return the rows of the step that a V1 runner has prepared."""
    return int(runner.query_start_loc.np[len(runner.input_batch.req_ids)])


class StepReader(GpuStepReader[Rows]):
    """Reads the steps of a V1 runner on a GPU out of its buffers.

    The runner's buffers stay where they are, so the tensors of a step are made once for each number
    of requests.

    Args:
        runner: the runner, with its KV cache.
        groups: the groups to read, by name.
        step_input: puts numbers of the host into buffers.
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
                name: torch.zeros_like(audited.own_blocks(table, number, groups[name].block_size))
                for name, table in self._own_tables()
                if table.block_size != groups[name].block_size
            }

    def _own_tables(self) -> list[tuple[str, BlockTable]]:
        """Return the runner's table of each group, by name."""
        tables = self._runner.input_batch.block_table
        return [(name, tables[int(name.partition(".")[2])]) for name in self._groups]

    def rows(self, prepared: Prepared) -> Rows:
        """Read the rows of the forward that comes next.

        Args:
            prepared: the result of ``_prepare_inputs``.
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
                blocks = audited.own_blocks(table, number, self._groups[name].block_size)
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
        """Return the drafts of each request, int32 ``[num_requests]``; None without drafts."""
        if metadata is None or not any(metadata.num_draft_tokens):
            return None
        there = self._there[:number]
        lengths = numpy.diff(self._runner.query_start_loc.np[: number + 1])
        # A scheduler at fault may count drafts whose rows the step does not have.
        drafts = numpy.minimum(numpy.asarray(metadata.num_draft_tokens, numpy.int32), lengths)
        self._put_drafts(there, drafts)
        return there


class SampledReader:
    """Reads what a V1 runner on a GPU has sampled into buffers of its own, without waiting.

    Args:
        runner: the runner.
        step_input: counts on the device.
    """

    def __init__(self, runner: RunnerV1, step_input: StepInput) -> None:
        self._runner: Final = runner
        self._input: Final = step_input
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def sampled(self, ids: Tensor, drafts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the number of sampled tokens of each request, and their ids.

        Shapes: int64 ``[num_requests]``, and int64 ``[num_requests, n]``, -1 where there is none.

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
        """Return buffers for counts and ids of all requests, so many ids each."""
        if width not in self._buffers:
            number = int(self._runner.max_num_reqs)
            with torch.inference_mode(False):
                counts = torch.zeros(number, dtype=torch.int64, device=device)
                kept = torch.zeros(number, width, dtype=torch.int64, device=device)
            self._buffers[width] = counts, kept
        return self._buffers[width]
