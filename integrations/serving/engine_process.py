"""An engine in a process of its own, told over a pipe what to do.

Several engines can then live side by side, each with settings of its own. Whatever goes wrong in
one of them is an ``EngineError`` with its last words, within a time limit: nobody waits without
end, and no process stays behind.

Pools of processes (multiprocessing, pebble, loky) were looked at: none of them ends what a worker
itself has started, as vLLM does, nor keeps a worker's output for the error.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from ...errors import KVTxnError

_MAIN: Final = f"from {__name__} import main; main()"

#: Lines of an engine's log that go into an error.
_LAST_LINES: Final = 40

#: A line of a log that names an exception, behind what vLLM's loggers put before each line.
_NAMED_ERROR: Final = re.compile(
    r"(?:^|\] |\) )((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception)(?:: .*)?)$"
)


class EngineError(KVTxnError, RuntimeError):
    """An engine did not start, failed, or gave no answer in time."""


class EngineProcess:
    """A handle on an engine's process.

    Args:
        command: arguments of the Python interpreter, see ``calling``; the descriptor of the
            engine's end of the pipe follows them.
        name: the engine's name in error messages.
        operation: the operation that needs the engine, for error messages.
        timeout: seconds that an answer may take, see below.
        environment: variables to set in the process, beside those of this process.
        quiet: keep the process's output for error messages instead of showing it.
        rest: says how to see the whole output, for errors that then quote of it the first line that
            names an error; "": they quote the last lines.

    Attributes:
        name: as given.
        timeout: seconds that each answer from now on may take.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        operation: str,
        timeout: float = 600.0,
        environment: Mapping[str, str] | None = None,
        quiet: bool = True,
        rest: str = "",
    ) -> None:
        self.name = name
        self._quiet, self._rest = quiet, rest
        self._operation = operation
        self.timeout = timeout
        self._failed = False
        self._pipe, theirs = multiprocessing.Pipe()
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115  # lives as long as the engine
            "w+", suffix=".log", errors="replace"
        )
        # Not multiprocessing's own processes: they would import the caller's main module anew.
        self._process = subprocess.Popen(
            [sys.executable, "-P", *command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log if quiet else None,
            stderr=subprocess.STDOUT if quiet else None,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # whatever the engine starts can be ended with it
        )
        theirs.close()

    def ask(self, message: object, when: str) -> Any:
        """Send a command, wait for its answer, for ``timeout`` seconds at most, and return it.

        Args:
            message: anything that can be pickled.
            when: the engine's occupation for error messages, such as "while it started".

        Raises:
            EngineError: the engine failed, ended, or gave no answer in time.
        """
        self.send(message)
        return self.answer(when)

    def send(self, message: object) -> None:
        """Send a command without waiting; ``answer`` waits for the engine's answer.

        Raises:
            EngineError: the engine has ended.
        """
        try:
            self._pipe.send(message)
        except OSError:
            raise self.error("has ended before its next command") from None

    def has_answered(self) -> bool:
        """Tell whether an answer waits, or the engine's end of the pipe is closed."""
        return self._pipe.poll(0)

    def answer(self, when: str) -> Any:
        """Wait for the next answer, for ``timeout`` seconds at most, and return it.

        Args:
            when: as for ``ask``.

        Raises:
            EngineError: as by ``ask``.
        """
        # Not for the pipe's end alone: the engine's own processes inherit it and may live on.
        deadline = time.monotonic() + self.timeout
        while not self._pipe.poll(0.1):
            if self._process.poll() is not None and not self._pipe.poll(0):
                raise self.error(f"ended {when}, exit code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self.error(f"gave no answer within {self.timeout:.0f} s {when}")
        try:
            failed, answer = self._pipe.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            raise self.error(f"ended {when}, exit code {self._process.returncode}") from None
        if failed:
            raise self.error(f"failed {when}: {answer}")
        return answer

    def stop(self, last: object = None, patience: float = 30.0) -> None:
        """End the process and every process that it started; a second time does nothing.

        Those that do not end by ``last`` are killed. The pipe is closed.

        Args:
            last: a command after which the engine ends by itself; None if no command does that.
            patience: seconds that the engine may take to end by itself; after an error none.
        """
        if self._pipe.closed:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if not self._failed and patience and last is not None:
                self._pipe.send(last)
                self._process.wait(timeout=patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it started can outlive it
        self._process.wait()
        self._pipe.close()

    def log(self) -> str:
        """Return everything that the engine has printed; "" if it was not ``quiet``."""
        return Path(self._log.name).read_text(errors="replace")

    def error(self, problem: str, about: str = "") -> EngineError:
        """Return an error that quotes the engine's log; ``stop`` will not wait for the engine then.

        With ``rest`` it quotes the first line that names an error, else or without such a line the
        last 40. An engine that is not ``quiet`` has shown its log already.

        Args:
            problem: the end of a sentence that begins with "the engine 'name' ".
            about: text that a log line must contain to be in the error.
        """
        self._failed = True
        hint = "its log is above" if not self._quiet else self._rest and self._first_error(problem)
        if hint:
            return EngineError(self._operation, f"the engine {self.name!r} {problem}", hint=hint)
        lines = [line for line in self.log().splitlines() if about in line]
        last = "\n".join(lines[-_LAST_LINES:]) or "(nothing)"
        return EngineError(
            self._operation,
            f"the engine {self.name!r} {problem}",
            hint=f"its log says last:\n{last}",
        )

    def _first_error(self, problem: str) -> str:
        """Return a hint with the log's first error; "" without one, or if ``problem`` has it.

        It is the cause of those after it: an engine's own processes fail first, and what waits for
        them knows only that they failed.
        """
        for line in self.log().splitlines():
            named = _NAMED_ERROR.search(line)
            if named is not None:
                told = named[1] in problem
                return "" if told else f"its log first says: {named[1]}; {self._rest}"
        return ""


@contextlib.contextmanager
def ending_with(stops: Sequence[Any]) -> Iterator[None]:
    """Stop engines at the end of the block; a SIGTERM or SIGHUP ends the block by SystemExit.

    The signals' handlers of before are put back afterwards.

    Args:
        stops: have a method ``stop(patience=...)`` each; more may be added meanwhile. After an
            exception they are not waited for.
    """
    patience = 0.0
    ends = (signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.signal(each, lambda number, _: sys.exit(128 + number)) for each in ends}
    try:
        yield
        patience = 30.0
    finally:
        for each in stops:
            each.stop(patience=patience)
        for number, handler in before.items():
            signal.signal(number, handler)


# -- in the engine's process ---------------------------------------------------------


def calling(module: str) -> list[str]:
    """Return the arguments of a Python process that calls ``serve`` with one end of a pipe.

    The function receives commands and sends ``(failed, answer)`` for each, until it returns.

    Args:
        module: full name of the module that has the function.
    """
    return ["-c", _MAIN, module]


def main() -> None:
    """Call ``serve`` of the module named on the command line, with the caller's pipe.

    The last two words are the module's name and the pipe's file number. An exception is printed,
    and its first line sent as an answer that failed. It returns quietly if the caller is gone.
    """
    pipe: Connection[Any, Any] = Connection(int(sys.argv[-1]))
    try:
        import_module(sys.argv[-2]).serve(pipe)
    except (EOFError, BrokenPipeError):  # the caller is gone
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send((True, f"{type(error).__name__}: {error}".splitlines()[0]))
