"""Reading the V2 runner for the ledger; positions and counts stay on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import attrs
import numpy
import torch
from torch import Tensor

from ....audit import RowGroup
from ....audit.step_input import StepInput
from . import audited, batches
from .audited import NO_CHANGES, Arrival, Changes, Rows
from .gpu_step_reader import GpuStepReader
from .protocols.engine import NewRequest, SchedulerOutput
from .protocols.runners import InputBatchV2, Runner, RunnerV2

#: Methods that the mixin overrides, with the parameters they must have; "?" as in ``batches``.
AUDITED_METHODS: Final = {
    "initialize_kv_cache": batches.V2_METHODS["initialize_kv_cache"],
    "update_requests": ("scheduler_output",),
    "prepare_inputs": batches.V2_METHODS["prepare_inputs"],
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


def gone_and_left(
    batch: InputBatchV2, scheduler_output: SchedulerOutput
) -> tuple[Iterable[str], Sequence[str]]:
    """Return the names of the requests that ended before a step, and of those that it has."""
    return sorted(scheduler_output.finished_req_ids), batch.req_ids


def num_rows(batch: InputBatchV2) -> int:
    """Return the rows of a V2 runner's step, without padding."""
    return int(batch.num_tokens)


def sampled_outputs(hidden_states: Tensor, batch: InputBatchV2) -> tuple[Tensor, Tensor]:
    """Return the outputs that a step samples from, float ``[n, hidden]``, and their rows."""
    rows = batch.logits_indices
    return hidden_states[rows], rows


def samples(runner: RunnerV2) -> bool:
    """Tell whether the runner samples: the stage is the last one, or the only one."""
    return bool(runner.is_last_pp_rank)


def graphs_find_rows(runner: RunnerV2) -> bool:
    """Tell whether the steps of a V2 runner lie where its captured forwards find them.

    They do not where drafts are shared out on the device, nor where ranks share a context.
    """
    usual = getattr(runner, "adaptive_verification", None) is None
    return usual and getattr(runner, "pcp_manager", None) is None


