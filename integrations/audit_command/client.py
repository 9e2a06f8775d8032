"""``EngineClient``: the side of an engine that the workloads of ``kvtxn audit`` use."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import attrs

from ..serving.engine_sizes import EngineSizes
from .audited import Engine, Requests
from .jobs import Job, sentence
from .prompts import Prompt

Tokens = list[int]

#: Seconds that one request may take before it is given up.
_STUCK: Final = 600.0


class EngineClient:
    """The side of an engine that a workload uses.

    Args:
        engine: the engine.
        requests: makes what the engine is asked with.
        sizes: its sizes.
        job: the job, with all arguments that the engine was started with.
        tell: is called with the number of requests that are done.

    Attributes:
        chance: the workload's random numbers; their seed is the user's.
        max_length: tokens of a request, prompt and output together.
        block_size: tokens per block.
        budget: requests that the workload should make; it may make a few more.
        made: requests made so far, each turn of a session counted as one.
        done: requests that came to an end, whichever.
        aborted: requests that the workload aborted.
        failed: the reasons of requests that failed.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Requests,
        sizes: EngineSizes,
        job: Job,
        tell: Callable[[int], None],
    ) -> None:
        self.chance, self._seed = random.Random(job.seed), job.seed
        self.max_length = sizes.max_length
        self.block_size = sizes.block_size
        self.budget = job.requests
        self.made = 0
        self.aborted = 0
        self.failed: list[str] = []
        self._engine = engine
        self._requests = requests
        self._tell = tell
        self._connected = job.engine_args.get("kv_transfer_config") is not None
        self._urgent = job.engine_args.get("scheduling_policy") == "priority"
        self._chance = random.Random(job.seed)
        self.done = 0
        self._vocabulary = int(sizes.vocabulary)
        # Special ids, such as an image's, are among the highest of a vocabulary.
        self._ids = range(min(3, sizes.vocabulary - 1), max(4, sizes.vocabulary // 2))

    def phrase(self, count: int) -> Tokens:
        """Return random token ids, ``count`` of them, from the lower half of the vocabulary."""
        return self.chance.choices(self._ids, k=count)

    def fitted(self, prompt: Sequence[int], most: int) -> tuple[Tokens, int]:
        """Return a prompt's beginning and a number of output tokens that fit the engine together.

        The output is cut to half of the longest request, then the prompt to the rest.
        """
        most = max(1, min(most, self.max_length // 2))
        return list(prompt)[: max(1, self.max_length - most - 1)], most

    def fitted_turns(self, turns: Sequence[tuple[Sequence[int], int]]) -> list[tuple[Tokens, int]]:
        """Return turns that fit the engine together: the first one cut, the last ones left out.

        vLLM does not refuse a session that is too long: its engine ends. No later turn's tokens are
        cut: if one has fewer new tokens than there are drafts, the engine may end, too. A turn's
        output may be cut.
        """
        first, *others = turns
        fitted = [self.fitted(*first)]
        left = self.max_length - 1 - len(fitted[0][0]) - fitted[0][1]
        for tokens, most in others:
            if len(tokens) >= left:
                break
            fitted.append((list(tokens), min(most, left - len(tokens))))
            left -= len(tokens) + fitted[-1][1]
        return fitted

    async def ask(
        self,
        prompt: Sequence[int],
        most: int,
        *,
        abort: int | None = None,
        among: Sequence[int] | None = None,
    ) -> Tokens:
        """Make a request, and return its output tokens; those so far if it fails or is aborted.

        A failure, or no end within ``_STUCK`` seconds, goes to ``failed``.

        Args:
            prompt: token ids; cut at the end where prompt and output would not fit.
            most: output tokens.
            abort: abort the request after so many output tokens; None: let it end.
            among: the only tokens that the output may have; the fewer they are, the more of a
                lookup drafter's drafts are accepted. None: any token.
        """
        text, most = self.fitted(prompt, most)
        number = self._number()
        kind = "request" if abort is None else "aborted"
        given, sampling = self._requests.prompt(text), self._requests.sampling(most, among)
        return await self._listen(f"{kind} {number}", given, sampling, abort)

    async def talk(
        self,
        turns: Sequence[tuple[Sequence[int], int]],
        *,
        among: Sequence[int] | None = None,
        stop: int | None = None,
    ) -> list[Tokens]:
        """Make a streaming session, turn by turn, and return the output tokens of each turn.

        If the engine fails or nothing ends for ``_STUCK`` seconds, that goes to ``failed``, and the
        turns that began are returned. Turns that do not fit the engine are cut or left out.

        Args:
            turns: each turn's new tokens, and the most output tokens of it.
            among: as for ``ask``.
            stop: a token that ends a turn, if the turn gets there.
        """
        turns = self.fitted_turns(turns)
        outputs: list[Tokens] = []
        numbers = [self._number() for _ in turns]
        name, ended = f"session {numbers[0]}", asyncio.Event()

        async def inputs() -> AsyncIterator[object]:
            for tokens, most in turns:
                outputs.append([])
                yield self._requests.turn(tokens, self._requests.sampling(most, among, stop))
                await ended.wait()
                ended.clear()

        try:
            first = self._requests.sampling(turns[0][1], among, stop)
            stream = self._engine.generate(inputs(), first, name, **self._urgency())
            async with asyncio.timeout(_STUCK):
                async for output in stream:
                    outputs[-1] += output.outputs[0].token_ids
                    if output.outputs[0].finish_reason is not None:
                        ended.set()
        except Exception as error:
            self.failed.append(f"{name}: {sentence(error)}")
        for _ in turns:
            self._end()
        return outputs

    async def reset(self, *, running: bool = False) -> None:
        """Ask the engine to clear its prefix cache; nothing happens where a busy engine refuses.

        An error goes to ``failed``.

        Args:
            running: preempt all requests that run, so that nothing is in use. With a connector
                nothing is cleared then.
        """
        if running and self._connected:
            return  # vLLM 0.32.0 ends with an AssertionError if a connector's load is on its way
        try:
            await self._engine.reset_prefix_cache(reset_running_requests=running)
        except Exception as error:  # of the engine's process, of any class
            self.failed.append(f"reset: {sentence(error)}")

    async def answer(self, prompts: Sequence[Prompt]) -> None:
        """Make the requests of the user's file, each at its time, and wait for all.

        In a file without times eight are under way at once. In a file with times, a request without
        one is made at the beginning, which is the first of these times.
        """
        times = [prompt.at for prompt in prompts if prompt.at is not None]
        gate, begin = asyncio.Semaphore(len(prompts) if times else 8), min(times, default=0.0)

        async def one(prompt: Prompt) -> None:
            await asyncio.sleep((prompt.at or begin) - begin)
            async with gate:
                await self._answer(self._sized(prompt))

        await asyncio.gather(*map(one, prompts))

    async def _answer(self, prompt: Prompt) -> None:
        """Make one request of the user's file, and wait for its end; a failure goes to ``failed``.

        So does a token id beyond the vocabulary, without a request.
        """
        name = f"line {prompt.line}"
        self._number()
        unknown = max(prompt.tokens or [0])
        if unknown >= self._vocabulary:  # not every vLLM refuses it: engines end
            what = f"token id {unknown} of a vocabulary of {self._vocabulary}"
            self.failed.append(f"{name}: {what}")
            self._end()
            return
        given = self._requests.prompt(
            (prompt.text or "") if prompt.tokens is None else prompt.tokens
        )
        sampling = self._requests.sampling(prompt.max_tokens)
        await self._listen(name, given, sampling, prompt.leave_after)

    def _sized(self, prompt: Prompt) -> Prompt:
        """Return a line of a trace with tokens that fit the engine; other prompts as they are."""
        sized = prompt.sized(self.block_size, self._named_block)
        if sized is prompt:
            return prompt
        tokens, most = self.fitted(sized.tokens or (), sized.max_tokens)
        return attrs.evolve(sized, tokens=tokens, max_tokens=most)

    def _named_block(self, name: int) -> Tokens:
        """Return random tokens for a block of a trace, the same ones for the same name and seed."""
        return random.Random(f"{self._seed} {name}").choices(self._ids, k=self.block_size)

    async def settle(self) -> None:
        """Make one last short request, so that the engine processes the ends of all others.

        It is not part of the workload, so ``made`` counts it only if it fails.
        """
        failed = len(self.failed)
        await self.ask(self.phrase(4), 2)
        self.made -= failed == len(self.failed)

    async def _listen(
        self, name: str, given: object, sampling: object, abort: int | None
    ) -> Tokens:
        """Make a request, and return the output tokens that came; a failure is noted, not raised.

        It is aborted after ``abort`` tokens, unless that is None, and counted as done in any case.
        """
        tokens: Tokens = []
        try:
            stream = self._engine.generate(given, sampling, name, **self._urgency())
            async with asyncio.timeout(_STUCK):
                async for output in stream:
                    tokens += output.outputs[0].token_ids
                    ended = output.outputs[0].finish_reason
                    if ended not in (None, "length", "stop"):
                        self.failed.append(f"{name}: ended with {ended!r}")
                    if abort is not None and len(tokens) >= abort:
                        self.aborted += 1
                        await self._engine.abort(name)
                        await stream.aclose()
                        break
        except Exception as error:
            self.failed.append(f"{name}: {sentence(error)}")
        self._end()
        return tokens

    def _urgency(self) -> dict[str, int]:
        """Return a random priority as an argument of a request; empty without priorities."""
        return {"priority": self._chance.randint(0, 3)} if self._urgent else {}

    def _number(self) -> int:
        """Count a request as made, and return its number, from 1 on."""
        self.made += 1
        return self.made

    def _end(self) -> None:
        """Count a request as done, and tell how many are."""
        self.done += 1
        self._tell(self.done)
