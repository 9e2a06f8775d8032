"""Recurrent states that vLLM's prefix cache keeps at the ends of blocks: its mode "align".

There a request's present state is in the block of its last token. Before a step that may reach
another block, vLLM copies state and past there; after a step whose accepted drafts crossed a
block's end, it copies those at this end into the block. It looks for a state in the column of the
last accepted draft. Here there is one state, so what looks for it looks in the first column, and
the state at the end of a block is written by the commit that takes the drafts in. The pasts of
convolutions stay vLLM's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import Tensor

from .engine_protocols import SchedulerOutput
from .hooks import check_methods, mix_in, precede
from .runner_protocols import Runner

if TYPE_CHECKING:
    from ....backends.state_tables.block_boundaries import BlockTables


#: The methods of ``MambaSpecDecodeGPUContext`` that copy states, with their parameters.
METHODS: Final = {
    "run_fused_precopy": (
        *("num_reqs", "state_idx_gpu", "src_col_gpu", "token_bias_gpu", "idx_mapping"),
    ),
    "run_fused_postprocess_align": (
        *("num_reqs", "num_accepted_tokens_gpu", "state_idx_gpu"),
        *("new_num_computed_tokens_gpu", "idx_mapping"),
    ),
    "run_fused_postprocess": (
        *("num_reqs", "num_accepted_tokens_gpu", "mamba_state_idx_gpu"),
        *("num_scheduled_tokens_gpu", "num_computed_tokens_gpu", "num_draft_tokens_gpu"),
    ),
}

#: The methods of the V1 runner that make this context, with their parameters.
V1_METHODS: Final = {"_get_mamba_bufs": (), "_get_mamba_state_copy_funcs": ()}

#: The fields of this class that have one number for each state or past.
FIELDS: Final = (
    *("state_base_addrs", "state_block_strides", "state_elem_sizes", "state_inner_sizes"),
    *("state_conv_widths", "state_group_indices", "state_dim_row_count", "state_dim_row_stride"),
)


def is_aligned(runner: Runner) -> bool:
    """Tell whether the prefix cache keeps states at the ends of blocks: vLLM's mode "align"."""
    return str(runner.vllm_config.cache_config.mamba_cache_mode) == "align"


def copies_differ() -> str | None:
    """Say in a sentence how vLLM's class of copies differs from the known one.

    None if it has the known fields, and methods with the known parameters.
    """
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext as Own

    missing = [name for name in FIELDS if name not in Own.__annotations__]
    if missing:
        return f"{Own.__name__}.{missing[0]} is not there"
    return check_methods(Own, METHODS)


def block_tables(runner: Runner, groups: list[str]) -> BlockTables:
    """Return the block tables of a runner's groups, a line per place of a batch.

    Args:
        runner: a runner whose caches exist.
        groups: names such as ``"group.0"``; the first one's block size counts for all.
    """
    from ....backends.state_tables.block_boundaries import BlockTables

    tables = tables_of_batch(runner, groups)
    number = int(groups[0].partition(".")[2])
    spec = runner.kv_cache_config.kv_cache_groups[number].kv_cache_spec
    return BlockTables.build(tuple(tables), int(spec.block_size))


def tables_of_batch(runner: Runner, groups: list[str]) -> list[Tensor]:
    """Return each group's block table, int32, with a line for each place of a batch."""
    numbers = [int(group.partition(".")[2]) for group in groups]
    if hasattr(runner, "block_tables"):  # V2 gathers the lines of the batch
        return [runner.block_tables.input_block_tables[number] for number in numbers]
    return [_v1_table(runner, number) for number in numbers]


def _v1_table(runner: Any, number: int) -> Tensor:
    """Return the block table of a group of the V1 runner, whose lines are those of the batch."""
    table: Tensor = runner.input_batch.block_table[number].get_device_tensor(runner.max_num_reqs)
    return table


