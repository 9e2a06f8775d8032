"""Prepared launches with one defect each, and defects of the windows over them.

``Prepared`` is sound: the torch executor with prepared launches, which are few lines of torch over
the fixed places. ``CAPTURED_CAUGHT_BY`` names the test of the kit that has to see a defect of the
launches, ``CORE_CAUGHT_BY`` the one that has to see a defect of the library's own windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import torch
from kvtxn.backends.torch_executor import TorchExecutor
from torch import Tensor

from kvtxn import lifecycle, recovery
from kvtxn.captured_launches import CapturedLaunches, CapturedPlaces, LayoutLaunches
from kvtxn.captured_shared import SharedPlaces
from kvtxn.captured_window import CapturedWindow
from kvtxn.captured_windows import CapturedWindows
from kvtxn.executor import Executor, StagedLayer, Txn
from kvtxn.layout import RowLayout
from kvtxn.row_io import read_layers, write_layers
from kvtxn.window import Window


class Layout(LayoutLaunches):
    """The launches of one layout, as the contract has them."""

    def __init__(self, executor: Executor, places: CapturedPlaces, layout: RowLayout) -> None:
        self.executor, self.places, self.layout = executor, places, layout

    def txn(self) -> Txn:
        """The window as its executor sees it; everything read where it is now."""
        refs, places = self.executor.layers, self.places
        txn = Txn(places.policy, refs, self.layout, places.counters)
        groups = dict.fromkeys(ref.group for ref in refs)
        inside = []
        for line, group in zip(places.slots, groups, strict=True):
            txn.slots[group] = slots = line[: self.layout.num_rows]
            limit = min(ref.num_slots for ref in refs if ref.group == group)
            inside.append(((slots >= -1) & (slots < limit)).all())
        txn.in_range = torch.stack(inside).all()
        for ref in refs:
            parts = zip(places.rows.get(ref.name, ()), ref.planes, strict=False)
            rows = tuple(p[: self.layout.num_rows].view(plane.format.dtype) for p, plane in parts)
            if places.policy == "undo":
                txn.saved[ref.name] = rows
            else:
                txn.staged[ref.name] = StagedLayer(ref, rows)
        return txn

    def save(self) -> None:
        txn = self.txn()
        now = read_layers(self.executor.layers, txn.slots)
        for name, parts in now.items():
            for part, room in zip(parts, self.places.rows[name], strict=True):
                words = room[: self.layout.num_rows]
                words.view(part.dtype).copy_(part)

    def counts(self, sampled: Tensor) -> Tensor:
        return sampled[: self.layout.num_requests].long() - 1

    def commit(self, sampled: Tensor) -> None:
        TorchExecutor.commit(self.executor, self.txn(), self.counts(sampled))


class Launches(CapturedLaunches):
    """Launches of a kind."""

    def __init__(self, kind: type[Layout], executor: Executor, places: CapturedPlaces) -> None:
        self.make = lambda layout: kind(executor, places, layout)

    def prepare(self, layout: RowLayout) -> LayoutLaunches:
        return self.make(layout)


class Prepared(TorchExecutor):
    """No defect: the control."""

    kind: ClassVar[type[Layout]] = Layout

    def captured_launches(self, places: CapturedPlaces) -> CapturedLaunches:
        return Launches(self.kind, self, places)


class CountsTheBonusToken(Prepared):
    class kind(Layout):
        def counts(self, sampled):
            return super().counts(sampled) + 1


class BakesTheAcceptanceIn(Prepared):
    """A graph that copied the first acceptance it saw."""

    class kind(Layout):
        def counts(self, sampled):
            self.first = self.__dict__.get("first", super().counts(sampled).clone())
            return self.first


class CountsInPlace(Prepared):
    class kind(Layout):
        def counts(self, sampled):
            sampled -= 1
            return sampled[: self.layout.num_requests].long()


class ReadsTheLastCounts(Prepared):
    """Takes a buffer of counts for one that ends with the last request's."""

    class kind(Layout):
        def counts(self, sampled):
            return sampled[len(sampled) - self.layout.num_requests :].long() - 1


