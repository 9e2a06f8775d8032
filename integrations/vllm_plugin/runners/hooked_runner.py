"""Hooking a model runner of vLLM's so that everything can be undone.

A runner changes its class for a private subclass of it, and so do schedulers and layers; see
``seam.hooks``. Four classes of vLLM's are patched, to hear of new objects:
``WorkerWrapperBase``, ``LLMEngine``, ``AsyncLLM`` and ``Scheduler``; ``plugin.register`` does that
and ``plugin.unregister`` undoes it. A runner keeps the inverses of every hook around it:
``kvtxn_undo`` has those of its present steps, ``kvtxn_unhook`` those of the runner itself.
``unhook_runner`` runs both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from ....config import TxnConfig
from ....log import get_logger
from ...serving.parts import Parts
from ..policy import RequiredError
from ..policy.settings import PluginSettings
from ..seam import Foreign
from ..seam.engine_protocols import SchedulerOutput
from ..seam.hooks import check_methods, restore_class, swap_class
from ..seam.runner_protocols import Runner, RunnerV1, RunnerV2

if TYPE_CHECKING:
    from ...serving.ledger.watch import Watch
    from ..seam.request_blocks import RequestBlocks

log = get_logger()

_hooked: WeakSet[Any] = WeakSet()


def show_log() -> Callable[[], None]:
    """Show kvtxn's log events beside vLLM's, at vLLM's level.

    Nothing is done if kvtxn's logger has handlers: the user configured it.

    Returns:
        A function that undoes it.
    """
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvtxn")
    if ours.handlers:
        return lambda: None
    before = ours.level, ours.propagate
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = not theirs.handlers

    def undo() -> None:
        ours.handlers = []
        ours.level, ours.propagate = before

    return undo


class HookedRunner(Runner, Protocol):
    """The attributes that kvtxn keeps on each model runner that it has hooked.

    Attributes:
        kvtxn: the steps of windows over the present KV cache; None while there are none.
        kvtxn_audit: the watch over the present KV cache; None while nothing is watched.
        kvtxn_parts: the parts that hear what the runner does.
        kvtxn_scheduled: what the scheduler says of the present step.
        kvtxn_requests: whose each block is; kept by the ledger, with a KV connector alone.
        kvtxn_states: on a GPU, the recurrent states that commits write; None without any.
        kvtxn_one_state: the caches have one state per request, which windows hold.
        kvtxn_settings: the user's settings.
        kvtxn_config: those of windows among them.
        kvtxn_rank: the worker's rank.
        kvtxn_required: the user wants no engine without kvtxn.
        kvtxn_on_trial: a self-test decides, after the warm-up, whether windows stay.
        kvtxn_announce: logs that windows are active, once the self-test is passed.
        kvtxn_undo: undoes the hooks around the present KV cache.
        kvtxn_unhook: undoes the hooks around the runner itself.
    """

    kvtxn: Any
    kvtxn_audit: Watch | None
    kvtxn_parts: Parts
    kvtxn_scheduled: SchedulerOutput
    kvtxn_requests: RequestBlocks
    kvtxn_states: Any
    kvtxn_one_state: bool
    kvtxn_settings: PluginSettings
    kvtxn_config: TxnConfig
    kvtxn_rank: int
    kvtxn_required: bool
    kvtxn_on_trial: bool
    kvtxn_announce: Callable[[], None] | None
    kvtxn_undo: ExitStack
    kvtxn_unhook: ExitStack


class HookedRunnerV1(HookedRunner, RunnerV1, Protocol):
    """A hooked runner of vLLM's V1 kind, on a CPU or a GPU."""


class HookedRunnerV2(HookedRunner, RunnerV2, Protocol):
    """A hooked runner of vLLM's V2 kind."""


def keep_for_graphs(runner: Foreign, owner: object) -> None:
    """Keep the owner of buffers that captured graphs read, on the runner, until the runner goes."""
    kept = vars(runner).get("kvtxn_kept", [])
    kept.append(owner)
    runner.kvtxn_kept = kept


def stay_out(
    why: str, rank: int, *, required: bool = False, error: Exception | None = None
) -> None:
    """Log as a warning that a worker runs stock vLLM, and the reason; or refuse that.

    Args:
        why: the reason.
        rank: the worker's.
        required: the user wants no engine without kvtxn: nothing is logged, it raises.
        error: the cause, if there is one.

    Raises:
        RequiredError: ``required``; it stops vLLM's start.
    """
    if required:
        raise RequiredError(
            "additional_config['kvtxn']", f"kvtxn is required, but {why}"
        ) from error
    log.warning("kvtxn.inactive", rank=rank, why=why, exc_info=error)


def is_hooked(runner: Foreign) -> bool:
    """Tell whether ``hook_runner`` has hooked this runner."""
    return hasattr(runner, "kvtxn_config")


def hook_runner(
    runner: Foreign,
    settings: PluginSettings,
    rank: int,
    methods: Mapping[str, Sequence[str]],
    *adapters: type,
) -> None:
    """Put adapters before a runner's own class, unless it is hooked or its methods differ.

    If they differ, that is logged. Else the runner gets its attributes ``kvtxn...``, without
    windows or audit yet, and ``is_hooked`` says so.

    Raises:
        RequiredError: its methods differ, and the user wants no engine without kvtxn.
    """
    if is_hooked(runner):
        return
    wrong = check_methods(type(runner), methods)
    if wrong is not None:
        why = f"this model runner is unknown: {wrong}"
        stay_out(why, rank, required=settings.required)
        return
    swap_class(runner, *adapters)
    runner.kvtxn = runner.kvtxn_audit = runner.kvtxn_states = runner.kvtxn_announce = None
    runner.kvtxn_one_state = runner.kvtxn_on_trial = False
    runner.kvtxn_settings = settings
    runner.kvtxn_config = settings.txn
    runner.kvtxn_required = settings.required
    runner.kvtxn_rank = rank
    runner.kvtxn_undo = ExitStack()
    runner.kvtxn_unhook = ExitStack()
    _hooked.add(runner)


def unhook_runner(runner: Foreign) -> None:
    """Give a hooked runner its own class back, and undo every hook around the runner.

    A window that is open is aborted. Only what ``keep_for_graphs`` keeps stays. Does nothing to a
    runner that is not hooked. Every hook is undone even if the abort raises.
    """
    if not is_hooked(runner):
        return
    with ExitStack() as ends:  # the last one first, whatever raises
        ends.callback(_forget, runner)
        ends.push(runner.kvtxn_unhook)
        ends.push(runner.kvtxn_undo)
        runner.kvtxn_parts.released()


def _forget(runner: Foreign) -> None:
    """Give a runner its own class back, and take away what kvtxn kept on it but ``kvtxn_kept``."""
    restore_class(runner)
    for name in [
        name for name in vars(runner) if name.startswith("kvtxn") and name != "kvtxn_kept"
    ]:
        delattr(runner, name)
    _hooked.discard(runner)


def unhook_runners() -> None:
    """Unhook every runner of this process, whichever of them raises.

    Raises:
        KVTxnError: somebody else has subclassed a runner's class.
    """
    with ExitStack() as ends:
        for runner in list(_hooked):
            ends.callback(unhook_runner, runner)