class OneStateCopies:
    """A mixin of vLLM's context of copies, for caches with one state per request.

    Attributes:
        kvtxn_pasts: the context's part that copies pasts of convolutions.
        kvtxn_states: the part that copies states.
        kvtxn_none: int32 ``[max_requests]``, zeros: columns between a state and the first one.
        kvtxn_one: int32 ``[max_requests]``, ones: accepted rows, by which vLLM finds a column.
        kvtxn_order: int32 ``[max_requests]``, 0, 1, ...: the places of a batch of the V1 runner.
        kvtxn_ends: copy states that are at a block's end after their last kept row. Where this is
            false, the commits have written them to both blocks.
    """

    kvtxn_pasts: Any
    kvtxn_states: Any
    kvtxn_none: Tensor
    kvtxn_one: Tensor
    kvtxn_order: Tensor
    kvtxn_ends: bool

    def run_fused_precopy(
        self,
        num_reqs: int,
        state_idx_gpu: Tensor,
        src_col_gpu: Tensor,
        token_bias_gpu: Tensor,
        idx_mapping: Tensor | None,
    ) -> None:
        """Before a step, copy pasts and states to the blocks that the step writes, as vLLM does.

        Pasts are copied from the column of the accepted draft, states from the request's one
        column.
        """
        given = num_reqs, state_idx_gpu, src_col_gpu
        self.kvtxn_pasts.run_fused_precopy(*given, token_bias_gpu, idx_mapping)
        if self.kvtxn_states.num_states:
            self.kvtxn_states.run_fused_precopy(*given, self.kvtxn_none, idx_mapping)

    def run_fused_postprocess_align(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: Tensor,
        state_idx_gpu: Tensor,
        new_num_computed_tokens_gpu: Tensor,
        idx_mapping: Tensor,
    ) -> None:
        """After a V2 runner's step, copy to the blocks whose ends the kept rows reached.

        Pasts are copied as by vLLM; states only with ``kvtxn_ends``, and only those at an end now.
        """
        given = state_idx_gpu, new_num_computed_tokens_gpu, idx_mapping
        self.kvtxn_pasts.run_fused_postprocess_align(num_reqs, num_accepted_tokens_gpu, *given)
        if self.kvtxn_ends and self.kvtxn_states.num_states:
            self.kvtxn_states.run_fused_postprocess_align(num_reqs, self.kvtxn_one, *given)

    def run_fused_postprocess(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: Tensor,
        mamba_state_idx_gpu: Tensor,
        num_scheduled_tokens_gpu: Tensor,
        num_computed_tokens_gpu: Tensor,
        num_draft_tokens_gpu: Tensor,
    ) -> None:
        """After a V1 runner's step, copy to the blocks whose ends the kept rows reached.

        Pasts are copied as by vLLM; states only with ``kvtxn_ends``, and only those at an end now.
        The counts by which the next step finds each past are left in ``num_accepted_tokens_out``.
        """
        pasts, accepted = self.kvtxn_pasts, num_accepted_tokens_gpu[:num_reqs]
        counts = num_scheduled_tokens_gpu, num_computed_tokens_gpu, num_draft_tokens_gpu
        pasts.run_fused_postprocess(num_reqs, num_accepted_tokens_gpu, mamba_state_idx_gpu, *counts)
        out: Any = self
        out.num_accepted_tokens_out[:num_reqs].copy_(pasts.num_accepted_tokens_out[:num_reqs])
        if self.kvtxn_ends and self.kvtxn_states.num_states:
            scheduled, computed, drafts = (count[:num_reqs] for count in counts)
            after = computed + scheduled - drafts + accepted - 1
            given = mamba_state_idx_gpu, after, self.kvtxn_order
            self.kvtxn_states.run_fused_postprocess_align(num_reqs, self.kvtxn_one, *given)


def part_of(context: Any, chosen: Tensor) -> Any:
    """Return a shallow copy of vLLM's context of copies that copies the chosen states alone.

    Its ``num_accepted_tokens_out`` is a tensor of its own, of zeros.

    Args:
        context: the context, which stays as it is.
        chosen: bool ``[num_states]``.
    """
    part = copy.copy(context)
    for name in FIELDS:
        setattr(part, name, getattr(context, name)[chosen].contiguous())
    part.num_states = int(chosen.sum())
    part.num_accepted_tokens_out = torch.zeros_like(context.num_accepted_tokens_out)
    return part


def hook_copies(runner: Runner, *, ends: bool) -> Callable[[], None]:
    """Let vLLM copy the one state that each request has, apart from pasts; return the undo.

    Args:
        runner: a runner whose prefix cache keeps states, and whose caches exist.
        ends: as for ``OneStateCopies.kvtxn_ends``.
    """
    context = context_of(runner)
    pasts = context.state_conv_widths > 0
    one = torch.ones_like(context.num_accepted_tokens_out)
    return mix_in(
        context,
        OneStateCopies,
        kvtxn_pasts=part_of(context, pasts),
        kvtxn_states=part_of(context, ~pasts),
        kvtxn_none=torch.zeros_like(one),
        kvtxn_one=one,
        kvtxn_order=torch.arange(len(one), dtype=torch.int32, device=one.device),
        kvtxn_ends=ends,
    )


