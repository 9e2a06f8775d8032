"""vLLM's V2 model runner on a GPU: what kvtxn needs of it is overridden here, once.

Every override runs vLLM's own code and tells the parts. What a part does with it, and in which
order the parts hear it, is not known here. The forward may be a replayed graph, which is not
touched.

On pipeline stages before the last one nothing is sampled: ``postprocess_sampled`` is told of an
earlier step there, when a later one begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from ...serving.parts import Parts
from ..seam import audited_requests, audited_steps_gpu, batches, state_layers
from ..seam.batches import PlannedV2
from ..seam.engine_protocols import KVCacheSpec, SchedulerOutput
from ..seam.runner_protocols import InputBatchV2


class AdapterV2:
    """The adapter of vLLM's V2 runner, which ``hook_runner`` puts before vLLM's own class."""

    kvtxn_parts: Parts = Parts()
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
        """Run a step up to its sampling; the parts hear whether its forward ended or raised.

        A step of an engine that samples nothing ends here. What the forward raises is raised.
        """
        ends = not self.kvtxn_samples
        run = super().execute_model  # type: ignore[misc]
        try:
            output = self.kvtxn_parts.run_call(run, ends, *args, **kwargs)
        except BaseException as error:
            self.kvtxn_parts.failed(error)
            raise
        self.kvtxn_parts.forward_ended()
        return output

    def update_requests(
        self, scheduler_output: SchedulerOutput, *others: Any, **named: Any
    ) -> None:
        """Tell the parts that a step begins; after vLLM's update, what it changed.

        That is which requests end and come, and which blocks they get.
        """
        self.kvtxn_scheduled = scheduler_output
        self.kvtxn_parts.step_begins()
        super().update_requests(scheduler_output, *others, **named)  # type: ignore[misc]
        changes = partial(audited_requests.changes_v2, self, scheduler_output)  # type: ignore[arg-type]
        self.kvtxn_parts.requests_changed(changes)

    def update_pp_decode_requests(self, *args: Any, **kwargs: Any) -> None:
        """Tell the parts before and after an earlier pipeline stage learns the outcome of a step.

        vLLM's own code calls ``postprocess_sampled``, unless all of that step's requests are gone.
        """
        self.kvtxn_parts.outcomes_arrive()
        try:
            super().update_pp_decode_requests(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.kvtxn_parts.outcomes_arrived()

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> object:
        """Tell the parts which graph is the forward, by vLLM's ``batch_desc``, then prepare."""
        chosen = args[2] if len(args) > 2 else kwargs.get("batch_desc")
        self.kvtxn_parts.graph_chosen(chosen)
        return super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]

    def prepare_attn(self, input_batch: InputBatchV2) -> object:
        """After vLLM has computed the step's slots, tell the parts which rows it has."""
        prepared = super().prepare_attn(input_batch)  # type: ignore[misc]
        self.kvtxn_parts.planned(PlannedV2(input_batch, prepared))
        return prepared

    # -- its sampling ------------------------------------------------------------------------

    def sample_tokens(self, *args: Any, **kwargs: Any) -> object:
        """Sample and draft as vLLM does; the parts hear that the step ends with this call."""
        run = super().sample_tokens  # type: ignore[misc]
        return self.kvtxn_parts.run_call(run, True, *args, **kwargs)

    def sample(
        self, hidden_states: Tensor, input_batch: InputBatchV2, grammar_output: object
    ) -> object:
        """Return what vLLM samples; the parts hear of the outputs before it, of the counts after.

        From 0.33 on vLLM asks connectors for their results after this, before
        ``postprocess_sampled``.
        """
        self.kvtxn_parts.sampling_begins(
            partial(audited_steps_gpu.sampled_outputs, hidden_states, input_batch)
        )
        output = super().sample(  # type: ignore[misc]
            hidden_states, input_batch, grammar_output
        )
        self.kvtxn_parts.sampled(None, batches.num_sampled(output))
        return output

    def postprocess_sampled(
        self,
        idx_mapping: object,
        sampled_tokens: Tensor,
        num_sampled: Tensor,
        num_rejected: object,
        *others: Any,
        **named: Any,
    ) -> None:
        """Tell the parts how many tokens each request got; after vLLM's own code, which ones.

        vLLM sends these to the host meanwhile, and the drafter runs after this. What vLLM adds (the
        rows' first places, and from 0.33 on the drafts that another stage sent) goes through.
        """
        self.kvtxn_parts.outcome_known(num_sampled)
        super().postprocess_sampled(  # type: ignore[misc]
            *(idx_mapping, sampled_tokens, num_sampled, num_rejected, *others), **named
        )
        self.kvtxn_parts.outcome_kept(sampled_tokens, num_sampled)
