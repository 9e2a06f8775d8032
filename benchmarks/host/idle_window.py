"""Host time of an idle window: begin, stage every layer by reference, commit.

Nothing settled and nothing accepted, so hardly a byte moves: the time left is the host's own work.
``--profile`` says where it goes.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import torch

from ... import LayerRef, TransactionManager, TxnConfig
from ...cli import natural, require
from ..common import machine
from ..common.markdown import table

#: Draft rows of each request.
_DRAFTS: Final = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the suite's arguments to its parser."""
    parser.add_argument("--layers", type=natural, default=32)
    parser.add_argument("--requests", type=natural, nargs="+", default=[1, 8, 32])
    parser.add_argument("--policies", nargs="+", default=["deferred", "undo", "direct"])
    parser.add_argument("--backend", default="auto")
    parser.add_argument(
        "--windows",
        type=natural,
        default=300,
        help="timed windows; before them as many run untimed",
    )
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    machine.add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every combination, print a table or JSON in microseconds; return the exit code 0.

    With ``--save`` the result is written. Torch runs in one thread from then on.
    """
    if not args.json:
        require("tabulate")
    torch.set_num_threads(1)  # on rows this small a second thread only adds waiting
    rows = [
        measure(args, policy, requests) for policy in args.policies for requests in args.requests
    ]
    results = {"suite": "host", "layers": args.layers, "rows": rows}
    if args.save:
        machine.write(args.save, results)
    if args.json:
        print(json.dumps({"machine": machine.describe(), **results}, indent=1))
        return 0
    print(f"{args.layers} layers, median of {args.windows} windows, microseconds on the host")
    parts = ("begin", "stage", "commit", "all")
    lines = [
        [row["policy"], str(row["requests"]), str(row["rows"]), *(f"{row[p]:.1f}" for p in parts)]
        for row in rows
    ]
    print(table(["policy", "requests", "rows", *parts], lines))
    if args.profile:
        print(profile(args))
    return 0


def window_runner(
    args: argparse.Namespace, policy: str, requests: int
) -> Callable[[], list[float]]:
    """Make a function that runs one window over all layers and accepts no draft.

    It returns four readings of ``time.perf_counter``, in seconds: before the window begins, after
    it began, after every layer is staged, and after the commit. Nothing waits for a GPU.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = requests * _DRAFTS
    shape = (max(1, -(-rows // 16)), 16, 8, 128)
    refs = [
        LayerRef(
            name=f"model.layers.{i}",
            key_cache=torch.zeros(shape, dtype=torch.bfloat16, device=device),
            value_cache=torch.zeros(shape, dtype=torch.bfloat16, device=device),
        )
        for i in range(args.layers)
    ]
    config = TxnConfig(policy=policy, backend=args.backend, max_rows=max(rows, 1))  # type: ignore[arg-type]
    manager = TransactionManager(refs, config)
    slots = torch.arange(rows, device=device)
    nothing = torch.zeros(requests, dtype=torch.int64, device=device)
    key = torch.randn(rows, 8, 128, dtype=torch.bfloat16, device=device)
    accepted: Any = nothing if device.type == "cuda" else [0] * requests

    def once() -> list[float]:
        """Run one window, and return the four readings."""
        times = [time.perf_counter()]
        with manager.window(_DRAFTS, slots, settled=0) as w:
            times.append(time.perf_counter())
            for ref in refs:
                w.stage(ref, key, key)
            times.append(time.perf_counter())
            w.commit(accepted)
            times.append(time.perf_counter())
        return times

    return once


def measure(args: argparse.Namespace, policy: str, requests: int) -> dict[str, Any]:
    """Measure the median host microseconds of begin, of all stages, of commit, and of the whole.

    Returns:
        The row of the result file: policy, requests, rows, and the four times.
    """
    once = window_runner(args, policy, requests)
    for _ in range(args.windows):  # as many, or the first row would show a processor that wakes up
        once()
    samples = []
    for _ in range(args.windows):
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a full queue would make the host wait
        samples.append(once())
    steps = [[(b - a) * 1e6 for a, b in pairwise(s)] for s in samples]
    begin, stage, commit = (statistics.median(column) for column in zip(*steps, strict=True))
    whole = statistics.median((s[-1] - s[0]) * 1e6 for s in samples)
    row = {"policy": policy, "requests": requests, "rows": requests * _DRAFTS}
    times = {"begin": begin, "stage": stage, "commit": commit, "all": whole}
    return {**row, **{name: round(value, 2) for name, value in times.items()}}


def profile(args: argparse.Namespace) -> str:
    """Return a listing of the 16 functions in which an idle window spends most of its time.

    Of the first policy and the first number of requests.
    """
    once = window_runner(args, args.policies[0], args.requests[0])
    once()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(args.windows):
        once()
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(16)
    return text.getvalue()