def context_of(runner: Runner) -> Any:
    """Return the object by which vLLM copies a runner's states; the V1 runner's is filled first.

    The runner's caches exist.
    """
    return runner.model_state._mamba_ctx if hasattr(runner, "model_state") else _v1_copies(runner)


def tables_of_requests(runner: Runner, groups: list[str]) -> list[Tensor]:
    """Return each group's block table, int32, with the lines by which the context of copies counts.

    These are the requests that a V2 runner knows, or the places of a V1 runner's batch.
    """
    numbers = [int(group.partition(".")[2]) for group in groups]
    if hasattr(runner, "block_tables"):  # V2 has a line for each request that it knows
        return [runner.block_tables.block_tables[number].gpu for number in numbers]
    return [_v1_table(runner, number) for number in numbers]


def _v1_copies(runner: Any) -> Any:
    """Return the V1 runner's context of copies, filled now rather than at the first step."""
    context = runner._get_mamba_bufs().postprocess_align
    context.initialize_from_forward_context(
        runner.kv_cache_config,
        runner.compilation_config.static_forward_context,
        runner._get_mamba_state_copy_funcs(),
        [_v1_table(runner, number) for number in context.mamba_group_ids],
    )
    return context


#: Tells of copies: by group, int ``[num_requests]`` twice, the blocks copied from and those copied
#: to; -1 where nothing is copied.
Carry = Callable[[Mapping[str, tuple[Tensor, Tensor]]], None]


@attrs.frozen(eq=False)
class CopyTeller:
    """Calls a function with the copies that vLLM's context is about to make, in block numbers.

    Its methods have the names and parameters of vLLM's.

    Attributes:
        tables: by group, int32 ``[requests, columns]``, the blocks; a line for each request that
            vLLM's kernels count by.
        carry: is called with the copies.
        size: tokens of a block.
        held: kvtxn's windows hold one state per request, in the first column whatever was accepted,
            and their commits leave the states at the ends of blocks: copies to ends are not
            reported.
    """

    tables: Mapping[str, Tensor]
    carry: Carry
    size: int
    held: bool = False

    def run_fused_precopy(
        self,
        num_reqs: int,
        state_idx_gpu: Tensor,
        src_col_gpu: Tensor,
        token_bias_gpu: Tensor,
        idx_mapping: Tensor | None,
    ) -> None:
        """Report the copies of states to the blocks that their requests' steps write.

        Requests of padding, and those whose column stays, count as not copied.
        """
        place, live = _places(idx_mapping, num_reqs, state_idx_gpu)
        source, target = src_col_gpu[place].long(), state_idx_gpu[place].long()
        copied = live & (source >= 0) & (source != target)
        bias = 0 if self.held else token_bias_gpu[place]
        self._tell(place, copied, source + bias, target)

    def run_fused_postprocess_align(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: Tensor,
        state_idx_gpu: Tensor,
        new_num_computed_tokens_gpu: Tensor,
        idx_mapping: Tensor,
    ) -> None:
        """Report the copies of states to the ends of blocks that a V2 runner's step reached.

        Nothing if ``held``.
        """
        place, live = _places(idx_mapping, num_reqs, state_idx_gpu)
        after = new_num_computed_tokens_gpu[place].long()
        running = after - num_accepted_tokens_gpu[place] + 1
        self._tell_ends(place, live, state_idx_gpu[place].long(), running, after)

    def run_fused_postprocess(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: Tensor,
        mamba_state_idx_gpu: Tensor,
        num_scheduled_tokens_gpu: Tensor,
        num_computed_tokens_gpu: Tensor,
        num_draft_tokens_gpu: Tensor,
    ) -> None:
        """Report the copies of states to the ends of blocks that a V1 runner's step reached.

        It computes the tokens after the step, which the V1 runner has in its kernel only. Nothing
        if ``held``.
        """
        place, live = _places(None, num_reqs, mamba_state_idx_gpu)
        counts = num_scheduled_tokens_gpu, num_computed_tokens_gpu, num_draft_tokens_gpu
        scheduled, computed, drafts = (count[place].long() for count in counts)
        running = computed + scheduled - drafts
        after = running + num_accepted_tokens_gpu[place] - 1
        self._tell_ends(place, live, mamba_state_idx_gpu[place].long(), running, after)

    def _tell_ends(
        self, place: Tensor, live: Tensor, column: Tensor, running: Tensor, after: Tensor
    ) -> None:
        """Report the copies of states that are at the ends of blocks; nothing if ``held``.

        Args:
            place: the lines of the requests.
            live: the requests that are none of padding.
            column: the column of the state after each request's first row of the step that counts.
            running: the tokens that this state has taken in.
            after: the tokens that the request's last state has taken in.
        """
        if self.held:
            return
        full = after // self.size
        further = full * self.size - running
        target = full - 1
        copied = live & (further >= 0) & ((column != target) | (further != 0))
        self._tell(place, copied, column + further, target)

    def _tell(self, place: Tensor, copied: Tensor, source: Tensor, target: Tensor) -> None:
        """Call ``carry`` once, with the source and target blocks of the copies by group.

        Args:
            place: int64 ``[num_requests]``, the lines of the requests.
            copied: bool ``[num_requests]``; -1 stands for the blocks of the others.
            source: int64 ``[num_requests]``, columns; outside of the table the nearest one is
                taken.
            target: the same of the blocks that are copied to.
        """
        told = {}
        for name, table in self.tables.items():
            lines, last = table[place].long(), table.shape[1] - 1
            blocks = (
                lines.gather(1, column.clamp(0, last)[:, None])[:, 0] for column in (source, target)
            )
            one, other = (torch.where(copied, block, -1) for block in blocks)
            told[name] = one, other
        self.carry(told)


