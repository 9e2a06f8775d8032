"""States that an engine's own kernels advance are in the window: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import torch

from ..captured_window import CapturedWindow
from ..window_transitions import WindowState
from .batches import Batch
from .captured_forward import COUNTS, SHAPE, CapturedForward
from .kit import TRANSACTIONAL, Kit
from .mixed_layers import Layers, MixedKit
from .promise_fallback import either
from .rig import Rig
from .supplied_states import ToyStates

#: Accepted drafts in four steps of one layout: what recurs may be committed by one launch.
_STEPS: Final = ((2, 0, 1), (3, 0, 4), (0, 0, 0), (1, 0, 2))


class Steps:
    """Steps of a captured forward whose window holds supplied states beside the rig's layers.

    Args:
        rig: the rig.

    Attributes:
        states: the supplied states.
        forward: the forward.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.states = ToyStates(device=rig.device)
        self.forward = CapturedForward(rig, states=self.states)
        self._sampled = torch.zeros(len(SHAPE[0]), dtype=torch.int32, device=rig.device)

    def begin(self, batch: Batch) -> CapturedWindow:
        """Begin the window of a step, and run its forward; expect what staging writes.

        The supplied states get new rows that wait; ``check`` expects them as before the step.
        """
        lengths = [
            settled + drafts for settled, drafts in zip(batch.settled, batch.draft_len, strict=True)
        ]
        window = self.forward.begin(batch)
        self.states.begin([5, 0, 2], lengths, replayed=True)
        self.forward.run()
        self._rig.expect_staged(batch)
        self._before = self.states.expected(None)
        return window

    def commit(self, window: CapturedWindow, counts: Sequence[int]) -> None:
        """Commit by counts that lie at one address in every step.

        From then on ``check`` expects the supplied states after these counts.
        """
        sampled = [count + 1 for count in counts]
        self._before = self.states.expected(sampled)
        self._sampled.copy_(torch.tensor(sampled, dtype=torch.int32))
        window.commit_sampled(self._sampled)

    def check(self, when: str) -> None:
        """Compare every word of the caches, and all supplied states, with what they have to be.

        Raises:
            AssertionError: something differs; the message begins with ``when``.
        """
        self._rig.check(when)
        for name, found, expected in zip(
            self.states.names, self.states.memory, self._before, strict=True
        ):
            assert torch.equal(found, expected), f"{when}: the states of {name}"


class SuppliedStates(MixedKit):
    """Promises 1 to 4 and 7 for windows of rows, rings, states, and a supplier's states."""

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_one_commit_takes_supplied_states_and_rows(self, mixed: Rig) -> None:
        """Each commit makes rows and supplied states durable, and nothing is durable before it.

        Where a commit's address recurs, one launch may do both.
        """
        steps = Steps(mixed)
        for counts in _STEPS:
            batch = mixed.batch(SHAPE)
            window = steps.begin(batch)
            steps.check("nothing of the step is durable")
            steps.commit(window, counts)
            mixed.expect_committed(batch, batch.kept(counts))
            steps.check("committed")
            assert window.state is WindowState.COMMITTED
            assert not steps.states.waits

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_an_abort_leaves_supplied_states(self, mixed: Rig) -> None:
        """An abort takes drafts back and changes no supplied state.

        Also between steps that commit rows and states by one launch.
        """
        steps = Steps(mixed)
        for end in ("abort", "commit", "abort", "commit", "commit", "abort", "commit"):
            batch = mixed.batch(SHAPE)
            window = steps.begin(batch)
            if end == "abort":
                window.abort()
                mixed.expect_aborted(batch)
            else:
                steps.commit(window, COUNTS)
                mixed.expect_committed(batch, batch.kept(COUNTS))
            steps.check(end)

    @pytest.mark.parametrize("fault", ["rows", "states", "both"])
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_a_failing_commit_of_supplied_states_or_rows(
        self, kit: Kit, layers: Layers, policy: str, fault: str
    ) -> None:
        """on_error="fallback": every accepted row and every state is in, whatever failed.

        The window ends in FELL_BACK, with "commit" or "states" as the reason.
        """
        rig, faults = kit.faulty_rig(policy, layers(policy), on_error="fallback")
        steps = Steps(rig)
        for done in range(len(steps.states.names)):
            batch = rig.batch(SHAPE)
            window = steps.begin(batch)
            if fault != "states":
                faults.arm("commit")
            if fault != "rows":
                steps.states.fails = {"commit": done}
            steps.commit(window, COUNTS)
            assert window.state is WindowState.FELL_BACK
            assert window.fallback_reason == ("commit" if fault == "rows" else "states")
            rig.expect_committed(batch, batch.kept(COUNTS))
            either(rig, batch)  # rejected rows may be there, as in stock
            steps.check(f"{fault} failed")
