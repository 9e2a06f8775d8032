"""The extras of kvtxn's own distribution: which of them brings a module that is missing."""

from __future__ import annotations

import re
from importlib.metadata import requires
from importlib.util import find_spec
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


def bringing(error: Exception, prefer: str | None = None) -> Extra | None:
    """Return the extra that brings the module which an import missed.

    Args:
        error: the error of the import.
        prefer: name of the extra that brings all that the caller needs, if there is one; other
            extras may bring this module alone.

    Returns:
        The extra; None for other errors, and for a module that no extra brings.
    """
    if not isinstance(error, ModuleNotFoundError):
        return None
    module = (error.name or "").partition(".")[0]
    wanted = _DISTRIBUTIONS.get(module, module).replace("_", "-")
    found = [extra for extra, distribution in _optional() if distribution == wanted]
    if not found:
        return None
    return Extra(wanted, _command(prefer if prefer in found else found[0]))


def missing(name: str) -> str | None:
    """Say that the package for which an extra is named is not installed; None if it is.

    Args:
        name: the package's, and the extra's; None is returned for a name that no extra has.
    """
    if (name, name) not in _optional() or find_spec(name) is not None:
        return None
    return f"{name} is not installed; {_command(name)} brings it"


def _optional() -> list[tuple[str, str]]:
    """List each extra with each distribution that it asks for, both by name."""
    pairs = []
    for requirement in requires("kvtxn") or ():
        distribution = re.match(r"([\w-]+)", requirement)
        extra = re.search(r"extra == [\"']([\w-]+)[\"']", requirement)
        if distribution and extra:
            pairs.append((extra[1], distribution[1].lower()))
    return pairs


def _command(extra: str) -> str:
    return f"pip install 'kvtxn[{extra}]'"
