"""Engines of tests: each in a process of its own, so that one that dies or hangs takes none along.

The processes are forked from one that has imported vLLM, since the import takes longer than most
engines.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

#: The longest message about an engine: lines, and characters of each.
LINES, WIDTH = 4, 240
#: What stands before a message in a line that vLLM logs.
_PREFIX = re.compile(r"^(\([^)]*pid=\d+\) )?(ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^]]*\] ?")


class EngineFailed(Exception):
    """An engine has no report; the message is its own last error, in a few lines."""


class Turns:
    """Turns of engines: all at once while somebody waits for them, else one fewer, at least one.

    The one that is left out is the tests' own: they compute as well, and a core that they share
    with an engine takes from both. Once they wait, their core is free.

    Args:
        count: engines at once while somebody waits.
    """

    def __init__(self, count: int) -> None:
        self._count, self._running, self._waiting = count, 0, 0
        self._changed = threading.Condition()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and have it."""
        with self._changed:
            self._changed.wait_for(lambda: self._running < self._most())
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for engines in here: nothing else is computed."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    def _most(self) -> int:
        return self._count if self._waiting else max(1, self._count - 1)


class EnginePool:
    """Engines that run beside the tests, as many at once as is said.

    Args:
        work: ``module:function``; the function gets an engine's job and its folder, and returns
            its report, which JSON can hold.
        jobs: what each engine is to do, by the engine's name; they start in this order.
        folder: for the files of all engines.
        count: engines at once, while somebody waits for a report; see ``Turns``.
        seconds: for one engine, until it counts as hung.
        environment: variables of all engines.
        preload: modules that are imported once for all; they may start no thread.
        method: how processes start, as ``multiprocessing`` has it.
    """

    def __init__(
        self,
        work: str,
        jobs: Mapping[str, Any],
        folder: Path,
        *,
        count: int,
        seconds: float,
        environment: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
        method: str = "forkserver",
    ) -> None:
        self._work, self._folder, self._seconds = work, folder, seconds
        self._environment = dict(environment or {})
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(list(preload))
            # An engine that is killed leaves its semaphores to a tracker, which has no need to say.
            quiet = {"PYTHONWARNINGS": "ignore:resource_tracker"}
            with mock.patch.dict(os.environ, self._environment | quiet):
                forkserver.ensure_running()
        forget_segments()
        self._running: dict[str, int] = {}
        self._stopped = False
        self._turns = Turns(count)
        self._threads = ThreadPoolExecutor(count)
        self._futures: dict[str, Future[dict[str, Any]]] = {
            name: self._threads.submit(self._carry_out, name, job) for name, job in jobs.items()
        }

    def report(self, name: str) -> dict[str, Any]:
        """Wait for an engine's report.

        Raises:
            EngineFailed: it has none.
        """
        with self._turns.waiting():
            return self._futures[name].result()

    def finished(self, name: str) -> bool:
        """Tell whether there is a report."""
        future = self._futures.get(name)
        return bool(future and future.done() and not future.cancelled() and not future.exception())

    def as_they_end(self) -> Iterator[str]:
        """Yield each engine's name once the engine has ended, well or not."""
        names = {future: name for name, future in self._futures.items()}
        ends = as_completed(names)
        for _ in names:
            with self._turns.waiting():
                future = next(ends)
            yield names[future]

    def log(self, name: str) -> str:
        """Return the log of an engine."""
        path = self._folder / name / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def partial(self, name: str) -> str:
        """Return what an engine wrote into ``partial.json`` before it ended; empty if nothing."""
        path = self._folder / name / "partial.json"
        return path.read_text() if path.exists() else ""

    def stop(self) -> None:
        """End the engines that still run: nobody will ask for them."""
        self._stopped = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running.values()):
            _end(process)
        self._threads.shutdown()

    def _carry_out(self, name: str, job: Any) -> dict[str, Any]:
        """Run one engine in its turn."""
        with self._turns.turn():
            if self._stopped:
                raise CancelledError
            return self._run(name, job)

    def _run(self, name: str, job: Any) -> dict[str, Any]:
        """Run one engine; whatever it leaves behind ends with it."""
        folder = self._folder / name
        folder.mkdir(parents=True)
        process = self._context.Process(
            target=_engine, args=(self._work, job, folder, self._environment)
        )
        process.start()
        self._running[name] = process.pid
        process.join(0 if self._stopped else self._seconds)
        hung = process.exitcode is None
        _end(process.pid)
        process.join()
        del self._running[name]
        forget_segments()
        if hung:
            raise EngineFailed(self._message(name, f"no report within {self._seconds:g} s"))
        path = folder / "report.json"
        if not path.exists():
            how = f"its process ended with exit code {process.exitcode}"
            raise EngineFailed(self._message(name, how))
        found: dict[str, Any] = json.loads(path.read_text())
        if "error" in found:
            raise EngineFailed(self._message(name, found["error"]))
        report: dict[str, Any] = found["report"]
        return report

    def _message(self, name: str, error: str) -> str:
        """An engine's own last error: what is known, and what its log says last of it."""
        lines = [_PREFIX.sub("", line).strip() for line in self.log(name).splitlines()]
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
        known = [line for line in error.splitlines() if line.strip()][: LINES - 1]
        more = [line for line in dict.fromkeys(errors or filter(None, lines)) if line not in known]
        told = [*known, *more[len(known) - LINES :]]
        return "\n".join(line[:WIDTH] for line in (f"engine {name}: {told[0]}", *told[1:]))


def _end(process: int) -> None:
    """Kill a process and all that it started."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def forget_segments(folder: Path = Path("/dev/shm"), age: float = 5.0) -> None:
    """Remove the shared memory of vLLM's CPU ranks that no process has mapped any more.

    A rank that is killed leaves its 4 MiB, and where the segment is named after a port, the next
    engine that is given this port cannot start ("create shm in SHMManager failed. errno: 17").

    Args:
        folder: where segments are files.
        age: seconds; a younger segment may be one that its rank is about to map.
    """
    left = {path.name: path for path in folder.glob("*-cpushm_*")}
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        with suppress(OSError):  # of a process that has ended, or of somebody else
            mapped = maps.read_text(errors="replace")
            left = {name: path for name, path in left.items() if name not in mapped}
    for path in left.values():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > age:
                path.unlink()


def _engine(work: str, job: Any, folder: Path, environment: dict[str, str]) -> None:
    """The engine's process: do the work; the report, or the error, goes into the folder."""
    os.setsid()  # what it starts can be ended with it
    os.chdir(folder)
    os.environ.update(environment)
    with (folder / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    module, _, function = work.partition(":")
    try:
        found = {"report": getattr(import_module(module), function)(job, folder)}
    except Exception as error:
        traceback.print_exc()
        found = {"error": "".join(traceback.format_exception_only(error))}
    path = folder / "report"
    path.write_text(json.dumps(found))
    path.rename(folder / "report.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine's own end may take long, and nobody needs it
