"""Measures steps with the code of the kvtxn that its process finds, new or old.

A script: a process that runs an old checkout cannot import this file from it. The first argument is
the folder in which Python finds kvtxn, or "" for the installed one; the last is the descriptor of a
pipe. Answers are ``(failed, answer)``.
"""

from __future__ import annotations

import os
import sys
import traceback
from argparse import Namespace
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Final

#: Where checkouts have the benchmark, and how it makes and measures steps; the newest first.
PLACES: Final = (
    ("kvtxn.benchmarks.host.engine_step", "make_steps", "measure"),
    ("kvtxn.benchmarks.host.engine_step", "_steps", "_measure"),
    ("kvtxn.benchmarks.steps", "_steps", "_measure"),
)


def benchmark() -> tuple[Any, Any]:
    """Find the functions of this kvtxn that make steps and measure them."""
    for name, make, measure in PLACES:
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            continue
        if hasattr(module, make):
            return getattr(module, make), getattr(module, measure)
    raise ImportError(f"this kvtxn has none of {[place[0] for place in PLACES]}")


def find_kvtxn_in(folder: str) -> None:
    """Let Python find kvtxn only in one folder: an editable installation would fill its gaps."""
    sys.path.insert(0, folder)
    sys.meta_path[:] = [each for each in sys.meta_path if "Editable" not in str(each)]


def stay_on_one_core() -> None:
    """Keep this thread on the core that the other checkout's process also uses.

    Cores of one machine differ by half in speed, with their clock and with their neighbours' work.
    Both processes may share a core, since only one of them measures at a time.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[len(cores) // 2]})


def serve(pipe: Connection[Any, Any]) -> None:
    """Make steps, measure them, and say where the code is.

    First comes ``settings``, the benchmark's arguments; then ``(policy, requests, changing)``.
    """
    import kvtxn

    settings = pipe.recv()
    make, measure = benchmark()
    pipe.send((False, kvtxn.__file__))
    args, made = Namespace(**settings), dict[str, Any]()
    while (asked := pipe.recv()) is not None:
        policy, requests, changing = asked
        if policy not in made:
            made[policy], _ = make(args, policy)
            stay_on_one_core()
        pipe.send((False, measure(args, made[policy], requests, changing=changing)))


def main() -> None:
    """Serve until there is nothing more to do."""
    pipe: Connection[Any, Any] = Connection(int(sys.argv[-1]))
    if sys.argv[1]:
        find_kvtxn_in(sys.argv[1])
    try:
        serve(pipe)
    except (EOFError, BrokenPipeError):  # the caller is gone
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send((True, f"{type(error).__name__}: {error}".splitlines()[0]))


if __name__ == "__main__":
    main()
