"""The job of ``kvtxn audit`` for an engine's process, and the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs

from .prompts import Prompt


@attrs.frozen(kw_only=True)
class Job:
    """An engine and its workloads.

    Attributes:
        engine_args: arguments of the engine; vLLM's ``additional_config`` asks for the audit.
        engine: ``"vllm"`` or ``"sglang"``.
        settings: of an audit that is asked for by an environment variable, as JSON.
        workloads: names from ``WORKLOADS``, to be played in turn; none to play ``prompts``.
        prompts: the prompts of the user's file.
        requests: requests to make, at least.
        seed: of the workload's random numbers.
        room: factor on the number of blocks, for workloads that give the engine few.
        log_level: log level of kvtxn and of the engine in its process; "debug" shows both logs.
    """

    engine_args: dict[str, Any]
    workloads: tuple[str, ...]
    engine: str = "vllm"
    settings: str = ""
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

    @property
    def violations(self) -> list[dict[str, Any]]:
        """The violations of all ranks, rank after rank."""
        return [each for recording in self.recordings for each in recording["violations"]]


def renamed(recording: dict[str, Any], own: Callable[[str], str]) -> dict[str, Any]:
    """Return a copy of a recording with the client's names of requests.

    Args:
        recording: as an engine returns it; unchanged. Renamed are ``name`` of each of its
            ``requests``, and ``request`` and ``written_request`` of each of its ``violations``.
        own: returns the client's name for an engine's. Not called for None, which stays.
    """

    def name(given: str | None) -> str | None:
        return given and own(given)

    return {
        **recording,
        "requests": [{**life, "name": name(life["name"])} for life in recording["requests"]],
        "violations": [
            {**v, "request": name(v["request"]), "written_request": name(v["written_request"])}
            for v in recording["violations"]
        ],
    }


def sentence(error: Exception) -> str:
    """Return an error as one line: pydantic's first message, or the first line of ``str(error)``.

    The name of its class if that line is empty.
    """
    listed = getattr(error, "errors", None)
    if callable(listed):
        return str(listed()[0]["msg"])
    return str(error).partition("\n")[0] or type(error).__name__
