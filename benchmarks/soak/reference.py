"""A stock engine in its own process, which generates the texts that a soak must give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from ...integrations.audit_command.client import Tokens
from .client import Said

#: Settings that the stock engine drops: windows, and every other source of cached rows.
_WITHOUT: Final = ("additional_config", "kv_transfer_config", "scheduler_cls", "async_scheduling")

#: Bits of a logit's fraction that two engines agree on, by the engine's dtype: a logit's last bits
#: depend on the order of its sums, and that on which requests share a step.
_BITS: Final[Mapping[str, int]] = {"bfloat16": 8, "float16": 11, "float32": 18}
#: Steps of a logit, as ``_BITS`` has them, by which the two likeliest tokens of a near-tie differ.
#: In bfloat16 a stock engine under this load parts from the judge's texts too, which run without
#: it: 3 of 1 632 texts beyond 6 steps, at up to 10; with windows 9 of 3 104, at up to 19 (H200,
#: vLLM 0.33.0). A lost or foreign row parts texts at any distance.
_NEAR: Final[Mapping[str, int]] = {"bfloat16": 24, "float16": 6, "float32": 6}


def without_windows(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a stock engine that computes every row anew."""
    kept = {name: value for name, value in engine_args.items() if name not in _WITHOUT}
    return kept | {"enable_prefix_caching": False, "logprobs_mode": "processed_logits"}


def serve(pipe: Connection[Any, Any]) -> None:
    """Start an engine, then judge each batch of texts that comes, until None comes.

    The findings of each batch are sent back.
    """
    from vllm import LLM

    engine_args: dict[str, Any] = pipe.recv()
    llm: Any = LLM(**engine_args)
    pipe.send((False, None))
    while (batch := pipe.recv()) is not None:
        pipe.send((False, judge(llm, batch, str(engine_args["dtype"]))))


def judge(llm: Any, batch: Sequence[Said], dtype: str) -> dict[str, Any]:
    """Compare texts with those of a stock engine.

    Args:
        llm: the stock engine.
        batch: the requests, and their texts.
        dtype: the engine's.

    Returns:
        ``texts`` that were compared; of these ``same`` as stock's, parted at a ``near`` tie, and
        ``other``; ``gap``: the most by which the logit of stock's token exceeds the other one's at
        a near-tie, in steps; ``wrong``: the first texts of ``other``.
    """
    found: dict[str, Any] = {"texts": 0, "same": 0, "near": 0, "other": 0, "gap": 0.0, "wrong": []}
    for said, stock in zip(batch, _answers(llm, batch), strict=True):
        for text in said.texts:
            found["texts"] += 1
            if text == stock:
                found["same"] += 1
                continue
            place = _parting(text, stock)
            gap = _gap(llm, said, stock, place, text, dtype)
            near = gap <= _NEAR[dtype]
            found["near" if near else "other"] += 1
            if near:
                found["gap"] = max(found["gap"], round(gap, 3))
            elif len(found["wrong"]) < 3:
                found["wrong"].append(
                    {"prompt": said.prompt, "among": said.among, "place": place}
                    | {"text": text, "stock": stock, "gap": gap if gap < math.inf else None}
                )
    return found


def _answers(llm: Any, batch: Sequence[Said]) -> list[Tokens]:
    """Return the stock engine's text for each request."""
    given = [{"prompt_token_ids": said.prompt} for said in batch]
    sampling = [_sampling(said.most, said.among) for said in batch]
    outputs = llm.generate(given, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _parting(text: Tokens, stock: Tokens) -> int:
    """Return the index at which two texts differ first; the shorter one may end there."""
    both = enumerate(zip(text, stock, strict=False))
    return next((place for place, (a, b) in both if a != b), min(len(text), len(stock)))


def _gap(llm: Any, said: Said, stock: Tokens, place: int, text: Tokens, dtype: str) -> float:
    """Return by how many steps stock's token at a place leads the other text's; inf: no tie.

    There is none where a text ends, or a token is not allowed. The engine is asked for the logits.
    """
    if place >= min(len(text), len(stock)):
        return math.inf
    pair = sorted({stock[place], text[place]})
    if said.among is not None and not {*pair} <= {*said.among}:
        return math.inf
    given = {"prompt_token_ids": [*said.prompt, *stock[:place]]}
    (output,) = llm.generate([given], _sampling(1, pair, logprobs=2), use_tqdm=False)
    (logits,) = output.outputs[0].logprobs
    own, other = (logits[token].logprob for token in (stock[place], text[place]))
    step = 2.0 ** (math.frexp(max(own, other))[1] - _BITS[dtype])
    return float(abs(own - other) / step)


def _sampling(most: int, among: Sequence[int] | None, logprobs: int | None = None) -> Any:
    """Return greedy sampling of ``most`` tokens among the allowed ones, with so many logprobs."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=most,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
        allowed_token_ids=None if among is None else sorted({*among}),
    )
