"""vLLM's V1 model runner on a CPU: each of its methods that kvtxn needs is overridden here, once.

Every override runs vLLM's own code and tells the parts. What a part does with it, and in which
order the parts hear it, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ....config import TxnConfig
from ...serving.parts import Parts
from ..internals.protocols.runners import BeforeV1


class CpuRunnerV1(BeforeV1):
    """The adapter of vLLM's V1 runner on a CPU, which ``hook_runner`` puts before vLLM's own class.

    Attributes:
        kvtxn_parts: the parts that hear what the runner does.
        kvtxn: the steps of windows over the present KV cache; None while there are none.
        kvtxn_audit: the watch over the present KV cache; None while nothing is watched.
        kvtxn_one_state: the caches have one state per request, which windows hold.
        kvtxn_prepared: the inputs of the forward that comes next; None for one of vLLM's own, such
            as a warm-up.
        kvtxn_samples: the engine samples tokens; a pooling engine does not.
        kvtxn_settings: the user's settings.
        kvtxn_config: those of windows among them.
        kvtxn_rank: the worker's rank.
        kvtxn_required: the user wants no engine without kvtxn.
        kvtxn_on_trial: a self-test decides, after the warm-up, whether windows stay.
        kvtxn_announce: logs that windows are active, once the self-test is passed.
        kvtxn_undo: undoes the hooks around the present KV cache.
        kvtxn_unhook: undoes the hooks around the runner itself.
    """

    kvtxn_parts: Parts = Parts()
    kvtxn: Any = None
    kvtxn_audit: Any = None
    kvtxn_one_state: bool = False
    kvtxn_prepared: Any = None
    kvtxn_samples: bool = True
    kvtxn_settings: Any
    kvtxn_config: TxnConfig
    kvtxn_rank: int = 0
    kvtxn_required: bool = False
    kvtxn_on_trial: bool = False
    kvtxn_announce: Callable[[], None] | None = None
    kvtxn_undo: ExitStack
    kvtxn_unhook: ExitStack

    def get_kv_cache_spec(self) -> Any:
        """Let the parts say what they need of the caches."""
        self.kvtxn_parts.caches_wanted()
        specs = super().get_kv_cache_spec()  # type: ignore[safe-super]
        return self.kvtxn_parts.caches_described(specs)

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **others: Any
    ) -> None:
        """Tell of new caches; those of a profiling run get no windows and no ledger."""
        self.kvtxn_parts.caches_dropped()
        self.kvtxn_undo.close()
        super().initialize_kv_cache(kv_cache_config, is_profiling, **others)  # type: ignore[misc]
        if not is_profiling:
            self.kvtxn_parts.caches_made()

    def _update_states(self, scheduler_output: Any) -> Any:
        """Tell that a step begins, and which requests and blocks it changes."""
        self.kvtxn_prepared = None
        self.kvtxn_parts.step_begins()
        result = super()._update_states(scheduler_output)  # type: ignore[misc]
        self.kvtxn_parts.requests_changed(scheduler_output)
        return result

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """Tell which rows the step has."""
        prepared = super()._prepare_inputs(  # type: ignore[misc]
            scheduler_output, num_scheduled_tokens
        )
        self.kvtxn_prepared = prepared
        self.kvtxn_parts.planned(prepared)
        return prepared

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Tell of the forward before it runs, and how it ended."""
        prepared, self.kvtxn_prepared = self.kvtxn_prepared, None
        try:
            self.kvtxn_parts.forward_begins(prepared, kwargs)
            output = super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            self.kvtxn_parts.failed(error)
            raise
        self.kvtxn_parts.forward_ended()
        return output

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """Tell what the forward computed, and what was sampled."""
        self.kvtxn_parts.sampling_begins(logits)
        try:
            output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        except BaseException as error:
            self.kvtxn_parts.failed(error)
            raise
        self.kvtxn_parts.sampled(output)
        return output

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step up to its sampling; a step of an engine that samples nothing ends here."""
        ends = not self.kvtxn_samples
        return self.kvtxn_call(super().execute_model, ends, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample and draft, which ends the step."""
        return self.kvtxn_call(super().sample_tokens, True, *args, **kwargs)  # type: ignore[misc]

    def kvtxn_call(self, run: Callable[..., Any], ends: bool, *args: Any, **kwargs: Any) -> Any:
        """Run one of the two calls that a step has, and tell how it ended.

        Args:
            run: vLLM's own method.
            ends: the step ends with this call.
            *args: of the method.
            **kwargs: likewise.
        """
        try:
            output = run(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, Exception):
                self.kvtxn_parts.raised(error)
            if ends:
                self.kvtxn_parts.step_failed()
            raise
        if ends:
            self.kvtxn_parts.step_ended(output)
        return output

    def kvtxn_tell(self, tell: Callable[[Any], None]) -> None:
        """Tell the watch something; an error of the audit's own ends the audit, not the engine."""
        if self.kvtxn_audit is not None:
            self.kvtxn_audit.hear(tell)

    def kvtxn_release(self) -> None:
        """Let the parts go: the runner is about to be unhooked."""
        self.kvtxn_parts.released()