class PreparesOnce(Prepared):
    """Windows over a second forward get the launches over the first one's tensors."""

    def captured_launches(self, places: CapturedPlaces) -> CapturedLaunches:
        self.launches = self.__dict__.get("launches") or super().captured_launches(places)
        return self.launches


class BakesTheSlotsIn(Prepared):
    class kind(Layout):
        def __init__(self, executor, places, layout):
            super().__init__(executor, places, layout)
            self.own = places.slots.clone()

        def txn(self):
            txn = super().txn()
            for line, group in zip(self.own, txn.slots, strict=True):
                txn.slots[group] = line[: self.layout.num_rows]
            return txn


class ReadsTheFirstAddress(Prepared):
    """A graph that goes on reading where the first acceptance was."""

    class kind(Layout):
        def counts(self, sampled):
            self.held = self.__dict__.get("held", sampled)
            return super().counts(self.held)


class LeavesOneLayerOut(Prepared):
    class kind(Layout):
        def commit(self, sampled):
            txn, kept = self.txn(), self.counts(sampled)
            mask = txn.kept(kept)
            rows = txn.saved or {name: layer.rows for name, layer in txn.staged.items()}
            if txn.policy == "undo":
                mask = txn.permit(txn.layout.is_draft) & ~mask
            if txn.policy != "direct":
                write_layers(txn.layers[:-1], rows, txn.slots, mask)
            txn.count(txn.kept(kept))


class WritesWildSlots(Prepared):
    """Writes the rows that have a place, and leaves the other one out."""

    class kind(Layout):
        def txn(self):
            txn = super().txn()
            txn.in_range = None
            for group, slots in txn.slots.items():
                limit = min(ref.num_slots for ref in txn.layers if ref.group == group)
                txn.slots[group] = torch.where(slots < limit, slots, -1)
            return txn


class WritesPadding(Prepared):
    class kind(Layout):
        def txn(self):
            txn = super().txn()
            txn.slots = {group: slots.clamp(min=0) for group, slots in txn.slots.items()}
            return txn


class CountsTwice(Prepared):
    class kind(Layout):
        def commit(self, sampled):
            super().commit(sampled)
            self.txn().count(self.txn().kept(self.counts(sampled)))


class CountsNothing(Prepared):
    class kind(Layout):
        def commit(self, sampled):
            before = self.places.counters.clone()
            super().commit(sampled)
            self.places.counters.copy_(before)


class SavesNothing(Prepared):
    class kind(Layout):
        def save(self):
            pass


class SavesOnce(Prepared):
    class kind(Layout):
        def save(self):
            if "done" not in self.__dict__:
                super().save()
            self.done = True


class ForgetsTheSlots(Prepared):
    class kind(Layout):
        saves_slots = True  # it does not


class WarmsUpOverTheCaches(Prepared):
    """Puts the slots back first."""

    class kind(Layout):
        def warm_up(self, sampled):
            self.places.slots[:, : self.layout.num_rows] = torch.arange(self.layout.num_rows)
            self.save() if self.places.policy == "undo" else None
            self.commit(sampled + 1)


class WaitsForTheDevice(Prepared):
    class kind(Layout):
        def commit(self, sampled):
            if int(sampled.sum()) >= 0:
                super().commit(sampled)


class Capturing(Prepared):
    """An executor that captures rows with states from the second commit of a layout on."""

    class kind(Layout):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            self.with_states, self.seen, self.fails = {}, 0, False

        def commit(self, sampled) -> None:
            if self.fails:
                raise RuntimeError("rows fail")
            super().commit(sampled)

        def recurs_with_states(self, sampled) -> bool:
            self.seen += 1
            return self.seen == 2

        def capture_with(self, sampled, states, capture) -> None:
            def both() -> None:
                states()
                self.commit(sampled)

            self.with_states[sampled.data_ptr()] = capture(both)


class LeavesStatesOut(Capturing):
    """The launch of both commits the rows alone."""

    class kind(Capturing.kind):
        def capture_with(self, sampled, states, capture):
            super().capture_with(sampled, lambda: None, capture)


class CommitsStatesAgain(Capturing):
    """The launch of both takes every accepted row in twice."""

    class kind(Capturing.kind):
        def capture_with(self, sampled, states, capture):
            super().capture_with(sampled, lambda: (states(), states()), capture)


