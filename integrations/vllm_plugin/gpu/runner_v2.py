"""vLLM's V2 model runner on a GPU, with windows.

``prepare_attn`` has just said which rows go where, so the step is planned there, before the
forward. ``postprocess_sampled`` is told how many tokens were sampled, so the commit is there: the
sampled tokens are on their way to the host by then, and the drafter has not seen the cache. With a
KV connector the commit comes before that, in ``sample``. The forward itself may be a replayed graph
and is not touched, but for what ``saving_graphs`` puts before it.

On pipeline stages before the last one ``postprocess_sampled`` is told of an earlier step, when a
later one begins: ``serving.pipeline_steps`` says why a commit there is right.
"""

from __future__ import annotations

from typing import Any

from ....manager import TransactionManager
from ....row_io import LayerRows
from ...serving.graph_steps import GraphSteps
from ...serving.pipeline_steps import PipelineSteps
from ..attach import hook_runner
from ..audit.gpu_runners import mixins_and_methods
from ..begun_graphs import NotesMode
from ..internals import Foreign, batches, whole_graphs
from ..internals.protocols.runners import BeforeV2
from ..settings import PluginSettings
from .runner import GpuRunnerMixin
from .saving_graphs import let_graphs_save


class GpuRunnerV2(NotesMode, GpuRunnerMixin, BeforeV2):
    """A mixin of vLLM's V2 runner: each method runs vLLM's own code in a window.

    Attributes:
        kvtxn_whole: the mode of steps whose graphs save rows; None if no graph does.
    """

    kvtxn: GraphSteps | PipelineSteps | None
    kvtxn_whole: object = None

    def make_graph_steps(
        self, manager: TransactionManager, rows: LayerRows | None
    ) -> GraphSteps | PipelineSteps:
        """Make steps that read the slots where this runner keeps them."""
        slots = batches.slot_mappings(self, list(manager.groups))
        later = batches.steps_until_known(self)
        if later is not None:
            return PipelineSteps(manager, slots, batches.query_len(self), later)
        steps = GraphSteps(manager, slots, batches.query_len(self), rows)
        if manager.policy == "undo":
            self.kvtxn_let_graphs_save(steps)
        return steps

    def kvtxn_let_graphs_save(self, steps: GraphSteps) -> None:
        """Let the graphs of whole forwards save the rows that drafts overwrite, if they can."""
        undo = let_graphs_save(self, steps)
        if undo is not None:
            self.kvtxn_undo.callback(setattr, self, "kvtxn_whole", None)
            self.kvtxn_undo.callback(undo)
            self.kvtxn_whole = whole_graphs.whole()

    def update_pp_decode_requests(self) -> None:
        """On an earlier pipeline stage, commit the step whose acceptance the runner takes now.

        vLLM's own code calls ``postprocess_sampled``, unless all of that step's requests are gone.
        """
        steps = self.kvtxn
        if not isinstance(steps, PipelineSteps):
            super().update_pp_decode_requests()  # type: ignore[misc]
            return
        steps.advance(*batches.arriving(self))
        try:
            super().update_pp_decode_requests()  # type: ignore[misc]
        finally:
            steps.settle()

    def prepare_attn(self, input_batch: Any) -> Any:
        """Plan the step, now that its slots are in place."""
        prepared = super().prepare_attn(input_batch)  # type: ignore[misc]
        steps = self.kvtxn
        if isinstance(steps, PipelineSteps):
            steps.begin(*batches.batch_rows(input_batch), batches.batch_name(input_batch))
        elif steps is not None:
            replayed = self.kvtxn_whole is not None and self.kvtxn_mode is self.kvtxn_whole
            alike = batches.alike(input_batch, steps.query_len)
            steps.begin(*batches.batch_rows(input_batch), replayed, alike)
        return prepared

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        """Commit at once if the engine has a KV connector.

        From 0.33 on vLLM asks connectors for their results before ``postprocess_sampled``. In any
        release the scheduler may hand a request's blocks on once it has the sampled tokens; so what
        a connector loads into them must not come before this step's last write.
        """
        output = super().sample(  # type: ignore[misc]
            hidden_states, input_batch, grammar_output
        )
        if self.kvtxn is not None and self.kvtxn_connected:
            self.kvtxn.commit(batches.num_sampled(output))
        return output

    def postprocess_sampled(
        self,
        idx_mapping: Any,
        sampled_tokens: Any,
        num_sampled: Any,
        num_rejected: Any,
        *others: Any,
        **named: Any,
    ) -> None:
        """Commit before the drafter runs; the sampled tokens are on their way to the host.

        Of pipeline stages the last alone samples; the others are told here of the step that
        ``update_pp_decode_requests`` has found. What vLLM adds (the rows' first places, and from
        0.33 on the drafts that another stage sent) goes through.
        """
        if self.kvtxn is not None:
            self.kvtxn.commit(num_sampled)
        super().postprocess_sampled(  # type: ignore[misc]
            *(idx_mapping, sampled_tokens, num_sampled, num_rejected, *others), **named
        )


def attach(runner: Foreign, settings: PluginSettings, rank: int) -> None:
    """Put the mixins before a runner's class, once, before its KV cache exists."""
    mixins, methods = mixins_and_methods(settings, "v2")
    hook_runner(runner, settings, rank, {**batches.V2_METHODS, **methods}, *mixins, GpuRunnerV2)
