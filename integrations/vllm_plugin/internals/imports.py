"""Hooks into modules of vLLM that wait until vLLM imports them.

A process of vLLM's imports what it needs: one that only inspects a model needs no engine, a worker
no front end. A hook that imported its module would make every process pay for all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import Lock
from types import ModuleType
from typing import Any

from ....errors import shown


def when_imported(name: str, hook: Callable[[Any], Callable[[], None]]) -> Callable[[], None]:
    """Call a function with a module once it is imported: at once, if it is.

    Args:
        name: the module's.
        hook: gets the module, and returns a function that undoes what it did. If it raises when
            the module is imported later, that is logged, and the import goes on.

    Returns:
        A function that undoes the hook, or lets it wait no longer.

    Raises:
        Exception: whatever the hook raises, if the module is imported already.
    """
    waiting = _Waiting(name, hook)
    sys.meta_path.insert(0, waiting)
    try:
        if name in sys.modules:
            waiting.run(import_module(name))  # waits for a thread that is importing it
    except BaseException:
        waiting.stop()
        raise
    return waiting.stop


class _Waiting(MetaPathFinder):
    """Waits for the import of one module.

    It finds the module by the finders after itself, and has the hook follow its execution.
    """

    def __init__(self, name: str, hook: Callable[[Any], Callable[[], None]]) -> None:
        self._name = name
        self._hook = hook
        self._lock = Lock()
        self._waits = True
        self._undo: Callable[[], None] | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, its execution followed by the hook; None of other modules."""
        if fullname != self._name or not self._waits:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        ask = [finder.find_spec for finder in others if hasattr(finder, "find_spec")]
        specs = (find(fullname, path, target) for find in ask)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ != self._name:  # a loader may serve several modules
                return
            try:
                self.run(module)
            except Exception as error:
                from ....log import get_logger

                why = f"{self._name} cannot be hooked: {shown(error)}"
                get_logger().warning("kvtxn.inactive", why=why)

        loader.exec_module = exec_module

    def run(self, module: ModuleType) -> None:
        """Call the hook, once."""
        with self._lock:
            if not self._waits:
                return
            self._leave()
        self._undo = self._hook(module)

    def stop(self) -> None:
        """Undo the hook; if it waits still, it waits no longer."""
        with self._lock:
            if self._waits:
                self._leave()
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _leave(self) -> None:
        self._waits = False
        sys.meta_path.remove(self)
