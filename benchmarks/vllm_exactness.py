"""``kvtxn bench exactness``: are an engine's tokens stock's, and its caches clean?

Engines of a small trained model run side by side, each in a process of its own, over the same
prompts. Two stock engines say how far stock agrees with itself, and two attention backends how
far rounding carries. Then every byte of the caches is looked at around each step, and each
stage of a step is made to fail once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from . import machine
from .exactness_engine import Task

help: Final = "tokens, caches, faults and memory of whole vLLM engines on a GPU"

#: Engine -> policy, attention backend, the engine it is compared with, and whether in its process.
ENGINES: Final[Mapping[str, tuple[str, str, str, bool]]] = {
    "stock": ("stock", "FLASH_ATTN", "stock", True),
    "stock again": ("stock", "FLASH_ATTN", "stock", True),
    "stock, TRITON_ATTN": ("stock", "TRITON_ATTN", "stock", True),
    "undo": ("undo", "FLASH_ATTN", "stock", True),
    "deferred": ("deferred", "FLASH_ATTN", "stock", True),
    "undo, TRITON_ATTN": ("undo", "TRITON_ATTN", "stock, TRITON_ATTN", True),
    "stock, multi-process": ("stock", "FLASH_ATTN", "stock", False),
    "undo, multi-process": ("undo", "FLASH_ATTN", "stock, multi-process", False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--prompts", type=int, default=240)
    parser.add_argument("--tokens", type=int, default=128, help="to generate per prompt")
    parser.add_argument("--drafts", type=int, default=4, help="draft tokens per request")
    parser.add_argument("--requests", type=int, default=64, help="requests at once")
    parser.add_argument("--windows", type=int, default=1000, help="windows to look at")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--timeout", type=float, default=500, help="seconds for all engines")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")


def run(args: argparse.Namespace) -> int:
    """Run every engine, compare, print, and write the result."""
    tasks = [_task(args, name) for name in args.engines]
    found, errors = observed(tasks, args.timeout)
    engines = []
    for task in tasks:
        mine, base = found[task.name], found.get(ENGINES[task.name][2])
        row = {k: v for k, v in mine.items() if k not in ("tokens", "few", "again", "faults")}
        if base is not None:
            row["compared_with"] = base["task"]["name"]
            row["tokens"] = compare(base["tokens"], mine["tokens"])
            row["faults"] = [
                {**each, "tokens": compare(base["few"], each["tokens"])}
                for each in mine.get("faults", ())
            ]
        engines.append(row)
        print(json.dumps(row), flush=True)
    print(json.dumps(errors), flush=True)
    if args.save:
        settings = {k: v for k, v in vars(args).items() if isinstance(v, (int, float, str))}
        result = {"settings": settings, "engines": engines, "attention": errors}
        print(f"written to {machine.write(args.save, result)}")
    return 0


def _task(args: argparse.Namespace, name: str) -> Task:
    policy, attention, _, in_process = ENGINES[name]
    return Task(
        name=name,
        policy=policy,
        attention=attention,
        prompts=args.prompts,
        tokens=args.tokens,
        drafts=args.drafts,
        max_num_seqs=args.requests,
        in_process=in_process,
        windows=args.windows if policy != "stock" else 0,
        faults=True,
    )


def observed(
    tasks: Sequence[Task], timeout: float
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """What each engine's process and the one for attention alone report.

    Raises:
        RuntimeError: a process failed; the message ends with its last words.
    """
    package = __package__ or ""
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{number}.json" for number in range(len(tasks) + 1)]
        logs = [result.with_suffix(".log") for result in results]
        commands = [
            ["exactness_engine", json.dumps(attrs.asdict(task)), str(result), str(log)]
            for task, result, log in zip(tasks, results, logs, strict=False)
        ]
        commands.append(["exactness_attention", str(results[-1])])
        running = []
        for (module, *arguments), log in zip(commands, logs, strict=True):
            command = [sys.executable, "-m", f"{package}.{module}", *arguments]
            with log.open("w") as sink:
                running.append(subprocess.Popen(command, stdout=sink, stderr=sink))
        try:
            for process in running:
                process.wait(timeout)
        finally:
            for process in running:
                process.kill()
        for result, log in zip(results, logs, strict=True):
            if not result.exists():
                last = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-40:])
                raise RuntimeError(f"an engine's process ended without a result:\n{last}")
        reports = [json.loads(result.read_text()) for result in results]
    return {task.name: report for task, report in zip(tasks, reports, strict=False)}, reports[-1]


def compare(base: Sequence[Any], other: Sequence[Any]) -> dict[str, Any]:
    """Tokens of two engines, and how near a tie it was where they part.

    Args:
        base: per prompt, ``[id, best log-probability, second]`` per token.
        other: likewise.

    Returns:
        ``same`` of ``prompts``; ``gaps``: in ``base``, best minus second log-probability at the
        first token that differs, smallest to largest; ``noise``: how much the best
        log-probability differs over equal beginnings, its 50th and 99th percentile and most.
    """
    gaps, noise = [], []
    for ours, theirs in zip(other, base, strict=True):
        pairs = list(zip(theirs, ours, strict=True))
        first = next((i for i, (a, b) in enumerate(pairs) if a[0] != b[0]), len(pairs))
        noise += [abs(a[1] - b[1]) for a, b in pairs[:first]]
        if first < len(pairs):
            gaps.append(round(theirs[first][1] - theirs[first][2], 4))
    noise.sort()
    spread = [noise[int(share * (len(noise) - 1))] for share in (0.5, 0.99, 1)] if noise else []
    return {
        "prompts": len(base),
        "same": len(base) - len(gaps),
        "gaps": sorted(gaps),
        "median_gap": statistics.median(gaps) if gaps else None,
        "noise": [round(each, 5) for each in spread],
    }
