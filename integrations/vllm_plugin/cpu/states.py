"""Recurrent states in the windows of vLLM's V1 model runner on a CPU.

Each request has one block for its state, where stock has one more per draft. So vLLM alone can no
longer speculate over these caches: if kvtxn cannot make its steps, the engine does not start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from torch import Tensor

from ....config import TxnConfig
from ....errors import KVTxnError
from ....manager import TransactionManager
from ...serving.eager_steps import EagerSteps
from ...serving.parts import Part
from ...serving.state_steps import StateSteps
from ..internals import batches, state_layers
from ..internals.config import runner_facts
from ..internals.layers import TargetLayer
from ..internals.mixers import StateBatch, step_batch
from ..internals.protocols.layers import KVCacheSpec
from ..internals.protocols.runners import Prepared
from ..policy.engine import EngineFacts
from ..policy.rules import decide
from ..seam.runner_cpu_v1 import CpuRunnerV1
from . import cache_layout, lent_rows
from .held_states import hook_states, operators_differ, state_ref
from .windows import row_slots


class States(Part):
    """Asks for one state per request, and says which requests a forward has while it runs.

    Args:
        runner: the hooked runner.

    Attributes:
        batch: the requests of the present step; None outside of its forward.
    """

    def __init__(self, runner: CpuRunnerV1) -> None:
        self._runner = runner
        self._drafts: Sequence[int] = ()  # of each request of the present step
        self.batch: StateBatch | None = None

    def caches_wanted(self) -> None:
        """Let the layers keep one state per request, if the windows will hold the states."""
        runner = self._runner
        if runner.kvtxn_one_state:
            return
        facts = with_state_dtype(runner, runner_facts(runner))
        policy, _ = decide(runner.kvtxn_config.policy, facts)
        if policy == "deferred" and unknown_operator(runner) is None:
            runner.kvtxn_unhook.callback(state_layers.hold_one_state(runner))
            runner.kvtxn_one_state = True

    def caches_described(self, specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
        """Ask for one block per request and state, if the windows will hold the states."""
        return state_layers.one_block_each(specs) if self._runner.kvtxn_one_state else specs

    def caches_made(self) -> None:
        """Refuse an engine without windows, which cannot run over these caches.

        Raises:
            KVTxnError: kvtxn stays out, though the caches have one state per request.
        """
        if self._runner.kvtxn_one_state and self._runner.kvtxn is None:
            raise KVTxnError(
                "initialize_kv_cache",
                "the caches have one state per request, but kvtxn has no windows over them; the "
                "log has the reason, event kvtxn.inactive",
                hint="leave the setting 'recurrent' out to run this engine without kvtxn",
            )

    def planned(self, prepared: Prepared) -> None:
        """Remember the drafts of each request."""
        steps = self._runner.kvtxn
        if steps is not None:
            try:
                self._drafts, _ = batches.drafts_and_ends(self._runner, prepared)
            except Exception as error:  # without them no state can be committed: read them again
                steps.manager.note_fallback("begin", error)
                self._drafts, _ = batches.drafts_and_ends(self._runner, prepared)

    def forward_begins(self, prepared: Prepared | None, inputs: Mapping[str, object]) -> None:
        """Let the layers know which requests the step has while they compute it."""
        steps = self._runner.kvtxn
        if steps is not None:
            self.batch = step_batch(self._runner, self._drafts, state_groups(steps))

    def forward_ended(self) -> None:
        """Forget the requests of the step."""
        self.batch = None

    def failed(self, error: BaseException) -> None:
        """Forget the requests of the step."""
        self.batch = None


class RowAndStateCaches:
    """Caches of attention, and of recurrent layers with one state per request.

    Args:
        runner: the hooked runner.
        states: knows the requests of the present step.
    """

    def __init__(self, runner: CpuRunnerV1, states: States) -> None:
        self._runner = runner
        self._states = states

    def facts(self, layers: Sequence[TargetLayer], facts: EngineFacts) -> EngineFacts:
        """Add the dtype of the states."""
        return with_state_dtype(self._runner, facts)

    def make_steps(
        self, layers: Sequence[TargetLayer], kv_dtype: str, settings: TxnConfig
    ) -> tuple[EagerSteps, dict[str, object]]:
        """Make the steps, and hook the attention and the recurrent layers.

        Raises:
            KVTxnError: an operator of a recurrent layer is not the one that is known.
        """
        wrong = unknown_operator(self._runner)
        if wrong is not None:
            raise KVTxnError("vllm", f"an operator of recurrent layers is unknown: {wrong}")
        states = state_layers.state_layers(self._runner)
        refs = [*cache_layout.layer_refs(layers, kv_dtype), *map(state_ref, states)]
        staging = "reference" if settings.staging == "auto" else settings.staging
        manager = TransactionManager(refs, attrs.evolve(settings, staging=staging))
        steps = StateSteps(manager, batches.vocab_size(self._runner))
        undo = self._runner.kvtxn_undo
        undo.callback(lent_rows.unhook_attention, layers)
        lent_rows.hook_attention(steps, layers)
        undo.callback(hook_states(steps, states, lambda: self._states.batch))
        return steps, {"states": len(states), "state_blocks": 1}

    def slots(self, steps: EagerSteps) -> Mapping[str, Tensor] | str:
        """Find the slots of rows and of states, by group."""
        rows = row_slots(steps)
        if isinstance(rows, str):
            return rows
        return {**rows, **state_layers.state_slots(self._runner, state_groups(steps))}


def with_state_dtype(runner: CpuRunnerV1, facts: EngineFacts) -> EngineFacts:
    """Add the dtype of a runner's states to the facts about its engine."""
    return attrs.evolve(facts, state_dtype=state_layers.state_dtype(runner))


def unknown_operator(runner: CpuRunnerV1) -> str | None:
    """Say how vLLM's operators of the model's states differ from those known; None if not."""
    return operators_differ(list(state_layers.modules_of(runner).values()))


def state_groups(steps: EagerSteps) -> list[str]:
    """Return the names of the KV-cache groups with states."""
    return [group for group, kind in steps.manager.kinds.items() if kind.per_request]
