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
from ...serving.windows_part import WindowsPart
from ..policy.engine_facts import EngineFacts
from ..runners.hooked_runner import HookedRunnerV1
from ..runners.window_steps import end_unheard, open_steps
from ..seam import batches
from ..seam.layers import TargetLayer
from . import attention, cache_layout


class RowCaches:
    """Caches of attention, with a row per token; see ``WindowsReader``."""

    def __init__(self, runner: HookedRunnerV1) -> None:
        self._runner = runner

    @property
    def steps(self) -> EagerSteps | None:
        """The runner's ``kvtxn``; a self-test takes them away for a while."""
        steps: EagerSteps | None = self._runner.kvtxn
        return steps

    @steps.setter
    def steps(self, steps: EagerSteps | None) -> None:
        self._runner.kvtxn = steps

    def open(self) -> EagerSteps | None:
        """Make steps over new caches; if there are none, log why and return None."""
        steps: EagerSteps | None = open_steps(self._runner, self.facts, self.make_steps)
        return steps

    def facts(self, layers: Sequence[TargetLayer], facts: EngineFacts) -> EngineFacts:
        """Return the facts as they are: none is known only once the caches exist."""
        return facts

    def make_steps(
        self, layers: Sequence[TargetLayer], kv_dtype: str, settings: TxnConfig
    ) -> tuple[EagerSteps, dict[str, object]]:
        """Make the steps; under ``deferred``, hook the attention: it keeps drafts out of the cache.

        The runner's ``kvtxn_undo`` unhooks it. Staging "auto" is "reference".

        Returns:
            The steps, and no facts for the log.

        Raises:
            LayerError: the cache's layout or an attention class is unknown.
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

    def slots(self, steps: EagerSteps, inputs: Mapping[str, object]) -> Mapping[str, Tensor] | str:
        """Return the slots of the step's rows by group, or why the step cannot have a window."""
        return row_slots(steps)


def row_slots(steps: EagerSteps) -> Mapping[str, Tensor] | str:
    """Return the slots of a step's rows by group, or why the step cannot have a window.

    See ``batches.step_slots``. Groups with states are left out.
    """
    manager = steps.manager
    layers = {ref.group: ref.name for ref in manager.layers.values() if not ref.replay}
    return batches.step_slots(layers, drafts_wait=manager.policy == "deferred")


class UnheardErrors(Part):
    """Ends this rank's process after an error of a window that vLLM would not hear of."""

    def __init__(self, runner: HookedRunnerV1) -> None:
        self._runner = runner

    def raised(self, error: Exception) -> None:
        """End this process after an error of a window that vLLM would not hear of.

        Does nothing after other errors.
        """
        end_unheard(self._runner, error)


def windows_of(runner: HookedRunnerV1, caches: RowCaches) -> list[Part]:
    """Return the parts that make the windows of a runner, and that end ranks that nobody hears.

    The ledger follows none of them: as on a GPU, it hears what vLLM has sampled, without a hook.
    """
    return [WindowsPart(caches, followed=False), UnheardErrors(runner)]
