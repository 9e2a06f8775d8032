"""The same prompts' chunks and preemptions without speculation: at the same tokens, in one request.

vLLM computes prompts, and a preempted request's tokens again, by another operator than the one of
decoding, which rounds in another way; and rounds by where chunks end. So the text of a request
depends on its chunks, and on where it was preempted.
"""

from __future__ import annotations

import time
from typing import Any

import attrs
from scenarios import Engine, Tokens


@attrs.define
class Stretch:
    """What one request computes from its arrival, or from a preemption, until it decodes.

    Attributes:
        generated: tokens that it had generated.
        left: tokens that are not yet computed.
        chunks: numbers of tokens that the steps computed.
    """

    generated: int
    left: int
    chunks: list[int] = attrs.field(factory=list)


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def number_of(name: str) -> int:
    """The number of a request of ``LLM.generate``."""
    return int(name.partition("-")[0])


def watch(llm: Any) -> dict[int, list[Stretch]]:
    """Keep the prompts' chunks and the preemptions from now on; returns them by request number."""
    scheduler, known = scheduler_of(llm), dict[int, list[Stretch]]()
    own = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        before = dict(scheduler.requests)
        found = own(*args, **kwargs)
        for name in found.preempted_req_ids or ():
            request = before[name]
            known[number_of(name)].append(Stretch(request.num_output_tokens, request.num_tokens))
        for name, count in found.num_scheduled_tokens.items():
            request = before[name]
            stretches = known.setdefault(number_of(name), [Stretch(0, request.num_tokens)])
            if stretches[-1].left > 0:
                stretches[-1].chunks.append(count)
                stretches[-1].left -= count
        return found

    scheduler.schedule = schedule
    return known


def forced(asked: Engine, prompt: list[int], stretches: list[Stretch], outputs: int) -> list[int]:
    """Generate for one request with these chunks and preemptions; returns its tokens."""
    engine, scheduler = asked.llm.llm_engine, scheduler_of(asked.llm)
    usual, [first, *later] = scheduler.max_num_scheduled_tokens, stretches
    chunks = list(first.chunks)
    engine.add_request("forced", {"prompt_token_ids": prompt}, asked.params(outputs))
    last, generated = None, 0
    while engine.has_unfinished_requests():
        if later and not chunks and generated == later[0].generated:
            scheduler._preempt_request(scheduler.running.pop(), time.time())
            chunks = list(later.pop(0).chunks)
        scheduler.max_num_scheduled_tokens = chunks.pop(0) if chunks else usual
        for output in engine.step():
            last = output.outputs[0]
            generated = len(last.token_ids)
    scheduler.max_num_scheduled_tokens = usual
    assert not later
    return asked.keep(prompt, last)


def compare(windows: Any, plain: Any, prompts: Tokens, outputs: int) -> dict[str, Any]:
    """Preempt requests of an engine with windows, and then of one that does not speculate.

    Returns:
        The tokens of all requests, from both engines; the two likeliest tokens of each step of the
        engine that does not speculate; and how often each request was preempted.
    """
    known, greedy = watch(windows), Engine(plain, scores=2)
    tokens = Engine(windows).run(prompts, outputs)
    order = sorted(known)
    assert len(order) == len(prompts)
    return {
        "windows": tokens,
        "greedy": [
            forced(greedy, prompt, known[number], outputs)
            for prompt, number in zip(prompts, order, strict=True)
        ],
        "logprobs": greedy.logprobs,
        "preemptions": [len(known[number]) - 1 for number in order],
    }
