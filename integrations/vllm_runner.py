"""The model runner's side: a private subclass that opens and closes windows.

The runner object changes its class; no class of vLLM's is patched, and
changing it back undoes everything. Per step: ``_prepare_inputs`` says which
rows are drafts, ``_model_forward`` is wrapped in a window, and ``_sample``
says what was accepted, before the drafter or a connector sees the cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import attrs

from .. import __version__
from ..config import Policy, TxnConfig
from ..log import get_logger
from ..manager import TransactionManager
from . import vllm_cpu, vllm_layers
from . import vllm_internals as internals
from .vllm_hooks import hook_runner, is_hooked
from .vllm_policy import decide
from .vllm_steps import Steps

log = get_logger()


@cache
def window_runner(own: Any) -> Any:
    """A subclass of a runner's own class; an object of that class can become one of this."""

    class WindowRunner(own):  # type: ignore[misc]
        """Every method is vLLM's, plus a window.

        Attributes:
            kvtxn: the steps, once the KV cache exists; None while kvtxn stays out.
            kvtxn_config: the settings.
            kvtxn_rank: the worker's rank.
        """

        kvtxn: Steps | None = None
        kvtxn_config: TxnConfig
        kvtxn_rank: int = 0

        def initialize_kv_cache(
            self,
            kv_cache_config: Any,
            is_profiling: bool = False,
            **others: Any,
        ) -> None:
            """Caches are new: so are the steps. None for a profiling run's caches."""
            self.kvtxn = None
            super().initialize_kv_cache(kv_cache_config, is_profiling, **others)
            if not is_profiling:
                self.kvtxn = open_steps(self)

        def _update_states(self, scheduler_output: Any) -> Any:
            """A step begins: a window that is still open belongs to one that was abandoned."""
            if self.kvtxn is not None:
                self.kvtxn.abandon()
            return super()._update_states(scheduler_output)

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
        runner.__class__ = type(runner).__mro__[1]


def open_steps(runner: Any) -> Steps | None:
    """Steps over the runner's new caches, or None and the reason in the log."""
    config: TxnConfig = runner.kvtxn_config
    try:
        layers, facts = internals.target_layers(runner)
        policy, why = decide(config.policy, facts)
        if policy == "off":
            log.warning("vllm.inactive", rank=runner.kvtxn_rank, why=why)
            return None
        # The attention copies draft rows out of the batch, so nobody else can write into them.
        staging = "reference" if config.staging == "auto" else config.staging
        settings = attrs.evolve(config, policy=cast(Policy, policy), staging=staging)
        refs = vllm_layers.layer_refs(layers, facts.kv_cache_dtype)
        steps = Steps(TransactionManager(refs, settings), internals.vocab_size(runner))
        if policy == "deferred":
            vllm_cpu.hook_attention(steps, layers)
    except Exception as error:
        if config.on_error == "raise":
            raise
        log.exception("vllm.inactive", rank=runner.kvtxn_rank, why=repr(error))
        return None
    manager = steps.manager
    log.info(
        "vllm.active",
        rank=runner.kvtxn_rank,
        policy=policy,
        why=why,
        backend=manager.executor.name,
        layers=len(manager.layers),
        groups=len(manager.groups),
        max_rows=settings.max_rows,
        kvtxn=__version__,
        vllm=internals.version(),
    )
    return steps
