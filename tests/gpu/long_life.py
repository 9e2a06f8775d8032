"""Serve an audited engine with as much as it holds until so many rows were read, and count.

What comes is drawn by lot: lengths, prefixes that requests share, requests that are aborted in the
middle, resets of the prefix cache. The engine's blocks are fewer than its requests fill, so some
are preempted. Nothing is planted: each violation is a false alarm.
"""

from __future__ import annotations

import random
import time
from typing import Any, Final

from scenarios import Engine, text

#: What is summed over ranks; ``unjudged`` are drafts that nobody resolved.
COUNTED: Final = {
    "rows": "kvtxn_audit_rows_checked_total",
    "violations": "kvtxn_audit_violations_total",
    "unjudged": "kvtxn_audit_unjudged_total",
}
#: vLLM's own counters, which say what happened.
THEIRS: Final = {
    "preempted": "vllm:num_preemptions",
    "prefix_hits": "vllm:prefix_cache_hits",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def live(
    llm: Any, *, rows: int, seconds: float, requests: int, longest: int, outputs: int
) -> dict[str, Any]:
    """Serve rounds of requests until ``rows`` were read, or ``seconds`` are over.

    Args:
        llm: a vLLM engine in this process, with the audit on.
        rows: stop after the round in which so many were read.
        seconds: stop after the round in which this time is over.
        requests: requests of a round.
        longest: most tokens of a prompt.
        outputs: tokens of each answer.

    Returns:
        Rows, violations and drafts that nobody resolved, over all ranks; what vLLM counted; steps,
        rounds, aborted requests and seconds.
    """
    from kvtxn.integrations.vllm_plugin import snapshots

    chance, begin = random.Random(0), time.monotonic()
    found: dict[str, Any] = {"rounds": 0, "steps": 0, "aborted": 0}
    while True:
        found["steps"] += _round(llm, chance, requests, longest, outputs, found)
        found["rounds"] += 1
        if chance.random() < 1 / 3:
            llm.reset_prefix_cache()
        counts = snapshots(llm)
        for name, counter in COUNTED.items():
            found[name] = int(sum(each.get(counter, 0) for each in counts))
        found["seconds"] = round(time.monotonic() - begin, 1)
        if found["rows"] >= rows or found["seconds"] >= seconds:
            break
    theirs = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return found | {name: int(theirs.get(counter, 0)) for name, counter in THEIRS.items()}


def _round(
    llm: Any,
    chance: random.Random,
    requests: int,
    longest: int,
    outputs: int,
    found: dict[str, Any],
) -> int:
    """Serve one round to its end; returns its steps."""
    engine, params = llm.llm_engine, Engine(llm).params(outputs)
    shared = text(chance.randrange(1 << 30), longest // 2)
    names = [f"{found['rounds']}-{index}" for index in range(requests)]
    for name in names:
        own = text(chance.randrange(1 << 30), chance.randrange(8, longest // 2))
        prompt = [*(shared if chance.random() < 0.5 else ()), *own]
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
        if steps % 8 == 0:
            gone = chance.sample(names, k=max(1, len(names) // 64))
            engine.abort_request(gone)
            found["aborted"] += len(gone)
    return steps
