"""Commands of kvtxn and Python programs in forks of a process that has imported vLLM.

A command that a user starts imports vLLM anew in each of its engines, which takes longer than most
of them run. Here an engine's process is forked where the command would start an interpreter; all
else is the command's own.
"""

from __future__ import annotations

import ctypes
import logging
import os
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from commands import OF_THE_POOL, VARIABLES, Ended
from folders import python_path
from kvtxn.integrations.serving import engine_process

from kvtxn.cli import main

#: From the C library's malloc.h: new memory is filled with a byte's complement.
M_PERTURB = -6

#: The command's open files before it opened any: an engine has these, and none of other engines.
_inherited: set[int] = set()


class Child:
    """A fork of this process, with what is needed here of ``subprocess.Popen``.

    Args:
        begin: is called in it; returns the exit code.
        out: takes what the process prints.
        err: takes its errors.
        session: give it a session of its own.
    """

    def __init__(
        self, begin: Callable[[], int | None], out: IO[str], err: IO[str], *, session: bool = False
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            return
        code: object = 1
        try:
            if session:
                os.setsid()
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = begin()
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 0 if code is None else 1)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        if self.returncode is None:
            process, status = os.waitpid(self.pid, os.WNOHANG)
            if process:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 1500) -> int:
        """Wait for the end; returns the exit code."""
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("engine", timeout)
            time.sleep(0.05)
        assert self.returncode is not None
        return self.returncode


class Fork(Child):
    """The handle of an engine's process."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        stdout: IO[str],
        env: Mapping[str, str],
        **others: Any,
    ) -> None:
        def begin() -> None:
            for number in _open_files() - _inherited - set(pass_fds):
                with suppress(OSError):  # it was that of the listing
                    os.close(number)
            from engine_child import fork_workers

            fork_workers()
            log = logging.getLogger("kvtxn")  # the command has configured it, for itself
            log.handlers = []
            log.setLevel(logging.NOTSET)
            os.environ.clear()
            os.environ.update(env)
            sys.argv = list(command)
            engine_process.main()

        super().__init__(begin, stdout, stdout, session=True)


def run(folder: Path, *words: object) -> Ended:
    """Run a command of kvtxn in a folder, in a fork of this process."""

    def begin() -> int:
        _inherited.update(_open_files())
        engine_process.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": Fork})
        sys.argv = ["kvtxn", *map(str, words)]
        return main(sys.argv[1:])

    return _run(folder, begin)


def run_program(folder: Path, program: Path, *words: object) -> Ended:
    """Run a Python program in a folder, in a fork of this process; vLLM forks its workers."""

    def begin() -> None:
        from engine_child import fork_workers

        fork_workers()
        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # it logs to the standard output
        sys.path.insert(0, str(program.parent))
        sys.argv = [str(program), *map(str, words)]
        runpy.run_path(str(program), run_name="__main__")

    return _run(folder, begin)


def _run(folder: Path, work: Callable[[], int | None]) -> Ended:
    """Call a function in a folder and in a fork, with the variables that a command has."""

    def begin() -> int | None:
        _clear_new_memory()
        os.chdir(folder)
        os.environ.update(VARIABLES | {"PYTHONPATH": python_path()})
        for name in OF_THE_POOL:
            os.environ.pop(name, None)
        return work()

    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        code = Child(begin, out, err).wait()
    return Ended(code, (folder / "out").read_text(), (folder / "err").read_text())


def _clear_new_memory() -> None:
    """Let the C library fill new memory with zeros, in this process and in its forks.

    vLLM's Mamba-2 layers on a CPU compute with memory that nobody wrote, so what an engine says,
    and with it the steps in which a fault shows, would change from run to run.
    """
    with suppress(AttributeError):  # a library without it
        ctypes.CDLL(None).mallopt(M_PERTURB, 0xFF)


def _open_files() -> set[int]:
    """Return the descriptors of this process's open files."""
    return set(map(int, os.listdir("/proc/self/fd")))
