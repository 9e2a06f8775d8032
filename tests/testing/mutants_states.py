"""Executors that are wrong about replayed states, and right about everything else.

``CORE_CAUGHT_BY`` has defects of the library's own windows over them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import attrs
import torch
from kvtxn.backends.torch_executor import TorchExecutor
from torch import Tensor

from kvtxn import recovery, state_replay
from kvtxn.captured_launches import CapturedPlaces
from kvtxn.captured_shared import SharedPlaces
from kvtxn.captured_windows import CapturedWindows
from kvtxn.executor import Capabilities, StagedLayer, Txn
from kvtxn.lifecycle import Lifecycle
from kvtxn.row_io import read, select, write
from kvtxn.window_transitions import Event


class TakesRejectedRowsIn(TorchExecutor):
    def advance(self, txn: Txn, accepted: Tensor) -> None:
        super().advance(txn, torch.ones_like(txn.layout.is_draft))


class TakesOneRowTooMany(TorchExecutor):
    def advance(self, txn: Txn, accepted: Tensor) -> None:
        if accepted.dtype is not torch.bool:
            accepted = accepted + 1
        super().advance(txn, accepted)


class ForgetsSettledRows(TorchExecutor):
    def advance(self, txn: Txn, accepted: Tensor) -> None:
        layout = attrs.evolve(txn.layout, is_draft=torch.ones_like(txn.layout.is_draft))
        super().advance(attrs.evolve(txn, layout=layout), txn.layout.kept(accepted))


class TakesSettledRowsInEarly(ForgetsSettledRows):
    """Takes settled rows in with the next layer that is staged, since they are known good."""

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        super().stage(txn, layer)
        TorchExecutor.advance(self, txn, torch.zeros(txn.layout.num_requests, dtype=torch.int64))


class AdvancesTwice(TorchExecutor):
    def advance(self, txn: Txn, accepted: Tensor) -> None:
        super().advance(txn, accepted)
        super().advance(txn, accepted)


class TakesSixtyFourRowsIn(TorchExecutor):
    """A chunk of the rows, and no further one."""

    def advance(self, txn: Txn, accepted: Tensor) -> None:
        first = torch.tensor(txn.layout.starts)[txn.layout.request]
        near = torch.arange(txn.layout.num_rows) - first < 64
        if accepted.ndim == 1:
            accepted = txn.layout.kept(accepted) & near
        super().advance(txn, accepted)


class AdvancesAByteOfRequests(TorchExecutor):
    """Has a signed byte for a request's number."""

    def advance(self, txn: Txn, accepted: Tensor) -> None:
        real = txn.slots
        late = txn.layout.request > 127
        txn.slots = {group: slots.masked_fill(late, -1) for group, slots in real.items()}
        super().advance(txn, accepted)
        txn.slots = real


class TakesDeepNodesByRow(TorchExecutor):
    """Behind the second node of a path it takes the rows in as they lie."""

    def advance(self, txn: Txn, accepted: Tensor) -> None:
        def turns(txn: Txn, accepted: Tensor) -> Any:
            found = real(txn, accepted)
            place = torch.arange(found.source.shape[1])
            deep = place - torch.tensor(txn.layout.settled).unsqueeze(1) > 1
            lies = state_replay._starts(txn).unsqueeze(1) + place
            found.source[deep] = lies[deep].clamp(max=txn.layout.num_rows - 1)
            return found

        real = state_replay._turns
        with mock.patch.object(state_replay, "_turns", turns if accepted.ndim == 2 else real):
            super().advance(txn, accepted)


class _StateByState(TorchExecutor):
    """The reference once more, with a place for an error."""

    def advance(self, txn: Txn, accepted: Tensor) -> None:
        if not txn.layout.num_rows:
            return
        turns = state_replay._turns(txn, accepted)
        for layer in state_replay.replayed(txn.staged.values()):
            slots = state_replay._slots(txn, layer.ref)
            before = tuple(read(plane, slots) for plane in layer.ref.planes)
            after = self.after(layer, before, turns)
            for plane, state in zip(layer.ref.planes, after, strict=True):
                self.put(plane, state, slots, turns.take.any(1))

    def after(self, layer: StagedLayer, before, turns):
        return state_replay._after(layer, before, turns)

    def put(self, plane, state: Tensor, slots: Tensor, took: Tensor) -> None:
        write(plane, state, select(slots, took))


