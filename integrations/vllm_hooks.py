"""Hooking with care: is a class what was expected, and where do events go."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..config import TxnConfig
from ..log import get_logger

log = get_logger()


def show_log() -> None:
    """Let kvtxn's events appear where vLLM's do, at vLLM's level, unless configured already."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvtxn")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = not theirs.handlers


def check_methods(owner: type, methods: Mapping[str, Sequence[str]]) -> str | None:
    """What about ``owner`` is not as expected, in a sentence; None if it all is."""
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


def is_hooked(runner: Any) -> bool:
    """Whether ``hook_runner`` has been here."""
    return hasattr(runner, "kvtxn_config")


def hook_runner(
    runner: Any,
    config: TxnConfig,
    rank: int,
    methods: Mapping[str, Sequence[str]],
    subclass: Callable[[Any], Any],
) -> None:
    """Give a runner a subclass of its own class, unless it has one or looks different.

    Args:
        runner: a model runner of vLLM's.
        config: the settings.
        rank: the worker's.
        methods: what its class has to have, see ``check_methods``.
        subclass: makes the class from the runner's own.
    """
    own = type(runner)
    if is_hooked(runner):
        return
    wrong = check_methods(own, methods)
    if wrong is not None:
        log.warning("vllm.inactive", rank=rank, why=f"this runner is unknown: {wrong}")
        return
    runner.__class__ = subclass(own)
    runner.kvtxn_config = config
    runner.kvtxn_rank = rank
