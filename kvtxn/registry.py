"""Executors by name: registered, loaded, and asked whether they can run here.

Executors come from the entry-point group ``kvtxn.backends`` (name ->
``module:Class``) or from ``register``. No backend is imported before it is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Final

import torch

from . import backend_names, extras
from .backend_names import names as names
from .config import TxnConfig
from .errors import BackendUnavailableError, ConfigError, KVTxnError
from .executor import Capabilities, Executor
from .layers import LayerRef

#: "auto" takes the first of these that can run; other backends are taken only by name.
#: "cudagraph" is not among them: only the user knows whether a graph may be captured in the middle
#: of a program with several threads or streams.
PREFERENCE: Final = ("triton", "torch")

#: The arguments that each method of an executor is given, by position.
_CALLS: Final = {
    "unavailable": ("device",),
    "__init__": ("layers", "config"),
    "own_slots": ("group", "slots"),
    "save": ("txn", "group"),
    "stage": ("txn", "layer"),
    "commit": ("txn", "accepted"),
    "advance": ("txn", "accepted"),
    "captured_launches": ("places",),
    "restore": ("txn",),
    "attend": ("txn", "layer", "query", "attention"),
}

_WHAT_AN_EXECUTOR_IS: Final = "subclass kvtxn.executor.Executor; its header is the contract"


def register(name: str, executor: type[Executor]) -> None:
    """Make ``executor`` available as ``backend=name``; the same pair again is harmless.

    Raises:
        ConfigError: ``name`` is taken by another executor, is "auto" or not a non-empty str, or
            ``executor`` is not a complete ``Executor`` subclass.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(
            "register",
            "the name of a backend must be a non-empty str",
            got=repr(name),
            hint="pass the name that users will write in TxnConfig(backend=...)",
        )
    other = backend_names.registered.get(name, executor) is not executor
    if name == "auto" or other or name in backend_names.installed():
        raise ConfigError(
            "register", f"backend name {name!r} is taken", hint="choose another, or unregister it"
        )
    problem = _defect(executor)
    if problem is not None:
        raise ConfigError(
            "register", f"{name!r} {problem}", got=repr(executor), hint=_WHAT_AN_EXECUTOR_IS
        )
    backend_names.registered[name] = executor


def _defect(executor: object) -> str | None:
    """Return why an object is not a usable executor class; None if it is one."""
    if not isinstance(executor, type) or not issubclass(executor, Executor):
        return "is not an Executor subclass"
    if executor.__abstractmethods__:
        return f"lacks {', '.join(sorted(executor.__abstractmethods__))}"
    name = getattr(executor, "name", None)
    if not isinstance(name, str) or not name:
        return "has no name: give its class `name`, a non-empty str"
    if not isinstance(getattr(executor, "capabilities", None), Capabilities):
        return "declares no Capabilities"
    if not isinstance(inspect.getattr_static(executor, "unavailable"), classmethod | staticmethod):
        return (
            "cannot be asked: unavailable is no classmethod: it is called as "
            f"{executor.__name__}.unavailable(device)"
        )
    return next(filter(None, (_wrong_call(executor, *call) for call in _CALLS.items())), None)


def _wrong_call(executor: type[Executor], name: str, given: tuple[str, ...]) -> str | None:
    """Return why a method cannot be called with these arguments, by position; None if it can."""
    try:
        signature = inspect.signature(getattr(executor, name))
    except (TypeError, ValueError):  # written in another language
        return None
    owner = () if name == "unavailable" else ("self",)
    try:
        signature.bind(*owner, *given)
    except TypeError:
        empty = inspect.Parameter.empty
        names_alone = [each.replace(annotation=empty) for each in signature.parameters.values()]
        taken = signature.replace(parameters=names_alone, return_annotation=empty)
        return f"cannot be used: {name}{taken} cannot be called as {name}({', '.join(given)})"
    return None


