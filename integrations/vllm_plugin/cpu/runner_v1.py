"""vLLM's V1 model runner on a CPU, with windows.

``_prepare_inputs`` says which rows are drafts, ``_model_forward`` is wrapped in a window, and
``_sample`` says how many drafts were accepted, before the drafter or a connector sees the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from ....config import TxnConfig
from ....manager import TransactionManager
from ...serving.eager_steps import EagerSteps
from ..attach import hook_runner
from ..audit.runner import audit_mixins
from ..internals import Foreign, batches
from ..internals.layers import TargetLayer
from ..runner import V1StepMixin
from ..settings import PluginSettings
from . import attention, cache_layout


class CpuRunnerV1(V1StepMixin):
    """A mixin of vLLM's V1 runner on a CPU: each method runs vLLM's own code in a window."""

    kvtxn: EagerSteps | None

    def make_steps(
        self, layers: Sequence[TargetLayer], kv_dtype: str, settings: TxnConfig
    ) -> tuple[EagerSteps, dict[str, object]]:
        """Make the steps; see ``WindowedRunnerMixin``."""
        # The attention copies draft rows out of the batch: nobody else can write into them.
        staging = "reference" if settings.staging == "auto" else settings.staging
        refs = cache_layout.layer_refs(layers, kv_dtype)
        manager = TransactionManager(refs, attrs.evolve(settings, staging=staging))
        steps = EagerSteps(manager, batches.vocab_size(self))
        if settings.policy == "deferred":
            self.kvtxn_undo.callback(attention.unhook_attention, layers)
            attention.hook_attention(steps, layers)
        return steps, {}

    def kvtxn_slots(self) -> Mapping[str, Tensor] | str:
        """Find the slots of the step, by group; see ``batches.step_slots``."""
        assert self.kvtxn is not None
        manager = self.kvtxn.manager
        layers = {ref.group: ref.name for ref in manager.layers.values() if not ref.replay}
        return batches.step_slots(layers, reads_window=manager.policy == "deferred")

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """Plan the step: which rows are drafts."""
        prepared = super()._prepare_inputs(  # type: ignore[misc]
            scheduler_output, num_scheduled_tokens
        )
        if self.kvtxn is not None:
            self.kvtxn.plan(lambda: batches.drafts_and_ends(self, prepared))
        return prepared

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Open the step's window; an exception of the forward aborts it."""
        steps = self.kvtxn
        if steps is None:
            return super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        steps.begin(self.kvtxn_slots)
        with steps.aborting():
            return super()._model_forward(*args, **kwargs)  # type: ignore[misc]

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """Commit the drafts that the sampled ids accept."""
        steps = self.kvtxn
        if steps is None:
            return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        with steps.aborting():
            output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        steps.commit(lambda: batches.sampled_ids(output))
        return output


def attach(runner: Foreign, settings: PluginSettings, rank: int) -> None:
    """Put the mixins before a runner's class, once, before its KV cache exists."""
    hook_runner(runner, settings, rank, batches.V1_METHODS, *audit_mixins(settings), CpuRunnerV1)
