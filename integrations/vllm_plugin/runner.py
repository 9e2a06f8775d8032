"""Mixins that ``swap_class`` puts in front of the class of every model runner kvtxn attaches to.

The runner's own class is not patched; ``attach.unhook_runner`` gives it back to the runner, and
undoes every hook around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import attrs
from torch import Tensor

from ... import __version__
from ...config import Policy, TxnConfig
from ...errors import BackendUnavailableError, ConfigError, KVTxnError
from ...log import get_logger
from .asked import RequiredError
from .attach import stay_out
from .internals import layers as attention_layers
from .internals import ranks, workers
from .internals.layers import TargetLayer
from .policy.engine import EngineFacts
from .policy.rules import decide

log = get_logger()


class WindowedRunnerMixin:
    """A mixin of vLLM's runners that keeps kvtxn's steps for as long as the KV cache lives.

    Attributes:
        kvtxn: the steps, once the KV cache exists; None while kvtxn stays out.
        kvtxn_config: the user's settings.
        kvtxn_rank: the worker's rank.
        kvtxn_room: memory reserved while vLLM measures how much is free, for the steps to take.
        kvtxn_required: the user wants no engine without kvtxn.
        kvtxn_on_trial: a self-test decides, after the warm-up, whether windows stay.
        kvtxn_announce: logs that windows are active, once the self-test is passed.
        kvtxn_undo: undoes the hooks of the present steps.
        kvtxn_unhook: undoes the hooks around the runner itself.
    """

    kvtxn: Any = None
    kvtxn_config: TxnConfig
    kvtxn_rank: int = 0
    kvtxn_room: Tensor | None = None
    kvtxn_required: bool = False
    kvtxn_on_trial: bool = False
    kvtxn_announce: Callable[[], None] | None = None
    kvtxn_undo: ExitStack
    kvtxn_unhook: ExitStack

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **others: Any
    ) -> None:
        """Make new steps for new caches; a profiling run's caches get none."""
        self.kvtxn = None
        self.kvtxn_undo.close()  # the hooks of the steps over earlier caches
        super().initialize_kv_cache(kv_cache_config, is_profiling, **others)  # type: ignore[misc]
        if not is_profiling:
            self.kvtxn_room = None  # the allocator keeps it, and gives it to the steps
            self.kvtxn = open_steps(self)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step's forward; an error of a window's is heard, whichever rank meets it."""
        return self.kvtxn_heard(super().execute_model, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rest of a step; an error of a window's is heard, whichever rank meets it."""
        return self.kvtxn_heard(super().sample_tokens, *args, **kwargs)  # type: ignore[misc]

    def kvtxn_heard(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a part of a step; end this rank's process if nobody would hear of a window's error.

        vLLM awaits the answer of one rank and drops the errors of all others. Such a rank would
        leave the others waiting in a collective until a time-out. vLLM notices that a process
        ends, and stops the engine within seconds.
        """
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if not self.kvtxn_stops(error) or ranks.is_heard(self):
                raise
            effect = "this rank's process ends, so that the engine stops: nobody awaits its answer"
            log.error("kvtxn.rank_ends", rank=self.kvtxn_rank, why=repr(error), effect=effect)
            ranks.end_process()
            raise

    def kvtxn_stops(self, error: Exception) -> bool:
        """Tell whether an error is a window's, which is to stop the engine."""
        notes = getattr(error, "__notes__", ())
        ours = isinstance(error, KVTxnError) or any(each.startswith("kvtxn:") for each in notes)
        return self.kvtxn is not None and (ours or self.kvtxn_config.on_error == "raise")

    def kvtxn_release(self) -> None:
        """Abort a window that is still open, before the runner is unhooked."""
        if self.kvtxn is not None:
            self.kvtxn.abandon()

    def kvtxn_facts(self, layers: Sequence[TargetLayer], facts: EngineFacts) -> EngineFacts:
        """Add to the facts those that are known once the caches exist."""
        return facts

    def make_steps(
        self, layers: Sequence[TargetLayer], kv_dtype: str, settings: TxnConfig
    ) -> tuple[Any, dict[str, object]]:
        """Make the steps over the target's layers; returns them, and more fields for the log.

        Args:
            layers: the target's layers with their caches.
            kv_dtype: vLLM's name of the caches' format.
            settings: the user's settings, with the policy that ``decide`` chose.
        """
        raise NotImplementedError


class V1StepMixin(WindowedRunnerMixin):
    """A mixin of vLLM's V1 runner, on any device: aborts windows of abandoned steps."""

    def _update_states(self, scheduler_output: Any) -> Any:
        """Abort a window that an abandoned step left open, then run vLLM's own code."""
        if self.kvtxn is not None:
            self.kvtxn.abandon()
        return super()._update_states(scheduler_output)  # type: ignore[misc]


def open_steps(runner: WindowedRunnerMixin) -> Any:
    """Make steps over a hooked runner's new caches; if impossible, log why and return None."""
    config: TxnConfig = runner.kvtxn_config
    try:
        layers, facts = attention_layers.target_layers(runner)
        policy, why = decide(config.policy, runner.kvtxn_facts(layers, facts))
        if policy == "off":
            # Of pipeline stages the last one has the windows: there, the engine has kvtxn.
            required = runner.kvtxn_required and facts.last_stage
            stay_out(why, runner.kvtxn_rank, required=required)
            return None
        settings = attrs.evolve(config, policy=cast(Policy, policy))
        steps, more = runner.make_steps(layers, facts.kv_cache_dtype, settings)
    except (BackendUnavailableError, ConfigError, RequiredError):
        raise  # the user named something that cannot be had: vLLM's start stops
    except Exception as error:
        runner.kvtxn_undo.close()
        if config.on_error == "raise":
            raise
        required = runner.kvtxn_required
        stay_out(repr(error), runner.kvtxn_rank, required=required, error=error)
        return None
    manager = steps.manager
    announce = partial(
        log.info,
        "kvtxn.active",
        rank=runner.kvtxn_rank,
        policy=policy,
        why=why,
        backend=manager.executor.name,
        layers=len(manager.layers),
        groups=len(manager.groups),
        max_rows=settings.max_rows,
        **more,
        kvtxn=__version__,
        vllm=workers.version(),
    )
    if runner.kvtxn_on_trial:
        runner.kvtxn_announce = announce
    else:
        announce()
    return steps
