"""What is asked of an engine: each scenario returns the tokens of every request."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from vllm_models import VOCAB

Tokens = list[list[int]]


class Engine:
    """A vLLM engine with what the scenarios need around it."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.cached = 0
        self.hits = 0

    def run(self, prompts: Tokens, outputs: int, temperature: float = 0.0) -> Tokens:
        """Generate; sampling uses the worker's global generator."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=temperature, max_tokens=outputs, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self.llm.generate(asked, params, use_tqdm=False)
        self.cached += sum(result.num_cached_tokens or 0 for result in results)
        return [list(result.outputs[0].token_ids) for result in results]


def text(seed: int, length: int) -> list[int]:
    """A prompt that repeats itself now and then, as text does."""
    chance = random.Random(seed)
    words = [[chance.randrange(1, VOCAB) for _ in range(4)] for _ in range(5)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += chance.choice(words)
    return tokens[:length]


def one(engine: Engine) -> Tokens:
    """A single request."""
    return engine.run([text(1, 30)], 48)


def eight(engine: Engine) -> Tokens:
    """As many requests as run at once."""
    return engine.run([text(10 + i, 20 + 3 * i) for i in range(8)], 40)


def chunked(engine: Engine) -> Tokens:
    """Prompts longer than a step takes, while others decode."""
    short = [text(20 + i, 24) for i in range(3)]
    return engine.run([*short, text(30, 200), text(31, 170)], 32)


def preempted(engine: Engine) -> Tokens:
    """More tokens than there are blocks."""
    return engine.run([text(40 + i, 50) for i in range(8)], 70)


def prefix(engine: Engine) -> Tokens:
    """The same long prefix again and again."""
    common = text(50, 130)
    first = engine.run([common + text(51, 9)], 24)
    again = engine.run([common + text(51 + i, 9) for i in range(4)], 24)
    return first + again


def sampled(engine: Engine) -> Tokens:
    """Temperature 0.8, one seed for the whole batch."""
    engine.llm.collective_rpc("oracle_seed", args=(1234,))
    return engine.run([text(60 + i, 30) for i in range(4)], 32, temperature=0.8)


def same_step(engine: Engine) -> Tokens:
    """A request hits the very block that another request's verify step is just filling.

    vLLM hashes a block when it schedules the step that computes its last row, so a request
    that is admitted in this step reads rows written within the same forward.
    """
    from vllm import SamplingParams

    inner = engine.llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    results: Tokens = []
    for trial in range(12):
        if engine.hits == 2:
            break
        prompt, name = text(100 + trial, 20 + trial % 5), f"same-step-{trial}"
        late, done = name + "-late", dict[str, list[int]]()
        tokens, admitted = list(prompt), 0
        inner.add_request(name, {"prompt_token_ids": prompt}, params)
        while inner.has_unfinished_requests():
            if not admitted and len(tokens) > len(prompt) and len(tokens) % 32 == 0:
                admitted = len(tokens)
                longer = {"prompt_token_ids": [*tokens, *text(200 + trial, 5)]}
                inner.add_request(late, longer, params)
            for output in inner.step():
                if output.request_id == late:
                    engine.hits += late not in done and output.num_cached_tokens == admitted
                else:
                    tokens = prompt + list(output.outputs[0].token_ids)
                done[output.request_id] = list(output.outputs[0].token_ids)
        results += [done[key] for key in sorted(done)]
    return results


SCENARIOS: dict[str, Callable[[Engine], Tokens]] = {
    scenario.__name__: scenario
    for scenario in (one, eight, chunked, preempted, prefix, sampled, same_step)
}
