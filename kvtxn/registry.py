"""Which executors exist, and which can run here.

Executors come from the entry-point group ``kvtxn.backends`` (name ->
``module:Class``) or from ``register``. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import torch

from .config import TxnConfig
from .errors import BackendUnavailableError, ConfigError, KVTxnError
from .executor import Capabilities, Executor
from .layers import LayerRef

GROUP: Final = "kvtxn.backends"

#: "auto" takes the first of these that can run; others only by name. Not "cudagraph": capturing
#: a graph in the middle of a program that uses several threads or streams is the user's choice.
PREFERENCE: Final = ("triton", "torch")

_WHAT_AN_EXECUTOR_IS: Final = "subclass kvtxn.executor.Executor; its header is the contract"

_registered: dict[str, type[Executor]] = {}


@cache
def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def register(name: str, executor: type[Executor]) -> None:
    """Make ``executor`` available as ``backend=name``; the same pair again is harmless.

    Raises:
        ConfigError: ``name`` is taken by another executor, is "auto" or no name at all, or
            ``executor`` is not a complete ``Executor`` subclass.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(
            "register",
            "the name of a backend must be a non-empty str",
            got=repr(name),
            hint="choose the word that users write: TxnConfig(backend=...)",
        )
    taken = name in _installed() or _registered.get(name, executor) is not executor
    if name == "auto" or taken:
        raise ConfigError(
            "register", f"backend name {name!r} is taken", hint="choose another, or unregister it"
        )
    problem = _defect(executor)
    if problem is not None:
        raise ConfigError(
            "register", f"{name!r} {problem}", got=repr(executor), hint=_WHAT_AN_EXECUTOR_IS
        )
    _registered[name] = executor


def _defect(executor: object) -> str | None:
    """What keeps somebody's class from being an executor; None if nothing does."""
    if not isinstance(executor, type) or not issubclass(executor, Executor):
        return "is no Executor subclass"
    if executor.__abstractmethods__:
        return f"lacks {', '.join(sorted(executor.__abstractmethods__))}"
    if not isinstance(getattr(executor, "capabilities", None), Capabilities):
        return "declares no Capabilities"
    return None


def unregister(name: str) -> None:
    """Undo ``register``; an unknown name is harmless."""
    _registered.pop(name, None)


def names() -> tuple[str, ...]:
    """Every registered backend, sorted, whether or not it can run here."""
    return tuple(sorted({*_installed(), *_registered}))


def load(name: str) -> type[Executor]:
    """The executor class registered as ``name``.

    Raises:
        BackendUnavailableError: no such name, its module cannot be imported, or what it names is
            no executor.
    """
    if name in _registered:
        return _registered[name]
    if name not in _installed():
        raise BackendUnavailableError(
            "backend", f"no backend is registered as {name!r}", expected=names(), got=name
        )
    try:
        loaded: type[Executor] = _installed()[name].load()
    except Exception as error:
        raise BackendUnavailableError(
            "backend",
            f"{name!r} cannot be imported: {error}",
            hint="install what it needs, or use backend='auto'",
        ) from error
    problem = _defect(loaded)
    if problem is not None:
        raise BackendUnavailableError(
            "backend", f"{name!r} {problem}", got=repr(loaded), hint=_WHAT_AN_EXECUTOR_IS
        )
    return loaded


def why_not(name: str, device: torch.device) -> str | None:
    """Why ``name`` cannot run on ``device``, or None if it can."""
    try:
        return load(name).unavailable(device)
    except BackendUnavailableError as error:
        return error.problem
    except Exception as error:  # somebody else's code: a reason not to use it
        return f"asking whether it can run failed: {error!r}"


def resolve(name: str, device: torch.device, kinds: frozenset[str] = frozenset()) -> type[Executor]:
    """The executor class for ``name`` on ``device``; "auto" chooses, a name never falls back.

    Args:
        name: a registered name, or "auto".
        device: where the caches are.
        kinds: names of the kinds of layers it has to hold.

    Raises:
        BackendUnavailableError: it cannot run here; the message says why.
    """
    if name == "auto":
        able = (
            n
            for n in PREFERENCE
            if n in names() and why_not(n, device) is None and kinds <= load(n).capabilities.kinds
        )
        name = next(able, "torch")  # missing only where the package is not installed properly
    executor = load(name)
    reason = why_not(name, device)
    if reason is not None:
        raise BackendUnavailableError(
            "backend",
            f"{name!r} cannot run on {device}: {reason}",
            hint="use backend='auto', or one that `kvtxn doctor` lists as available",
        )
    if not kinds <= executor.capabilities.kinds:
        raise BackendUnavailableError(
            "backend",
            f"{name!r} cannot hold {' and '.join(sorted(kinds - executor.capabilities.kinds))} "
            "layers",
            expected=f"layers of kind {', '.join(sorted(executor.capabilities.kinds))}",
            got=sorted(kinds),
            hint="use backend='auto', or the 'torch' backend, which holds every kind",
        )
    return executor


def build(executor: type[Executor], layers: Sequence[LayerRef], config: TxnConfig) -> Executor:
    """The executor of one manager.

    Raises:
        BackendUnavailableError: its constructor failed.
    """
    try:
        return executor(layers, config)
    except KVTxnError:
        raise
    except Exception as error:
        raise BackendUnavailableError(
            "backend",
            f"{executor.name!r} cannot be built: {error!r}",
            hint="see the cause above, or use another backend",
        ) from error
