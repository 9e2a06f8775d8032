"""Reading the V2 runner for the ledger; positions and counts stay on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

import attrs
import numpy
import torch
from torch import Tensor

from ....audit import RowGroup
from ....audit.step_input import StepInput
from ...serving.step import NO_CHANGES, Arrival, Changes, Rows
from . import audited, batches
from .gpu_step_reader import GpuStepReader
from .protocols.engine import NewRequest, SchedulerOutput
from .protocols.runners import InputBatchV2, Runner, RunnerV2

#: Methods that an audit overrides, with the parameters they must have; "?" as in ``batches``.
AUDITED_METHODS: Final = {
    "initialize_kv_cache": batches.V2_METHODS["initialize_kv_cache"],
    "update_requests": ("scheduler_output",),
    "prepare_attn": batches.V2_METHODS["prepare_attn"],
    "sample": batches.V2_METHODS["sample"],
    "postprocess_sampled": batches.V2_METHODS["postprocess_sampled"],
    "sample_tokens": ("grammar_output",),
}


def lacking(runner: RunnerV2) -> str | None:
    """Say why the ledger cannot watch a V2 runner whose model is loaded; None if it can."""
    if int(getattr(runner.model_state, "num_new_sampled_tokens_per_step", 1)) != 1:
        return "a diffusion model writes the rows of one position again and again"
    return None


def changes(runner: RunnerV2, scheduler_output: SchedulerOutput) -> Changes:
    """Read the changes of a step. A request that was preempted comes again as a new one."""
    told, cached = scheduler_output, scheduler_output.scheduled_cached_reqs
    new, copies = told.scheduled_new_reqs, told.kv_cache_block_copies or ()
    gone = told.finished_req_ids or told.preempted_req_ids
    by_request = [blocks for blocks in cached.new_block_ids if blocks]
    if not (gone or new or copies or by_request):
        return NO_CHANGES
    grown: list[list[int]] = [[] for _ in runner.kv_cache_config.kv_cache_groups]
    if by_request:
        by_group = zip(*by_request, strict=True)
        for known, blocks in zip(grown, by_group, strict=True):
            known += chain.from_iterable(blocks)
        if not (gone or new or copies):  # the usual change
            return Changes((), (), grown, ())
    return Changes(
        gone=sorted({*told.finished_req_ids, *(told.preempted_req_ids or ())}),
        arrivals=[_arrival(runner, each) for each in new],
        grown=grown,
        copies=[audited.pair(copy) for copy in copies],
    )


def _arrival(runner: RunnerV2, new: NewRequest) -> Arrival:
    return audited.arrival_of(
        *(runner, new, new.req_id, audited.tokens_of(new), new.num_computed_tokens, new.block_ids)
    )


@attrs.frozen(eq=False)
class Told:
    """A request as the scheduler told the V2 runner of it.

    Attributes:
        came: what it said when the request came.
        tables: the request's blocks by KV-cache group.
    """

    came: NewRequest
    tables: list[list[int]]


def note_requests(known: dict[str, Told], scheduler_output: SchedulerOutput) -> None:
    """Bring up to date which requests a runner has, and their blocks; it keeps no such list.

    Args:
        known: requests by name, as this function left them after the step before.
        scheduler_output: what the step changes.
    """
    told, cached = scheduler_output, scheduler_output.scheduled_cached_reqs
    for name in (*told.finished_req_ids, *(told.preempted_req_ids or ())):
        known.pop(name, None)
    for new in told.scheduled_new_reqs:
        known[new.req_id] = Told(new, [list(blocks) for blocks in new.block_ids])
    for name, grown in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if name in known and grown is not None:
            for own, more in zip(known[name].tables, grown, strict=True):
                own += more


def num_rows(batch: Any) -> int:
    """Return the rows of a V2 runner's step, without padding."""
    return int(batch.num_tokens)


def sampled_outputs(hidden_states: Tensor, batch: InputBatchV2) -> tuple[Tensor, Tensor]:
    """Return the outputs that a step samples from, float ``[n, hidden]``, and their rows."""
    rows = batch.logits_indices
    return hidden_states[rows], rows


def samples(runner: RunnerV2) -> bool:
    """Tell whether the runner samples: the stage is the last one, or the only one."""
    return bool(runner.is_last_pp_rank)


class StepReader(GpuStepReader[Rows]):
    """Reads the steps of a V2 runner out of its buffers.

    The runner's buffers stay where they are, so the tensors of a step are made once for each number
    of requests, and found again by the buffers' addresses.

    Args:
        runner: the runner, with its KV cache.
        groups: the groups to read, by name.
        step_input: puts numbers of the host into buffers.
    """

    def __init__(self, runner: Any, groups: Mapping[str, RowGroup], step_input: StepInput) -> None:
        super().__init__(runner, step_input)
        self._numbers: Final = {name: int(name.partition(".")[2]) for name in groups}

    def rows(
        self, batch: InputBatchV2, prepared: tuple[Sequence[Tensor], *tuple[object, ...]]
    ) -> Rows:
        """Read the rows of the forward that comes next.

        Args:
            batch: vLLM's ``InputBatch``.
            prepared: the result of ``prepare_attn``: block tables and slot mappings.
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
        """Return the drafts of each request, int ``[num_requests]``; None without drafts."""
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


def runner_device(runner: Runner) -> torch.device:
    """Return the device of a runner's tensors."""
    return torch.device(runner.device)


def lines(runner: Any) -> int:
    """Return the most requests that a V2 runner knows at one time; it forgets preempted ones."""
    return int(runner.max_num_reqs) + 1
