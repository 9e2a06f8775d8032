"""The start of an engine that asks for kvtxn: settings are checked, runner and scheduler hooked.

Every worker with a model runner then logs one line: ``kvtxn.active`` with the policy, or
``kvtxn.inactive`` with the reason, and in the latter case the engine runs as if kvtxn were not
installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

import attrs

from ...errors import KVTxnError
from ...log import get_logger
from ..serving.ledger.violation_log import say_logged_alone
from . import engine_calls, runner_parts, self_test, worker_answers
from .audit import watch_opening
from .audit.audited_scheduler import follow_scheduler, unhook_schedulers
from .policy import STOPS_THE_START, RequiredError, supported, wants
from .policy.doctor import bounded, check_fit, hook_gone
from .policy.engine_facts import EngineFacts
from .policy.rules import decide, on_trial, refused
from .policy.settings import PluginSettings, is_audited, settings
from .runners.hooked_runner import (
    HookedRunner,
    is_hooked,
    show_log,
    stay_out,
    unhook_runner,
    unhook_runners,
)
from .seam import audited_requests, engine_config, workers
from .seam.engine_protocols import Scheduler, VllmConfig, VllmEngine, WorkerWrapper
from .seam.media_contents import follow_media, unfollow_media

log = get_logger()

_GPU: Final = "kvtxn.integrations.vllm_plugin.gpu"

#: By vLLM's name: the attention that vLLM finds where drafts wait in spare blocks.
WINDOW_ATTENTION: Final[Mapping[str, str]] = {
    "FLASH_ATTN": f"{_GPU}.flash_backend.WindowFlashBackend",
    "TRITON_ATTN": f"{_GPU}.triton_backend.WindowTritonBackend",
    "TRITON_MLA": f"{_GPU}.triton_backend.WindowTritonLatentBackend",
    "FLASH_ATTN_MLA": f"{_GPU}.flash_latent_backend.WindowFlashLatentBackend",
}

#: Undo the hooks that engines of this process brought along.
_undo_engines: list[Callable[[], None]] = []


def unhook() -> None:
    """Undo every hook around the engines of this process; one that cannot be undone stops no other.

    Raises:
        KVTxnError: as ``restore_class``: somebody else has changed a hooked object's class.
    """
    with ExitStack() as ends:  # the last one first, whatever raises
        for undo in _undo_engines:
            ends.callback(undo)
        _undo_engines.clear()
        ends.callback(unhook_schedulers)
        ends.callback(unfollow_media)
        ends.callback(engine_calls.unhook_clients)
        ends.callback(unhook_runners)


def on_engine(engine: VllmEngine, asked: Mapping[str, object]) -> None:
    """Let the front end of an audited engine tell its workers the content of images and audio."""
    if is_audited(asked):
        follow_media(engine)


def on_scheduler(scheduler: Scheduler, config: VllmConfig, asked: Mapping[str, object]) -> None:
    """Let an audited engine's scheduler count lost reuse, and contain violations if asked to.

    Nothing without an audit, or if the ledger cannot watch the engine.

    Raises:
        RequiredError: it cannot contain, and the user requires that.
    """
    # Where the ledger cannot watch an engine, its workers say why.
    if is_audited(asked) and audited_requests.unwatched(config) is None:
        _undo_engines.append(show_log())  # an engine's core may have a process of its own
        evicts = any(wants(asked, name, "contain") for name in ("on_violation", "stale"))
        required = wants(asked, "required", True)
        follow_scheduler(scheduler, config, contains=evicts, required=required)


def check_settings(config: VllmConfig, asked: Mapping[str, object]) -> None:
    """Check the user's settings before any worker starts, and whether requirements can be met.

    Raises:
        ConfigError: a setting is not valid.
        RequiredError: the engine cannot have what the user requires.
    """
    facts = engine_config.config_facts(config)
    wanted = settings(asked, 1, facts.device)
    check_fit(wanted, facts, config)
    if wanted is None or not wanted.required:
        return
    _check_stock(facts)
    policy, why = decide(wanted.txn.policy, facts)
    if policy == "off" and wanted.windows:
        stay_out(why, 0, required=True)
    gone = hook_gone(facts)
    if gone is not None and wanted.windows:
        stay_out(gone, 0, required=True)
    _audited(config, wanted, 0)


def _check_stock(facts: EngineFacts) -> None:
    """Refuse an engine that vLLM itself does not run; do nothing for others.

    Raises:
        RequiredError: its hint is another one, since leaving ``required`` out is no help.
    """
    why = refused(facts)
    if why is not None:
        raise RequiredError("vLLM", why, hint="choose another model or device")


def on_worker(wrapper: WorkerWrapper, asked: Mapping[str, object]) -> None:
    """Attach to a worker's model runner, if the engine can have what the user asks for.

    Otherwise the reason is logged. Without windows an audit is attached alone. Windows are made
    with the engine's caches, and only then are they announced, or the reason that they cannot be.

    Raises:
        KVTxnError: a setting is not valid, or the user requires kvtxn and the engine cannot have
            it, or anything fails in that; it stops vLLM's start.
        Exception: any, if the user wants errors to be raised.
    """
    config = workers.engine_config(wrapper)
    _undo_engines.append(show_log())
    rank, runner = workers.rank_of(wrapper), workers.runner_of(wrapper)
    raises, required = wants(asked, "on_error", "raise"), wants(asked, "required", True)
    with _or_stock(runner, rank, raises=raises, required=required):
        facts = engine_config.config_facts(config)
        wanted = settings(asked, _most_rows(config, facts), facts.device)
        assert wanted is not None  # it is asked for
        check_fit(wanted, facts, config)
        if wanted.required:
            _check_stock(facts)
        wanted = _audited(config, wanted, rank)
        policy, why = decide(wanted.txn.policy, facts)
        gone = hook_gone(facts) if policy != "off" else None
        if gone is not None:
            policy, why = "off", gone
        if wanted.windows and policy != "off":
            _attach(wrapper, bounded(wanted, config), rank, facts, policy)
            return
        if wanted.windows:
            stay_out(why, rank, required=wanted.required)
        if wanted.audit == "off":
            return
        runner_parts.attach(runner, wanted, rank, facts, windows=False)
        _follow_updates(wrapper, wanted)
        if facts.device != "cpu":
            watch_opening.reserve_memory(wrapper, wanted)
            _after_warm_up(wrapper, facts)


@contextmanager
def _or_stock(runner: HookedRunner, rank: int, *, raises: bool, required: bool) -> Iterator[None]:
    """After an error of kvtxn's own unhook a runner and log it, unless the user wants the error.

    Raises:
        KVTxnError: one of ``STOPS_THE_START``, for which the runner stays hooked; a
            ``RequiredError`` if ``required``.
        Exception: any, if ``raises``.
    """
    try:
        yield
    except STOPS_THE_START:
        raise
    except Exception as error:
        try:
            unhook_runner(runner)
        except Exception as another:
            log.warning("kvtxn.not_unhooked", why=repr(another), effect="some hooks stay, idle")
        if raises:
            raise
        stay_out(repr(error), rank, required=required, error=error)


def _audited(config: VllmConfig, wanted: PluginSettings, rank: int) -> PluginSettings:
    """Return the settings; with their audit off, and a log line, if the ledger cannot watch.

    If it can watch but not contain as asked, rank 0 logs that of schedulers that are not vLLM's;
    others say so themselves.

    Raises:
        RequiredError: it cannot watch or contain, and the user requires it.
    """
    why = None if wanted.audit == "off" else audited_requests.unwatched(config)
    if why is None:
        why = audited_requests.uncontained(config) if wanted.evicts else None
        if why is not None and wanted.required:
            stay_out(why, rank, required=True)
        if why is not None and rank == 0 and audited_requests.foreign_scheduler(config) is not None:
            say_logged_alone(why)  # other schedulers say so themselves
        return wanted
    if wanted.required:
        stay_out(why, rank, required=True)
    log.warning("kvtxn.audit_inactive", rank=rank, why=why)
    return attrs.evolve(wanted, audit="off")


def _attach(
    wrapper: WorkerWrapper, wanted: PluginSettings, rank: int, facts: EngineFacts, policy: str
) -> None:
    """Attach windows to the worker's runner, and install the other hooks that the policy needs.

    These follow weights and the end of the warm-up, and on a GPU reserve memory and register
    attention. Nothing is done to a runner that is hooked already, or is unknown.
    """
    runner = workers.runner_of(wrapper)
    if is_hooked(runner):
        return
    runner_parts.attach(runner, wanted, rank, facts, windows=True)
    if not is_hooked(runner):
        return
    _follow_updates(wrapper, wanted)
    runner.kvtxn_on_trial = on_trial(facts)
    if runner.kvtxn_on_trial or facts.device != "cpu":
        _after_warm_up(wrapper, facts)
    if facts.device == "cpu":
        return
    from .gpu.windows import reserve_memory

    reserve_memory(wrapper)
    watch_opening.reserve_memory(wrapper, wanted)
    if policy == "deferred":  # before the model is made, which asks for its attention
        _register_attention(rank, supported.read_rows(facts.version, unchecked=facts.unchecked))


def _register_attention(rank: int, names: Sequence[str]) -> None:
    """Let vLLM find kvtxn's attention under these names of backends.

    Where another plug-in has taken a name, its attention stays, and a warning is logged.
    """
    from .seam import backends

    for name in names:
        try:
            _undo_engines.append(backends.register(name, WINDOW_ATTENTION[name]))
        except KVTxnError as error:
            effect = "drafts cannot wait: 'auto' takes 'undo', 'deferred' leaves kvtxn inactive"
            log.warning(
                "kvtxn.attention_taken", rank=rank, backend=name, why=str(error), effect=effect
            )


def _follow_updates(wrapper: WorkerWrapper, wanted: PluginSettings) -> None:
    """Let the audit of a hooked runner's worker hear of weights that vLLM changes.

    Nothing without an audit or on a runner that is not hooked.
    """
    runner = workers.runner_of(wrapper)
    if wanted.audit != "off" and is_hooked(runner):
        runner.kvtxn_unhook.callback(watch_opening.follow_updates(wrapper))


def _after_warm_up(wrapper: WorkerWrapper, facts: EngineFacts) -> None:
    """Call ``_warmed_up`` whenever the worker of a hooked runner has warmed up; follow its sleep.

    Nothing is done for a runner that is not hooked.
    """
    runner = workers.runner_of(wrapper)
    if is_hooked(runner):
        then = partial(_warmed_up, runner, facts.version)
        runner.kvtxn_unhook.callback(workers.after_warm_up(wrapper, then))
        runner.kvtxn_unhook.callback(worker_answers.let_sleep(wrapper))


def _warmed_up(runner: HookedRunner, version: str) -> None:
    """Test a runner on trial, or reset its counters; then let its audit begin to watch.

    Windows and steps before this point were vLLM's warm-up. After an error the runner runs stock,
    as in ``_or_stock``.
    """
    config, rank = getattr(runner, "kvtxn_config", None), getattr(runner, "kvtxn_rank", 0)
    raises = config is not None and config.on_error == "raise"
    required = getattr(runner, "kvtxn_required", False)
    with _or_stock(runner, rank, raises=raises, required=required):
        if getattr(runner, "kvtxn_on_trial", False):
            self_test.decide_by_test(runner, version)
        elif getattr(runner, "kvtxn", None) is not None:
            runner.kvtxn.manager.metrics.restart()
        watch = getattr(runner, "kvtxn_audit", None)
        if watch is not None:
            watch.begin()


def _most_rows(config: VllmConfig, facts: EngineFacts) -> int:
    """Return the default of ``max_rows``: all rows that a step's requests with drafts can have.

    On a GPU, where it sizes buffers, it may be less; see ``window_rows``.
    """
    if facts.device == "cpu":
        return engine_config.most_window_rows(config)
    return engine_config.window_rows(config)
