"""Attaching to vLLM's objects so that everything can be undone.

A runner, scheduler or layer that kvtxn hooks changes its class for a private subclass of it
(``swap_class``); its own class stays as it is. Four classes of vLLM's are patched, to hear of new
objects: ``WorkerWrapperBase``, ``LLMEngine``, ``AsyncLLM`` and ``Scheduler``; ``plugin.register``
does that and ``plugin.unregister`` undoes it. A runner keeps the inverses of every hook around it:
``kvtxn_undo`` has those of its present steps, ``kvtxn_unhook`` those of the runner itself.
``unhook_runner`` runs both.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

from ...config import TxnConfig
from ...errors import KVTxnError
from ...log import get_logger
from .asked import RequiredError
from .internals import Foreign
from .internals.protocols.runners import Runner
from .settings import PluginSettings

log = get_logger()

_hooked: WeakSet[Any] = WeakSet()


def show_log() -> Callable[[], None]:
    """Show kvtxn's log events beside vLLM's, at vLLM's level, unless the user configured them.

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


# -- an object's class --------------------------------------------------------------


@cache
def _subclass(own: Any, mixins: tuple[Any, ...]) -> Any:
    """Return the subclass that objects of class ``own`` share once they have these mixins.

    Python lets an object change its class only where both have one layout, and a class has that of
    its first base. So the first base is an empty subclass of ``own``; then come the mixins, with
    all their bases, and ``own`` is last.
    """
    layout = type(own.__name__, (own,), {})
    before = type("Mixins", mixins, {}).__mro__[1:-1]
    return type(f"Window{own.__name__}", (layout, *before, own), {"kvtxn_own_class": own})


def is_swapped(target: object) -> bool:
    """Tell whether the object has a class that ``swap_class`` made."""
    return hasattr(target, "kvtxn_own_class")


def swap_class(target: object, *mixins: type) -> None:
    """Put mixins before an object's own class in its method resolution order.

    Args:
        target: an object of a class with ``__dict__``; its class itself stays as it is.
        *mixins: plain classes, the first one first; they reach the object's own methods by
            ``super()``.

    Raises:
        KVTxnError: the object's class was swapped before.
    """
    if is_swapped(target):
        raise KVTxnError(
            "swap_class",
            f"this object's class, {type(target).__name__}, was swapped before",
            hint="call restore_class first",
        )
    own: Any = type(target)
    target.__class__ = _subclass(own, mixins)


def restore_class(target: object) -> None:
    """Give an object the class that it had before ``swap_class``.

    Raises:
        KVTxnError: the class was not swapped, or somebody else has subclassed it since.
    """
    own = vars(type(target)).get("kvtxn_own_class")
    if own is None:
        raise KVTxnError(
            "restore_class",
            f"{type(target).__name__} is not a class that swap_class made",
            hint="undo later changes of the object's class first",
        )
    target.__class__ = own


def mix_in(target: object, *mixins: type, **own: object) -> Callable[[], None]:
    """Put mixins before an object's class, and give the object what they need.

    Args:
        target: as for ``swap_class``.
        *mixins: as for ``swap_class``.
        **own: attributes of the object, by name.

    Returns:
        A function that takes mixins and attributes away again.

    Raises:
        KVTxnError: as ``swap_class``.
    """
    swap_class(target, *mixins)
    vars(target).update(own)

    def undo() -> None:
        restore_class(target)
        for name in own:
            delattr(target, name)

    return undo


def follow(target: Any, name: str, after: Callable[[Any], None]) -> Callable[[], None]:
    """Call a function with each result of an object's method, whoever else has hooked it.

    Args:
        target: the object.
        name: the method's name.
        after: gets the result.

    Returns:
        A function that undoes it.
    """
    own = getattr(target, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        after(result)
        return result

    setattr(target, name, call)
    return lambda: delattr(target, name)


def precede(target: Any, name: str, before: Callable[..., None]) -> Callable[[], None]:
    """Call a function with the arguments of an object's method, before the method.

    Args:
        target: the object.
        name: the method's name.
        before: gets the arguments.

    Returns:
        A function that undoes it.
    """
    own = getattr(target, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return own(*args, **kwargs)

    setattr(target, name, call)
    return lambda: delattr(target, name)


# -- a model runner -----------------------------------------------------------------


class HookedRunner(Runner, Protocol):
    """The attributes that kvtxn keeps on each model runner that it has hooked.

    Attributes:
        kvtxn: the steps of windows over the present KV cache; None while there are none.
        kvtxn_audit: the watch over the present KV cache; None while nothing is watched.
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
    kvtxn_audit: Any
    kvtxn_settings: PluginSettings
    kvtxn_config: TxnConfig
    kvtxn_rank: int
    kvtxn_required: bool
    kvtxn_on_trial: bool
    kvtxn_announce: Callable[[], None] | None
    kvtxn_undo: ExitStack
    kvtxn_unhook: ExitStack


def keep_for_graphs(runner: Foreign, owner: object) -> None:
    """Keep the owner of buffers that a runner's captured graphs read, for as long as it lives."""
    kept = vars(runner).get("kvtxn_kept", [])
    kept.append(owner)
    runner.kvtxn_kept = kept


def check_methods(owner: type, methods: Mapping[str, Sequence[str]]) -> str | None:
    """Compare a class's methods with the expected ones.

    Args:
        owner: the class.
        methods: each method's parameters after ``self``, by the method's name; "?" after a name
            marks a parameter or method that some releases lack.

    Returns:
        One sentence about the first difference; None without any.
    """
    for name, parameters in methods.items():
        method = inspect.getattr_static(owner, name, None)
        if not inspect.isfunction(method):
            return f"{owner.__name__}.{name} is not there"
        found = tuple(inspect.signature(method).parameters)[1:]
        everything = tuple(parameter.rstrip("?") for parameter in parameters)
        needed = tuple(parameter for parameter in parameters if not parameter.endswith("?"))
        if found not in (everything, needed):
            return f"{owner.__name__}.{name} takes {found}, not {everything}"
    return None


def stay_out(
    why: str, rank: int, *, required: bool = False, error: Exception | None = None
) -> None:
    """Log that a worker runs stock vLLM, and the reason.

    Args:
        why: the reason, one sentence.
        rank: the worker's.
        required: the user set ``"required": true``: raise instead of logging.
        error: an exception that nobody expected here; the log gets its traceback.

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
    *mixins: type,
) -> None:
    """Put mixins before a runner's own class, unless it is hooked or its methods differ.

    Args:
        runner: a model runner of vLLM's.
        settings: the user's settings.
        rank: the worker's.
        methods: the methods that its class must have, see ``check_methods``.
        *mixins: see ``swap_class``.

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
    swap_class(runner, *mixins)
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
    runner that is not hooked.
    """
    if not is_hooked(runner):
        return
    runner.kvtxn_release()
    runner.kvtxn_undo.close()
    runner.kvtxn_unhook.close()
    restore_class(runner)
    for name in [
        name for name in vars(runner) if name.startswith("kvtxn") and name != "kvtxn_kept"
    ]:
        delattr(runner, name)
    _hooked.discard(runner)


def unhook_runners() -> None:
    """Unhook every runner of this process."""
    for runner in list(_hooked):
        unhook_runner(runner)
