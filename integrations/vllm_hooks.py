"""Hooking with care: is a class what was expected, and where do events go."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence


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