class WritesPaddingToTheFirstState(_StateByState):
    def put(self, plane, state: Tensor, slots: Tensor, took: Tensor) -> None:
        super().put(plane, state, slots.clamp(min=0), took)


class RoundsAfterEachRow(_StateByState):
    def after(self, layer: StagedLayer, before, turns):
        for turn in range(turns.take.shape[1]):
            one = attrs.evolve(
                turns, source=turns.source[:, turn : turn + 1], take=turns.take[:, turn : turn + 1]
            )
            before = tuple(state_replay._after(layer, before, one))
        return before


class FusesProductAndSum(_StateByState):
    """Rounds the sum alone, as a fused multiply-add does."""

    def after(self, layer: StagedLayer, before, turns):
        def step(recurrence, state, row):
            if recurrence.moves_bytes:
                return type(recurrence).step(recurrence, state, row)
            double = [part.double() for part in row]
            return type(recurrence).step(recurrence, state.double(), double).float()

        fused = []
        for recurrence in layer.ref.replay:
            made = type("Fused", (type(recurrence),), {})
            clone = object.__new__(made)
            for field in attrs.fields(type(recurrence)):
                object.__setattr__(clone, field.name, getattr(recurrence, field.name))
            made.step = lambda self, state, row, real=recurrence: step(real, state, row)
            fused.append(clone)
        twin = object.__new__(type(layer.ref))
        for field in attrs.fields(type(layer.ref)):
            object.__setattr__(twin, field.name, getattr(layer.ref, field.name))
        object.__setattr__(twin, "replay", tuple(fused))
        return state_replay._after(StagedLayer(twin, layer.rows), before, turns)


class TakesRowsInBackwards(_StateByState):
    def after(self, layer: StagedLayer, before, turns):
        flipped = attrs.evolve(turns, source=turns.source.flip(1), take=turns.take.flip(1))
        return state_replay._after(layer, before, flipped)


class ReadsTheNextRequest(_StateByState):
    def after(self, layer: StagedLayer, before, turns):
        return state_replay._after(layer, tuple(state.roll(1, 0) for state in before), turns)


class TouchesStatesThatTookNothing(_StateByState):
    """Makes one NaN of every NaN, and writes states back that nothing was done to."""

    def put(self, plane, state: Tensor, slots: Tensor, took: Tensor) -> None:
        state = state.clone()
        state[~took] = 0
        super().put(plane, state, slots, torch.ones_like(took))


class ForgetsRequestsBeyondItsGrid(_StateByState):
    def put(self, plane, state: Tensor, slots: Tensor, took: Tensor) -> None:
        first = torch.arange(len(took), device=took.device) < 32
        super().put(plane, state, slots, took & first)


class StopsAfterSomeRows(_StateByState):
    def after(self, layer: StagedLayer, before, turns):
        few = attrs.evolve(turns, source=turns.source[:, :16], take=turns.take[:, :16])
        return state_replay._after(layer, before, few)


class TakesAMaskForACount(TorchExecutor):
    def advance(self, txn: Txn, accepted: Tensor) -> None:
        if accepted.dtype is torch.bool:
            drafts = (accepted & txn.layout.is_draft).long()
            counts = drafts.new_zeros(txn.layout.num_requests)
            accepted = counts.index_add_(0, txn.layout.request, drafts)
        super().advance(txn, accepted)


class AddsZero(TorchExecutor):
    """A zero's sign is lost, even of states that took nothing in."""

    def advance(self, txn: Txn, accepted: Tensor) -> None:
        super().advance(txn, accepted)
        for layer in state_replay.replayed(txn.staged.values()):
            slots = state_replay._slots(txn, layer.ref)
            for states in layer.ref.states:
                states[slots[slots >= 0]] += 0.0


