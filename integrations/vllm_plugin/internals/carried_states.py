"""The copies of states that vLLM makes between blocks where its prefix cache keeps states.

Before a step that may reach another block, vLLM copies a request's state there; after a step whose
accepted drafts crossed a block's end, it copies the state at this end into the block. Here the
blocks of both copies are read from what vLLM gives to its kernels, without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor

from .aligned_states import context_of, is_aligned, tables_of_requests
from .hooks import precede

#: Tells of copies: by group, int ``[num_requests]`` twice, the blocks copied from and those copied
#: to; -1 where nothing is copied.
Carry = Callable[[Mapping[str, tuple[Tensor, Tensor]]], None]


@attrs.frozen(eq=False)
class CopyTeller:
    """Tells of the copies of vLLM's context before they are made; its methods have vLLM's names.

    Attributes:
        tables: by group, int32 ``[requests, columns]``, the blocks; a line for each request that
            vLLM's kernels count by.
        carry: is told.
        size: tokens of a block.
        held: kvtxn's windows hold one state per request, which is in the first column, whatever was
            accepted; what is at the ends of blocks is left by their commits.
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
        """Tell of states that go to the blocks of their steps."""
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
        """Tell of states at the ends of blocks."""
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
        """Do the same in the V1 runner, which counts the tokens after the step in the kernel."""
        place, live = _places(None, num_reqs, mamba_state_idx_gpu)
        counts = num_scheduled_tokens_gpu, num_computed_tokens_gpu, num_draft_tokens_gpu
        scheduled, computed, drafts = (count[place].long() for count in counts)
        running = computed + scheduled - drafts
        after = running + num_accepted_tokens_gpu[place] - 1
        self._tell_ends(place, live, mamba_state_idx_gpu[place].long(), running, after)

    def _tell_ends(
        self, place: Tensor, live: Tensor, column: Tensor, running: Tensor, after: Tensor
    ) -> None:
        """Tell of states at the ends of blocks.

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
        """Tell of copies from column to column of each group's table."""
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
    """Return the lines of a batch's requests, int64 ``[num_requests]``, and which have one."""
    if mapping is None:
        every = torch.arange(count, device=like.device)
        return every, every >= 0
    return mapping[:count].long().clamp(min=0), mapping[:count] >= 0


class HostCopies:
    """The copies of a V1 runner that drafts nothing, whose columns are on the host.

    Args:
        runner: the runner.
        sizes: tokens of a block, by group of states.
    """

    def __init__(self, runner: Any, sizes: Mapping[str, int]) -> None:
        self._runner = runner
        self._numbers = {name: int(name.partition(".")[2]) for name in sizes}
        self._size = next(iter(sizes.values()))  # one for all groups
        self._columns: dict[str, int] = {}

    def begin(self, scheduler_output: Any) -> None:
        """Remember the columns of the states before vLLM has prepared a step."""
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
        """Return the blocks that vLLM has copied from and to since, by group."""
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


def lacks_context(runner: Any) -> bool:
    """Tell whether a runner copies states without the context: V1 does where nothing is drafted."""
    return not hasattr(runner, "model_state") and runner.speculative_config is None


def tell_copies(
    runner: Any, groups: Iterable[str], carry: Carry, *, held: bool = False
) -> Callable[[], None]:
    """Let a runner's context tell of the copies that it makes.

    Args:
        runner: a runner whose prefix cache keeps states, and whose caches exist.
        groups: names of the groups to tell of.
        carry: is told.
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
