"""Reads the recurrent states of SGLang's hybrids for the ledger.

Each request has a slot with the state after its tokens so far. In front of a prompt's forward
SGLang clears the slot, or copies the state of a hit into it. A forward writes the state after each
request's last row, but for one that verifies drafts: there a commit does, once it is known which of
them stay. States for the radix tree get slots of their own, behind certain numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ....audit import StateGroup
from ....errors import KVTxnError
from ...serving.step import Rows, States
from .pools import STATES, host_slots
from .protocols import ForwardBatch, ReqToTokenPool, Scheduler
from .steps import MAX_REMEMBERED, ForwardStep

#: Backends whose kernels read the slot of a request that begins, so that it has to be cleared.
_READS_CLEARED: Final = ("GDNAttnBackend", "KDAAttnBackend")

#: Hears that states were written once drafts were decided. The function returns pairs, int64
#: ``[num_requests]`` each: slots of the step's requests, and how many tokens each state has taken
#: in; -1 for none.
Committed = Callable[[Callable[[], list[tuple[Tensor, Tensor]]]], None]
#: Hears that states were copied. The function returns what ``Ledger.carry`` takes.
Copied = Callable[[Callable[[], dict[str, tuple[Tensor, Tensor]]]], None]


def state_group(scheduler: Scheduler) -> StateGroup:
    """Return the group of a hybrid's states, with the slots of the device, then those of the host.

    A slot has the states of all layers; slot 0 is padding.
    """
    own, pool = state_slots(scheduler), scheduler.req_to_token_pool.mamba_pool
    return StateGroup(STATES, own + host_slots(scheduler, pool))


def state_slots(scheduler: Scheduler) -> int:
    """Return the number of a hybrid's slots of states on the device, the padding's included."""
    return int(scheduler.req_to_token_pool.mamba_allocator.size) + 1


class StateReader:
    """Reads which states the forwards of a target's runner continue and write.

    Args:
        scheduler: SGLang's, of a hybrid.
        device: of all tensors.
    """

    def __init__(self, scheduler: Scheduler, device: torch.device) -> None:
        self._pool: Final[ReqToTokenPool] = scheduler.req_to_token_pool
        self._backend: Final = scheduler.tp_worker.model_runner.attn_backend
        kind = type(self._backend.linear_attn_backend).__name__
        self._reads_cleared: Final = kind in _READS_CLEARED
        config = getattr(scheduler.model_config, "hf_text_config", None)
        #: A prompt's forward has the states behind multiples of so many rows at hand.
        self._chunk: Final = int(getattr(config, "mamba_chunk_size", 64))
        self._device: Final = device
        #: By the buffers of rows, which are held lest others take their number.
        self._known: Final[dict[int, tuple[object, States]]] = {}
        self._slots = torch.zeros(0, dtype=torch.int64, device=device)
        #: The last forward: its rows, and the slot of each request's state.
        self._last: tuple[Rows, Tensor] | None = None

    def follow(self, committed: Committed, copied: Copied) -> None:
        """Hear what SGLang commits after drafts, and which states it copies between forwards.

        SGLang's own methods are replaced on the backend and the pool, by ones that call them first.

        Args:
            committed: called after each commit that follows a forward which ``states`` has read.
            copied: called after each copy.
        """
        backend, pool = self._backend, self._pool.mamba_pool
        commit, copy = backend.update_mamba_state_after_mtp_verify, pool.copy_from
        backend.update_mamba_state_after_mtp_verify = partial(self._commits, commit, committed)
        pool.copy_from = partial(_copies, copy, copied)

    # -- a forward ---------------------------------------------------------------------------

    def states(self, step: ForwardStep, rows: Rows) -> States:
        """Read the states of the forward that comes next, into buffers that stay.

        A step with drafts writes no state by itself: its slots are -1. ``follow`` reads of its
        commit by the rows of the last call.

        Args:
            step: the forward.
            rows: its rows, as they were read.
        """
        assert rows.first is not None  # of every step of SGLang's
        assert rows.table_lines is not None
        batch, number = step.batch, len(step.requests)
        own = self._pool.req_index_to_mamba_index_mapping[rows.table_lines].long()
        self._last = rows, own
        states = self._states_of(rows)
        slots, sources = states.slots[STATES].fill_(-1), states.sources[STATES]
        sources.copy_(own if self._reads_cleared else own.masked_fill(rows.first == 0, -1))
        if rows.drafts is None:
            slots.index_copy_(0, rows.starts[1 : number + 1] - 1, own)
        ends, end_at = self._kept_for_tree(step, rows)
        if not step.extends:
            return attrs.evolve(states, ends=ends, end_at=end_at)
        return attrs.evolve(
            states, ends=ends, end_at=end_at, cleared=_cleared(batch, own), copies=_copied(batch)
        )

    def padding(self, rows: Rows) -> States:
        """Return states in the buffers of rows of padding; all slots and sources are -1."""
        states = self._states_of(rows)
        for each in (states.slots, states.sources):
            each[STATES].fill_(-1)
        return states

    def _states_of(self, rows: Rows) -> States:
        """Return states in buffers of any content; the same ones for rows in the same buffers."""
        size, number = len(rows.tokens), len(rows.names)
        with torch.inference_mode(False):  # steps write into them in inference mode or not
            if size > len(self._slots):
                self._known.clear()
                self._slots = torch.zeros(size, dtype=torch.int64, device=self._device)
            held, found = self._known.get(id(rows.buffers), (None, None))
            if found is None or held is not rows.buffers:
                sources = torch.zeros(number, dtype=torch.int64, device=self._device)
                found = States(
                    {STATES: self._slots[:size]}, {STATES: sources}, None, buffers=object()
                )
                if len(self._known) >= MAX_REMEMBERED:
                    self._known.clear()
                self._known[id(rows.buffers)] = rows.buffers, found
        return found

    def _kept_for_tree(
        self, step: ForwardStep, rows: Rows
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the slots of states that a forward keeps for the tree, and their lengths.

        Both are int64 ``[num_requests]``, -1 for a request without. Without any kept states, or
        with drafts, an empty dict and None.

        Raises:
            KVTxnError: a forward of prompts keeps states, and their lengths are not told.
        """
        batch, first = step.batch, rows.first
        chosen, slots = batch.mamba_track_mask, batch.mamba_track_indices
        if rows.drafts is not None or chosen is None or slots is None or not step.keeps_states:
            return {}, None
        assert first is not None
        lengths = first + 1
        if step.extends:
            if batch.mamba_track_seqlens is None:
                raise KVTxnError("forward", "a state is kept after an unknown number of tokens")
            rest = batch.mamba_track_seqlens - first
            lengths = first + rest.div(self._chunk, rounding_mode="floor") * self._chunk
        return {STATES: slots.long().masked_fill(~chosen, -1)}, lengths.masked_fill(~chosen, -1)

    # -- what comes later --------------------------------------------------------------------

    def _commits(
        self,
        commit: Callable[..., None],
        committed: Committed,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Let SGLang commit states after drafts; then tell ``committed``, if a forward was read."""
        commit(*args, **kwargs)
        if self._last is not None:
            committed(partial(self._committed, *self._last, *args, **kwargs))

    def _committed(
        self,
        rows: Rows,
        own: Tensor,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None,
        mamba_steps_to_track: Tensor | None,
        *_: object,
        **__: object,
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the slots that a commit has written, with the lengths of their states.

        First those of the requests' own states, then those for the tree, if any; the parameters are
        SGLang's.
        """
        found = [_left(rows, own, last_correct_step_indices)]
        if mamba_track_indices is not None and mamba_steps_to_track is not None:
            found.append(_left(rows, mamba_track_indices, mamba_steps_to_track))
        return found


def _left(rows: Rows, slots: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return slots and the lengths of their states, see ``_lengths``; no slot without a length."""
    lengths = _lengths(rows, steps)
    return slots.long().masked_fill(lengths < 0, -1), lengths


def _lengths(rows: Rows, steps: Tensor) -> Tensor:
    """Return how many tokens the states after some rows of a step have taken in.

    Args:
        rows: those of the step.
        steps: int ``[num_requests]``, a row of each request, by its number within; -1 for none.

    Returns:
        int64 ``[num_requests]``; -1 for none.
    """
    assert rows.positions is not None
    within = steps.long()
    row = rows.starts[: len(within)] + within.clamp(min=0)
    return (rows.positions[row] + 1).masked_fill(within < 0, -1)


def _cleared(batch: ForwardBatch, own: Tensor) -> dict[str, Tensor]:
    """Return the slot of each request whose state is cleared before the forward; -1 for others.

    By group; empty if none is cleared.
    """
    cleared = batch.mamba_clear_indices
    if cleared is None or not len(cleared):
        return {}
    chosen = (own[:, None] == cleared[None, :]).any(1)
    return {STATES: own.masked_fill(~chosen, -1)}


def _copied(batch: ForwardBatch) -> dict[str, tuple[Tensor, Tensor]]:
    """Return from which slots states are copied before the forward, and to which, by group.

    Empty if none are.
    """
    source, target = batch.mamba_cow_src_indices, batch.mamba_cow_dst_indices
    if source is None or target is None or not len(source):
        return {}
    return {STATES: (source.long(), target.long())}


def _copies(copy: Callable[..., None], copied: Copied, *args: Any, **kwargs: Any) -> None:
    """Let SGLang copy states, then give ``copied`` a function that returns the slots."""
    copy(*args, **kwargs)
    copied(partial(_slots_copied, *args, **kwargs))


def _slots_copied(src_indices: Tensor, dst_indices: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return which slots were copied, for ``Ledger.carry``; the parameters are SGLang's."""
    return {STATES: (src_indices.long(), dst_indices.long())}
