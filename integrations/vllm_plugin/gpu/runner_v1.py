"""vLLM's V1 model runner on a GPU, with windows.

The forward may be a replayed graph and is not touched, and nothing waits for the device.
``_prepare_inputs`` says which rows are drafts and has their slots computed; ``_sample`` says how
many were accepted, before the drafter or a connector sees the cache.
"""

from __future__ import annotations

from typing import Any

from ....manager import TransactionManager
from ....row_io import LayerRows
from ...serving.packed_steps import PackedGraphSteps
from ..attach import hook_runner
from ..audit.gpu_runners import mixins_and_methods
from ..internals import Foreign, batches
from ..internals.protocols.runners import BeforeV1
from ..settings import PluginSettings
from .runner import GpuRunnerMixin


class GpuRunnerV1(GpuRunnerMixin, BeforeV1):
    """A mixin of vLLM's V1 runner on a GPU: each method runs vLLM's own code in a window."""

    kvtxn: PackedGraphSteps | None

    def make_graph_steps(
        self, manager: TransactionManager, rows: LayerRows | None
    ) -> PackedGraphSteps:
        """Make steps over slots of their own, since this runner keeps them by group."""
        return PackedGraphSteps(manager, batches.query_len(self), batches.vocab_size(self), rows)

    def _update_states(self, scheduler_output: Any) -> Any:
        """Abort a window that an abandoned step left open, then run vLLM's own code."""
        if self.kvtxn is not None:
            self.kvtxn.abandon()
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _may_reorder_batch(self, scheduler_output: Any) -> None:
        """Let requests with drafts lead, so that windows have no other rows.

        Where the order decides about sums it stays vLLM's, and the windows take other requests in.
        """
        super()._may_reorder_batch(scheduler_output)  # type: ignore[misc]
        if self.kvtxn is not None and self.kvtxn.deferred and not self.kvtxn_keeps_order:
            batches.lead_with_drafts(self, scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """Plan the step, now that its slots are in place."""
        prepared = super()._prepare_inputs(  # type: ignore[misc]
            scheduler_output, num_scheduled_tokens
        )
        steps = self.kvtxn
        if steps is not None:
            rows = batches.prepared_rows(self, prepared, num_scheduled_tokens)
            slots = batches.slots_of_groups(self, list(steps.manager.groups))
            steps.begin_among(*rows, slots)
        return prepared

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """Commit the drafts that the sampled ids accept."""
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        if self.kvtxn is not None:
            self.kvtxn.commit_ids(batches.sampled_ids(output))
        return output


def attach(runner: Foreign, settings: PluginSettings, rank: int) -> None:
    """Put the mixins before a runner's class, once, before its KV cache exists."""
    mixins, methods = mixins_and_methods(settings, "v1")
    hook_runner(runner, settings, rank, {**batches.V1_GPU_METHODS, **methods}, *mixins, GpuRunnerV1)
