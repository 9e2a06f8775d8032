"""The plug-in's entry point: hooks into vLLM that wait until an engine asks for kvtxn.

kvtxn stays out unless the user asks for it:

    LLM(model=..., speculative_config=...,
        additional_config={"kvtxn": {"policy": "auto"}})

The keys are those of ``TxnConfig`` and ``required``, see ``settings``.

vLLM calls ``register`` in each of its processes, and the hooks run in every engine, whether it asks
for kvtxn or not. So nothing is imported before an engine asks, and no exception gets out of a hook
before it is known that the engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ...errors import shown
from ..pytest_audit import engines as pytest_audit
from .policy import STOPS_THE_START, RequiredError, is_asked, wants
from .seam import Foreign, frontend, prefix_lookups, workers
from .seam.workers import ANSWERS

if TYPE_CHECKING:
    from .seam.engine_protocols import Scheduler, VllmEngine, WorkerWrapper

__all__ = ["register", "unregister"]

#: Undo the hooks of ``register``.
_undo: list[Callable[[], None]] = []


def register() -> None:
    """Install the hooks into vLLM's workers, engines and schedulers, in each of its processes.

    vLLM calls this. A second call does nothing. Never raises, since an exception would end vLLM's
    process: an error is logged, and hooks installed before it stay.
    """
    if _undo:
        return
    try:
        answers = {name: _answer(name) for name in ANSWERS}
        _undo.append(workers.hook_workers(_on_worker, answers))
        _undo.append(frontend.hook_engines(_before_engine, _after_engine))
        _undo.append(prefix_lookups.hook_schedulers(_on_scheduler))
        if (end := pytest_audit.write_events()) is not None:
            _undo.append(end)
    except Exception as error:
        what = ("workers", "engines", "schedulers", "events")[len(_undo)]
        why = f"vLLM's {what} cannot be hooked: {shown(error)}"
        _warn("kvtxn.inactive", why, "engines of this process run stock, or without counters")


def unregister() -> None:
    """Undo every hook into vLLM in this process, those of running engines included.

    Raises:
        KVTxnError: as ``starting.unhook``; the hooks of ``register`` then stay.
    """
    from . import starting

    starting.unhook()
    while _undo:
        _undo.pop()()


def _answer(name: str) -> Callable[[WorkerWrapper], object]:
    """Return a method for workers that answers the RPC ``name``, given the worker's wrapper."""

    def answer(wrapper: WorkerWrapper) -> object:
        from . import worker_answers

        return worker_answers.answer(name, wrapper)

    return answer


# -- hooks, which run in every engine --------------------------------------------------------


def _before_engine(config: Foreign) -> None:
    """Check the settings of an engine that asks for kvtxn, before any worker starts.

    In a test that wants audits, the engine's ``additional_config`` asks for one first. Settings
    that are not valid, or requirements that cannot be met, stop the start; other errors are logged.
    """
    if pytest_audit.is_wanted() and config is not None:
        with _or_stock("kvtxn.audit_inactive", "the engine is not audited for the test"):
            wanted = pytest_audit.with_audit(workers.additional_config(config))
            workers.replace_additional_config(config, wanted)
    event, effect = "kvtxn.settings_not_checked", "each worker checks them again"
    if (asked := _asked(lambda: config, event)) is not None:
        with _or_stock(event, effect):
            from . import starting

            starting.check_settings(config, asked)


def _after_engine(engine: VllmEngine) -> None:
    """Publish or keep the counters of an engine that asks for kvtxn; hash its images for an audit.

    Errors are logged, and the engine runs on.
    """
    event, effect = "kvtxn.no_metrics", "the engine runs on, without kvtxn's counters"
    if (asked := _asked(lambda: frontend.config_of(engine), event)) is not None:
        with _or_stock(event, effect):
            from . import engine_calls

            engine_calls.on_engine(engine)
        with _or_stock("kvtxn.media_by_name", "images count by the names that clients give"):
            from . import starting

            starting.on_engine(engine, asked)


def _on_worker(wrapper: WorkerWrapper) -> None:
    """Attach to the model runner of a worker whose engine asks for kvtxn.

    An error is logged and the engine runs stock, unless the user requires kvtxn or wants errors.
    """
    event, effect = "kvtxn.inactive", "the engine runs stock"
    if (asked := _asked(lambda: workers.engine_config(wrapper), event)) is not None:
        with _or_stock(event, effect, asked):
            from . import starting

            starting.on_worker(wrapper, asked)


def _on_scheduler(scheduler: Scheduler, config: Foreign) -> None:
    """Let the audit into the scheduler of an engine that asks for kvtxn.

    An error is logged, unless the user requires kvtxn or wants errors.
    """
    event, effect = "kvtxn.scheduler_not_hooked", "wrong rows are logged and not contained"
    if (asked := _asked(lambda: config, event)) is not None:
        with _or_stock(event, effect, asked):
            from . import starting

            starting.on_scheduler(scheduler, config, asked)


def _asked(config_of: Callable[[], Foreign], event: str) -> Mapping[str, object] | None:
    """Return an engine's ``additional_config`` if it asks for kvtxn.

    Args:
        config_of: returns the engine's ``VllmConfig``.
        event: the event of a warning if that, or what it says, cannot be read: a release moved it.

    Returns:
        None if the engine does not ask, or if nobody can tell.
    """
    try:
        asked = workers.additional_config(config_of())
        return asked if is_asked(asked) else None
    except Exception as error:
        why = f"whether this engine asks for kvtxn cannot be read: {shown(error)}"
        _warn(event, why, "the engine runs stock")
        return None


@contextmanager
def _or_stock(event: str, effect: str, asked: Mapping[str, object] | None = None) -> Iterator[None]:
    """Log an exception of kvtxn's own, and let the engine start without what it was for.

    Args:
        event: the log event.
        effect: what the engine does without.
        asked: the user's ``additional_config``: an engine that requires kvtxn does not start, nor
            one that wants errors to be raised. None: another hook decides that.

    Raises:
        KVTxnError: one of ``STOPS_THE_START``, a ``RequiredError`` if kvtxn is required.
        Exception: any, if the user wants errors to be raised.
    """
    try:
        yield
    except STOPS_THE_START:
        raise
    except Exception as error:
        if wants(asked, "on_error", "raise"):
            raise
        if wants(asked, "required", True):
            raise RequiredError(
                "additional_config['kvtxn']", f"kvtxn is required, but {shown(error)}"
            ) from error
        _warn(event, shown(error), effect)


def _warn(event: str, why: str, effect: str) -> None:
    """Log a warning; an error in that is dropped."""
    with suppress(Exception):
        from ...log import get_logger

        get_logger().warning(event, why=why, effect=effect)
