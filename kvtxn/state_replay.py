"""Advances recurrent states by the rows that a commit keeps: the reference, and the repair.

At commit each state takes in the rows of its request that the commit keeps, settled ones first, in
float32, and is written once. A row can be repaired by writing it a second time; a state cannot,
because it would take its rows in twice. So the window remembers whether the states advanced, and a
repair after a half-way failure starts from a copy of them, made by ``read_states``.

Everything here is computed on the device, without waiting for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import torch
from torch import Tensor

from .executor import StagedLayer, Txn
from .formats import words
from .layers import LayerRef, Plane
from .row_io import read, select, write


@attrs.frozen(eq=False)
class _Turns:
    """The row that each request takes in at each turn.

    Attributes:
        source: int64 ``[num_requests, turns]``, rows of the window.
        take: bool ``[num_requests, turns]``; False if a request takes no row in at that turn.
    """

    source: Tensor
    take: Tensor

    def until(self, most: Tensor) -> _Turns:
        """Return these turns without the rows of a request beyond its first ``most`` rows."""
        early = self.take.cumsum(1) <= most.unsqueeze(1)
        return _Turns(self.source, self.take & early)


def replayed(layers: Iterable[StagedLayer]) -> tuple[StagedLayer, ...]:
    """Return the staged layers whose states advance at commit, in order."""
    return tuple(layer for layer in layers if layer.ref.replay)


def moved(layers: Iterable[StagedLayer]) -> tuple[StagedLayer, ...]:
    """Return the staged layers whose rows are written to slots, in order."""
    return tuple(layer for layer in layers if not layer.ref.replay)


def advance(txn: Txn, accepted: Tensor) -> None:
    """Let the state of every staged replayed layer take in its settled and its kept rows.

    ``txn.advanced`` is left to the caller.
    """
    layers = replayed(txn.staged.values())
    if not layers or not txn.layout.num_rows:
        return
    turns = _turns(txn, accepted)
    for layer in layers:
        before = _stored(txn, layer.ref)[: len(layer.ref.planes)]
        for plane, slots, mask, state in _writes(txn, layer, before, turns):
            write(plane, state, select(slots, mask))


def read_states(txn: Txn) -> dict[str, tuple[Tensor, ...]]:
    """Copy the states of the staged replayed layers, by layer name, as words.

    One tensor ``[num_requests, *row_shape]`` per state; then, if requests may cross a
    boundary, one more per state, of the slots beyond.
    """
    layers = replayed(txn.staged.values()) if txn.layout.num_rows else ()
    return {layer.ref.name: _stored(txn, layer.ref) for layer in layers}


def finish(txn: Txn, accepted: Tensor) -> None:
    """Bring the states to the content that the window's commit should have given them.

    If an executor failed half-way, the states are first put back from their copies. States that
    ``txn.advanced`` says have advanced stay; the others are noted there.
    """
    if not txn.advanced:
        put_back(txn)
        advance(txn, accepted)
        txn.advanced = True


def wrong_states(txn: Txn, accepted: Tensor) -> list[str]:
    """Name the layers whose states a commit left wrong. Waits for the device.

    ``txn.states_before`` has the states before the commit; without any, no layer is named.
    """
    if not txn.states_before:
        return []
    turns, wrong = _turns(txn, accepted), []
    for layer in replayed(txn.staged.values()):
        before = txn.states_before[layer.ref.name][: len(layer.ref.planes)]
        for plane, slots, mask, state in _writes(txn, layer, before, turns):
            real = mask & (slots >= 0)
            if not torch.equal(read(plane, slots)[real], state[real]):
                wrong.append(layer.ref.name)
    return list(dict.fromkeys(wrong))


def put_back(txn: Txn) -> None:
    """Write the states from before the commit back, if there are copies of them."""
    for layer in replayed(txn.staged.values()):
        stored = iter(txn.states_before.get(layer.ref.name, ()))
        for slots in _all_slots(txn, layer.ref):
            mask = txn.permit(torch.ones_like(slots, dtype=torch.bool))
            for plane, state in zip(layer.ref.planes, stored, strict=False):
                write(plane, state, select(slots, mask))


def _stored(txn: Txn, ref: LayerRef) -> tuple[Tensor, ...]:
    """Read the states of each request, and of the slots beyond a boundary, as words."""
    every = _all_slots(txn, ref)
    return tuple(read(plane, slots) for slots in every for plane in ref.planes)


def _all_slots(txn: Txn, ref: LayerRef) -> list[Tensor]:
    """Return each request's slot, and, if there are boundaries, each slot beyond a boundary."""
    crossings = txn.crossings.get(ref.group)
    return [_slots(txn, ref)] + ([] if crossings is None else [crossings.beyond])