#: The defect, and the test of the kit that must go red for it.
CAPTURED_CAUGHT_BY: dict[type[Executor], str] = {
    CountsInPlace: "test_the_acceptance_may_move_or_stay",
    ReadsTheLastCounts: "test_the_acceptance_may_move_or_stay",
    PreparesOnce: "test_steps_of_changing_shape",
    CountsTheBonusToken: "test_steps_are_exact",
    BakesTheAcceptanceIn: "test_the_acceptance_may_move_or_stay",
    ReadsTheFirstAddress: "test_the_acceptance_may_move_or_stay",
    BakesTheSlotsIn: "test_steps_of_changing_shape",
    LeavesOneLayerOut: "test_steps_are_exact",
    WritesWildSlots: "test_a_slot_outside_its_cache",
    WritesPadding: "test_padding",
    CountsTwice: "test_counts_add_up",
    CountsNothing: "test_counts_add_up",
    SavesNothing: "test_steps_are_exact",
    SavesOnce: "test_steps_of_changing_shape",
    ForgetsTheSlots: "test_an_abort_in_the_slots_of_its_own_step",
    WarmsUpOverTheCaches: "test_warming_up_leaves_no_trace",
    LeavesStatesOut: "test_one_commit_takes_supplied_states_and_rows",
    CommitsStatesAgain: "test_one_commit_takes_supplied_states_and_rows",
}

#: Defects that only a GPU can show.
CAPTURED_ON_CUDA: dict[type[Executor], str] = {WaitsForTheDevice: "test_a_step_does_not_wait"}


# -- defects of the library's own windows ------------------------------------------------


def raises_at_once() -> Any:
    """Under ``on_error="raise"`` the error comes out before the caches are restored."""

    def failed(context: Any, txn: Txn, accepted: Any, before: Any, error: Exception) -> Any:
        if context.on_error == "raise":
            raise error
        return real(context, txn, accepted, before, error)

    real = recovery.commit_failed
    return mock.patch.object(recovery, "commit_failed", failed)


def gives_up_on_failure() -> Any:
    """A commit that failed is labelled, and nobody finishes it."""
    return mock.patch.object(recovery, "finish_commit", return_value=None)


def leaves_marks() -> Any:
    """A step without a window goes on with the drafts of the last one."""
    real = CapturedWindows.mark
    left = lambda self, plan: plan is not None and real(self, plan)  # noqa: E731
    return mock.patch.object(CapturedWindows, "mark", left)


def marks_too_late() -> Any:
    """The marks are those of the step before."""

    def mark(self: CapturedWindows, plan: Any) -> None:
        last, self.__dict__["last"] = self.__dict__.get("last"), plan
        real(self, last)

    real = CapturedWindows.mark
    return mock.patch.object(CapturedWindows, "mark", mark)


def marks_elsewhere() -> Any:
    """Windows do not use the marks that a captured forward reads."""

    def made(self: CapturedWindows, *args: Any) -> None:
        real(self, *args)
        self.position = self.position.clone()

    real = CapturedWindows.__init__
    return mock.patch.object(CapturedWindows, "__init__", made)


def copies_given_rows() -> Any:
    """Windows keep the rows of the first replay, in copies of the tensors that they were given."""

    def made(self: CapturedWindows, context: Any, turn: Any, slots: Any, rows: Any, *rest: Any):
        if rows is not None:
            rows = {name: tuple(part.clone() for part in parts) for name, parts in rows.items()}
        real(self, context, turn, slots, rows, *rest)

    real = CapturedWindows.__init__
    return mock.patch.object(CapturedWindows, "__init__", made)


def takes_some_for_all() -> Any:
    """A layer that nobody noted is taken for staged."""

    def commit(self: CapturedWindow, sampled: Tensor) -> Any:
        self._noted = None
        return real(self, sampled)

    real = CapturedWindow.commit_sampled
    return mock.patch.object(CapturedWindow, "commit_sampled", commit)


