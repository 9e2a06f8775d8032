"""vLLM's V2 model runner on a GPU, with windows.

``prepare_attn`` has just said which rows go where, so the step is planned there, before the
forward. ``postprocess_sampled`` is told how many tokens were sampled, so the commit is there: the
sampled tokens are on their way to the host by then, and the drafter has not seen the cache. With a
KV connector the commit comes before that, in ``sample``. The forward itself may be a replayed graph
and is not touched.
"""

from __future__ import annotations

from typing import Any

from ....manager import TransactionManager
from ....row_io import LayerRows
from ...serving.graph_steps import GraphSteps
from ..attach import hook_runner
from ..audit.gpu_runners import mixins_and_methods
from ..internals import Foreign, batches
from ..settings import PluginSettings
from .runner import GpuRunnerMixin


class GpuRunnerV2(GpuRunnerMixin):
    """A mixin of vLLM's V2 runner: each method runs vLLM's own code in a window."""

    kvtxn: GraphSteps | None

    def make_graph_steps(self, manager: TransactionManager, rows: LayerRows | None) -> GraphSteps:
        """Make steps that read the slots where this runner keeps them."""
        slots = batches.slot_mappings(self, list(manager.groups))
        return GraphSteps(manager, slots, batches.query_len(self), rows)

    def prepare_attn(self, input_batch: Any) -> Any:
        """Plan the step, now that its slots are in place."""
        prepared = super().prepare_attn(input_batch)  # type: ignore[misc]
        if self.kvtxn is not None:
            self.kvtxn.begin(*batches.batch_rows(input_batch))
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

        Of pipeline stages the last alone samples, and the others have no windows. What vLLM adds
        (the rows' first places, and from 0.33 on the drafts that another stage sent) goes through.
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
