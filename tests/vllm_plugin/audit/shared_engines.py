"""Two engines in turn that share a connector's directory and a store of identities."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stale_engines
from kvtxn.integrations.vllm_plugin import snapshots
from planting import Rig

#: Rows of the prompt that the connector brings.
ROWS = 96


def store(folder: Path) -> dict[str, str]:
    """The settings of a store in a folder."""
    return {"audit_store": f"sqlite:///{folder / 'identities.db'}"}


def fill(build: Callable[[], Any], ask: Callable[[Any], object]) -> None:
    """Let an engine in a process of its own store what it is asked, and end without a goodbye."""
    child = multiprocessing.get_context("fork").Process(target=_first, args=(build, ask))
    child.start()
    child.join()
    if child.exitcode:
        raise RuntimeError(f"the first engine's process ended with {child.exitcode}")


def ask(llm: Any) -> None:
    """Ask for the prompt."""
    Rig(llm).run([stale_engines.PROMPT], 4)


def _first(build: Callable[[], Any], ask: Callable[[Any], object]) -> None:
    llm = build()
    ask(llm)
    rig = Rig(llm)
    assert rig.watch.transfers._shared._thread.wait(60)
    assert rig.found() == []
    os._exit(0)


def find(llm: Any, engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Ask for the prompt whose rows the first engine stored; and again with other weights."""
    rig, report = Rig(llm), {}
    for name, change in (("same", lambda *given: None), ("other", stale_engines.told)):
        rig.engine.reset_prefix_cache()
        change(llm, rig)
        before = _unverified(llm)
        old = len(rig.found())
        rig.run([stale_engines.PROMPT], 4)
        unverified = _unverified(llm) - before
        report[name] = {
            "unverified": unverified,
            "found": rig.found()[old:],
            "request": rig.ran[-1],
        }
    raw = b"".join(path.read_bytes() for path in folder.glob("identities.db*"))
    return {**report, "store": len(raw), "names": b"1.0" in raw}


def _unverified(llm: Any) -> float:
    return float(snapshots(llm)[0]["kvtxn_audit_rows_unverified_total"])
