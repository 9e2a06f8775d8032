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
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Final

import attrs

from ..errors import KVTxnError
from . import vllm_child
from .vllm_child import Measured
from .vllm_work import Work

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
    """

    policy: str
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}
    timeout: float = 600.0

    @property
    def label(self) -> str:
        """What it is called in a result: the policy, and the acceptance mode if one was named."""
        mode = self.settings.get("acceptance")
        return self.policy if mode is None else f"{self.policy}+{mode}"

    @property
    def config(self) -> dict[str, Any]:
        """VLLM's ``additional_config``; empty for stock."""
        if self.policy == "stock":
            return {}
        return {"kvtxn": {"policy": self.policy, **self.settings}}


class Engine:
    """A handle on the engine's process.

    Args:
        spec: what to start; ``ready`` waits until it has.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115  # lives as long as the engine
            "r", suffix=".log", errors="replace"
        )
        self._process = context.Process(
            target=vllm_child.serve,
            args=(
                dict(spec.arguments),
                spec.config,
                dict(spec.environment),
                theirs,
                self._log.name,
            ),
        )
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until the engine runs, and kvtxn in it where that was asked for."""
        self._answer("while it started")
        if self.spec.policy != "stock":
            active = [rank.get("kvtxn_active") for rank in self.snapshot()]
            if not active or not all(active):
                raise self._error("runs without kvtxn", "kvtxn")

    def run(self, work: Work) -> Measured:
        """Do one repetition."""
        self._send("run", work)
        measured: Measured = self._answer("during a repetition")
        return measured

    def snapshot(self) -> list[dict[str, float]]:
        """The plugin's counters per rank; empty for stock."""
        self._send("snapshot", None)
        counters: list[dict[str, float]] = self._answer("while its counters were read")
        return counters

    def announced(self) -> str | None:
        """What the plug-in said that it does, in the log; None where it said nothing."""
        said = [line.partition("vllm.active")[2] for line in self.log().splitlines()]
        return next((text.strip("' ") for text in reversed(said) if text), None)

    def stop(self) -> None:
        """End the process and all that it started; its counters have been read by then."""
        with contextlib.suppress(OSError):
            self._pipe.send(("stop", None))
        self._process.join(timeout=30)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # An engine's own processes can outlive their work; the child leads their group.
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()

    def log(self) -> str:
        """What the engine printed."""
        self._log.seek(0)
        return self._log.read()

    def _send(self, command: str, work: Work | None) -> None:
        try:
            self._pipe.send((command, work))
        except OSError:
            raise self._error("has ended before its next command") from None

    def _answer(self, when: str) -> Any:
        # Not the end of the pipe alone: the engine's own processes inherit it and may live on.
        deadline = time.monotonic() + self.spec.timeout
        while not self._pipe.poll(0.1):
            if not self._process.is_alive() and not self._pipe.poll(0):
                raise self._error(f"ended {when}, exit code {self._process.exitcode}")
            if time.monotonic() > deadline:
                raise self._error(f"gave no answer within {self.spec.timeout:.0f} s {when}")
        try:
            failed, answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(timeout=5)
            raise self._error(f"ended {when}, exit code {self._process.exitcode}") from None
        if failed:
            raise self._error(f"failed {when}: {answer}")
        return answer

    def _error(self, problem: str, about: str = "") -> EngineError:
        lines = [line for line in self.log().splitlines() if about in line]
        last = "\n".join(lines[-_LAST_LINES:]) or "(nothing)"
        return EngineError(
            "bench vllm",
            f"the engine {self.spec.label!r} {problem}",
            hint=f"its log says last:\n{last}",
        )
