"""vLLM's V1 model runner, on a CPU or a GPU: what kvtxn needs of it is overridden here, once.

Every override runs vLLM's own code and tells the parts. What a part does with it, and in which
order the parts hear it, is not known here.

On a GPU the forward may be a replayed graph, which is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from ...serving.parts import Parts
from ...serving.step import Array
from ..seam import audited_requests, batches, state_layers
from ..seam.batches import PlannedV1
from ..seam.engine_protocols import KVCacheSpec, SchedulerOutput
from ..seam.runner_protocols import Prepared


class AdapterV1:
    """The adapter of vLLM's V1 runner, which ``hook_runner`` puts before vLLM's own class.

    Attributes:
        kvtxn_parts: the parts that hear what the runner does.
        kvtxn_planned: the step whose forward comes next; None for one of vLLM's own, such as a
            warm-up.
        kvtxn_scheduled: what the scheduler says of the present step.
        kvtxn_samples: the engine samples tokens; a pooling engine does not.
        kvtxn_undo: undoes the hooks around the present KV cache.
    """

    kvtxn_parts: Parts = Parts()
    kvtxn_planned: PlannedV1 | None = None
    kvtxn_scheduled: SchedulerOutput
    kvtxn_samples: bool = True
    kvtxn_undo: ExitStack

    # -- caches ------------------------------------------------------------------------------

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return vLLM's cache specifications; with one state per request if a part wants that.

        The parts are told first that caches are wanted.
        """
        self.kvtxn_parts.caches_wanted()
        specs = super().get_kv_cache_spec()  # type: ignore[misc]
        wanted = self.kvtxn_parts.wants_one_state()
        return state_layers.one_block_each(specs) if wanted else specs

    def initialize_kv_cache(
        self, kv_cache_config: object, is_profiling: bool = False, **others: Any
    ) -> None:
        """Make new caches, after undoing the hooks of the old ones; the parts hear of both.

        The parts may change the plan. Caches of a profiling run are planned by vLLM alone, and get
        no windows and no ledger.
        """
        self.kvtxn_parts.caches_dropped()
        self.kvtxn_undo.close()
        if not is_profiling:
            kv_cache_config = self.kvtxn_parts.caches_planned(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, is_profiling, **others)  # type: ignore[misc]
        if is_profiling:
            self.kvtxn_parts.profiling_caches_made()
        else:
            self.kvtxn_parts.caches_made()

    # -- a step up to its forward ------------------------------------------------------------

    def execute_model(self, *args: Any, **kwargs: Any) -> object:
        """Run a step up to its sampling; a step of an engine that samples nothing ends here.

        Whatever happens, no planned step is left for the next forward.
        """
        ends = not self.kvtxn_samples
        run = super().execute_model  # type: ignore[misc]
        try:
            return self.kvtxn_parts.run_call(run, ends, *args, **kwargs)
        finally:
            self.kvtxn_planned = None  # an error came before the forward: the next is another's

    def _update_states(self, scheduler_output: SchedulerOutput) -> object:
        """Tell the parts that a step begins; after vLLM's update, what it changed.

        That is which requests end and come, and which blocks they get.
        """
        self.kvtxn_planned = None
        self.kvtxn_scheduled = scheduler_output
        self.kvtxn_parts.step_begins()
        result = super()._update_states(scheduler_output)  # type: ignore[misc]
        changes = partial(audited_requests.changes, self, scheduler_output)  # type: ignore[arg-type]
        self.kvtxn_parts.requests_changed(changes)
        return result

    def _may_reorder_batch(
        self, scheduler_output: SchedulerOutput, *others: Any, **named: Any
    ) -> None:
        """After vLLM has ordered the batch, let the parts move drafting requests to the front."""
        super()._may_reorder_batch(scheduler_output, *others, **named)  # type: ignore[misc]
        lead = partial(batches.lead_with_drafts, self, scheduler_output)  # type: ignore[arg-type]
        self.kvtxn_parts.batch_ordered(lead)

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: Array
    ) -> Prepared:
        """After vLLM has computed the step's slots, tell the parts which rows it has."""
        prepared: Prepared = super()._prepare_inputs(  # type: ignore[misc]
            scheduler_output, num_scheduled_tokens
        )
        step = PlannedV1(self, prepared, num_scheduled_tokens)  # type: ignore[arg-type]
        self.kvtxn_planned = step
        self.kvtxn_parts.planned(step)
        return prepared

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> object:
        """Let the parts change, in ``kwargs``, the arguments by which vLLM looks for a graph."""
        self.kvtxn_parts.graph_sought(kwargs)
        return super()._determine_batch_execution_and_padding(*args, **kwargs)  # type: ignore[misc]

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> object:
        """Return vLLM's attention metadata, and tell the parts those by layer.

        Before a capture these describe padding alone.
        """
        made = super()._build_attention_metadata(*args, **kwargs)  # type: ignore[misc]
        self.kvtxn_parts.attention_described(batches.metadata_by_layer(made))
        return made

    def _model_forward(self, *args: Any, **kwargs: Any) -> object:
        """Run the forward; tell the parts before it, and whether it ended or raised."""
        step, self.kvtxn_planned = self.kvtxn_planned, None
        try:
            self.kvtxn_parts.forward_begins(step, kwargs)
            output = super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            self.kvtxn_parts.failed(error)
            raise
        self.kvtxn_parts.forward_ended()
        return output

    # -- its sampling ------------------------------------------------------------------------

    def sample_tokens(self, *args: Any, **kwargs: Any) -> object:
        """Sample and draft as vLLM does; the parts hear that the step ends with this call."""
        run = super().sample_tokens  # type: ignore[misc]
        return self.kvtxn_parts.run_call(run, True, *args, **kwargs)

    def _sample(self, logits: Tensor | None, spec_decode_metadata: object) -> object:
        """Return vLLM's samples; tell the parts of the logits before, and of the sampled ids after.

        If sampling raises, the parts are told that the step failed.
        """
        self.kvtxn_parts.sampling_begins(lambda: (logits, None))
        try:
            output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        except BaseException as error:
            self.kvtxn_parts.failed(error)
            raise
        self.kvtxn_parts.sampled(batches.sampled_ids(output), None)
        return output