class MovesNumbers(_StateByState):
    """Makes one NaN of every NaN that a convolution moves."""

    def after(self, layer: StagedLayer, before, turns):
        after = state_replay._after(layer, before, turns)
        moved = [one.moves_bytes for one in layer.ref.replay]
        return [
            _one_nan(state, plane) if moves else state
            for state, plane, moves in zip(after, layer.ref.planes, moved, strict=True)
        ]


def _one_nan(state: Tensor, plane) -> Tensor:
    numbers = state.view(plane.format.dtype)
    return torch.where(numbers.isnan(), torch.nan, numbers).view(state.dtype)


class KnowsNoBoundary(TorchExecutor):
    def advance(self, txn: Txn, accepted: Tensor) -> None:
        super().advance(attrs.evolve(txn, crossings={}), accepted)


class CrossesOneRowEarly(TorchExecutor):
    def advance(self, txn: Txn, accepted: Tensor) -> None:
        early = {
            group: attrs.evolve(at, boundary=(at.boundary - 1).clamp(min=0))
            for group, at in txn.crossings.items()
        }
        super().advance(attrs.evolve(txn, crossings=early), accepted)


class CrossesAtTheBoundary(TorchExecutor):
    """Goes on beyond with the very row that ends at the boundary, where nothing is to go on."""

    def advance(self, txn: Txn, accepted: Tensor) -> None:
        super().advance(txn, accepted)
        for layer in state_replay.replayed(txn.staged.values()):
            at = txn.crossings.get(layer.ref.group)
            if at is not None:
                took = state_replay._turns(txn, accepted).take.sum(1) == at.boundary
                for plane in layer.ref.planes:
                    state = read(plane, state_replay._slots(txn, layer.ref))
                    write(plane, state, select(at.beyond, took))


class DeniesReplay(TorchExecutor):
    capabilities: ClassVar[Capabilities] = attrs.evolve(
        TorchExecutor.capabilities, kinds=frozenset({"paged", "ring", "recurrent"})
    )