def commits_twice() -> Any:
    """A window that is over may be committed again."""

    def commit(self: CapturedWindow, sampled: Tensor) -> Any:
        if self.state.is_final and self._state is not None:
            self._state = self._shared.first_state
        return real(self, sampled)

    real = CapturedWindow.commit_sampled
    return mock.patch.object(CapturedWindow, "commit_sampled", commit)


def tells_nobody() -> Any:
    """Hooks are never called: a window over a captured forward ends by itself."""

    def begin(self: CapturedWindows, plan: Any, *rest: Any) -> Any:
        window = real(self, plan, *rest)
        self._shared.quiet, self._shared.on_commit = True, ()
        return window

    real = CapturedWindows.begin
    return mock.patch.object(CapturedWindows, "begin", begin)


def takes_rows_for_saved() -> Any:
    """A window whose forward has not come yet puts back what an earlier step saved."""
    never = property(lambda self: False, lambda self, value: None)
    return mock.patch.object(CapturedWindow, "_unsaved", never)


def hides_what_a_replay_wrote() -> Any:
    """An abort takes a replayed graph for a forward that did not run, and tells of no row."""

    def abort(self: CapturedWindow, *, replayed: bool | None = None) -> None:
        Window.abort(self)

    return mock.patch.object(CapturedWindow, "abort", abort)


def tells_of_rows_that_were_not_written() -> Any:
    """An abort tells of the settled rows of a forward that did not come to its end."""

    def told(*args: Any, complete: bool) -> Any:
        return real(*args, complete=True)

    real = lifecycle.ended
    return mock.patch.object(lifecycle, "ended", told)


def hides_settled_rows_at_an_abort() -> Any:
    """An abort tells of no row, though settled rows stay in the caches."""

    def told(number: int, state: Any, txn: Txn, accepted: Any, *, complete: bool) -> Any:
        return real(number, state, txn, accepted, complete=complete and accepted is not None)

    real = lifecycle.ended
    return mock.patch.object(lifecycle, "ended", told)


def writes_settled_rows_again() -> Any:
    """After a fallback it also writes the rows that the forward wrote, from places never filled."""

    def fill(self: SharedPlaces, txn: Txn, *, saved: bool) -> None:
        real(self, txn, saved=saved)
        txn.drafts_alone = False

    real = SharedPlaces.fill
    return mock.patch.object(SharedPlaces, "fill", fill)


def puts_back_rows_that_were_not_saved() -> Any:
    """A save that failed leaves rows of an earlier window, and an error puts those back."""

    def failed(context: Any, txn: Txn, operation: str, error: Exception, *rest: Any) -> Any:
        if operation == "begin" and txn.policy == "undo":
            txn.saved = {ref.name: tuple(old(p, txn) for p in ref.planes) for ref in txn.layers}
        return real(context, txn, operation, error, *rest)

    def old(plane: Any, txn: Txn) -> Tensor:
        return torch.zeros(txn.layout.num_rows, *plane.row_shape, dtype=plane.format.dtype)

    real = recovery.go_direct
    return mock.patch.object(recovery, "go_direct", failed)


#: What makes the defect, and the test of the kit that must go red for it.
CORE_CAUGHT_BY: dict[Callable[[], Any], str] = {
    raises_at_once: "test_a_failing_step_restores_and_raises",
    gives_up_on_failure: "test_a_failing_step_loses_nothing",
    leaves_marks: "test_steps_of_changing_shape",
    marks_too_late: "test_steps_are_exact",
    marks_elsewhere: "test_each_replay_commits_its_own_rows",
    copies_given_rows: "test_each_replay_commits_its_own_rows",
    takes_some_for_all: "test_a_layer_that_is_missing",
    commits_twice: "test_the_states_are_those_of_the_table",
    tells_nobody: "test_hooks_are_told_of_accepted_rows_alone",
    hides_what_a_replay_wrote: "test_hooks_are_told_of_accepted_rows_alone",
    hides_settled_rows_at_an_abort: "test_it_is_told_of_nothing_before_commit",
    tells_of_rows_that_were_not_written: "test_an_abort_between_layers",
    writes_settled_rows_again: "test_a_failing_step_loses_nothing",
    puts_back_rows_that_were_not_saved: "test_a_failing_step_restores_and_raises",
    takes_rows_for_saved: "test_an_abort_before_a_forward_that_saves",
}
