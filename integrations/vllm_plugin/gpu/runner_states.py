"""Recurrent states that only a commit writes: what vLLM's two model runners on a GPU share.

Each request has one block for its state, where stock has one more per draft. So vLLM alone can no
longer speculate over these caches: if kvtxn cannot make its steps, the engine does not start.

Each runner's own mixin tells the states of every step, and when to commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import attrs

from ....config import TxnConfig
from ....cuda_graphs import GraphCache
from ....errors import KVTxnError
from ....log import get_logger
from ....manager import TransactionManager
from ..internals import Foreign, aligned_states, held_states, state_layers, state_sizes
from ..internals.commit_graphs import Capture, captures, uses_graphs
from ..internals.config import runner_facts
from ..internals.held_states import HeldStates
from ..internals.layers import TargetLayer, attention_of
from ..internals.protocols.runners import BeforeRunner
from ..policy.engine import GATED_DELTA, MAMBA2, EngineFacts
from ..policy.rules import decide
from ..policy.state_choice import takes
from ..policy.state_rules import measured_fast
from ..settings import PluginSettings

log = get_logger()


class GpuStateMixin(BeforeRunner):
    """A mixin of vLLM's runners on a GPU, for models with recurrent layers.

    It comes before that of the runner's windows, ``GpuRunnerV1`` or ``GpuRunnerV2``.

    Attributes:
        kvtxn_one_state: the caches have one state per request; None before that is decided.
        kvtxn_states: the states; None while kvtxn stays out.
    """

    kvtxn: Any
    kvtxn_config: TxnConfig
    kvtxn_rank: int
    kvtxn_undo: ExitStack
    kvtxn_settings: PluginSettings
    kvtxn_one_state: bool | None = None
    kvtxn_states: HeldStates | None = None

    @property
    def kvtxn_fast(self) -> bool:
        """Tell whether kvtxn's own kernels are to verify, where it has one."""
        return self.kvtxn_settings.recurrent == "fast"

    def kvtxn_unknown(self) -> str | None:
        """Say in a sentence what kvtxn does not know about the layers; None if nothing."""
        return held_states.launches_differ(self, fast=self.kvtxn_fast)

    def kvtxn_report_steps(self, states: HeldStates) -> Callable[[], None]:
        """Let the states be told of each step's metadata; returns a function that undoes it."""
        raise NotImplementedError

    def get_kv_cache_spec(self) -> dict[str, Foreign]:
        """Ask for one block per request and state, if commits will write the states."""
        specs: dict[str, Foreign] = super().get_kv_cache_spec()  # type: ignore[safe-super]
        return state_layers.one_block_each(specs) if self.kvtxn_decided() else specs

    def kvtxn_decided(self) -> bool:
        """Tell whether commits will write the states; decided once, when the model is loaded."""
        if self.kvtxn_one_state is None:
            facts = self.kvtxn_facts((), runner_facts(self))
            policy, _ = decide(self.kvtxn_config.policy, facts)
            wrong = None if policy == "off" else self.kvtxn_unknown()
            if wrong is not None:
                log.warning("kvtxn.states_unknown", rank=self.kvtxn_rank, why=wrong)
            self.kvtxn_one_state = policy != "off" and wrong is None
        return self.kvtxn_one_state

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **others: Any
    ) -> None:
        """Make the steps; without them this engine cannot run.

        Raises:
            KVTxnError: kvtxn stays out, though the caches have one state per request.
        """
        self.kvtxn_states = None
        super().initialize_kv_cache(  # type: ignore[misc]
            kv_cache_config, is_profiling, **others
        )
        if self.kvtxn_one_state and is_profiling:  # the forward shall be the one to come
            self.kvtxn_hook_states(lambda _: None, None).forget_caches()
        elif self.kvtxn_one_state and self.kvtxn is None:
            raise KVTxnError(
                "initialize_kv_cache",
                "the caches have one state per request, but kvtxn has no windows over them; the "
                "log has the reason, event kvtxn.inactive",
                hint="leave the setting 'recurrent' out to run this engine without kvtxn",
            )

    def kvtxn_facts(self, layers: Sequence[TargetLayer], facts: EngineFacts) -> EngineFacts:
        """Add what the states are; and the attention, or what it can do once caches exist."""
        known = attrs.evolve(
            facts,
            state_dtype=state_layers.state_dtype(self),
            inner_states=state_layers.leaves_inner_states(self),
        )
        if layers:
            found: EngineFacts = super().kvtxn_facts(layers, known)  # type: ignore[misc]
            return found
        return attrs.evolve(known, attention=attention_of(self, facts.device))

    def kvtxn_bytes_of_states(self) -> int:
        """Return the bytes of the buffers in which rows wait for the commit of the states."""
        decided = self.kvtxn_decided()
        return state_sizes.bytes_of_buffers(self, fast=self.kvtxn_fast) if decided else 0

    def kvtxn_hold_states(self, manager: TransactionManager) -> dict[str, object]:
        """Let commits write the states; returns fields for the log.

        Raises:
            KVTxnError: the model's recurrent layers are not those that kvtxn knows.
        """
        if not self.kvtxn_decided():
            wrong = self.kvtxn_unknown()
            raise KVTxnError("vllm", f"the model's recurrent layers are unknown: {wrong}")
        make = captures() if uses_graphs(self) else None
        states = self.kvtxn_hook_states(
            lambda error: manager.note_fallback("states", error), make, manager.executor.graphs
        )
        self.kvtxn_states = states
        kinds = {layer.kind for layer in states.layers} & {GATED_DELTA, MAMBA2}
        chosen = self.kvtxn_settings.recurrent == "auto"
        return {
            "states": len(states.layers),
            "recurrent": "exact" if chosen else self.kvtxn_settings.recurrent,
            **({"recurrent_why": takes(runner_facts(self))} if chosen else {}),
            **({"with_fast": measured_fast(min(kinds))} if kinds and not self.kvtxn_fast else {}),
            "state_blocks": 1,
            "state_buffer_bytes": states.nbytes,
            "commit_graphs": 0 if states.graphs is None else states.graphs.count,
        }

    def kvtxn_hook_states(
        self,
        note: Callable[[Exception], None],
        make: Capture | None,
        kept: GraphCache | None = None,
    ) -> HeldStates:
        """Let the layers read states and keep their rows, until ``kvtxn_undo`` is closed.

        Args:
            note: called with an error after which the commit of the states was repeated.
            make: captures the commits of all layers; None commits layer by layer.
            kept: keeps what is captured.
        """
        states = HeldStates(self, note, make, fast=self.kvtxn_fast, kept=kept)
        states.warm_up()
        self.kvtxn_undo.callback(states.unhook)
        states.hook()
        self.kvtxn_undo.callback(self.kvtxn_report_steps(states))
        if states.aligned:
            ends = not states.writes_ends
            self.kvtxn_undo.callback(aligned_states.hook_copies(self, ends=ends))
        return states