class CommitsRowsAlone(TorchExecutor):
    """Commits the rows of a captured window, and no state."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        moved = self.moved
        if txn.drafts_alone:
            self.moved = tuple(ref for ref in moved if not ref.states)
        super().commit(txn, accepted)
        self.moved = moved

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        if not (txn.drafts_alone and layer.ref.states):
            super().stage(txn, layer)

    def advance(self, txn: Txn, accepted: Tensor) -> None:
        if not txn.drafts_alone:
            super().advance(txn, accepted)


class SelectsCapturedStatesAlone(TorchExecutor):
    """Commits the rows of a captured window and selects states, but replays none."""

    def advance(self, txn: Txn, accepted: Tensor) -> None:
        if not txn.drafts_alone:
            super().advance(txn, accepted)


class TakesOneCapturedRowTooFew(TorchExecutor):
    """Takes the last kept draft of a captured window for the bonus token."""

    def advance(self, txn: Txn, accepted: Tensor) -> None:
        if txn.drafts_alone and accepted.dtype is not torch.bool:
            accepted = (accepted - 1).clamp(min=0)
        super().advance(txn, accepted)


#: The defect, and the test of the kit that must go red for it.
CAUGHT: dict[type[TorchExecutor], str] = {
    TakesRejectedRowsIn: "test_replayed_states",
    TakesOneRowTooMany: "test_every_accepted_count",
    ForgetsSettledRows: "test_replayed_states",
    TakesSettledRowsInEarly: "test_abort_at_any_point",
    TakesSixtyFourRowsIn: "test_a_request_with_many_rows",
    AdvancesAByteOfRequests: "test_states_of_many_requests",
    TakesDeepNodesByRow: "test_states_along_a_path",
    AdvancesTwice: "test_every_accepted_count",
    WritesPaddingToTheFirstState: "test_replayed_states",
    RoundsAfterEachRow: "test_every_accepted_count",
    FusesProductAndSum: "test_every_accepted_count",
    TakesRowsInBackwards: "test_states_along_a_path",
    ReadsTheNextRequest: "test_requests_that_come_and_go",
    TouchesStatesThatTookNothing: "test_replayed_states",
    ForgetsRequestsBeyondItsGrid: "test_states_of_many_requests",
    StopsAfterSomeRows: "test_a_request_with_many_rows",
    TakesAMaskForACount: "test_masks_with_gaps",
    AddsZero: "test_a_state_that_takes_nothing_in",
    MovesNumbers: "test_inputs_of_every_bit_pattern",
    KnowsNoBoundary: "test_every_way_across",
    CrossesOneRowEarly: "test_every_way_across",
    CrossesAtTheBoundary: "test_every_way_across",
    DeniesReplay: "test_denied_kinds",
    CommitsRowsAlone: "test_steps_are_exact",
    SelectsCapturedStatesAlone: "test_steps_are_exact",
    TakesOneCapturedRowTooFew: "test_steps_are_exact",
}


# -- defects of the library's own repairs -------------------------------------------------


def copies_no_state() -> Any:
    """A failed commit has no copies of the states from before it."""
    return mock.patch.object(state_replay, "read_states", return_value={})


def takes_rows_in_again() -> Any:
    """A repair does not ask whether the executor has advanced the states."""

    def finish(txn: Txn, accepted: Tensor) -> None:
        txn.advanced, txn.states_before = False, {}
        real(txn, accepted)

    real = state_replay.finish
    return mock.patch.object(state_replay, "finish", finish)


def finishes_no_state() -> Any:
    """A repair leaves states that did not advance as they are."""
    return mock.patch.object(state_replay, "finish", return_value=None)


def puts_no_state_back() -> Any:
    """An error leaves the states that have advanced."""
    return mock.patch.object(state_replay, "put_back", return_value=None)


def takes_settled_rows_in_at_an_abort() -> Any:
    """An abort advances the states that were staged by their settled rows."""

    def finish(self: Lifecycle, event: Event, accepted: Any = None) -> None:
        if event is Event.ABORT and self.txn is not None:
            none = torch.zeros(self.txn.layout.num_requests, dtype=torch.int64)
            state_replay.advance(self.txn, none)
        real(self, event, accepted)

    real = Lifecycle.finish
    return mock.patch.object(Lifecycle, "finish", finish)


def prepares_launches_that_know_no_state() -> Any:
    """Windows over a captured forward with states are committed by launches for rows."""

    def made(
        self: CapturedWindows, context: Any, turn: Any, slots: Tensor, *rest: Any, **more: Any
    ):
        real(self, context, turn, slots, *rest, **more)
        places = CapturedPlaces(
            policy=context.policy, slots=slots, rows=self.rows, counters=self._shared.counters
        )
        self._launches = context.executor.captured_launches(places)

    real = CapturedWindows.__init__
    return mock.patch.object(CapturedWindows, "__init__", made)


def saves_no_ring() -> Any:
    """Where no draft was marked, rejected rows that the forward wrote stay in the rings."""
    return mock.patch.object(recovery, "save_rings", return_value=None)


def drops_states_of_a_failed_begin() -> Any:
    """Where no draft was marked, no row of a state waits for the commit."""

    def fill(self: SharedPlaces, txn: Txn, **more: Any) -> None:
        real(self, txn, **more)
        self.stored = lambda num_rows: {}

    real = SharedPlaces.fill
    return mock.patch.object(SharedPlaces, "fill", fill)


#: Defects of the library, whose executor is sound, and the test that must go red.
CORE_CAUGHT_BY: dict[Callable[[], Any], str] = {
    copies_no_state: "test_nothing_accepted_is_lost",
    takes_rows_in_again: "test_nothing_accepted_is_lost",
    finishes_no_state: "test_nothing_accepted_is_lost",
    puts_no_state_back: "test_an_error_surfaces_after_restoring",
    takes_settled_rows_in_at_an_abort: "test_the_exception_of_the_body_wins",
    prepares_launches_that_know_no_state: "test_steps_are_exact",
    saves_no_ring: "test_a_failing_step_loses_nothing",
    drops_states_of_a_failed_begin: "test_a_failing_step_loses_nothing",
}
