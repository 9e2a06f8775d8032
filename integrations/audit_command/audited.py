"""An engine under audit, whichever: how it is asked, and what it reports."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from ..serving.engine_sizes import EngineSizes
from .jobs import Job, Refused


class Engine(Protocol):
    """An asynchronous engine."""

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[Any, None]:
        """Make a request; yields its outputs as they come.

        ``output.outputs[0]`` has the ``token_ids`` since the last output, and the
        ``finish_reason``: ``"length"``, ``"stop"`` or another word at the end, None before.
        """

    async def abort(self, request_id: str) -> None:
        """Give a request up."""

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> object:
        """Empty the prefix cache."""


class Requests(Protocol):
    """The objects that an engine is asked with."""

    def prompt(self, given: str | Sequence[int]) -> object:
        """Return a prompt of a text, or of token ids."""

    def sampling(
        self, most: int, among: Sequence[int] | None = None, stop: int | None = None
    ) -> object:
        """Return greedy sampling of ``most`` tokens, or up to ``stop``, handed over as they come.

        Args:
            most: output tokens.
            among: the only tokens that the output may have; None: any.
            stop: a token that ends the output; None: none does.
        """

    def turn(self, tokens: Sequence[int], sampling: object) -> object:
        """Return a turn of a streaming session.

        Raises:
            NotImplementedError: the engine has no streaming sessions.
        """


@attrs.frozen(kw_only=True)
class Audited:
    """An engine that runs under the ledger.

    Attributes:
        engine: the engine.
        requests: makes what it is asked with.
        sizes: its sizes.
        arguments: all arguments that it was started with.
        facts: the engine in words, by name of the fact.
        counters: returns the counters of each rank.
        recordings: returns the recording of each rank, with the client's names of requests.
        stop: ends the engine and its processes.
    """

    engine: Engine
    requests: Requests
    sizes: EngineSizes
    arguments: dict[str, Any]
    facts: dict[str, str]
    counters: Callable[[], Awaitable[list[dict[str, float]]]]
    recordings: Callable[[], Awaitable[list[dict[str, Any]]]]
    stop: Callable[[], None]


class Front(Protocol):
    """A kind of engine: a module of this package."""

    def environment(self, job: Job) -> Mapping[str, str]:
        """Return variables of the engine's process."""

    async def start(self, job: Job) -> Audited | Refused:
        """Start an engine in this process, with what its workloads need."""
