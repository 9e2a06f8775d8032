"""vLLM's V1 model runner on a CPU, with windows that hold recurrent states beside rows.

Each request has one block for its state, where stock has one more per draft. So vLLM alone can no
longer speculate over these caches: if kvtxn cannot make its steps, the engine does not start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from ....config import TxnConfig
from ....errors import KVTxnError
from ....manager import TransactionManager
from ...serving.eager_steps import EagerSteps
from ...serving.state_steps import StateSteps
from ..attach import hook_runner
from ..audit.runner import audit_mixins
from ..internals import Foreign, batches, state_layers
from ..internals.config import runner_facts
from ..internals.layers import TargetLayer
from ..internals.mixers import StateBatch, step_batch
from ..policy.engine import EngineFacts
from ..policy.rules import decide
from ..settings import PluginSettings
from . import cache_layout, lent_rows
from .held_states import hook_states, operators_differ, state_ref
from .runner_v1 import CpuRunnerV1


class StateRunnerV1(CpuRunnerV1):
    """A mixin of vLLM's V1 runner on a CPU, for models with recurrent layers.

    Attributes:
        kvtxn_one_state: the caches have one state per request.
        kvtxn_drafts: the drafts of each request of the present step.
        kvtxn_batch: the requests of the present step; None outside of its forward.
    """

    kvtxn_one_state: bool = False
    kvtxn_drafts: Sequence[int] = ()
    kvtxn_batch: StateBatch | None = None

    def get_kv_cache_spec(self) -> dict[str, Foreign]:
        """Ask for one block per request and state, if the windows will hold the states."""
        if not self.kvtxn_one_state:
            facts = self.kvtxn_facts((), runner_facts(self))
            policy, _ = decide(self.kvtxn_config.policy, facts)
            if policy == "deferred" and self.kvtxn_operators_differ() is None:
                self.kvtxn_unhook.callback(state_layers.hold_one_state(self))
                self.kvtxn_one_state = True
        specs: dict[str, Foreign] = super().get_kv_cache_spec()  # type: ignore[misc]
        return state_layers.one_block_each(specs) if self.kvtxn_one_state else specs

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **others: Any
    ) -> None:
        """Make the steps; without them this engine cannot run.

        Raises:
            KVTxnError: kvtxn stays out, though the caches have one state per request.
        """
        super().initialize_kv_cache(kv_cache_config, is_profiling, **others)
        if self.kvtxn_one_state and not is_profiling and self.kvtxn is None:
            raise KVTxnError(
                "initialize_kv_cache",
                "the caches have one state per request, but kvtxn has no windows over them; the "
                "log has the reason, event kvtxn.inactive",
                hint="leave the setting 'recurrent' out to run this engine without kvtxn",
            )

    def kvtxn_facts(self, layers: Sequence[TargetLayer], facts: EngineFacts) -> EngineFacts:
        """Add the dtype of the states."""
        return attrs.evolve(facts, state_dtype=state_layers.state_dtype(self))

    def make_steps(
        self, layers: Sequence[TargetLayer], kv_dtype: str, settings: TxnConfig
    ) -> tuple[EagerSteps, dict[str, object]]:
        """Make the steps; see ``WindowedRunnerMixin``."""
        wrong = self.kvtxn_operators_differ()
        if wrong is not None:
            raise KVTxnError("vllm", f"an operator of recurrent layers is unknown: {wrong}")
        states = state_layers.state_layers(self)
        refs = [*cache_layout.layer_refs(layers, kv_dtype), *map(state_ref, states)]
        staging = "reference" if settings.staging == "auto" else settings.staging
        manager = TransactionManager(refs, attrs.evolve(settings, staging=staging))
        steps = StateSteps(manager, batches.vocab_size(self))
        self.kvtxn_undo.callback(lent_rows.unhook_attention, layers)
        lent_rows.hook_attention(steps, layers)
        self.kvtxn_undo.callback(hook_states(steps, states, lambda: self.kvtxn_batch))
        return steps, {"states": len(states), "state_blocks": 1}

    def kvtxn_operators_differ(self) -> str | None:
        """Say how vLLM's operators of the model's states differ from those known; None if not."""
        return operators_differ(list(state_layers.modules_of(self).values()))

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """Plan the step, and remember the drafts of each request."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        steps = self.kvtxn
        if steps is not None:
            try:
                self.kvtxn_drafts, _ = batches.drafts_and_ends(self, prepared)
            except Exception as error:  # without them no state can be committed: read them again
                steps.manager.note_fallback("begin", error)
                self.kvtxn_drafts, _ = batches.drafts_and_ends(self, prepared)
        return prepared

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Tell the layers which requests the step has while they compute it."""
        if self.kvtxn is None:
            return super()._model_forward(*args, **kwargs)
        groups = self.kvtxn_groups(self.kvtxn)
        self.kvtxn_batch = step_batch(self, self.kvtxn_drafts, groups)
        try:
            return super()._model_forward(*args, **kwargs)
        finally:
            self.kvtxn_batch = None

    @staticmethod
    def kvtxn_groups(steps: EagerSteps) -> list[str]:
        """Return the names of the KV-cache groups with states."""
        kinds = steps.manager.kinds
        return [group for group, kind in kinds.items() if kind.per_request]

    def kvtxn_slots(self) -> Mapping[str, Tensor] | str:
        """Find the slots of rows and of states; see ``CpuRunnerV1``."""
        rows = super().kvtxn_slots()
        if isinstance(rows, str) or self.kvtxn is None:
            return rows
        groups = self.kvtxn_groups(self.kvtxn)
        return {**rows, **state_layers.state_slots(self, groups)}


def attach(runner: Foreign, settings: PluginSettings, rank: int) -> None:
    """Put the mixins before a runner's class, once, before its KV cache exists."""
    methods = {**batches.V1_METHODS, **state_layers.METHODS}
    hook_runner(runner, settings, rank, methods, *audit_mixins(settings), StateRunnerV1)
