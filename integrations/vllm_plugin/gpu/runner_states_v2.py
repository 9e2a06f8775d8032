"""vLLM's V2 model runner on a GPU, with recurrent states that only a commit writes.

``model_state`` makes the metadata of a step, so the states are told of the step there;
``postprocess_sampled`` commits them, before the rows of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...serving.graph_steps import GraphSteps
from ...serving.pipeline_steps import PipelineSteps
from ..attach import check_methods, hook_runner, mix_in
from ..audit.gpu_runners import mixins_and_methods
from ..internals import Foreign, batches, held_states, state_layers, verify_steps
from ..internals.held_states import HeldStates
from ..settings import PluginSettings
from .joint_commits import JointCommits
from .runner_states import GpuStateMixin
from .runner_v2 import GpuRunnerV2


class ReportedModelState:
    """A mixin of vLLM's ``model_state``: tells the states about the metadata of each step."""

    kvtxn_states: HeldStates

    def prepare_attn(self, input_batch: Any, cudagraph_mode: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the metadata, and let the states' kernels find their blocks."""
        metadata = super().prepare_attn(  # type: ignore[misc]
            input_batch, cudagraph_mode, *args, **kwargs
        )
        captured = verify_steps.is_capture(args, kwargs)
        replayed = not captured and verify_steps.is_replay(cudagraph_mode)
        self.kvtxn_states.begin(metadata, input_batch, captured=captured, replayed=replayed)
        return metadata


class GpuStateRunnerV2(GpuStateMixin, GpuRunnerV2):
    """A mixin of vLLM's V2 runner, for models with recurrent layers."""

    def kvtxn_unknown(self) -> str | None:
        """Say what kvtxn does not know about the layers, or about ``model_state``."""
        wrong = super().kvtxn_unknown()
        return wrong or check_methods(type(held_states.model_state(self)), verify_steps.METHODS)

    def kvtxn_report_steps(self, states: HeldStates) -> Callable[[], None]:
        """Let the runner's ``model_state`` tell the states of each step."""
        return mix_in(held_states.model_state(self), ReportedModelState, kvtxn_states=states)

    def kvtxn_join_commits(self, steps: GraphSteps | PipelineSteps) -> None:
        """Let steps commit the states beside the rows.

        With a KV connector rows are committed sooner than states, so each by themselves.
        """
        states = self.kvtxn_states
        if isinstance(steps, GraphSteps) and states is not None and not self.kvtxn_connected:
            steps.beside = JointCommits(states, steps.manager.executor.graphs)

    def postprocess_sampled(
        self,
        idx_mapping: Any,
        sampled_tokens: Any,
        num_sampled: Any,
        num_rejected: Any,
        *others: Any,
        **named: Any,
    ) -> None:
        """Commit the states, then the rows of attention or both at once; see ``GpuRunnerV2``."""
        states = self.kvtxn_states
        if states is not None and getattr(self.kvtxn, "beside", None) is None:
            states.commit(num_sampled)
        super().postprocess_sampled(
            *(idx_mapping, sampled_tokens, num_sampled, num_rejected, *others), **named
        )


def attach(runner: Foreign, settings: PluginSettings, rank: int) -> None:
    """Put the mixins before a runner's class, once, before its KV cache exists."""
    mixins, audited = mixins_and_methods(settings, "v2")
    methods = {**batches.V2_METHODS, **state_layers.METHODS, **audited}
    hook_runner(runner, settings, rank, methods, *mixins, GpuStateRunnerV2)
