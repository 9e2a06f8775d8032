"""Names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def first_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports a name's module at its first use.

    Args:
        package: the package's ``__name__``.
        homes: by name, the relative name of the module that has it. For other names it raises
            AttributeError, as Python expects.
    """

    def __getattr__(name: str) -> Any:
        """Import the name's module, and return its value, which the package has from then on."""
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name], package), name)
        setattr(sys.modules[package], name, value)  # asked once
        return value

    return __getattr__