class StepReader(GpuStepReader[tuple[Rows, bool]]):
    """Reads the steps of a V2 runner out of its buffers.

    The runner's buffers stay where they are, so the tensors of a step are made once for each number
    of requests, and found again by the buffers' addresses.

    Args:
        runner: the runner, with its KV cache.
        groups: the groups to read, by name.
        step_input: puts numbers of the host into buffers.

    Attributes:
        in_graphs: captured forwards read the rows themselves, as ``in_place`` describes them.
        placed: the last step's rows lie as ``in_place`` describes them.
    """

    in_graphs: bool = False
    placed: bool = False

    def __init__(
        self, runner: RunnerV2, groups: Mapping[str, RowGroup], step_input: StepInput
    ) -> None:
        super().__init__(runner, step_input)
        self._numbers: Final = {name: int(name.partition(".")[2]) for name in groups}
        self._names: list[str] = []

    def repeats(self, batch: InputBatchV2) -> bool:
        """Tell whether a step has the requests and the numbers of drafts of the last one read."""
        if batch.has_prefill or not batch.num_draft_tokens or batch.req_ids != self._names:
            return False
        drafts = batch.num_draft_tokens_per_req
        return drafts is not None and bool(drafts.tobytes() == self._drafts)

    def goes_on(
        self, batch: InputBatchV2, scheduler_output: SchedulerOutput
    ) -> Sequence[tuple[list[int], ...]] | None:
        """Return the new blocks, by KV-cache group, of each request that gets some.

        Returns:
            None if the step does not repeat the last one, or changes anything else.
        """
        told = scheduler_output
        if told.finished_req_ids or told.scheduled_new_reqs:
            return None
        if told.preempted_req_ids or told.kv_cache_block_copies:
            return None
        usual = batch.num_draft_tokens == self._total and batch.req_ids == self._names
        if batch.has_prefill or not (usual or self.repeats(batch)):
            return None  # usually each request has the most drafts, so that the total tells it
        return [*filter(None, told.scheduled_cached_reqs.new_block_ids)]

    def lacks_requests(
        self, batch: InputBatchV2, scheduler_output: SchedulerOutput
    ) -> Sequence[tuple[list[int], ...]] | None:
        """Return the same of a step that goes on without some of the last one's requests.

        Returns:
            None if none ended, if the step changes anything else, or if in one of both steps a
            request has not the most drafts.
        """
        told, number = scheduler_output, batch.num_reqs
        if not told.finished_req_ids or told.scheduled_new_reqs:
            return None
        if told.preempted_req_ids or told.kv_cache_block_copies:
            return None
        if self._total < 0 or batch.has_prefill or not number < len(self._names):
            return None
        if batch.num_draft_tokens != number * self._most:
            return None
        return [*filter(None, told.scheduled_cached_reqs.new_block_ids)]

    def went_on(self, batch: InputBatchV2) -> None:
        """Hear that ``lacks_requests`` was told of a step: the next one is compared with it."""
        number, before = batch.num_reqs, len(self._names)
        self._names, self._total = batch.req_ids, batch.num_draft_tokens
        self._drafts = self._drafts[: len(self._drafts) // before * number]  # all are alike

    def rows(
        self, batch: InputBatchV2, prepared: tuple[Sequence[Tensor], *tuple[object, ...]]
    ) -> Rows:
        """Read the rows of the forward that comes next.

        Args:
            batch: vLLM's ``InputBatch``.
            prepared: the result of ``prepare_attn``: block tables and slot mappings.
        """
        runner, number, tables = self._runner, int(batch.num_reqs), prepared[0]
        self._names = batch.req_ids
        inputs, slots = runner.input_buffers, runner.block_tables.slot_mappings
        self._forget_unless((inputs.positions, inputs.input_ids, slots))
        drafts = self._drafts_of(batch, number)
        key = (
            *(number, drafts is None, batch.query_start_loc.data_ptr()),
            *[tables[group].data_ptr() for group in self._numbers.values()],
        )
        known = self._known.get(key)
        if known is not None:
            rows, self.placed = known
            if rows.names == batch.req_ids:
                return rows
            rows = attrs.evolve(rows, names=batch.req_ids)
        else:
            rows = self._rows(batch.req_ids, batch.query_start_loc, tables, number, drafts)
            self.placed = self._is_placed(batch, tables)
        self._known[key] = rows, self.placed
        return rows

    def _rows(
        self,
        names: Any,
        starts: Tensor,
        tables: Sequence[Tensor],
        number: int,
        drafts: Tensor | None,
    ) -> Rows:
        inputs, slots = self._runner.input_buffers, self._runner.block_tables.slot_mappings
        return Rows(
            names=names,
            starts=starts[: number + 1],
            first=None,
            tokens=inputs.input_ids,
            drafts=drafts,
            slots={name: slots[group] for name, group in self._numbers.items()},
            tables={name: tables[group] for name, group in self._numbers.items()},
            positions=inputs.positions,
            buffers=object(),
        )

    def in_place(self, number: int) -> Rows:
        """Describe the rows of any step of at most so many requests by where a forward finds them.

        What is beyond a step's own requests is padding.
        """
        tables = [each[:number] for each in self._runner.block_tables.input_block_tables]
        starts = self._runner.input_buffers.query_start_loc
        return self._rows((), starts, tables, number, self._there[:number])

    def _is_placed(self, batch: InputBatchV2, tables: Sequence[Tensor]) -> bool:
        """Tell whether a step's tensors lie where ``in_place`` says that they do."""
        if not self.in_graphs:
            return False
        theirs, runner = self._runner.block_tables.input_block_tables, self._runner
        pairs = [(tables[group], theirs[group]) for group in self._numbers.values()]
        pairs.append((batch.query_start_loc, runner.input_buffers.query_start_loc))
        return all(one.data_ptr() == other.data_ptr() for one, other in pairs)

    def _drafts_of(self, batch: InputBatchV2, number: int) -> Tensor | None:
        """Return the drafts of each request, int ``[num_requests]``; None without drafts."""
        there = self._views.get(number)
        if there is None:
            there = self._views[number] = self._there[:number]
        if not batch.num_draft_tokens or batch.num_draft_tokens_per_req is None:
            if self.in_graphs:
                self._put_drafts(there, numpy.zeros(number, numpy.int32))
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


def most_requests(runner: Runner) -> int:
    """Return the most requests of one step."""
    return int(runner.max_num_reqs)


def lines(runner: RunnerV2) -> int:
    """Return the most requests that a V2 runner knows at one time; it forgets preempted ones."""
    return int(runner.max_num_reqs) + 1
