"""The job of ``kvtxn audit`` for an engine's process, and the answers."""

from __future__ import annotations

from typing import Any, Final

import attrs

from .prompts import Prompt


@attrs.frozen(kw_only=True)
class Job:
    """An engine and its workloads.

    Attributes:
        engine_args: arguments of the engine; ``additional_config`` asks for the audit.
        workloads: names from ``WORKLOADS``, to be played in turn; none to play ``prompts``.
        prompts: the prompts of the user's file.
        requests: requests to make, at least.
        seed: of the workload's random numbers.
        room: factor on the number of blocks, for workloads that give the engine few.
        log_level: log level of kvtxn and vLLM in the engine's process; "debug" shows both logs.
    """

    engine_args: dict[str, Any]
    workloads: tuple[str, ...]
    prompts: tuple[Prompt, ...] = ()
    requests: int = 100
    seed: int = 0
    room: int = 1
    log_level: str = "error"


#: The command that ends a job early; the result covers the time until then.
STOP: Final = "stop"


@attrs.frozen
class Played:
    """Progress of a job: the workload that is played, and the requests that are done."""

    workload: str
    done: int


@attrs.frozen
class Refused:
    """The answer of an engine's process that did not start an engine: the reason, one sentence."""

    why: str


@attrs.frozen(kw_only=True)
class Found:
    """The result of an engine's workloads.

    Attributes:
        engine: the engine in words, by name of the fact.
        counters: the counters of each rank.
        recordings: the recording of each rank, see ``RecordingLedger.recording``.
        requests: requests made, each turn of a session counted as one.
        aborted: requests that the workload aborted.
        failed: the reasons of requests that the engine refused or did not finish.
        seconds: wall time of the workloads, the engine's start not included.
        interrupted: the user ended the job before its end: ``requests`` lacks the
            requests that were not made.
    """

    engine: dict[str, str]
    counters: list[dict[str, float]]
    recordings: list[dict[str, Any]]
    requests: int
    aborted: int
    failed: list[str]
    seconds: float
    interrupted: bool = False
