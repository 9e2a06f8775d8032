"""Scenarios of engines with KV connectors: rows leave the cache, and come back for later requests.

Each returns what it generated, and is compared with an engine that has no connector.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from scenarios import Engine, Tokens, preempted, text


def forget(engine: Engine) -> None:
    """Empty the prefix cache, once vLLM has heard that the connectors' transfers are over."""
    for number in range(50):
        if engine.llm.reset_prefix_cache():
            return
        time.sleep(0.02)
        asked = [{"prompt_token_ids": text(900 + number, 8)}]
        engine.llm.generate(asked, engine.params(2), use_tqdm=False)
    raise RuntimeError("the prefix cache cannot be emptied")


def come_back(engine: Engine) -> Tokens:
    """Prompts, their continuation, and the prompts again, each with an empty prefix cache.

    The second time blocks come back that verify steps filled, drafts at their ends included.
    """
    prompts = [text(500 + i, 70 + 9 * i) for i in range(8)]
    first = engine.run(prompts, 60)
    forget(engine)
    longer = [prompt + tokens[:40] for prompt, tokens in zip(prompts, first, strict=True)]
    second = engine.run(longer, 30)
    forget(engine)
    return [*first, *second, *engine.run(prompts, 60)]


def full_blocks(engine: Engine) -> Tokens:
    """Requests that end with a block, and their texts once more, each with an empty prefix cache.

    A request's last token was sampled and never computed: its slot, the last of that block, is that
    of a draft that was rejected, or of an earlier owner's row. Another request keeps the steps
    going that a connector needs to store a block after its request's end.
    """
    size = int(engine.llm.llm_engine.vllm_config.cache_config.block_size)
    found: Tokens = []
    for number in range(4):
        prompts = [text(700 + 8 * number + i, 18 + 7 * i + number) for i in range(4)]
        busy = text(760 + number, 8)
        lengths = [2 * size - len(prompt) % size for prompt in prompts]
        params = [engine.params(length) for length in lengths]
        first = engine.ask([*prompts, busy], [*params, engine.params(2 * size + 24)])
        forget(engine)
        texts = [a + b for a, b in zip(prompts, first, strict=False)]
        assert all(len(each) % size == 0 for each in texts)
        found += first + engine.run([each + text(770 + number, 3) for each in texts], 12)
        forget(engine)
    return found


def _core(engine: Engine) -> Any:
    """Return vLLM's engine core, which runs in this process."""
    return engine.llm.llm_engine.engine_core.engine_core


def storing(engine: Engine) -> list[str] | None:
    """Name the requests whose stores are under way, as OffloadingConnector's scheduler has them.

    None if the engine has no such connector.
    """
    connector: Any = _core(engine).scheduler.connector
    for each in (connector, *getattr(connector, "_connectors", ())):
        states = getattr(getattr(each, "connector_scheduler", None), "_req_status", None)
        if states is not None:
            return [name for name, state in states.items() if state.transfer_jobs]
    return None


def _due(engine: Engine, step: int, begin: int, name: str) -> bool:
    """Tell whether to strike at a request: its stores are under way, or nobody says so."""
    found = storing(engine)
    if found is None:
        return step == begin + 2
    return step >= begin and any(each.startswith(name) for each in found)


def _stepped(
    engine: Engine,
    asked: dict[str, list[int]],
    outputs: int,
    each: Callable[[int, Callable[[], None]], None],
) -> dict[str, Any]:
    """Run requests step by step.

    ``each`` is called before every step with its number, and with a call that takes one more.
    """
    inner, params, done = engine.llm.llm_engine, engine.params(outputs), dict[str, Any]()
    for name, prompt in asked.items():
        inner.add_request(name, {"prompt_token_ids": prompt}, params)

    def take() -> None:
        for output in inner.step():
            done[output.request_id] = output.outputs[0]

    for step in range(400):
        if not inner.has_unfinished_requests():
            break
        each(step, take)
        take()
    return done


@contextmanager
def _paused(engine: Engine, take: Callable[[], None]) -> Iterator[None]:
    """End the steps that are under way, and let no request be scheduled meanwhile.

    The last step begins with the stores of the one before it, so these are under way then.
    """
    core = _core(engine)
    scheduler = core.scheduler
    if scheduler.sched_step_seq == scheduler.processed_step_seq:  # as in synchronous scheduling
        yield
        return
    core.pause_scheduler("keep", clear_cache=False)
    for _ in range(4):
        if scheduler.sched_step_seq > scheduler.processed_step_seq:
            take()
    yield
    core.resume_scheduler()


def aborted(engine: Engine) -> Tokens:
    """Requests that are aborted while blocks of theirs are stored; then all of them once more."""
    asked = {f"abort-{i}": text(600 + i, 70 + 5 * i) for i in range(8)}
    waiting = ["abort-0", "abort-1"]

    def abort(step: int, _take: Callable[[], None]) -> None:
        for name in waiting:
            if _due(engine, step, 2 + 4 * int(name[-1]), name):
                engine.llm.llm_engine.abort_request([name])
                waiting.remove(name)
                return

    done = _stepped(engine, asked, 40, abort)
    assert not waiting, f"nothing was stored of {waiting}"
    first = [engine.keep(asked[name], done[name]) for name in list(asked)[2:]]
    forget(engine)
    return first + engine.run(list(asked.values()), 30)


def interrupted(engine: Engine) -> Tokens:
    """All running requests at once lose their blocks, twice, while some of these are stored.

    The connector forgets what it has: vLLM 0.32 fails where it loads them again in the same step.
    Beside a connector vLLM keeps the blocks of a step that is under way (of n-grams since 0.33 as
    well, with the V2 runner), and cannot reset its cache then. So the scheduler pauses first.
    """
    asked = {f"interrupt-{i}": text(650 + i, 40 + 6 * i) for i in range(6)}
    begins = [5, 17]

    def interrupt(step: int, take: Callable[[], None]) -> None:
        if begins and _due(engine, step, begins[0], ""):
            with _paused(engine, take):
                if storing(engine) != []:  # else all stores have ended meanwhile
                    engine.llm.llm_engine.reset_prefix_cache(True, True)
                    begins.pop(0)

    done = _stepped(engine, asked, 44, interrupt)
    assert not begins, "nothing was stored"
    first = [engine.keep(asked[name], done[name]) for name in asked]
    forget(engine)
    return first + engine.run(list(asked.values()), 30)


SCENARIOS: dict[str, Callable[[Engine], Tokens]] = {
    each.__name__: each for each in (come_back, full_blocks, preempted, aborted, interrupted)
}
