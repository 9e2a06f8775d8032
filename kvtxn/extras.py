"""The extras of kvtxn's own distribution: which of them brings a module that is missing."""

from __future__ import annotations

import re
from importlib.metadata import requires
from typing import Final

import attrs

#: Modules whose distribution has another name.
_DISTRIBUTIONS: Final = {"cpuinfo": "py-cpuinfo", "pynvml": "nvidia-ml-py"}


@attrs.frozen
class Extra:
    """An extra that brings a missing module.

    Attributes:
        distribution: the distribution that has the module.
        command: the command that installs kvtxn with the extra.
    """

    distribution: str
    command: str


def bringing(error: Exception) -> Extra | None:
    """Return the extra that brings the module which an import missed; None for other errors."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    module = (error.name or "").partition(".")[0]
    wanted = _DISTRIBUTIONS.get(module, module).replace("_", "-")
    for requirement in requires("kvtxn") or ():
        found = re.match(r"([\w-]+)", requirement)
        extra = re.search(r"extra == [\"']([\w-]+)[\"']", requirement)
        if found and extra and found[1].lower() == wanted:
            return Extra(wanted, f"pip install 'kvtxn[{extra[1]}]'")
    return None
