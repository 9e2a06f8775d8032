"""A random program drives the executor under test and the model, faults included.

Hypothesis chooses layers, windows, orders, faults and misuse, and shrinks
a failure to the shortest program that shows it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from ..errors import (
    AcceptanceError,
    IncompleteWindowError,
    LayerError,
    SlotMappingError,
    WindowStateError,
)
from ..window import Window
from ..window_transitions import WindowState
from .batches import Batch, handed_in
from .caches import LAYOUTS, LayerSpec
from .faults import MOMENTS, InjectedFault
from .kit import Kit, KitBase
from .number_formats import FORMATS
from .oracle import Replay
from .rig import Rig

_BLOCK_SIZES: Final = {"a": 3, "b": 4}


@st.composite
def _layers(draw: st.DrawFn) -> LayerSpec:
    """Draw the description of a layer of any layout and format, in one of two groups."""
    group = draw(st.sampled_from(sorted(_BLOCK_SIZES)))
    return LayerSpec(
        draw(st.sampled_from(LAYOUTS)),
        FORMATS[draw(st.sampled_from(sorted(FORMATS)))],
        group,
        heads=draw(st.integers(1, 3)),
        size=draw(st.integers(1, 6)),
        value_size=draw(st.none() | st.integers(1, 6)),
        block_size=_BLOCK_SIZES[group],
        num_blocks=draw(st.integers(9, 11)),
    )


_SHAPES: Final = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=4).map(
    lambda pairs: (tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
)

#: Faults: the moment in a call, and the number of the call; mostly there is none.
_FAULTS: Final = (
    st.none() | st.none() | st.tuples(st.sampled_from(MOMENTS), st.sampled_from([1, 2]))
)

Shape = tuple[tuple[int, ...], tuple[int, ...]]
Fault = tuple[str, int] | None

_is_open = precondition(lambda self: self.model.state is not None)
_none_open = precondition(lambda self: self.model.state is None)
_all_staged = precondition(lambda self: self.model.state is not None and not self.model.missing)
_some_missing = precondition(lambda self: self.model.state is not None and self.model.missing)


class Model:
    """The expected states, counters and bytes of a manager's windows, one after the other.

    It is plain Python beside the oracle, written from the promises and not from the code. The
    program tells it of each call after making it, and whether the executor failed in it.

    Args:
        rig: the manager; the model writes into its oracle.
        on_error: the manager's setting for failures of its executor.

    Attributes:
        state: the state of the present window; None without one.
        staged: numbers of the staged layers of the present window.
        mapped: groups that have slots.
        rows: draft rows staged, committed, rejected so far.
        outcomes: windows by final state.
    """

    def __init__(self, rig: Rig, on_error: str) -> None:
        self._rig = rig
        self._raises = on_error == "raise"
        self.state: WindowState | None = None
        self.staged: list[int] = []
        self.mapped: list[str] = []
        self.rows = [0, 0, 0]
        self.outcomes: Counter[WindowState] = Counter()
        self._batch: Batch | None = None
        self._before: Replay | None = None

    @property
    def batch(self) -> Batch:
        """The present window's rows."""
        assert self._batch is not None, "no window is open"
        return self._batch

    @property
    def missing(self) -> list[int]:
        """Numbers of the layers that are not staged yet."""
        return [index for index in range(len(self._rig.refs)) if index not in self.staged]

    def begin(self, batch: Batch, mapped: Sequence[str], failed: bool) -> None:
        """Follow the begin of a window.

        Saving the old rows of a group in ``mapped`` may have failed.
        """
        self._batch, self._before = batch, self._rig.truth.copy()
        self.state, self.staged, self.mapped = WindowState.OPEN, [], list(mapped)
        if failed:
            self._failed([])

    def map(self, group: str, failed: bool) -> None:
        """Follow a stage that brought a group's slots; saving the old rows may have failed."""
        self.mapped.append(group)
        if failed:
            self._failed(self.staged)

    def stage(self, index: int, failed: bool) -> None:
        """Follow the staging of a layer, which may have failed, in the oracle and the state."""
        batch = self.batch
        if failed and self._raises:
            direct = self._rig.policy == "direct"
            self._adopt(index, [direct or not draft for draft in batch.drafts])
            self._failed(self.staged)
            return
        self.staged.append(index)
        if failed:
            self._failed(self.staged)
        else:
            waiting = self._rig.policy == "deferred" and self.state is WindowState.OPEN
            self._write([index], [not (waiting and draft) for draft in batch.drafts])
        if not self.missing and self.state is WindowState.OPEN:
            self.state = WindowState.STAGED

    def attend(self, failed: bool) -> None:
        """Follow an attention, which changes the window only if it failed."""
        if failed:
            self._failed(self.staged)

    def commit(self, kept: Sequence[bool], failed: bool) -> None:
        """Follow a commit of these rows, with every layer staged.

        The executor may have failed in it.
        """
        if failed and self._raises:
            self._failed(self.staged)
            return
        if self.state is not WindowState.DIRECT and self._rig.policy != "direct":
            self._take_back(self.staged)
            self._write(self.staged, kept)
        fell_back = failed or self.state is WindowState.DIRECT
        self._end(WindowState.FELL_BACK if fell_back else WindowState.COMMITTED, kept)

    def abort(self, failed: bool) -> None:
        """Follow an abort, which may have failed; a window that had fallen back leaves its rows."""
        fell_back = failed or self.state is WindowState.DIRECT
        if self.state is not WindowState.DIRECT and self._rig.policy == "undo":
            self._take_back(self.staged)
        if failed and self._raises:
            fell_back = False
        self._end(WindowState.FELL_BACK if fell_back else WindowState.ABORTED)

    def _failed(self, layers: Iterable[int]) -> None:
        """Follow a failure of the executor: all rows are written through, or all taken back.

        With ``on_error="raise"`` the window has ended as aborted; else it is direct from now on.
        """
        if not self._raises:
            self.state = WindowState.DIRECT
            self._write(layers, [True] * self.batch.num_rows)
            return
        if self._rig.policy != "direct":  # stock has nothing to take back
            self._take_back(layers)
        self._end(WindowState.ABORTED)

    def _write(self, layers: Iterable[int], mask: Sequence[bool]) -> None:
        """Write the masked rows of the present window into the oracle, in these layers."""
        self._rig.write(self.batch, mask, list(layers))

    def _take_back(self, layers: Iterable[int]) -> None:
        """Restore these layers' draft slots, in the oracle, to what they held at the begin."""
        assert self._before is not None
        for index in layers:
            cache = self._rig.caches[index]
            slots = self.batch.slots[cache.spec.group]
            for slot, draft in zip(slots, self.batch.drafts, strict=True):
                if draft:
                    self._rig.truth.write(cache.name, slot, self._before.read(cache.name, slot))

    def _adopt(self, index: int, mask: Sequence[bool]) -> None:
        """Accept, in the oracle, old or new words in these rows of a layer that failed half-way."""
        cache = self._rig.caches[index]
        slots, rows = self.batch.slots[cache.spec.group], self.batch.rows[cache.name]
        for slot, row, unsure in zip(slots, rows, mask, strict=True):
            if unsure:
                self._rig.truth.adopt(cache.name, slot, row)

    def _end(self, state: WindowState, kept: Sequence[bool] | None = None) -> None:
        """End the present window in a state: count its rows, once it had slots, and the outcome."""
        if self.mapped:
            for place, number in enumerate(self.batch.count(kept, self.mapped)):
                self.rows[place] += number
        self.outcomes[state] += 1
        self.state = None


