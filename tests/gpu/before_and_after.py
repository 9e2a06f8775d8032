"""Engines of two checkouts of kvtxn on one GPU, by turns.

    python tests/gpu/before_and_after.py OUT.json ROUNDS NAME=PATHS@SETTINGS ... -- OPTIONS

PATHS is the PYTHONPATH of an engine, which begins with the folder of its kvtxn; SETTINGS are those
of kvtxn as JSON, or nothing for stock vLLM; OPTIONS are those of ``kvtxn bench vllm`` (the model,
requests, tokens). Each engine is ``vllm.LLM`` in a process of its own. All get the same prompts,
one after the other; each round has other prompts, and another order of engines. An engine's core
runs in its own process, so that all requests of a load reach it at once and every run has the same
steps. OUT gets every run, and by engine the ratios to the first one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import attrs


def serve() -> None:
    """Be an engine: read its arguments and then prompts, a line of JSON each; answer each line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    from first_configs import take_first_configs

    take_first_configs()
    from vllm import LLM, SamplingParams

    import kvtxn

    # Stock's own clock of each request, which vLLM keeps for its statistics alone.
    llm = LLM(**{"disable_log_stats": False, **json.loads(sys.stdin.readline())})
    print(json.dumps(kvtxn.__file__), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        given = SamplingParams(temperature=0.0, max_tokens=work["tokens"], ignore_eos=True)
        found = llm.generate(work["prompts"], given, use_tqdm=False)
        ids = [list(each.outputs[0].token_ids) for each in found]
        times = [each.metrics for each in found]
        begin, end = min(t.queued_ts for t in times), max(t.last_token_ts for t in times)
        steady = [t.last_token_ts - t.first_token_ts for t in times]
        answer = {
            "tokens_per_s": sum(map(len, ids)) / (end - begin),
            "per_token": statistics.median(steady) / (work["tokens"] - 1),
            "first_token": statistics.median(t.first_token_ts - t.queued_ts for t in times),
            "digest": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12],
        }
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


def start(spec: str, arguments: dict[str, Any], folder: Path) -> tuple[str, Any]:
    """Start an engine; returns its name and its process."""
    name, rest = spec.split("=", 1)
    paths, settings = rest.split("@", 1)
    path = os.pathsep.join([paths, str(Path(__file__).parent)])
    log = (folder / f"{name}.log").open("w")
    command = [sys.executable, __file__, "--serve"]
    engine = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        cwd=folder, env=os.environ | {"PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )  # fmt: skip
    config = {"kvtxn": json.loads(settings)} if settings else {}
    engine.stdin.write(json.dumps(arguments | {"additional_config": config}) + "\n")  # type: ignore[union-attr]
    engine.stdin.flush()  # type: ignore[union-attr]
    return name, engine


def ask(engine: Any, work: dict[str, Any]) -> dict[str, Any]:
    """Let an engine generate.

    Raises:
        RuntimeError: it has ended; its log is beside those of the others.
    """
    engine.stdin.write(json.dumps(work) + "\n")
    engine.stdin.flush()
    line = engine.stdout.readline()
    if not line:
        raise RuntimeError(f"an engine has ended, rc {engine.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def cell(engines: dict[str, Any], point: Any, rounds: int, vocabulary: int) -> dict[str, Any]:
    """Run all engines by turns on one load; the first round is not counted."""
    from kvtxn.benchmarks.common import paired_stats

    chance = random.Random(0)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    names = list(engines)
    for number in range(rounds + 1):
        # New prompts, or the first token would come out of the prefix cache.
        draw = [
            [chance.randrange(3, vocabulary) for _ in range(point.context)]
            for _ in range(point.requests)
        ]
        work = {"tokens": point.tokens, "prompts": [{"prompt_token_ids": ids} for ids in draw]}
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            answer = ask(engines[name], work)
            runs[name] += [answer] * (number > 0)
    ratios: dict[str, dict[str, Any]] = {}
    for name, key in product(names[1:], ("tokens_per_s", "per_token", "first_token")):
        pairs = list(zip(runs[names[0]], runs[name], strict=True))
        compared = paired_stats.compare([mine[key] / first[key] for first, mine in pairs])
        ratios.setdefault(name, {})[key] = attrs.asdict(compared)
    return {"load": attrs.asdict(point), "ratios": ratios, "runs": runs}


def main() -> int:
    """Run the engines; prints the ratios as they come."""
    cut = sys.argv.index("--")
    out, rounds, *specs = sys.argv[1:cut]
    from kvtxn.benchmarks.common.machine import describe
    from kvtxn.benchmarks.engines import command, models, options

    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    args = parser.parse_args(sys.argv[cut + 1 :])
    folder = Path(tempfile.mkdtemp())
    print(f"the engines' logs: {folder}", flush=True)
    model = models.MODELS[args.model]
    arguments = dict(command.engine_arguments(args, model, folder))
    engines = dict(start(spec, arguments, folder) for spec in specs)
    where = {name: json.loads(engine.stdout.readline()) for name, engine in engines.items()}
    found: dict[str, Any] = {
        "command": " ".join(sys.argv), "machine": describe(), "engines": where, "cells": [],
    }  # fmt: skip
    for point in options.points(args):
        found["cells"].append(cell(engines, point, int(rounds), model.shape.vocab))
        Path(out).write_text(json.dumps(found, indent=1, default=str))
        print(point, json.dumps(found["cells"][-1]["ratios"]), flush=True)
    for engine in engines.values():
        engine.kill()
    return 0


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["--serve"] else main())
