"""The extras of kvtxn's own distribution, and the extra that brings a missing module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.metadata import requires
from importlib.util import find_spec
from typing import Final

import attrs

#: Modules whose distribution has another name.
_DISTRIBUTIONS: Final = {"cpuinfo": "py-cpuinfo", "pynvml": "nvidia-ml-py"}


@attrs.frozen
class Extra:
    """An extra that brings missing modules.

    Attributes:
        distribution: the distribution that has the module; of several, all of them.
        command: the command that installs kvtxn with the extra.
    """

    distribution: str
    command: str


def bringing(
    error: Exception, prefer: str | None = None, needs: Sequence[str] = ()
) -> Extra | None:
    """Return the extra that brings the module which an import missed.

    Args:
        error: the error of the import.
        prefer: name of the extra that brings all that the caller needs, if there is one; other
            extras may bring only this module.
        needs: other modules that the caller needs; missing ones are named, too.

    Returns:
        The extra; None for other errors, and for a module that no extra brings.
    """
    if not isinstance(error, ModuleNotFoundError):
        return None
    missed = (error.name or "").partition(".")[0]
    missing = {missed, *(each for each in needs if find_spec(each) is None)}
    wanted = {_distribution(module) for module in missing}
    brings: dict[str, set[str]] = {}
    for extra, distribution in _optional():
        brings.setdefault(extra, set()).add(distribution)
    if not wanted <= set().union(*brings.values()):
        return None
    chosen = []
    while wanted:  # one extra, if there is one with all, or that of the caller
        best = max(brings, key=lambda extra: (len(wanted & brings[extra]), extra == prefer))
        chosen.append(best)
        wanted -= brings[best]
    return Extra(listed(missing), _command(",".join(sorted(chosen))))


def listed(modules: Iterable[str]) -> str:
    """Name the distributions that have these modules: "a, b and c"."""
    names = sorted(map(_distribution, modules))
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _distribution(module: str) -> str:
    """Return the name of the distribution that has a module, with hyphens."""
    return _DISTRIBUTIONS.get(module, module).replace("_", "-")


def missing(name: str) -> str | None:
    """Return a sentence if the package for which an extra is named is missing, else None.

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
    """Return the command that installs kvtxn with an extra, or with several divided by commas."""
    return f"pip install 'kvtxn[{extra}]'"
