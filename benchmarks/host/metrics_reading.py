"""Cost of one reading of the counters; ``/metrics`` takes one every few seconds.

An engine whose core runs in its caller's process takes as long as its workers are kept from the
next step; where the core has a process of its own, as in a server, the call's way there and back
comes on top, and keeps nobody but the caller.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any, Final
from unittest import mock

import numpy

from ...cli import natural
from ..common import machine
from ..common.markdown import machine_line, table

#: Places of an engine's core, as results name them.
IN_PROCESS: Final = "in the caller's process"
OWN_PROCESS: Final = "in a process of its own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the suite's arguments."""
    parser.add_argument("--readings", type=natural, default=2000, help="per engine")
    parser.add_argument("--policy", default="auto")
    machine.add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Measure two engines, one after the other, and print a table."""
    from ...integrations.vllm_plugin.metrics.snapshots import INTERVAL

    rows = [measure(args, where) for where in (IN_PROCESS, OWN_PROCESS)]
    results = {"suite": "readings", "interval": INTERVAL, "rows": rows}
    print(report({"machine": machine.describe(), **results}))
    if args.save:
        print(f"written to {machine.write(args.save, results)}")
    return 0


def measure(args: argparse.Namespace, where: str) -> dict[str, Any]:
    """Measure the microseconds of readings between steps, in an engine that had windows."""
    from ...integrations.vllm_plugin import snapshots

    own = str(int(where == OWN_PROCESS))
    with mock.patch.dict(os.environ, {"VLLM_ENABLE_V1_MULTIPROCESSING": own}):
        llm = _engine(args.policy)
    found = snapshots(llm)[0]
    if not found.get("kvtxn_windows_total"):
        raise RuntimeError(f"this engine had no windows: {found}")
    times = []
    for _ in range(args.readings):
        start = time.perf_counter()
        snapshots(llm)
        times.append(time.perf_counter() - start)
    llm.llm_engine.engine_core.shutdown()
    middle, most = numpy.percentile(times, (50, 99)) * 1e6
    return {"core": where, "readings": args.readings,
            "median": round(float(middle), 1), "most": round(float(most), 1)}  # fmt: skip


def _engine(policy: str) -> Any:
    """Start an engine of the demo's model and let it speculate."""
    from vllm import LLM, SamplingParams

    from ...integrations.demo.engine import MODEL

    llm = LLM(
        model=str(MODEL),
        max_model_len=256,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        gpu_memory_utilization=0.2,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4,
                            "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        additional_config={"kvtxn": {"policy": policy}},
    )  # fmt: skip
    prompt = "It was a fine evening, and it was a fine evening, and it was"
    llm.generate([prompt], SamplingParams(max_tokens=64, temperature=0), use_tqdm=False)
    return llm


def report(found: dict[str, Any]) -> str:
    """Tabulate a result."""
    interval = found["interval"]
    rows = [
        [row["core"], f"{row['median']:.0f}", f"{row['most']:.0f}",
         f"{row['median'] / interval / 1e4:.4f} %"]
        for row in found["rows"]
    ]  # fmt: skip
    header = ["the engine's core runs", "median", "99 %", f"of {interval:.0f} s"]
    return f"{table(header, rows)}\n\nMicroseconds. {machine_line(found['machine'])}."
