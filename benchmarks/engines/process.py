"""A vLLM engine in its own process, and the commands that this process sends it.

Engines of several policies live side by side and take turns, so that compared numbers were measured
within seconds of each other.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

from ...integrations.serving.engine_process import (
    EngineError,
    EngineProcess,
    calling,
    ending_with,
)
from .audits import AUDITS, Audited
from .child import Held, Measured
from .hybrids import RECURRENT
from .load import Work

__all__ = ["Engine", "EngineError", "EngineSpec", "running"]

#: Settings of an engine's process, unless the user's own environment has them; the second lets
#: rates of acceptance be set in its workers.
_DEFAULTS: Final = {"HF_HUB_OFFLINE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


@attrs.frozen(kw_only=True)
class EngineSpec:
    """An engine to start.

    Attributes:
        policy: a kvtxn policy; ``"stock"``; of ``AUDITS``: stock with the audit alone; or of
            ``RECURRENT``: how a hybrid's states are held, under policy "auto".
        arguments: arguments of ``vllm.LLM``.
        environment: variables that the process has before it imports vLLM.
        timeout: seconds that the start, or one repetition, may take.
        label: the engine's name in a result; by default its policy.
    """

    policy: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = {}
    timeout: float = 600.0
    label: str = attrs.Factory(lambda self: self.policy, takes_self=True)

    @property
    def audited(self) -> bool:
        """True if an audit watches the engine; it has no windows then."""
        return self.policy in AUDITS

    @property
    def config(self) -> dict[str, Any]:
        """The engine's ``additional_config``: its policy, audit or states; empty for stock."""
        if self.policy == "stock":
            return {}
        if self.audited:
            return {"kvtxn": {"audit": self.policy}}
        if self.policy in RECURRENT:
            return {"kvtxn": {"policy": "auto", "recurrent": self.policy}}
        return {"kvtxn": {"policy": self.policy}}


@contextlib.contextmanager
def running(specs: Iterable[EngineSpec]) -> Iterator[list[Engine]]:
    """Start engines side by side, and yield them when all are ready.

    All are stopped at the end of the block, even after a SIGTERM.

    Raises:
        EngineError: one of them did not start, or runs without kvtxn.
    """
    engines: list[Engine] = []
    with ending_with(engines):
        for spec in specs:
            engines.append(Engine(spec))
        for engine in engines:
            engine.ready()
        yield engines


class Engine:
    """A handle on the engine's process.

    Args:
        spec: the engine to start; ``ready`` waits for the end of its start.

    Attributes:
        spec: as given.
        process: the engine's process.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        defaults = {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()}
        self.process = EngineProcess(
            calling("kvtxn.benchmarks.engines.child"),
            name=spec.label,
            operation="bench vllm",
            timeout=spec.timeout,
            environment=defaults | dict(spec.environment),
        )
        self.process.send((dict(spec.arguments), spec.config))

    def ready(self) -> None:
        """Wait until the engine runs, with kvtxn active if the spec has a policy or an audit.

        Raises:
            EngineError: the engine did not start, or runs without kvtxn.
        """
        self.process.answer("while it started")
        if self.spec.audited:
            self.audited()
        elif self.spec.policy != "stock":
            active = [rank.get("kvtxn_active") for rank in self.snapshot()]
            if not active or not all(active):
                raise self.process.error("runs without kvtxn", "kvtxn")

    def run(self, work: Work) -> Measured:
        """Run the work's requests once, and wait for the outcome.

        Raises:
            EngineError: the engine failed, or took longer than the spec allows; so do other calls.
        """
        measured: Measured = self.process.ask(("run", work), "during a repetition")
        return measured

    def reported(self) -> float:
        """Ask how many requests of the longest length fit, as vLLM reports it."""
        return float(self.process.ask(("reported", None), "while its cache was read"))

    def hold(self, work: Work) -> Held:
        """Run the work's requests, all at once; return how many ran at a time.

        The engine's core has to run in the engine's process: it is asked there after each step.
        """
        held: Held = self.process.ask(("hold", work), "while its requests were counted")
        return held

    def snapshot(self) -> list[dict[str, float]]:
        """Read the plug-in's counters per rank; empty for stock."""
        found: list[dict[str, float]]
        found = self.process.ask(("snapshot", None), "while its counters were read")
        return found

    def audited(self) -> list[Audited]:
        """Read the audit's counts since its start, by rank; empty without an audit.

        Raises:
            EngineError: the audit of a rank does not watch, or does not watch any more.
        """
        if not self.spec.audited:
            return []
        found: list[Audited] = self.process.ask(("audited", None), "while its audit was read")
        active = [rank.counters.get("kvtxn_audit_active") for rank in found]
        if not active or not all(active):
            raise self.process.error("runs without its audit", "kvtxn")
        return found

    def memory(self) -> list[dict[str, int] | None]:
        """Return ``audits.memory`` by rank: bytes on the device; None without an audit."""
        found: list[dict[str, int] | None]
        found = self.process.ask(("memory", None), "while its audit was measured")
        return found

    def clock(self, work: Work) -> list[dict[str, float] | None]:
        """Run the work once; return ``host_timer``'s times, in microseconds, of each rank."""
        found: list[dict[str, float] | None]
        found = self.process.ask(("clock", work), "while its windows were timed")
        return found

    def announced(self) -> str | None:
        """Return the newest line in the log by which kvtxn became active, its event left out.

        None without one.
        """
        event = "kvtxn.audit_active" if self.spec.audited else "kvtxn.active"
        said = [line.partition(event)[2] for line in self.log().splitlines()]
        return next((text.lstrip("' ").rstrip() for text in reversed(said) if text), None)

    def stop(self, patience: float = 30.0) -> None:
        """End the process and every process that it started; read its counters before.

        Args:
            patience: seconds in which a healthy engine may end by itself.
        """
        self.process.stop(("stop", None), patience)

    def log(self) -> str:
        """Return all that the engine has printed so far."""
        return self.process.log()
