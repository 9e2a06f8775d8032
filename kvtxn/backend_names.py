"""The names of backends, known without importing any of them.

``TxnConfig`` checks a backend's name when it is built; ``kvtxn.registry`` loads the class that the
name stands for. Both need only the names, so the names live here, below both.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

#: The entry-point group in which packages announce executors: name -> ``module:Class``.
GROUP: Final = "kvtxn.backends"

#: Executor classes that ``kvtxn.registry.register`` added in this process, by name.
registered: Final[dict[str, type[Any]]] = {}


@cache
def installed() -> dict[str, EntryPoint]:
    """Return the entry points of installed packages by name, as they were at the first call.

    No module is imported.
    """
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def names() -> tuple[str, ...]:
    """Return the name of every backend, sorted, including backends that cannot run here."""
    return tuple(sorted({*installed(), *registered}))
