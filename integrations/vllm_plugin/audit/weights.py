"""An engine's weights under audit: they are sampled, and users tell of those that change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ....audit import WeightWatch
from ....errors import ConfigError
from ..internals import frontend as front
from ..internals import weights as engine_weights
from ..internals import workers
from ..internals.engine_protocols import WorkerWrapper
from ..internals.workers import NEW_WEIGHTS
from ..seam.hooked_runner import HookedRunner
from .watch import Watch


def follow_weights(runner: HookedRunner, watch: Watch) -> None:
    """Let a watch hear of weights that change; if that fails, the audit ends.

    Without it, rows of earlier weights would count as those of the present ones.
    """
    try:
        every = runner.kvtxn_settings.weights_every
        watch.weights = WeightWatch(watch.ledger, engine_weights.parameters(runner), every)
        runner.kvtxn_undo.callback(engine_weights.follow_loads(runner, watch.weights.changed))
    except Exception as error:
        watch.stop(error)


def changed(wrapper: WorkerWrapper, weights: str) -> None:
    """Tell a worker's audit that weights have changed, awake or asleep."""
    watch = getattr(workers.runner_of(wrapper), "kvtxn_audit", None)
    if watch is not None and watch.weights is not None:
        watch.weights.changed(weights)


def follow_updates(wrapper: WorkerWrapper) -> Callable[[], None]:
    """Let a worker's audit hear of weights that vLLM changes.

    Returns:
        A function that undoes it.
    """
    return engine_weights.follow_updates(wrapper, partial(changed, wrapper))


def new_weights(llm: object, weights: str = "target") -> None:
    """Tell the audit that weights have changed, where vLLM cannot see it; no request need end.

    Call it after an update that writes into the model's parameters itself. Updates by vLLM's own
    calls are heard without it: ``load_weights`` of the model, ``reload_weights``,
    ``update_weights``, and waking up from sleep of level 2. All changes until the next step are one
    epoch, and telling twice is harmless.

    Args:
        llm: a vLLM ``LLM`` or ``LLMEngine``.
        weights: ``"target"``, or ``"drafter"`` if the drafter's weights have changed.

    Raises:
        ConfigError: there are no weights of this name; or it is an ``AsyncLLM``, of which
            ``await llm.collective_rpc("kvtxn_new_weights")`` does the same, or no engine.
    """
    if weights not in NEW_WEIGHTS:
        raise ConfigError(
            "new_weights", "these weights are unknown", expected=f"one of {tuple(NEW_WEIGHTS)}",
            got=repr(weights), hint="leave them out for the target's",
        )  # fmt: skip
    front.ask_engine(llm, "new_weights", NEW_WEIGHTS[weights])
