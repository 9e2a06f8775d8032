"""Which executors exist, and which can run here.

Executors come from the entry-point group ``kvtxn.backends`` (name ->
``module:Class``) or from ``register``. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import torch

from .errors import BackendUnavailableError
from .executor import Executor

GROUP: Final = "kvtxn.backends"

#: "auto" takes the first of these that can run; others only by name. Not "cudagraph": capturing
#: a graph in the middle of a program that uses several threads or streams is the user's choice.
PREFERENCE: Final = ("triton", "torch")

_registered: dict[str, type[Executor]] = {}


@cache
def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def register(name: str, executor: type[Executor]) -> None:
    """Make ``executor`` available as ``backend=name``; the same pair again is harmless.

    Raises:
        ValueError: ``name`` is taken by another executor, or is "auto".
    """
    taken = name in _installed() or _registered.get(name, executor) is not executor
    if name == "auto" or taken:
        raise ValueError(f"register: backend name {name!r} is taken; choose another")
    _registered[name] = executor


def unregister(name: str) -> None:
    """Undo ``register``; an unknown name is harmless."""
    _registered.pop(name, None)


def names() -> tuple[str, ...]:
    """Every registered backend, sorted, whether or not it can run here."""
    return tuple(sorted({*_installed(), *_registered}))


def load(name: str) -> type[Executor]:
    """The executor class registered as ``name``.

    Raises:
        BackendUnavailableError: no such name, or its module cannot be imported.
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
    reason = executor.unavailable(device)
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
