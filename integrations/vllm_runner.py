"""The model runner's side: a private subclass that opens and closes windows.

The runner object changes its class; no class of vLLM's is patched, and
changing it back undoes everything. Per step: ``_prepare_inputs`` says which
rows are drafts, ``_model_forward`` is wrapped in a window, and ``_sample``
says what was accepted, before the drafter or a connector sees the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import attrs

from ..config import TxnConfig
from ..manager import TransactionManager
from . import vllm_cpu, vllm_layers
from . import vllm_internals as internals
from .vllm_hooks import hook_runner, is_hooked
from .vllm_runner_head import V1Head
from .vllm_steps import Steps


@cache
def window_runner(own: Any) -> Any:
    """A subclass of a runner's own class; an object of that class can become one of this."""

    class WindowRunner(V1Head, own):  # type: ignore[misc]
        """Every method is vLLM's, plus a window."""

        kvtxn: Steps | None

        def kvtxn_steps(
            self, layers: Sequence[internals.TargetLayer], kv_dtype: str, settings: TxnConfig
        ) -> tuple[Steps, dict[str, object]]:
            """See ``RunnerHead``."""
            # The attention copies draft rows out of the batch: nobody else can write into them.
            staging = "reference" if settings.staging == "auto" else settings.staging
            refs = vllm_layers.layer_refs(layers, kv_dtype)
            manager = TransactionManager(refs, attrs.evolve(settings, staging=staging))
            steps = Steps(manager, internals.vocab_size(self))
            if settings.policy == "deferred":
                vllm_cpu.hook_attention(steps, layers)
            return steps, {}

        def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
            if self.kvtxn is not None:
                self.kvtxn.plan(lambda: internals.drafts_and_ends(self, prepared))
            return prepared

        def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
            steps = self.kvtxn
            if steps is None:
                return super()._model_forward(*args, **kwargs)
            deferred = steps.manager.policy == "deferred"
            layers = {ref.group: ref.name for ref in steps.manager.layers.values()}
            steps.begin(lambda: internals.step_slots(layers, reads_window=deferred))
            with steps.aborting():
                return super()._model_forward(*args, **kwargs)

        def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
            steps = self.kvtxn
            if steps is None:
                return super()._sample(logits, spec_decode_metadata)
            with steps.aborting():
                output = super()._sample(logits, spec_decode_metadata)
            steps.commit(lambda: internals.sampled_ids(output))
            return output

    return WindowRunner


def attach(runner: Any, config: TxnConfig, rank: int) -> None:
    """Hook a runner; the KV cache does not exist yet. Hooking it twice is harmless."""
    hook_runner(runner, config, rank, internals.RUNNER_METHODS, window_runner)


def detach(runner: Any) -> None:
    """Give a hooked runner its own class back; an open window is aborted."""
    if is_hooked(runner):
        if runner.kvtxn is not None:
            runner.kvtxn.abandon()
            vllm_cpu.unhook_attention(internals.target_layers(runner)[0])
        runner.__class__ = type(runner).__bases__[-1]
