"""The same preemption without speculation: at the same token, computed again in the same chunks.

vLLM computes a preempted request's tokens again as a prompt, by another operator than the one of
decoding, which rounds in another way. So the text after a preemption depends on where it happened.
"""

from __future__ import annotations

import time
from typing import Any

from scenarios import Engine, Tokens


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def watch(llm: Any) -> dict[int, dict[str, Any]]:
    """Keep what is preempted from now on.

    Returns:
        By the number of a request: how many tokens it had generated, and the numbers of tokens
        that the steps computed until all were computed again.
    """
    scheduler, places = scheduler_of(llm), dict[int, dict[str, Any]]()
    own = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        before = {request.request_id: request for request in scheduler.running}
        found = own(*args, **kwargs)
        for name in found.preempted_req_ids or ():
            request = before[name]
            places[int(name.partition("-")[0])] = {
                "generated": request.num_output_tokens, "left": request.num_tokens, "chunks": [],
            }  # fmt: skip
        for name, count in found.num_scheduled_tokens.items():
            place = places.get(int(name.partition("-")[0]))
            if place is not None and place["left"] > 0:
                place["chunks"].append(count)
                place["left"] -= count
        return found

    scheduler.schedule = schedule
    return places


def forced(llm: Any, prompt: list[int], place: dict[str, Any], outputs: int) -> list[int]:
    """Generate for one request that is preempted at this place; returns its tokens."""
    engine, scheduler = llm.llm_engine, scheduler_of(llm)
    usual, chunks, preempted = scheduler.max_num_scheduled_tokens, list(place["chunks"]), False
    engine.add_request("forced", {"prompt_token_ids": prompt}, Engine(llm).params(outputs))
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        if not preempted and len(tokens) == place["generated"]:
            preempted = True
            scheduler._preempt_request(scheduler.running.pop(), time.time())
        most = chunks.pop(0) if preempted and chunks else usual
        scheduler.max_num_scheduled_tokens = most
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
    scheduler.max_num_scheduled_tokens = usual
    assert preempted
    return tokens


def compare(windows: Any, plain: Any, prompts: Tokens, outputs: int) -> dict[str, Any]:
    """Preempt requests of an engine with windows, and then of one that does not speculate.

    Returns:
        The tokens of all requests, from the engine with windows and from the other one without any
        preemption; and of the preempted ones, from the latter preempted at the same places.
    """
    places = watch(windows)
    tokens = Engine(windows).run(prompts, outputs)
    return {
        "windows": tokens,
        "undisturbed": Engine(plain).run(prompts, outputs),
        "preempted": {
            str(number): forced(plain, prompts[number], place, outputs)
            for number, place in places.items()
        },
    }