def _places(mapping: Tensor | None, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lines of a batch's requests, int64 ``[num_requests]``, and which of them have one.

    Args:
        mapping: int ``[num_requests]`` at least, the line of each, negative for padding; None: each
            request has the line of its number.
        count: the number of requests.
        like: a tensor on the device of the result if there is no ``mapping``.
    """
    if mapping is None:
        every = torch.arange(count, device=like.device)
        return every, every >= 0
    return mapping[:count].long().clamp(min=0), mapping[:count] >= 0


class HostCopies:
    """The copies of states by a V1 runner that drafts nothing, worked out on the host.

    Args:
        runner: the runner.
        sizes: tokens of a block, by group of states; one for all.
    """

    def __init__(self, runner: Any, sizes: Mapping[str, int]) -> None:
        self._runner = runner
        self._numbers = {name: int(name.partition(".")[2]) for name in sizes}
        self._size = next(iter(sizes.values()))  # one for all groups
        self._columns: dict[str, int] = {}

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        """Remember the column of each request's state; call it before vLLM prepares a step.

        Requests that end, are put back, or are resumed in the step are forgotten.
        """
        self._columns = dict(self._runner.mamba_state_idx)
        told = scheduler_output
        for names in (
            told.finished_req_ids,
            told.preempted_req_ids or (),
            told.scheduled_cached_reqs.resumed_req_ids,
        ):
            for name in names:
                self._columns.pop(name, None)

    def take(self) -> dict[str, tuple[list[int], list[int]]]:
        """Return the blocks that vLLM has copied states from and to since ``begin``, by group.

        A request whose column changed was copied; of a forgotten one the last computed token's
        column counts. Two lists of equal length each; empty for a group without copies.
        """
        runner = self._runner
        found: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in self._numbers}
        for name in runner.input_batch.req_ids:
            state, column = runner.requests[name], runner.mamba_state_idx[name]
            before = self._columns.get(name, (state.num_computed_tokens - 1) // self._size)
            if before in (-1, column):
                continue
            for group, number in self._numbers.items():
                blocks = state.block_ids[number]
                found[group][0].append(int(blocks[before]))
                found[group][1].append(int(blocks[column]))
        return found


def lacks_context(runner: Runner) -> bool:
    """Tell whether a runner copies states on the host: a V1 runner without speculation does."""
    return not hasattr(runner, "model_state") and runner.speculative_config is None


def tell_copies(
    runner: Runner, groups: Iterable[str], carry: Carry, *, held: bool = False
) -> Callable[[], None]:
    """Let a function be called before each copy of states that a runner's context makes.

    Args:
        runner: a runner whose prefix cache keeps states, and whose caches exist.
        groups: names of the groups of states.
        carry: the function, called with the blocks copied from and to, by group.
        held: as for ``CopyTeller``.

    Returns:
        A function that undoes it.
    """
    assert is_aligned(runner)
    names = [*groups]
    tables = dict(zip(names, tables_of_requests(runner, names), strict=True))
    context = context_of(runner)
    teller = CopyTeller(tables, carry, int(context.block_size), held)
    undo = ExitStack()
    for tell in (
        teller.run_fused_precopy,
        teller.run_fused_postprocess_align,
        teller.run_fused_postprocess,
    ):
        undo.callback(precede(context, tell.__name__, tell))
    return undo.close
