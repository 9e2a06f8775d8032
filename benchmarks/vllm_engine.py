"""One vLLM engine in a process of its own, told what to run over a pipe.

Engines of several policies live side by side and take turns, so that what is compared was
measured within seconds of each other. Whatever goes wrong in there, the answer is an
``EngineError`` with the engine's last words, within the time limit: never a wait without end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ..errors import KVTxnError
from .vllm_child import Measured
from .vllm_work import Work

_MAIN: Final = "from kvtxn.benchmarks.vllm_child import main; main()"

#: What an engine's process has set unless the user's own environment says otherwise; the second
#: lets rates of acceptance be set in its workers.
_DEFAULTS: Final = {"HF_HUB_OFFLINE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}

#: Lines of an engine's log that go into an error.
_LAST_LINES: Final = 40


class EngineError(KVTxnError, RuntimeError):
    """An engine did not start, failed, or took too long."""


@attrs.frozen(kw_only=True)
class EngineSpec:
    """What to start.

    Attributes:
        policy: a kvtxn policy, or ``"stock"``.
        arguments: of ``vllm.LLM``.
        settings: more of kvtxn's settings.
        environment: set before vLLM is imported.
        timeout: seconds that the start, or one repetition, may take.
        label: what it is called in a result; its policy, if nothing else is said.
    """

    policy: str
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}
    timeout: float = 600.0
    label: str = attrs.Factory(lambda self: self.policy, takes_self=True)

    @property
    def config(self) -> dict[str, Any]:
        """The engine's ``additional_config``; empty for stock."""
        if self.policy == "stock":
            return {}
        return {"kvtxn": {"policy": self.policy, **self.settings}}


@contextlib.contextmanager
def running(specs: Iterable[EngineSpec]) -> Iterator[list[Engine]]:
    """Engines that run side by side; all are ended with the block, even by a SIGTERM.

    Raises:
        EngineError: one of them did not start.
    """
    engines: list[Engine] = []
    patience = 0.0  # for whoever fails or is interrupted
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for spec in specs:
            engines.append(Engine(spec))
        for engine in engines:
            engine.ready()
        yield engines
        patience = 30.0
    finally:
        for engine in engines:
            engine.stop(patience)
        signal.signal(signal.SIGTERM, before)


class Engine:
    """A handle on the engine's process.

    Args:
        spec: what to start; ``ready`` waits until it has.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._failed = False
        self._pipe, theirs = multiprocessing.Pipe()
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115  # lives as long as the engine
            "w+", suffix=".log", errors="replace"
        )
        # Not multiprocessing's own processes: they would import the caller's main module anew.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**_DEFAULTS, **os.environ, **spec.environment},
            start_new_session=True,  # whatever the engine starts can be ended with it
        )
        theirs.close()
        self._send((dict(spec.arguments), spec.config))

    def ready(self) -> None:
        """Wait until the engine runs, and kvtxn in it where that was asked for."""
        self._answer("while it started")
        if self.spec.policy != "stock":
            active = [rank.get("kvtxn_active") for rank in self.snapshot()]
            if not active or not all(active):
                raise self._error("runs without kvtxn", "kvtxn")

    def run(self, work: Work) -> Measured:
        """Do one repetition."""
        self._send(("run", work))
        measured: Measured = self._answer("during a repetition")
        return measured

    def switch(self, on: bool) -> None:
        """From now on steps have windows, or are stock's; for an engine under ``undo``."""
        self._send(("switch", on))
        self._answer("while its windows were switched")

    def snapshot(self) -> list[dict[str, float]]:
        """The plugin's counters per rank; empty for stock."""
        self._send(("snapshot", None))
        counters: list[dict[str, float]] = self._answer("while its counters were read")
        return counters

    def clock(self, work: Work) -> list[dict[str, float] | None]:
        """One more repetition, in which windows are timed on each rank's host; ``vllm_clock``."""
        self._send(("clock", work))
        found: list[dict[str, float] | None] = self._answer("while its windows were timed")
        return found

    def announced(self) -> str | None:
        """What the plug-in said that it does, in the log; None where it said nothing."""
        said = [line.partition("vllm.active")[2] for line in self.log().splitlines()]
        return next((text.lstrip("' ").rstrip() for text in reversed(said) if text), None)

    def stop(self, patience: float = 30.0) -> None:
        """End the process and all that it started; its counters have been read by then.

        Args:
            patience: seconds in which an engine that is well may end by itself.
        """
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if not self._failed and patience:
                self._pipe.send(("stop", None))
                self._process.wait(timeout=patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it started can outlive it
        self._process.wait()

    def log(self) -> str:
        """What the engine printed."""
        return Path(self._log.name).read_text(errors="replace")

    def _send(self, message: object) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            raise self._error("has ended before its next command") from None

    def _answer(self, when: str) -> Any:
        # Not the end of the pipe alone: the engine's own processes inherit it and may live on.
        deadline = time.monotonic() + self.spec.timeout
        while not self._pipe.poll(0.1):
            if self._process.poll() is not None and not self._pipe.poll(0):
                raise self._error(f"ended {when}, exit code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self._error(f"gave no answer within {self.spec.timeout:.0f} s {when}")
        try:
            failed, answer = self._pipe.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            raise self._error(f"ended {when}, exit code {self._process.returncode}") from None
        if failed:
            raise self._error(f"failed {when}: {answer}")
        return answer

    def _error(self, problem: str, about: str = "") -> EngineError:
        self._failed = True
        lines = [line for line in self.log().splitlines() if about in line]
        last = "\n".join(lines[-_LAST_LINES:]) or "(nothing)"
        return EngineError(
            "bench vllm",
            f"the engine {self.spec.label!r} {problem}",
            hint=f"its log says last:\n{last}",
        )


@attrs.frozen(eq=False)
class Switched:
    """An engine as it runs with its windows switched on, or off: then it is stock.

    What differs between two engines of one configuration (the kernels that each of them compiled,
    where its memory lies) is the same here. Only under ``undo``: under ``deferred`` the captured
    forward itself is another.

    Attributes:
        engine: one with windows.
        spec: what to be; its policy says whether windows are on.
    """

    engine: Engine
    spec: EngineSpec

    def run(self, work: Work) -> Measured:
        """Do one repetition this way."""
        self.engine.switch(self.spec.policy != "stock")
        return self.engine.run(work)

    def snapshot(self) -> list[dict[str, float]]:
        """The plugin's counters per rank; empty for stock."""
        if self.spec.policy == "stock":
            return []
        self.engine.switch(True)
        return self.engine.snapshot()

    def clock(self, work: Work) -> list[dict[str, float] | None]:
        """One more repetition, with windows that are timed."""
        self.engine.switch(True)
        return self.engine.clock(work)

    def announced(self) -> str | None:
        """What the plug-in said that it does."""
        return None if self.spec.policy == "stock" else self.engine.announced()
