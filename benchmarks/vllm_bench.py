"""``kvtxn bench vllm``: whole engines, stock against policies, taking turns.

One engine per policy, each in processes of its own, all up at once; every cell repeats in
rounds of one run per engine, so drift hits all alike. Prompts come from the prefix cache from
the second round on, so what is measured is decoding. The first round warms up and is dropped.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import machine
from .vllm_engine import Engine, EngineSpec, Measured, Work
from .vllm_models import SHAPES, write_drafter, write_model

help = "whole vLLM engines: stock against deferred and undo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--model", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--drafter", choices=("ngram", "eagle"), default="ngram")
    parser.add_argument("--drafts", type=int, default=4, help="draft tokens per request")
    parser.add_argument("--policies", default="stock,deferred,undo", help="commas between")
    parser.add_argument("--requests", default="1,4", help="requests at once, commas between")
    parser.add_argument("--context", default="64", help="prompt tokens, commas between")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate per request")
    parser.add_argument(
        "--acceptance",
        default="real",
        help="'real', or rates of synthetic acceptance per draft, commas between",
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds per cell")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--output", default=None, help="name of the result file")


def run(args: argparse.Namespace) -> int:
    """Start the engines, measure every cell, write the result and print a table."""
    policies = args.policies.split(",")
    contexts, requests = _ints(args.context), _ints(args.requests)
    rates = [None] if args.acceptance == "real" else [float(r) for r in args.acceptance.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        arguments = _arguments(args, Path(folder), max(contexts), max(requests), rates[0])
        # On a CPU the caches of several engines have to share the memory.
        space = {} if torch.cuda.is_available() else {"VLLM_CPU_KVCACHE_SPACE": "1"}
        specs = [EngineSpec(policy=p, arguments=arguments, environment=space) for p in policies]
        engines = [Engine(spec) for spec in specs]
        try:
            for engine in engines:
                engine.ready()
            cells = [
                _cell(engines, args, *point)
                for point in itertools.product(contexts, requests, rates)
            ]
            counters = {
                engine.spec.policy: engine.snapshot()
                for engine in engines
                if engine.spec.policy != "stock"
            }
        finally:
            for engine in engines:
                engine.stop()
    settings = {key: value for key, value in vars(args).items() if _plain(value)}
    name = args.output or f"vllm-{args.model}-{args.drafter}"
    path = machine.write(name, {"settings": settings, "cells": cells, "counters": counters})
    print(table(cells))
    print(f"written to {path}")
    return 0


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _plain(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _arguments(
    args: argparse.Namespace, folder: Path, context: int, requests: int, rate: float | None
) -> dict[str, Any]:
    """What ``vllm.LLM`` is given, the same for every policy."""
    length = context + args.tokens + args.drafts + 8
    speculation: dict[str, Any] = {
        "method": args.drafter,
        "num_speculative_tokens": args.drafts,
    }
    if args.drafter == "eagle":
        speculation["model"] = str(write_drafter(folder, args.model, length))
    else:
        speculation |= {"prompt_lookup_max": 4, "prompt_lookup_min": 1}
    if rate is not None:
        speculation["rejection_sample_method"] = "synthetic"
        speculation["synthetic_acceptance_rates"] = _positions(rate, args.drafts)
    on_gpu = torch.cuda.is_available()
    # Engines that start together must not measure each other's memory: the cache's size is given.
    tokens = requests * (length + 64)
    settings: dict[str, Any] = {"enforce_eager": True}
    if on_gpu:
        cache = tokens * SHAPES[args.model].token_bytes + (256 << 20)
        settings = {"kv_cache_memory_bytes": cache, "gpu_memory_utilization": 0.05}
    return {
        "model": str(write_model(folder, args.model, length)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if on_gpu else "float32",
        "max_model_len": length,
        "max_num_seqs": requests,
        "speculative_config": speculation,
        "seed": 0,
        **settings,
    }


def _positions(rate: float, drafts: int) -> list[float]:
    """Rates per position, each draft accepted with one chance given those before it.

    The chance is such that on average the share ``rate`` of all drafts is accepted.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        share = sum(middle**place for place in range(1, drafts + 1)) / drafts
        low, high = (middle, high) if share < rate else (low, middle)
    return [low**place for place in range(1, drafts + 1)]


def _cell(
    engines: Sequence[Engine],
    args: argparse.Namespace,
    context: int,
    requests: int,
    rate: float | None,
) -> dict[str, Any]:
    """One point: rounds in which every engine runs once, in alternating order."""
    chooser = random.Random(context * 1000 + requests)
    vocab = SHAPES[args.model].vocab
    period = [chooser.randrange(2, vocab) for _ in range(16)]  # an n-gram drafter finds it again
    prompts = [
        [chooser.randrange(2, vocab), *(period * context)][:context] for _ in range(requests)
    ]
    work = Work(
        prompts=prompts,
        max_tokens=args.tokens,
        temperature=args.temperature,
        rates=None if rate is None else _positions(rate, args.drafts),
    )
    runs: dict[str, list[Measured]] = {engine.spec.policy: [] for engine in engines}
    for turn in range(args.rounds + 1):
        for engine in engines if turn % 2 else reversed(engines):
            measured = engine.run(work)
            if turn:
                runs[engine.spec.policy].append(measured)
    cell: dict[str, Any] = {"context": context, "requests": requests, "acceptance": rate}
    for policy, repeated in runs.items():
        speeds = sorted(each.generated / each.seconds for each in repeated)
        cell[policy] = {
            "tokens_per_s": statistics.median(speeds),
            "slowest": speeds[0],
            "fastest": speeds[-1],
            "drafted": [each.drafted for each in repeated],
            "accepted": [each.accepted for each in repeated],
            "digests": [each.digest for each in repeated],
        }
    print(_line(cell), flush=True)
    return cell


def _line(cell: dict[str, Any]) -> str:
    """A row of the table: speeds relative to stock, and whether the counts are stock's."""
    policies = [key for key, value in cell.items() if isinstance(value, dict)]
    base = cell.get("stock", cell[policies[0]])
    shown = []
    for policy in policies:
        mine = cell[policy]
        share = sum(mine["accepted"]) / max(1, sum(mine["drafted"]))
        shown.append(
            f"{mine['tokens_per_s']:.0f} ({mine['tokens_per_s'] / base['tokens_per_s']:.3f}; "
            f"{mine['slowest']:.0f} to {mine['fastest']:.0f}; {100 * share:.1f} %)"
        )
    rate = "real" if cell["acceptance"] is None else f"{100 * cell['acceptance']:.0f} %"
    return f"| {cell['context']} | {cell['requests']} | {rate} | " + " | ".join(shown) + " |"


def table(cells: Sequence[dict[str, Any]]) -> str:
    """The cells as Markdown: tokens/s (of stock's; slowest to fastest; drafts accepted)."""
    policies = [key for key, value in cells[0].items() if isinstance(value, dict)]
    head = "| context | requests | acceptance | " + " | ".join(policies) + " |"
    rule = "|---:|---:|---:|" + "---|" * len(policies)
    return "\n".join([head, rule, *map(_line, cells)])
