"""The requests of a soak: each is accounted for, and some are kept to be asked again."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from ...integrations.audit_command.client import EngineClient, Tokens
from ...integrations.audit_command.jobs import Job
from ...integrations.audit_command.vllm_engine import VllmRequests

#: Requests of a round that are kept, of each client.
_KEPT: Final = 4


@attrs.define
class Account:
    """The requests of a soak; each turn of a session is one.

    Attributes:
        asked: requests that were made.
        finished: requests that ended with all of their tokens.
        aborted: requests that were aborted in the middle.
        lost: requests that did neither.
        why: the reasons of the first lost requests, in words.
        numbers: a number for each request's name: an abort ends all requests of a name.
    """

    asked: int = 0
    finished: int = 0
    aborted: int = 0
    lost: int = 0
    why: list[str] = attrs.field(factory=list)
    numbers: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))

    def lose(self, why: str) -> None:
        """Count a lost request; its reason is kept for the first ten."""
        self.lost += 1
        if len(self.why) < 10:
            self.why.append(why)


@attrs.frozen
class Said:
    """A request, and the texts that it was answered with.

    Attributes:
        prompt: token ids.
        most: number of output tokens.
        among: the only tokens that the output may have; None: any.
        texts: output tokens, of each time that it was asked.
    """

    prompt: Tokens
    most: int
    among: Tokens | None
    texts: list[Tokens]


class SoakClient(EngineClient):
    """A client of one workload that accounts for each request.

    Args:
        engine: vLLM's ``AsyncLLM``.
        sizes: its sizes.
        seed: of the workload's random numbers.
        account: the account, which several clients share.
        patience: seconds after which a request counts as lost.
        keeps: keep some requests, for ``kept``.
        engine_args: the engine's arguments, which decide what requests it can serve.
    """

    def __init__(
        self,
        engine: Any,
        sizes: Any,
        seed: int,
        account: Account,
        patience: float,
        *,
        keeps: bool,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        job = Job(engine_args=dict(engine_args or {}), workloads=(), seed=seed)
        super().__init__(engine, VllmRequests(), sizes, job, _tell_nobody)
        self._account, self._patience = account, patience
        self._choice, self._seen = random.Random(seed + 1), 0
        self._keeps, self._kept = keeps, list[Said]()

    async def ask(
        self,
        prompt: Sequence[int],
        most: int,
        *,
        abort: int | None = None,
        among: Sequence[int] | None = None,
    ) -> Tokens:
        """Make a request as ``EngineClient.ask`` does, and put it into the account.

        It counts as finished with all its tokens, as aborted after ``abort`` of them, else as lost.
        Without an answer within the patience it is lost, and has no tokens.
        """
        text, most = self.fitted(prompt, most)
        account, tokens = self._account, list[int]()
        account.asked += 1
        failures = len(self.failed)
        try:
            async with asyncio.timeout(self._patience):
                tokens = await super().ask(text, most, abort=abort, among=among)
        except TimeoutError:
            account.lose(f"no answer within {self._patience:.0f} s")
            return tokens
        if len(tokens) == most:
            account.finished += 1
            if self._keeps and abort is None:
                self._keep(Said(text, most, None if among is None else [*among], [tokens]))
        elif abort is not None and len(tokens) >= abort:
            account.aborted += 1
        else:
            last = self.failed[-1] if len(self.failed) > failures else "no error"
            account.lose(f"{len(tokens)} of {most} tokens; {last}")
        return tokens

    async def talk(
        self,
        turns: Sequence[tuple[Sequence[int], int]],
        *,
        among: Sequence[int] | None = None,
        stop: int | None = None,
    ) -> list[Tokens]:
        """Make a streaming session as ``EngineClient.talk`` does; put each turn into the account.

        A turn is lost if it ends early, or if the session does not end within the patience; then
        there are no outputs, and nothing raises.
        """
        account, outputs = self._account, list[Tokens]()
        turns = self.fitted_turns(turns)
        account.asked += len(turns)
        try:
            async with asyncio.timeout(self._patience):
                outputs = await super().talk(turns, among=among, stop=stop)
        except TimeoutError:
            account.lose(f"no end of a session within {self._patience:.0f} s")
            account.lost += len(turns) - 1
            return outputs
        said = [*outputs, *[Tokens()] * len(turns)]  # nothing of turns that never began
        for (_, most), tokens in zip(turns, said, strict=False):
            if len(tokens) == most or (tokens and tokens[-1] == stop):
                account.finished += 1
            else:
                account.lose(f"a turn of a session: {len(tokens)} of {most} tokens")
        return outputs

    def kept(self) -> list[Said]:
        """Return the requests that were kept since the last call; keep none of them any more."""
        kept, self._kept, self._seen = self._kept, [], 0
        return kept

    def _number(self) -> int:
        """Count a request, and return a number that no other client's request has."""
        super()._number()
        return next(self._account.numbers)

    def _keep(self, said: Said) -> None:
        """Keep a uniform random sample, of ``_KEPT`` requests, of those since the last ``kept``."""
        self._seen += 1
        if len(self._kept) < _KEPT:
            self._kept.append(said)
        elif (place := self._choice.randrange(self._seen)) < _KEPT:
            self._kept[place] = said


def _tell_nobody(done: int) -> None:
    """Do nothing with the number of finished requests."""


#: Gets one sample or the texts of some requests.
Tell = Callable[[dict[str, Any]], None]