def unregister(name: str) -> None:
    """Undo ``register``; an unknown name is harmless."""
    backend_names.registered.pop(name, None)


def load(name: str) -> type[Executor]:
    """Load the executor class registered as ``name``.

    Raises:
        BackendUnavailableError: the name is unknown, its module cannot be imported, or the entry
            point does not name an executor class.
    """
    if name in backend_names.registered:
        return backend_names.registered[name]
    if name not in backend_names.installed():
        raise BackendUnavailableError(
            "backend", f"no backend is registered as {name!r}", expected=names(), got=name
        )
    try:
        loaded: type[Executor] = backend_names.installed()[name].load()
    except Exception as error:
        extra = extras.bringing(error)
        mends = "" if extra is None else f"; {extra.command} brings it"
        raise BackendUnavailableError(
            "backend",
            f"{name!r} cannot be imported: {error}{mends}",
            hint="install the packages that it needs, or use backend='auto'",
        ) from error
    problem = _defect(loaded)
    if problem is not None:
        raise BackendUnavailableError(
            "backend", f"{name!r} {problem}", got=repr(loaded), hint=_WHAT_AN_EXECUTOR_IS
        )
    return loaded


def ask(name: str, device: torch.device) -> str | None:
    """Return the answer of the executor's ``unavailable``: None, or a sentence.

    Raises:
        BackendUnavailableError: the executor cannot be loaded, or gave another answer.
        Exception: the error of the executor's own check.
    """
    answer: object = load(name).unavailable(device)
    if answer is not None and (not isinstance(answer, str) or not answer.strip()):
        raise BackendUnavailableError(
            "backend",
            f"unavailable() of {name!r} returned {answer!r}, neither None nor a sentence",
            hint="return None if it can run on the device, else a sentence that says why not",
        )
    return answer


def why_not(name: str, device: torch.device) -> str | None:
    """Return why ``name`` cannot run on ``device``, or cannot be asked; None if it can run.

    No error is raised.
    """
    try:
        return ask(name, device)
    except BackendUnavailableError as error:
        return error.problem
    except Exception as error:  # a backend that raises here cannot be used
        return f"its check for this device failed: {error!r}"


def resolve(name: str, device: torch.device, kinds: frozenset[str] = frozenset()) -> type[Executor]:
    """Return the executor class for ``name`` on ``device``; only "auto" chooses.

    "auto" takes the first of ``PREFERENCE`` that can run there and hold the layers, else torch's.

    Args:
        name: a registered name, or "auto".
        device: the device of the caches.
        kinds: names of the kinds of layers that the executor has to hold.

    Raises:
        BackendUnavailableError: the backend cannot run here; the message says why.
    """
    if name == "auto":
        able = (
            n
            for n in PREFERENCE
            if n in names() and why_not(n, device) is None and kinds <= load(n).capabilities.kinds
        )
        name = next(able, "torch")  # torch can always run; if it is missing, load() says so
    executor = load(name)
    reason = why_not(name, device)
    if reason is not None:
        raise BackendUnavailableError(
            "backend",
            f"{name!r} cannot run on {device}: {reason}",
            hint="use backend='auto', or a backend that `kvtxn doctor` lists as available",
        )
    if not kinds <= executor.capabilities.kinds:
        raise BackendUnavailableError(
            "backend",
            f"{name!r} cannot hold {' and '.join(sorted(kinds - executor.capabilities.kinds))} "
            "layers",
            expected=f"an executor for layers of kind {', '.join(sorted(kinds))}",
            got=f"one for {', '.join(sorted(executor.capabilities.kinds)) or 'no kind'}",
            hint="use backend='auto', or the 'torch' backend, which holds every kind",
        )
    return executor


def build(executor: type[Executor], layers: Sequence[LayerRef], config: TxnConfig) -> Executor:
    """Build the executor of one manager.

    Raises:
        BackendUnavailableError: the executor's constructor failed.
        KVTxnError: the constructor's own, as it is.
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
