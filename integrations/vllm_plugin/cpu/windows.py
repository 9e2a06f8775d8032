"""The windows of vLLM's V1 model runner on a CPU.

A step's plan says which rows are drafts, a window is open while the model computes them, and it is
committed before the drafter or a connector sees the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from torch import Tensor

from ....config import TxnConfig
from ....manager import TransactionManager
from ...serving.eager_steps import EagerSteps
from ...serving.parts import Part
from ...serving.step import PlannedStep, drafts_and_ends, known
from ..internals import batches
from ..internals.layers import TargetLayer
from ..policy.engine import EngineFacts
from ..seam.hooked_runner import HookedRunnerV1
from ..seam.window_steps import end_unheard, open_steps
from . import attention, cache_layout


class RowCaches:
    """Caches of attention, with a row per token."""

    def __init__(self, runner: HookedRunnerV1) -> None:
        self._runner = runner

    def facts(self, layers: Sequence[TargetLayer], facts: EngineFacts) -> EngineFacts:
        """Add the facts that are known only once the caches exist: none."""
        return facts

    def make_steps(
        self, layers: Sequence[TargetLayer], kv_dtype: str, settings: TxnConfig
    ) -> tuple[EagerSteps, dict[str, object]]:
        """Make the steps; under ``deferred``, hook the attention.

        It then keeps drafts out of the cache. The runner's ``kvtxn_undo`` unhooks it. Returns the
        steps, and no facts for the log.
        """
        # The attention copies draft rows out of the batch: nobody else can write into them.
        staging = "reference" if settings.staging == "auto" else settings.staging
        refs = cache_layout.layer_refs(layers, kv_dtype)
        manager = TransactionManager(refs, attrs.evolve(settings, staging=staging))
        steps = EagerSteps(manager, batches.vocab_size(self._runner))
        if settings.policy == "deferred":
            self._runner.kvtxn_undo.callback(attention.unhook_attention, layers)
            attention.hook_attention(steps, layers)
        return steps, {}

    def slots(self, steps: EagerSteps) -> Mapping[str, Tensor] | str:
        """Find the slots of the step, by group."""
        return row_slots(steps)


def row_slots(steps: EagerSteps) -> Mapping[str, Tensor] | str:
    """Find the slots of a step in the groups with a row per token; see ``batches.step_slots``."""
    manager = steps.manager
    layers = {ref.group: ref.name for ref in manager.layers.values() if not ref.replay}
    return batches.step_slots(layers, reads_window=manager.policy == "deferred")


class Windows(Part):
    """Opens a window for each step with drafts, and commits the accepted ones.

    The steps are the runner's ``kvtxn``; a self-test takes them away for a while.
    """

    def __init__(self, runner: HookedRunnerV1, caches: RowCaches) -> None:
        self._runner = runner
        self._caches = caches

    def caches_dropped(self) -> None:
        """Forget the steps over the caches that go."""
        self._runner.kvtxn = None

    def caches_made(self) -> None:
        """Make steps over new caches, or log why there are none."""
        self._runner.kvtxn = open_steps(self._runner, self._caches.facts, self._caches.make_steps)

    def step_begins(self) -> None:
        """Abort a window that an abandoned step left open."""
        if self._runner.kvtxn is not None:
            self._runner.kvtxn.abandon()

    def planned(self, step: PlannedStep) -> None:
        """Note which rows of the step are drafts, for ``forward_begins``."""
        if self._runner.kvtxn is not None:
            self._runner.kvtxn.plan(lambda: drafts_and_ends(step.rows()))

    def forward_begins(self, step: PlannedStep | None, inputs: Mapping[str, object]) -> None:
        """Open the step's window."""
        steps = self._runner.kvtxn
        if steps is not None:
            steps.begin(lambda: self._caches.slots(steps))

    def failed(self, error: BaseException) -> None:
        """Abort the step's window."""
        if self._runner.kvtxn is not None:
            self._runner.kvtxn.abandon()

    def sampled(self, ids: Tensor | None, counts: Tensor | None) -> None:
        """Commit the drafts that the sampled ids accept."""
        if self._runner.kvtxn is not None:
            self._runner.kvtxn.commit(lambda: known(ids))

    def raised(self, error: Exception) -> None:
        """End this rank's process after an error of a window that vLLM would not hear of."""
        end_unheard(self._runner, error)

    def released(self) -> None:
        """Abort a window that is still open."""
        if self._runner.kvtxn is not None:
            self._runner.kvtxn.abandon()