def _writes(
    txn: Txn, layer: StagedLayer, before: tuple[Tensor, ...], turns: _Turns
) -> Iterator[tuple[Plane, Tensor, Tensor, Tensor]]:
    """Yield each write to a layer's states: plane, slot and mask per request, states as words.

    Without boundaries there is one write per state: the state after all turns. With boundaries
    the state at the boundary goes to the slot, and the state after all turns to the slot beyond.
    """
    ref, slots = layer.ref, _slots(txn, layer.ref)
    crossings = txn.crossings.get(ref.group)
    here = turns
    if crossings is not None:
        most = crossings.boundary
        crosses = (crossings.beyond >= 0) & (turns.take.sum(1) > most) & (slots >= 0)
        here = turns.until(torch.where(crosses, most, turns.take.shape[1]))
        for plane, state in zip(ref.planes, _after(layer, before, turns), strict=True):
            yield plane, crossings.beyond, crosses, state
    for plane, state in zip(ref.planes, _after(layer, before, here), strict=True):
        yield plane, slots, here.take.any(1), state


def _starts(txn: Txn) -> Tensor:
    """Return each request's first row, int64 ``[num_requests]``; if none, the next request's."""
    requests = torch.arange(txn.layout.num_requests, device=txn.layout.request.device)
    return torch.searchsorted(txn.layout.request, requests)


def _slots(txn: Txn, ref: LayerRef) -> Tensor:
    """Return the slot of each request's state; -1 if it has no state or no rows."""
    if not txn.layout.num_rows:
        return _starts(txn).fill_(-1)
    starts = _starts(txn).clamp(max=txn.layout.num_rows - 1)
    mine = txn.layout.request[starts] == torch.arange(starts.shape[0], device=starts.device)
    return torch.where(mine, txn.slots[ref.group][starts], -1)


def _turns(txn: Txn, accepted: Tensor) -> _Turns:
    """List the rows that each request takes in, in order; for a tree, the rows of the path."""
    layout = txn.layout
    chosen = ~layout.is_draft | layout.kept(accepted)
    rows, sources = torch.arange(layout.num_rows, device=chosen.device), layout.sources(accepted)
    if sources is not None:
        rows = torch.where(layout.is_draft, sources.clamp(min=0), rows)
    longest = max(
        known + drafts for known, drafts in zip(layout.settled, layout.draft_len, strict=True)
    )
    places = _starts(txn).unsqueeze(1) + torch.arange(longest, device=rows.device)
    inside = places < layout.num_rows
    places = places.clamp(max=layout.num_rows - 1)
    requests = torch.arange(layout.num_requests, device=rows.device).unsqueeze(1)
    inside &= layout.request[places] == requests
    return _Turns(rows[places], inside & txn.permit(chosen)[places])


def _after(layer: StagedLayer, before: tuple[Tensor, ...], turns: _Turns) -> list[Tensor]:
    """Compute the states after the turns, ``[num_requests, *row_shape]``, as words."""
    after, rows = [], list(layer.rows)
    for recurrence, state, plane, stored in zip(
        layer.ref.replay, layer.ref.states, layer.ref.planes, before, strict=True
    ):
        count = len(recurrence.kept(state))
        parts, rows = rows[:count], rows[count:]
        now = stored.reshape(-1, *plane.staged_shape)
        if recurrence.moves_bytes:
            parts = [words(part) for part in parts]
        else:
            now = now.view(state.dtype).float()
        for turn in range(turns.take.shape[1]):
            row = [part[turns.source[:, turn]] for part in parts]
            row = row if recurrence.moves_bytes else [part.float() for part in row]
            take = turns.take[:, turn].view(-1, *[1] * (now.ndim - 1))
            now = torch.where(take, recurrence.step(now, row), now)
        if not recurrence.moves_bytes:
            now = words(now.to(state.dtype))
        # A state that took nothing in keeps its bytes, those of a NaN included.
        took = turns.take.any(1).view(-1, *[1] * (now.ndim - 1))
        now = torch.where(took, now, stored.reshape(now.shape))
        after.append(now.reshape(stored.shape))
    return after
