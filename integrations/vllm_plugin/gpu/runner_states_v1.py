"""vLLM's V1 model runner on a GPU, with recurrent states that only a commit writes.

The forward may be a replayed graph, and graphs read the tables of states at fixed addresses; so
``_build_attention_metadata``, which comes before each forward, names the blocks of its requests
there, and before a forward that is captured it names none. ``_sample`` commits the states, before
``_update_states_after_model_execute`` counts the accepted drafts and the drafter sees the cache.

By its rows alone vLLM takes a prompt of as many rows as a verify step has for drafts, and replays a
graph of such steps, which knows nothing of the prompt. Here no step with a prompt replays one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..attach import check_methods, hook_runner
from ..audit.gpu_runners import mixins_and_methods
from ..internals import Foreign, aligned_states, batches, state_layers
from ..internals.held_states import HeldStates
from ..settings import PluginSettings
from .runner_states import GpuStateMixin
from .runner_v1 import GpuRunnerV1


class GpuStateRunnerV1(GpuStateMixin, GpuRunnerV1):
    """A mixin of vLLM's V1 runner, for models with recurrent layers.

    Attributes:
        kvtxn_told: the states that are told of each step; those of a profiling run are not those
            that are committed.
        kvtxn_has_prompts: a request of the present step has other rows than one and its drafts.
    """

    kvtxn_told: HeldStates | None = None
    kvtxn_has_prompts: bool = False

    def kvtxn_unknown(self) -> str | None:
        """Say what kvtxn does not know about the layers, or about the copies of states."""
        wrong = super().kvtxn_unknown()
        if wrong is None and aligned_states.is_aligned(self):
            wrong = check_methods(type(self), aligned_states.V1_METHODS)
        return wrong

    def kvtxn_report_steps(self, states: HeldStates) -> Callable[[], None]:
        """Let the states be told of each step's metadata; returns a function that undoes it."""
        self.kvtxn_told = states

        def undo() -> None:
            self.kvtxn_told = None

        return undo

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """Plan the step, and note whether there are prompts in it."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        rows = batches.prepared_rows(self, prepared, num_scheduled_tokens)
        self.kvtxn_has_prompts = batches.has_prompts(rows)
        return prepared

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        """Let no step with a prompt count as one that verifies drafts alone.

        vLLM's warm-up says itself what its steps are.
        """
        told = self.kvtxn_told is not None and kwargs.get("force_uniform_decode") is None
        if told and self.kvtxn_has_prompts:
            kwargs["force_uniform_decode"] = False
        return super()._determine_batch_execution_and_padding(*args, **kwargs)  # type: ignore[misc]

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Make the metadata, and let the states' kernels find their blocks."""
        made = super()._build_attention_metadata(*args, **kwargs)  # type: ignore[misc]
        if self.kvtxn_told is not None:
            self.kvtxn_told.begin(batches.metadata_by_layer(made), batches.StepRows.of(self))
        return made

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """Commit the rows of attention and the states that the sampled ids accept."""
        output = super()._sample(logits, spec_decode_metadata)
        if self.kvtxn_states is not None:
            self.kvtxn_states.commit(batches.kept_counts(output))
        return output


def attach(runner: Foreign, settings: PluginSettings, rank: int) -> None:
    """Put the mixins before a runner's class, once, before its KV cache exists."""
    mixins, audited = mixins_and_methods(settings, "v1")
    methods = {**batches.V1_GPU_METHODS, **batches.V1_STATE_METHODS, **state_layers.METHODS}
    hook_runner(runner, settings, rank, {**methods, **audited}, *mixins, GpuStateRunnerV1)
