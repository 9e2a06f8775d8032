"""SGLang engines of an 8B shape, by turns: stock, with the ledger, and with the KV canary.

python tests/gpu/sglang_cost.py OUT [--rounds 5]

All of them run on one GPU at once and one of them works at a time, so each cell compares rounds of
the same minute. Weights are dummies. OUT gets ``cost.json`` and a log for each engine. SGLang and
kvtxn are those that this Python imports.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent

#: By name: variables and arguments of an engine. The first one is what the others are held against.
ENGINES: Final[Mapping[str, tuple[dict[str, str], dict[str, Any]]]] = {
    "stock": ({}, {}),
    "ledger": ({"KVTXN_SGLANG": '{"audit": "ledger"}'}, {}),
    "canary": ({}, {"kv_canary": "log"}),
}
LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}
ARGUMENTS: Final = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "context_length": 2048,
    "max_running_requests": 32,
    "max_total_tokens": 65536,
    "mem_fraction_static": 0.85,
    "random_seed": 0,
    "log_level": "info",
    "watchdog_timeout": 600,
    "cuda_graph_backend_prefill": "disabled",
    "cuda_graph_max_bs_decode": 32,
    "chunked_prefill_size": 8192,
}
REQUESTS: Final = (8, 32)
CONTEXT: Final = 1024
TOKENS: Final = 192


# -- one engine ---------------------------------------------------------------------------


def serve() -> None:
    """Start the engine that the first line of the input describes; answer each line after it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints belongs into the log
    import sglang

    engine = sglang.Engine(**json.loads(sys.stdin.readline()))
    print(json.dumps("up"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(engine, json.loads(line))), file=answers, flush=True)


def timed(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Generate one token for each prompt, then all."""

    def run(tokens: int) -> tuple[float, list[list[int]]]:
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        begin = time.perf_counter()
        found = engine.generate(input_ids=prompts, sampling_params=parameters)
        seconds = time.perf_counter() - begin
        return seconds, [list(one.get("output_ids") or one.get("token_ids")) for one in found]

    first, _ = run(1)
    seconds, tokens = run(TOKENS)
    return {
        "first": first,
        "seconds": seconds,
        "generated": sum(map(len, tokens)),
        "digest": hashlib.md5(repr(tokens).encode()).hexdigest()[:12],
    }


# -- by turns -----------------------------------------------------------------------------


class Worker:
    """A process with an engine.

    Args:
        name: of ``ENGINES``.
        out: folder for the log and the model.
    """

    def __init__(self, name: str, out: Path) -> None:
        from sglang_machine import environment

        variables, more = ENGINES[name]
        found = environment() | variables
        # What SGLang wants of a machine that lacks some of its packages; it mends nothing else.
        paths = [found.get("PYTHONPATH", ""), str(HERE), str(out / "plugins")]
        found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with open(out / f"cost.{name}.log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=found,
            )
        self.send({**ARGUMENTS, "model_path": str(out / "model"), **more})

    def send(self, line: Any) -> None:
        print(json.dumps(line), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """Wait for a line; None once the process has died."""
        line = self.process.stdout.readline()
        return json.loads(line) if line else None


def turns(names: list[str], rounds: int) -> Iterable[list[str]]:
    """Name the engines of each round in their order; each is first in turn."""
    return (names[n % len(names) :] + names[: n % len(names)] for n in range(rounds))


def cell(workers: Mapping[str, Worker], requests: int, rounds: int) -> dict[str, Any]:
    """Time all engines; the first round warms them up and its times are dropped."""
    chance, digests = random.Random(requests), []
    rows: dict[str, list[Any]] = {name: [] for name in workers}
    for number, order in enumerate(turns(list(workers), rounds + 1)):
        prompts = [[chance.randrange(3, 30000) for _ in range(CONTEXT)] for _ in range(requests)]
        same = {}
        for name in order:
            workers[name].send(prompts)
            got = workers[name].answer()
            same[name] = got["digest"]
            rows[name] += [got] if number else []
        digests.append(same)
    facts = {"requests": requests, "context": CONTEXT, "tokens": TOKENS}
    return {**facts, "rows": rows, "digests": digests}


def main() -> None:
    """Time the engines, and write after each cell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for cost.json, the logs and the model")
    parser.add_argument("--rounds", type=int, default=5, help="of each cell, beside a first one")
    given = parser.parse_args()
    from sglang_engines import install
    from sglang_machine import where

    out = given.out.resolve()
    (out / "model").mkdir(parents=True, exist_ok=True)
    install(out / "plugins")
    (out / "model" / "config.json").write_text(json.dumps(LLAMA))
    workers = {}
    try:
        for name in ENGINES:
            workers[name] = Worker(name, out)
            time.sleep(3)  # one measures the free memory before the next one takes some
        up = {name: worker.answer() for name, worker in workers.items()}
        found: dict[str, Any] = {**where(out), "up": up, "cells": []}
        alive = {name: worker for name, worker in workers.items() if up[name]}
        for requests in REQUESTS:
            found["cells"].append(cell(alive, requests, given.rounds))
            (out / "cost.json").write_text(json.dumps(found))
    finally:
        for worker in workers.values():
            worker.process.kill()


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        main()
