"""Scenarios: each sends requests to an engine and returns the tokens of every request."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from model_files import VOCAB

Tokens = list[list[int]]

#: Speculation of the tests' engines: drafts from earlier tokens of the same request.
NGRAM: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


class Engine:
    """A vLLM engine with what the scenarios need around it.

    Args:
        llm: the engine.
        scores: ask for so many of the likeliest tokens of every step.

    Attributes:
        salt: of the prompts from now on, so that blocks of earlier ones are not found; or None.
        cached: prompt tokens that were in the prefix cache.
        hits: requests that hit a block in the step that filled it.
        prompts: of the requests, in the order of the tokens that a scenario returns.
        logprobs: of the same, per step ``[token, logprob]`` from the likeliest on; where asked for.
    """

    def __init__(self, llm: Any, scores: int | None = None) -> None:
        self.llm = llm
        self.scores = scores
        self.salt: str | None = None
        self.cached = 0
        self.hits = 0
        self.prompts: Tokens = []
        self.logprobs: list[list[list[list[float]]]] = []

    def run(self, prompts: Tokens, outputs: int, temperature: float = 0.0) -> Tokens:
        """Generate; sampling uses the worker's global generator."""
        return self.ask(prompts, self.params(outputs, temperature))

    def params(self, outputs: int, temperature: float = 0.0) -> Any:
        """Make the settings of a request that no scenario says otherwise of."""
        from vllm import SamplingParams

        return SamplingParams(
            temperature=temperature,
            max_tokens=outputs,
            ignore_eos=True,
            detokenize=False,
            logprobs=self.scores,
        )

    def ask(self, prompts: Tokens, params: Any) -> Tokens:
        """Generate with these parameters; every output of every prompt."""
        salt = {} if self.salt is None else {"cache_salt": self.salt}
        asked = [{"prompt_token_ids": prompt, **salt} for prompt in prompts]
        results = self.llm.generate(asked, params, use_tqdm=False)
        self.cached += sum(result.num_cached_tokens or 0 for result in results)
        pairs = zip(prompts, results, strict=True)
        return [self.keep(prompt, output) for prompt, found in pairs for output in found.outputs]

    def keep(self, prompt: list[int], output: Any) -> list[int]:
        """Keep the results of a request that has ended."""
        self.prompts.append(prompt)
        steps = output.logprobs or []
        ranked = [sorted(step.items(), key=lambda item: -item[1].logprob) for step in steps]
        self.logprobs.append([[[token, found.logprob] for token, found in step] for step in ranked])
        return list(output.token_ids)


def text(seed: int, length: int) -> list[int]:
    """A prompt that repeats itself now and then, as text does."""
    chance = random.Random(seed)
    words = [[chance.randrange(1, VOCAB) for _ in range(4)] for _ in range(5)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += chance.choice(words)
    return tokens[:length]


def one(engine: Engine) -> Tokens:
    """Generate for a single request."""
    return engine.run([text(1, 30)], 48)


def eight(engine: Engine) -> Tokens:
    """Generate for eight requests, the most that run at once."""
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
    inner, params = engine.llm.llm_engine, engine.params(40)
    results: Tokens = []
    for trial in range(12):
        if engine.hits == 2:
            break
        prompt, name = text(100 + trial, 20 + trial % 5), f"same-step-{trial}"
        late, done, asked = name + "-late", dict[str, Any](), {name: prompt}
        tokens, admitted = list(prompt), 0
        inner.add_request(name, {"prompt_token_ids": prompt}, params)
        while inner.has_unfinished_requests():
            if not admitted and len(tokens) > len(prompt) and len(tokens) % 32 == 0:
                admitted = len(tokens)
                asked[late] = [*tokens, *text(200 + trial, 5)]
                inner.add_request(late, {"prompt_token_ids": asked[late]}, params)
            for output in inner.step():
                if output.request_id == late:
                    engine.hits += late not in done and output.num_cached_tokens == admitted
                else:
                    tokens = prompt + list(output.outputs[0].token_ids)
                done[output.request_id] = output.outputs[0]
        results += [engine.keep(asked[key], done[key]) for key in sorted(done)]
    return results


def structured(engine: Engine) -> Tokens:
    """Output that a grammar shapes; it refuses drafts as well."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=40,
        structured_outputs=StructuredOutputsParams(regex="(ab|cd|abcd|[x-z]k){16,18}"),
    )
    return engine.ask([text(300 + i, 30) for i in range(3)], params)


def logprobs(engine: Engine) -> Tokens:
    """The most likely tokens of every step, not only the sampled one."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=3)
    return engine.ask([text(10 + i, 20 + 3 * i) for i in range(3)], params)


def stop(engine: Engine) -> Tokens:
    """Requests end in the middle of a window, at a string that spans tokens."""
    from vllm import SamplingParams

    prompts = [text(10 + i, 20 + 3 * i) for i in range(4)]
    free = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    whole = engine.ask(prompts, free)
    found = []
    for prompt, tokens in zip(prompts, whole, strict=True):
        string = "".join(chr(token + 1) for token in tokens[20:23])
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=[string])
        found += engine.ask([prompt], params)
    assert all(len(short) < len(long) for short, long in zip(found, whole, strict=True))
    return whole + found


def n2(engine: Engine) -> Tokens:
    """Two samples of each prompt: two requests that share its blocks."""
    from vllm import SamplingParams

    engine.llm.collective_rpc("oracle_seed", args=(4321,))
    params = SamplingParams(temperature=0.8, max_tokens=32, ignore_eos=True, n=2)
    return engine.ask([text(320 + i, 70) for i in range(2)], params)


def abort(engine: Engine) -> Tokens:
    """Requests that are aborted in the middle; later ones take their blocks."""
    from vllm import SamplingParams

    inner = engine.llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    names = {f"abort-{i}": text(330 + i, 30) for i in range(9)}
    done: dict[str, list[int]] = {}
    waiting = list(names)
    ids = {}
    for step in range(400):
        if step in (0, 6, 11):
            for name in waiting[:3]:
                ids[name] = inner.add_request(name, {"prompt_token_ids": names[name]}, params)
            waiting = waiting[3:]
        if step in (5, 10):
            inner.abort_request([f"abort-{3 * (step // 5 - 1)}"])
        if not waiting and not inner.has_unfinished_requests():
            break
        for output in inner.step():
            done[output.request_id] = list(output.outputs[0].token_ids)
    assert len(done["abort-0"]) < 40 == len(done["abort-1"])
    return [done[name] for name in names]


def reused(engine: Engine) -> Tokens:
    """Prompts in the blocks of requests that are over, in chunks that end within a block.

    The requests end near the end of a block, and so that is where their last drafts were.
    """
    rounds = [[text(340 + 8 * n + i, 40) for i in range(8)] for n in range(3)]
    return [tokens for prompts in rounds for tokens in engine.run(prompts, 22)]


SCENARIOS: dict[str, Callable[[Engine], Tokens]] = {
    scenario.__name__: scenario
    for scenario in (
        *(one, eight, chunked, preempted, prefix, sampled, same_step),
        *(structured, logprobs, stop, n2, abort, reused),
    )
}
