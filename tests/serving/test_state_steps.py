"""StateSteps, without vLLM: whatever fails, a state takes in the accepted drafts, and once."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from kvtxn.integrations.serving.eager_steps import StateRows, StateSteps

from kvtxn import KVTxnError, LayerRef, TransactionManager, TxnConfig
from kvtxn.recurrent import ShortConv

WIDTH, CHANNELS = 4, 3
#: Requests 0 and 2 have two and three drafts; rows 1, 2 and 4, 5, 6 are drafts.
DRAFTS, ENDS, ROWS = [2, 0, 3], [3, 4, 7], [1, 2, 4, 5, 6]
SLOTS = {"rows": torch.arange(3, 10), "state": torch.tensor([4, 1, 2])}
SPECULATING = (0, 2)
ACCEPTED = (1, 0, 3)


class Rig:
    """Two layers with states in one group, one with rows in another; and what a step does."""

    def __init__(self, **settings) -> None:
        self.states = [torch.randn(6, WIDTH - 1, CHANNELS) for _ in range(2)]
        self.before = [state.clone() for state in self.states]
        self.caches = torch.zeros(2, 4, 4, 1, 2)
        refs = [LayerRef("attn", *self.caches, group="rows")] + [
            LayerRef.recurrent(f"conv.{i}", state, group="state", replay=ShortConv(WIDTH))
            for i, state in enumerate(self.states)
        ]
        self.manager = TransactionManager(
            refs, TxnConfig(policy="deferred", backend="torch", max_rows=8, **settings)
        )
        self.steps = StateSteps(self.manager, vocab_size=50)
        self.rows = [torch.randn(7, CHANNELS) for _ in self.states]

    def begin(self) -> None:
        """Plan the step, and open its window."""
        self.steps.plan(lambda: (DRAFTS, ENDS))
        self.steps.begin(lambda: SLOTS)

    def attend(self) -> None:
        """Stage the rows of attention, as the hooks of a forward do while the window defers."""
        if self.steps.deferring:
            try:
                self.steps.stage(self.manager.layers["attn"], *torch.randn(2, 7, 1, 2))
            except RuntimeError as error:
                self.steps.fail("stage", error)

    def verify(self, layer: int, **changes) -> None:
        """Hand over the draft rows of a layer with a state."""
        rows = {
            "requests": SPECULATING,
            "draft_len": (2, 3),
            "slots": SLOTS["state"][list(SPECULATING)],
            "parts": (self.rows[layer][ROWS],),
        }
        ref = self.manager.layers[f"conv.{layer}"]
        self.steps.verified(ref, StateRows(**(rows | changes)))

    def forward(self) -> None:
        """Run every layer."""
        self.attend()
        self.verify(0)
        self.verify(1)

    def commit(self) -> None:
        """Accept one draft of the first request, and all of the third."""
        ids = torch.tensor([[7] * (n + 1) + [-1] * (4 - n) for n in ACCEPTED])
        self.steps.commit(lambda: ids)

    def check(self) -> None:
        """Compare: accepted drafts are in, in their order, and no other state changed."""
        for state, before, rows in zip(self.states, self.before, self.rows, strict=True):
            expected = before.clone()
            for request, first in zip(SPECULATING, (1, 4), strict=True):
                slot = int(SLOTS["state"][request])
                taken = rows[first : first + ACCEPTED[request]]
                expected[slot] = torch.cat([before[slot], taken])[-(WIDTH - 1) :]
            assert torch.equal(state, expected)


def broken(*args: object, **kwargs: object) -> None:
    """Stands for anything that fails."""
    raise RuntimeError("a test made this fail")


def test_a_window_takes_rows_and_states_in_together():
    rig = Rig()
    rig.begin()
    rig.forward()
    rig.commit()
    rig.check()
    counts = rig.manager.snapshot()
    assert counts["kvtxn_windows_total_committed"] == 1
    assert counts["kvtxn_rows_committed_total"] == sum(ACCEPTED)
    assert counts["kvtxn_rows_rejected_total"] == 1
    assert counts["kvtxn_fallbacks_total"] == 0


#: What fails, by name: the object and its method.
FAILING: dict[str, Callable[[Rig], tuple[object, str]]] = {
    "plan": lambda rig: (rig.steps, "plan"),
    "window": lambda rig: (rig.manager, "window"),
    "stage": lambda rig: (rig.manager.context.stager, "take_if_unchanged"),
    "accept": lambda rig: (rig.manager.acceptance, "from_ids"),
    "advance": lambda rig: (rig.manager.executor, "advance"),
    "commit": lambda rig: (rig.manager.executor, "commit"),
}


@pytest.mark.parametrize("what", FAILING)
def test_a_failure_is_repaired(what):
    """Without a window, without a part of it, and with a commit that failed or never came."""
    rig = Rig()
    if what == "plan":
        rig.steps.begin(lambda: SLOTS)  # nobody knows which rows are drafts, but the layers do
        rig.forward()
        rig.commit()
    else:
        with mock.patch.object(*FAILING[what](rig), broken):
            rig.begin()
            rig.forward()
            rig.commit()
        assert rig.manager.snapshot()["kvtxn_fallbacks_total"] > 0
    rig.check()


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_window_that_falls_back_between_layers_loses_none(place):
    """After ``place`` layers: those that were staged are taken in by the window, others alone."""
    rig = Rig()
    rig.begin()
    layers = [rig.attend, lambda: rig.verify(0), lambda: rig.verify(1)]
    for number, layer in enumerate([*layers, lambda: None]):
        if number == place:
            rig.steps.fail("attend", RuntimeError("a test made this fail"))
        layer()
    rig.commit()
    rig.check()
    assert rig.manager.snapshot()["kvtxn_windows_total_fell_back"] == 1


def test_a_step_that_has_no_window_on_purpose_is_taken_in_as_well():
    """More rows than ``max_rows``, or slots that cannot be found."""
    rig = Rig()
    rig.steps.plan(lambda: (DRAFTS, ENDS))
    rig.steps.begin(lambda: "microbatches")
    rig.forward()
    rig.commit()
    rig.check()
    assert rig.manager.snapshot()["kvtxn_bypassed_windows_total"] == 1


def test_an_abandoned_step_takes_nothing_in():
    """The engine gave the step up: nobody will read what its drafts would have led to."""
    rig = Rig()
    rig.begin()
    rig.forward()
    rig.steps.abandon()
    assert all(map(torch.equal, rig.states, rig.before))
    rig.begin()  # and the next step knows nothing of it
    rig.forward()
    rig.commit()
    rig.check()


def test_a_step_without_drafts_is_none():
    rig = Rig()
    rig.steps.plan(lambda: ([0, 0], [1, 2]))
    rig.steps.begin(lambda: SLOTS)
    rig.steps.commit(lambda: torch.tensor([[7], [8]]))
    assert all(map(torch.equal, rig.states, rig.before))
    assert rig.manager.snapshot()["kvtxn_windows_total"] == 0


def test_other_rows_than_the_drafts_stop_the_engine():
    """A draft that was taken in with the settled rows cannot be taken back."""
    rig = Rig()
    rig.begin()
    with pytest.raises(KVTxnError, match=r"verifies other rows.*\(2, 3\) of requests \(0, 2\)"):
        rig.verify(0, draft_len=(2, 2))
    rig = Rig()
    rig.begin()
    rig.verify(0)
    with pytest.raises(KVTxnError, match=r"layer 'conv\.1' took the drafts of this step in"):
        rig.commit()


def test_a_repair_that_fails_stops_the_engine():
    """The state is known to be behind its request, so nobody may read it."""
    rig = Rig()
    rig.steps.begin(lambda: SLOTS)
    rig.forward()
    rig.verify(0, parts=(rig.rows[0][:3],))
    with pytest.raises(KVTxnError, match=r"a state did not take in.*start the engine again"):
        rig.commit()


def test_on_error_raise_restores_and_raises():
    """The states are those before the window; the error is the executor's own."""
    rig = Rig(on_error="raise")
    rig.begin()
    rig.forward()
    with (
        mock.patch.object(rig.manager.executor, "advance", broken),
        pytest.raises(RuntimeError, match="a test made this fail"),
    ):
        rig.commit()
    assert all(map(torch.equal, rig.states, rig.before))
