"""Windows over a hooked runner's new caches: opening them, and hearing of their errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import attrs

from .... import __version__
from ....config import Policy, TxnConfig
from ....errors import BackendUnavailableError, ConfigError, KVTxnError
from ....log import get_logger
from ..policy import RequiredError
from ..policy.engine_facts import EngineFacts
from ..policy.rules import decide
from ..seam import layers as attention_layers
from ..seam import ranks, workers
from ..seam.layers import TargetLayer
from .hooked_runner import HookedRunner, stay_out

log = get_logger()


def end_unheard(runner: HookedRunner, error: Exception) -> None:
    """End this rank's process if an error of a window's stops the engine and nobody would hear it.

    That is logged first; otherwise nothing happens. vLLM awaits the answer of one rank and drops
    the errors of all others. Such a rank would leave the others waiting in a collective until a
    time-out. vLLM notices that a process ends, and stops the engine within seconds.
    """
    if not _stops(runner, error) or ranks.is_heard(runner):
        return
    effect = "this rank's process ends, so that the engine stops: nobody awaits its answer"
    log.error("kvtxn.rank_ends", rank=runner.kvtxn_rank, why=repr(error), effect=effect)
    ranks.end_process()


def _stops(runner: HookedRunner, error: Exception) -> bool:
    """Tell whether an error stops the engine on behalf of kvtxn: of a runner that has windows.

    It is kvtxn's own, or carries its note, or the user wants errors to be raised.
    """
    notes = getattr(error, "__notes__", ())
    ours = isinstance(error, KVTxnError) or any(each.startswith("kvtxn:") for each in notes)
    return runner.kvtxn is not None and (ours or runner.kvtxn_config.on_error == "raise")


def open_steps(
    runner: HookedRunner,
    facts_of: Callable[[Sequence[TargetLayer], EngineFacts], EngineFacts],
    make: Callable[[Sequence[TargetLayer], str, TxnConfig], tuple[Any, dict[str, object]]],
) -> Any:
    """Make steps over a hooked runner's new caches, and announce them; else log why, return None.

    A runner on trial announces them after its self-test. After an error the hooks around the caches
    are undone.

    Args:
        runner: the hooked runner.
        facts_of: given the target's layers and the facts about the engine, adds the facts that are
            known once the caches exist.
        make: given the target's layers with their caches, vLLM's name of the caches' format, and
            the user's settings with the policy that ``decide`` chose, makes the steps; returns
            them, and more fields for the log.

    Raises:
        BackendUnavailableError: the user named a backend that cannot be had.
        ConfigError: the user named something else that cannot be had.
        RequiredError: there are no windows, and the user wants no engine without them.
        Exception: any, if the user wants errors to be raised.
    """
    config: TxnConfig = runner.kvtxn_config
    try:
        layers, facts = attention_layers.target_layers(runner)
        policy, why = decide(config.policy, facts_of(layers, facts))
        if policy == "off":
            # Of pipeline stages the last one has the windows: there, the engine has kvtxn.
            required = runner.kvtxn_required and facts.last_stage
            stay_out(why, runner.kvtxn_rank, required=required)
            return None
        settings = attrs.evolve(config, policy=cast(Policy, policy))
        steps, more = make(layers, facts.kv_cache_dtype, settings)
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


def refuse_without_windows(runner: HookedRunner) -> None:
    """Refuse caches with one state per request that no window commits.

    Raises:
        KVTxnError: the runner has such caches, and no windows.
    """
    if runner.kvtxn_one_state and runner.kvtxn is None:
        raise KVTxnError(
            "initialize_kv_cache",
            "the caches have one state per request, but kvtxn has no windows over them; the "
            "log has the reason, event kvtxn.inactive",
            hint="leave the setting 'recurrent' out to run this engine without kvtxn",
        )
