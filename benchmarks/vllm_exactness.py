"""``kvtxn bench exactness``: are an engine's tokens stock's, and its caches clean?

Engines of a small trained model run side by side, each in a process of its own, over the same
prompts. Two stock engines say how far stock agrees with itself, and two attention backends how
far rounding carries. Then every byte of the caches is looked at around each step, and each
stage of a step is made to fail once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from ..cli import natural
from . import machine
from .exactness_engine import Task

help: Final = "tokens, caches, faults and memory of whole vLLM engines on a GPU"


@attrs.frozen
class Kind:
    """An engine.

    Attributes:
        policy: a kvtxn policy, or ``"stock"``.
        compared_with: the engine whose tokens its own are compared with.
        attention: vLLM's name of the attention backend.
        in_process: whether its core runs in its caller's process.
        ranks: GPUs, by tensor parallelism.
    """

    policy: str
    compared_with: str = "stock"
    attention: str = "FLASH_ATTN"
    in_process: bool = True
    ranks: int = 1


#: By name.
ENGINES: Final[Mapping[str, Kind]] = {
    "stock": Kind("stock"),
    "stock again": Kind("stock"),
    "stock, TRITON_ATTN": Kind("stock", attention="TRITON_ATTN"),
    "undo": Kind("undo"),
    "deferred": Kind("deferred"),
    "undo, TRITON_ATTN": Kind("undo", "stock, TRITON_ATTN", attention="TRITON_ATTN"),
    "stock, multi-process": Kind("stock", in_process=False),
    "undo, multi-process": Kind("undo", "stock, multi-process", in_process=False),
    "stock, TP=2": Kind("stock", ranks=2),
    "undo, TP=2": Kind("undo", "stock, TP=2", ranks=2),
    "deferred, TP=2": Kind("deferred", "stock, TP=2", ranks=2),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--prompts", type=natural, default=240)
    parser.add_argument("--tokens", type=natural, default=128, help="to generate per prompt")
    parser.add_argument("--drafts", type=natural, default=4, help="draft tokens per request")
    parser.add_argument("--requests", type=natural, default=64, help="requests at once")
    parser.add_argument("--windows", type=natural, default=1000, help="windows to look at")
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=list(ENGINES),
        help="default: all that the machine has GPUs for",
    )
    parser.add_argument("--timeout", type=float, default=500, help="seconds for all engines")
    machine.add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Run every engine, compare, print, and write the result; exit code 1 if one failed."""
    gpus = torch.cuda.device_count()
    if not gpus:
        print("the comparison of whole engines needs a CUDA device")
        return 1
    names = args.engines or [name for name, kind in ENGINES.items() if kind.ranks <= gpus]
    tasks = [_task(args, name) for name in names]
    found, errors, failed = observed(tasks, args.timeout)
    engines = []
    for task in tasks:
        if task.name not in found:
            continue
        mine, base = found[task.name], found.get(ENGINES[task.name].compared_with)
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
    for name, last in failed.items():
        print(f"{name} ended without a result:\n{last}", file=sys.stderr, flush=True)
    if args.save:
        settings = {k: v for k, v in vars(args).items() if isinstance(v, (int, float, str))}
        words = {name: text.strip().rpartition("\n")[2] for name, text in failed.items()}
        result = {"settings": settings, "engines": engines, "attention": errors, "failed": words}
        print(f"written to {machine.write(args.save, result)}")
    return 1 if failed else 0


def _task(args: argparse.Namespace, name: str) -> Task:
    kind = ENGINES[name]
    return Task(
        name=name,
        policy=kind.policy,
        attention=kind.attention,
        prompts=args.prompts,
        tokens=args.tokens,
        drafts=args.drafts,
        max_num_seqs=args.requests,
        ranks=kind.ranks,
        in_process=kind.in_process,
        windows=args.windows if kind.policy != "stock" else 0,
        faults=True,
    )


def observed(
    tasks: Sequence[Task], timeout: float
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]], dict[str, str]]:
    """What each engine's process reports, and the one for attention alone.

    Returns:
        The reports by name, that of the attention, and of processes that failed or took too long
        their last words, by name.
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
        until = time.monotonic() + timeout
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
        found, failed = dict[str, Any](), dict[str, str]()
        names = [*(task.name for task in tasks), _ALONE]
        for name, result, log in zip(names, results, logs, strict=True):
            if result.exists():
                found[name] = json.loads(result.read_text())
            else:
                text = log.read_text(errors="replace")
                failed[name] = "".join(text.splitlines(keepends=True)[-40:])
    return found, found.pop(_ALONE, []), failed


#: What the process is called that measures attention without an engine.
_ALONE: Final = "attention alone"


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
