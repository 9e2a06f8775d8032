"""The workloads of ``kvtxn audit``: requests that are made to shake an engine.

Each is a coroutine over an ``EngineClient``. Prompts are random token ids with phrases that repeat:
lookup drafters find drafts in them, and any model will do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import attrs

from .client import EngineClient, Tokens


@attrs.frozen
class Workload:
    """A workload, and the engine that it needs.

    Attributes:
        help: one line for people.
        play: makes the requests.
        engine_args: arguments of the engine, unless the user gives others.
        few_blocks: the engine gets fewer blocks than the requests need, unless the user says
            ``num_gpu_blocks_override``.
        offloads: the engine gets an offloading connector, unless the user names a connector.
    """

    help: str
    play: Callable[[EngineClient], Awaitable[None]]
    engine_args: Mapping[str, object] = attrs.field(factory=dict)
    few_blocks: bool = False
    offloads: bool = False


def share(client: EngineClient, part: float) -> int:
    """Return a share of the longest request, or of 1024 tokens if it is longer; 1 at least."""
    return max(1, int(min(client.max_length, 1024) * part))


def repeating(client: EngineClient, most: int) -> Tokens:
    """Return a random phrase of 3 to 12 tokens, up to 4 times, ``most`` tokens at most."""
    phrase = client.phrase(client.chance.randint(3, 12))
    return (phrase * client.chance.randint(1, 4))[:most]


async def chat(client: EngineClient) -> None:
    """Hold conversations with one system prompt; some users leave in the middle of an answer.

    Rounds of four conversations and three short requests until the budget is spent; the prefix
    cache is reset after each.
    """
    system = client.phrase(share(client, 0.12))

    async def converse() -> None:
        text = list(system)
        for _ in range(3):
            text += repeating(client, share(client, 0.08))
            leaves = client.chance.randint(1, 8) if client.chance.random() < 0.2 else None
            most = client.chance.randint(1, share(client, 0.12))
            among = text[-8:] if client.chance.random() < 0.5 else None
            text += await client.ask(text, most, abort=leaves, among=among)
            if leaves is not None:
                return

    async def shortest() -> None:
        for _ in range(3):  # the first comes in the step of the others, the next ones among them
            await client.ask(client.phrase(1), client.chance.randint(2, 12))

    while client.made < client.budget:
        await asyncio.gather(*(converse() for _ in range(4)), shortest())
        await client.reset()


async def sessions(client: EngineClient) -> None:
    """Hold streaming sessions that go on after a stop; other requests find their rows afterwards.

    A turn ends at its limit, often among accepted drafts, or at a stop token; the next turn begins
    there. Some turns fill blocks of their own. Rounds of four until the budget is spent; the prefix
    cache is reset after every sixth.
    """

    async def session(most: int) -> None:
        words = client.phrase(12)
        second = client.phrase(client.chance.choice([12, client.block_size + 12]))
        turns = [(words * 3, most), (second, 8), (client.phrase(6) * 2, 5)]
        among = words[: client.chance.randint(2, 12)]
        stop = client.chance.choice([None, None, among[0]])
        outputs = await client.talk(turns, among=among, stop=stop)
        # Others with the same beginning. An engine keeps the last token of a turn, or drops it.
        for end in (-1, None):
            text: Tokens = []
            for (tokens, _), output in zip(turns, outputs, strict=False):
                text += [*tokens, *output[:end]]
            await client.ask(text + client.phrase(3), 4)

    number = 0
    while client.made < client.budget:
        await asyncio.gather(*(session(2 + (4 * number + lane) % 56) for lane in range(4)))
        number += 1
        if number % 6 == 0:
            await client.reset()


async def prefix(client: EngineClient) -> None:
    """Make requests with common beginnings, some in one step, others after the first has ended.

    Until the budget is spent; after every three batches the prefix cache is reset, and new
    beginnings are chosen.
    """
    while client.made < client.budget:
        roots = [client.phrase(share(client, 0.2)) for _ in range(2)]
        for _ in range(3):
            prompts = []
            for _ in range(4):
                root = client.chance.choice(roots)
                cut = client.chance.choice([len(root), client.chance.randint(1, len(root))])
                prompts.append(root[:cut] + repeating(client, share(client, 0.1)))
            prompts += prompts[:2]  # the same text twice in one step
            lengths = [client.chance.randint(1, share(client, 0.08)) for _ in prompts]
            outputs = await asyncio.gather(*map(client.ask, prompts, lengths))
            roots += [prompts[0] + outputs[0]]
        await client.reset()


async def preempt(client: EngineClient) -> None:
    """Make more requests than the cache has blocks for: some are preempted, and computed again.

    Rounds until the budget is spent. Once in each, all that run are preempted, by a reset of the
    prefix cache.
    """

    async def reset() -> None:
        await client.ask(client.phrase(4), client.chance.randint(1, 12))
        await client.reset(running=True)

    while client.made < client.budget:
        waiting: list[Awaitable[object]] = [reset()]
        for number in range(12):
            prompt = client.phrase(share(client, 0.15)) + repeating(client, share(client, 0.1))
            abort = client.chance.randint(1, 20) if number % 6 == 5 else None
            most = client.chance.randint(share(client, 0.1), share(client, 0.4))
            waiting.append(client.ask(prompt, most, abort=abort, among=prompt[-8:]))
        await asyncio.gather(*waiting)


async def offload(client: EngineClient) -> None:
    """Play texts that leave the cache through a connector, then requests that begin with them.

    Rounds of four requests until the budget is spent. A prompt and its output end at a block's
    end, or one token beside it. In every other round the cache is reset before the follower: it
    sends prompt, output and two more tokens, so that only the connector has the rows.
    """
    size = client.block_size
    while client.made < client.budget:
        for number in range(4):
            # Prompt and output end where a block ends, or a little before or after it.
            blocks = client.chance.randint(1, max(1, share(client, 0.3) // size))
            prompt = repeating(client, blocks * size)
            most = (blocks + 1) * size - len(prompt) + client.chance.choice([-1, 0, 0, 0, 1])
            busy = client.ask(client.phrase(8), most + 8)  # so that steps follow its last one
            first = client.ask(prompt, max(1, most), among=prompt[-4:])
            output, _ = await asyncio.gather(first, busy)
            if number % 2:
                await client.reset()
            await client.ask(prompt + output + client.phrase(2), 6)


@attrs.frozen
class TimedRequest:
    """One request of a timed trace.

    Attributes:
        at: when it begins, as a share of ``_SPREAD`` after the trace's beginning.
        prompt: token ids.
        most: output tokens.
        abort: as for ``EngineClient.ask``.
    """

    at: float
    prompt: Tokens
    most: int
    abort: int | None = None


Trace = list[TimedRequest]

#: Traces that are remembered, to be changed.
_KEPT: Final = 8
#: Most requests of a trace.
_MOST_TIMED: Final = 12
#: Seconds over which the requests of a trace begin: some steps of a tiny model.
_SPREAD: Final = 0.05


async def bursts(client: EngineClient) -> None:
    """Play timed traces of requests that overlap, new ones or earlier ones with small changes.

    Until the budget is spent; after some traces the prefix cache is reset. Timed traces of several
    requests as the input that is mutated: GRIEF, arXiv 2605.11202. There texts and their
    log-probabilities say whether a request was harmed; here the ledger does.
    """
    kept: list[Trace] = []
    while client.made < client.budget:
        if kept and client.chance.random() < 0.7:
            trace = client.chance.choice(kept)
            for _ in range(client.chance.randint(1, 3)):
                trace = _changed(client, trace, client.chance.choice(kept))
        else:
            trace = _fresh_trace(client)
        await asyncio.gather(*(_begin_in_time(client, each) for each in trace))
        kept = [*kept, trace][-_KEPT:]
        if client.chance.random() < 0.2:
            await client.reset()


async def _begin_in_time(client: EngineClient, request: TimedRequest) -> None:
    """Wait until a request's time, make the request, and wait for its end.

    With a prompt of odd length its output has only the prompt's last 8 tokens.
    """
    await asyncio.sleep(request.at * _SPREAD)
    repeats = request.prompt[-8:] if len(request.prompt) % 2 else None
    await client.ask(request.prompt, request.most, abort=request.abort, among=repeats)


def _fresh_trace(client: EngineClient) -> Trace:
    """Return a random trace of 2 to 6 requests, which share beginnings of one phrase."""
    root, found = client.phrase(share(client, 0.2)), []
    for _ in range(client.chance.randint(2, 6)):
        begin = root[: client.chance.randint(0, len(root))]
        prompt = begin + repeating(client, share(client, 0.1))
        most = client.chance.randint(1, share(client, 0.1))
        found.append(TimedRequest(client.chance.random(), prompt, most))
    return found


def _changed(client: EngineClient, trace: Trace, other: Trace) -> Trace:
    """Return a trace with one random change: a request changed, added, doubled or left out.

    A time, a prompt's length, the output's length or an abort is changed. The last 12 requests
    stay.

    Args:
        client: the client.
        trace: the trace; stays as it is.
        other: a trace that a request may be taken from.
    """
    number = client.chance.randrange(len(trace))
    one, rest = trace[number], trace[:number] + trace[number + 1 :]
    block = len(one.prompt) // client.block_size * client.block_size
    edge = max(1, block + client.chance.randint(-1, 1))  # where a block ends, or beside it
    text = one.prompt + repeating(client, client.block_size)
    changes: tuple[Callable[[], Trace], ...] = (
        lambda: [*rest, attrs.evolve(one, at=client.chance.choice([0.0, client.chance.random()]))],
        lambda: [*rest, attrs.evolve(one, prompt=text[:edge])],
        lambda: [*rest, attrs.evolve(one, prompt=text)],
        lambda: [*rest, attrs.evolve(one, most=1)],
        lambda: [*rest, attrs.evolve(one, abort=client.chance.randint(1, 4))],
        lambda: [*trace, one],
        lambda: [*trace, client.chance.choice(other)],
        lambda: rest or trace,
    )
    return client.chance.choice(changes)()[-_MOST_TIMED:]


WORKLOADS: Final[Mapping[str, Workload]] = {
    "chat": Workload("conversations with one system prompt; some users leave", chat),
    "sessions": Workload("streaming sessions that go on after a stop", sessions),
    "prefix": Workload("requests with common beginnings, some in one step", prefix),
    "preempt": Workload(
        "more requests than blocks, and resets of the cache that preempt all",
        preempt,
        {"max_num_seqs": 16},
        few_blocks=True,
    ),
    "offload": Workload("rows that leave through a connector and return", offload, offloads=True),
    "bursts": Workload("timed traces of requests that overlap, changed at random", bursts),
}
