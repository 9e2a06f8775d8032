"""The way from ``commit`` to the first byte is short, and stays short."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from small_caches import make_layers, rows

import kvtxn
from kvtxn import TransactionManager, TxnConfig

#: Folders whose functions are counted: the library's and its backends'.
HOMES = [Path(kvtxn.__file__).parent, Path(__file__).parent.parent / "backends"]


def functions_until(commit, done):
    """Names of kvtxn's own Python functions that ``commit()`` calls before ``done`` is true.

    Comprehensions, which are functions to some releases of Python, are not counted.
    """
    called = []

    def watch(frame, event, arg):
        code = frame.f_code
        ours = any(home in Path(code.co_filename).parents for home in HOMES)
        if event == "call" and ours and not done(code) and not code.co_name.endswith("comp>"):
            called.append(code.co_qualname)

    sys.setprofile(watch)
    try:
        commit()
    finally:
        sys.setprofile(None)
    return called


def staged_window(policy, settled):
    """A window whose layers are all staged, the first one's key cache, and the executor."""
    layers = make_layers()
    manager = TransactionManager(layers, TxnConfig(policy=policy, backend="torch"))
    for _ in range(2):  # the second window finds everything warm
        window = manager.window(3, range(2 * (3 + settled)), settled=settled)
        for ref in layers:
            window.stage(ref, *rows(2 * (3 + settled)))
        if manager.snapshot()["kvtxn_windows_total"] == 0:
            window.commit(2)
    return window, layers[0].key_cache


@pytest.mark.parametrize("settled", [0, 1])
@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_twelve_functions_to_the_first_byte(policy, settled):
    """Counted from ``Window.commit`` until a cache changes."""
    window, cache = staged_window(policy, settled)
    version = cache._version
    called = functions_until(lambda: window.commit(accepted=2), lambda _: cache._version != version)
    called = called[called.index("Window.commit") :]
    assert called[-1] != "Window.commit"
    assert cache._version != version
    assert len(called) <= 12, "\n".join(called)


@pytest.mark.parametrize(("accepted", "most"), [(2, 4), ([2, 1], 7)], ids=["int", "list"])
def test_four_functions_to_any_executor(accepted, most):
    """The window's own part, the same for every executor; a list is checked on the host."""
    window, _ = staged_window("deferred", 1)
    reached = []

    def at_the_executor(code):
        reached.extend(
            ["TorchExecutor.commit"] if code.co_qualname == "TorchExecutor.commit" else []
        )
        return bool(reached)

    called = functions_until(lambda: window.commit(accepted), at_the_executor)
    called = called[called.index("Window.commit") :]
    assert reached
    assert len(called) <= most, "\n".join(called)