class Program(RuleBasedStateMachine):
    """The rules of the program; a subclass sets ``kit``, the backend under test."""

    kit: ClassVar[Kit]
    window: Window | None = None

    @initialize(
        specs=st.lists(_layers(), min_size=1, max_size=4),
        policy=st.data(),
        on_error=st.sampled_from(["fallback", "raise"]),
        staging=st.sampled_from(["auto", "reference", "copy"]),
        seed=st.integers(0, 2**20),
    )
    def build(
        self, specs: list[LayerSpec], policy: st.DataObject, on_error: str, staging: str, seed: int
    ) -> None:
        """Build a manager of the backend, whose executor fails on command, and its model."""
        chosen = policy.draw(st.sampled_from(sorted(self.kit.capabilities.policies)), "policy")
        self.rig, self.faults = self.kit.faulty_rig(
            chosen, specs, seed=seed, on_error=on_error, staging=staging
        )
        self.model = Model(self.rig, on_error)
        self.attends = self.rig.manager.executor.capabilities.attention

    def call(self, action: Callable[[], object], at: str, fault: Fault) -> bool:
        """Make an allowed call, in which a method may fail; return True if it did.

        Args:
            action: the call. It may raise only under ``on_error="raise"``.
            at: the executor's method that fails.
            fault: how; None: nothing fails.
        """
        before = len(self.faults.fired)
        if fault is not None:
            self.faults.arm(at, *fault)
        try:
            action()
        except InjectedFault:
            assert self.rig.manager.config.on_error == "raise", "a fallback raised"
            assert len(self.faults.fired) > before
        self.faults.disarm()
        return len(self.faults.fired) > before

    # -- calls of a correct caller --------------------------------------------------------

    @_none_open
    @rule(
        shape=_SHAPES,
        late=st.booleans(),
        padding=st.sampled_from([0.0, 0.3, 1.0]),
        fault=_FAULTS,
        data=st.data(),
    )
    def begin(
        self, shape: Shape, late: bool, padding: float, fault: Fault, data: st.DataObject
    ) -> None:
        """Open a window, with the slots of all groups, of some, or of none; saving may fail."""
        payload = data.draw(st.sampled_from(["native", "cast"]), "payload")
        batch = self.rig.batch(shape, padding=padding, payload=payload)
        groups = data.draw(st.permutations(sorted(batch.slots)), "groups")
        given = groups[: data.draw(st.integers(0, len(groups) - 1), "known")] if late else groups
        slots = self.rig.slots(batch)
        saves = self.faults.calls["save"]

        def action() -> None:
            """Open the window, with the slots of the groups in ``given``."""
            self.window = self.rig.manager.window(
                batch.draft_len, {group: slots[group] for group in given}, batch.settled
            )

        failed = self.call(action, "save", fault)
        if failed and self.rig.manager.config.on_error == "raise":
            given = given[: self.faults.calls["save"] - saves]
        self.model.begin(batch, given, failed)

    @_some_missing
    @rule(which=st.integers(0, 9), again=st.booleans(), saving=st.booleans(), fault=_FAULTS)
    def stage(self, which: int, again: bool, saving: bool, fault: Fault) -> None:
        """Stage any layer that is missing, with slots if its group has none yet; it may fail.

        On a CPU slots may be given again.
        """
        model, batch = self.model, self.model.batch
        index = model.missing[which % len(model.missing)]
        ref = self.rig.refs[index]
        late = ref.group not in model.mapped
        repeat = again and self.rig.device.type == "cpu"  # by content; a device compares memory
        slots = batch.slots[ref.group] if late or repeat else None
        at = "save" if saving else "stage"
        failed = self.call(lambda: self._stage(index, slots), at, fault)
        if late:
            model.map(ref.group, failed and saving)
        if model.state is not None:
            model.stage(index, failed and not saving)

    @_some_missing
    @rule(fault=_FAULTS)
    def stage_the_rest(self, fault: Fault) -> None:
        """Stage all layers that are missing, in their order; each call gets the fault."""
        while self.model.state is not None and self.model.missing:
            self.stage(0, False, False, fault)

    def _stage(self, index: int, slots: list[int] | Tensor | None = None) -> None:
        """Hand the present window's rows of a layer in, with slots or without."""
        self.rig.hand_in(self._open, self.model.batch, index, slots)

    @property
    def _open(self) -> Window:
        """The present window, or the last one."""
        assert self.window is not None
        return self.window

    @precondition(lambda self: self.model.state is not None and self.attends)
    @rule(which=st.integers(0, 9), fault=_FAULTS)
    def attend(self, which: int, fault: Fault) -> None:
        """Attend to a staged layer with keys and values, if any.

        It changes nothing unless it fails.
        """
        staged = [i for i in self.model.staged if not self.rig.refs[i].is_latent]
        if not staged:
            return
        index, batch = staged[which % len(staged)], self.model.batch
        attend = partial(self.rig.attend, self._open, batch, index, length=6)
        failed = self.call(attend, "attend", fault)
        self.model.attend(failed)

    @_all_staged
    @rule(data=st.data(), form=st.sampled_from(["device", "list", "mask"]), fault=_FAULTS)
    def commit(self, data: st.DataObject, form: str, fault: Fault) -> None:
        """Accept some drafts, in one of the forms of acceptance; the commit may fail."""
        batch = self.model.batch
        counts = [data.draw(st.integers(0, drafts), "accepted") for drafts in batch.draft_len]
        kept = batch.kept(counts)
        given: list[int] | Tensor = counts if form == "list" else self.rig.accepted(counts)
        if form == "mask":  # any rows may be kept, not only prefixes
            mask = [data.draw(st.booleans(), "kept") for _ in range(batch.num_rows)]
            kept = [both == (True, True) for both in zip(mask, batch.drafts, strict=True)]
            given = torch.tensor(mask, dtype=torch.bool).to(self.rig.device)
        self.model.commit(kept, self.call(lambda: self._open.commit(given), "commit", fault))

    @_is_open
    @rule(fault=_FAULTS, really=st.sampled_from([False, True]))
    def abort(self, fault: Fault, really: bool) -> None:
        """Abort the window in any state; not every time, so that some windows get further."""
        if really:
            self.model.abort(self.call(self._open.abort, "restore", fault))

    @_none_open
    @rule(
        shape=_SHAPES,
        at=st.sampled_from(["stage", "commit"]),
        form=st.sampled_from(["device", "list", "mask"]),
        fault=_FAULTS,
        data=st.data(),
    )
    def a_whole_window(
        self, shape: Shape, at: str, form: str, fault: Fault, data: st.DataObject
    ) -> None:
        """Run a window from begin to commit in one step, so that many programs commit."""
        self.begin(shape, False, 0.3, None, data)
        self.stage_the_rest(fault if at == "stage" else None)
        if self.model.state is not None:
            self.commit(data, form, fault if at == "commit" else None)

    @_none_open
    @rule(shape=_SHAPES, fault=_FAULTS, data=st.data())
    def a_whole_window_given_up(self, shape: Shape, fault: Fault, data: st.DataObject) -> None:
        """Run a window from begin to abort in one step, with every row staged."""
        self.begin(shape, False, 0.3, None, data)
        self.stage_the_rest(None)
        self.abort(fault, True)

    # -- calls that must be refused -------------------------------------------------------

    @_some_missing
    @rule()
    def go_wrong_while_open(self) -> None:
        """Commit too early, stage twice or misshapen, map again, open another window.

        All are refused. So is staging without slots, where a group has none yet.
        """
        model, rig = self.model, self.rig
        with pytest.raises(IncompleteWindowError):
            self._open.commit(0)
        with pytest.raises(WindowStateError):
            rig.manager.window([1], [-1, -1])
        if model.staged:
            with pytest.raises(LayerError):
                self._stage(model.staged[0])
        ref = rig.refs[model.missing[0]]
        parts, slots = model.batch.tensors[ref.name], list(model.batch.slots[ref.group])
        if ref.group not in model.mapped:
            with pytest.raises(SlotMappingError):
                self._open.stage(ref, *handed_in(ref, parts))  # type: ignore[arg-type]
            return
        with pytest.raises(LayerError):
            self._open.stage(ref, *handed_in(ref, [part[..., :0] for part in parts]))  # type: ignore[arg-type]
        if slots:
            slots[0] = -1 if slots[0] >= 0 else next(s for s in range(30) if s not in slots)
            with pytest.raises(SlotMappingError):
                self._stage(model.missing[0], torch.tensor(slots).to(rig.device))

    @_all_staged
    @rule(excess=st.integers(1, 3))
    def go_wrong_at_commit(self, excess: int) -> None:
        """Accept too many drafts, for too many requests, or in an unknown form: all are refused.

        So is staging a layer again.
        """
        batch = self.model.batch
        too_many = [drafts + excess for drafts in batch.draft_len] or [0]
        wrong: tuple[Any, ...] = (too_many, [*batch.draft_len, 0], "all")
        for accepted in wrong:
            with pytest.raises(AcceptanceError):
                self._open.commit(accepted)
        with pytest.raises((LayerError, WindowStateError)):
            self._stage(0)

    @precondition(lambda self: self.model.state is None and self.window is not None)
    @rule()
    def use_it_again(self) -> None:
        """Commit, abort and stage in a window after its end: each raises WindowStateError."""
        ref = self.rig.refs[0]
        calls: tuple[Callable[[], None], ...] = (
            lambda: self._open.commit(0),
            lambda: self._open.abort(),
            lambda: self._open.stage(ref, torch.zeros(0)),
        )
        for call in calls:
            with pytest.raises(WindowStateError):
                call()

    # -- what must hold after every step --------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        """After every step, compare states, counters and every cached word with the model."""
        self.rig.check()
        flat, model = self.rig.manager.snapshot(), self.model
        self.rig.check_rows(model.rows)
        ended = {state: flat[f"kvtxn_windows_total_{state.value}"] for state in _FINAL}
        assert ended == {state: model.outcomes[state] for state in _FINAL}
        current = self.rig.manager.current
        assert (current.state if current is not None else None) is model.state


_FINAL: Final = tuple(state for state in WindowState if state.is_final)


class RandomProgram(KitBase):
    """The model agrees with any calls in any order."""

    def test_random_program(
        self, kit: Kit, program_settings: settings, caplog: pytest.LogCaptureFixture
    ) -> None:
        """After any calls in any order, states, counters and bytes are the model's.

        The calls are begin, stage, attend, commit and abort; some fail on command, and some are
        misuse, which has to be refused.
        """
        caplog.set_level(logging.ERROR, logger="kvtxn")  # a thousand fallbacks say nothing
        bound = type("Program", (Program,), {"kit": kit})
        run_state_machine_as_test(bound, settings=program_settings)
