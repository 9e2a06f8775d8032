"""Benchmarks and running engines: what they change in one, and what they read in a worker.

They change its start, its acceptance and its windows, and read its memory and how many requests
it holds.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from contextlib import suppress

import numpy
import torch

from .protocols.engine import VllmEngine, Worker


def together(engine: VllmEngine, add: Callable[[], None]) -> float:
    """Let requests begin in one step, however long it takes to add them.

    A core in a process of its own begins with the first request that reaches it. How many of the
    others join its first steps is then a race, and times to first token differ by a third between
    runs of the same work. So the core's scheduler is paused while requests are added. A core in
    this process makes no step meanwhile anyway.

    Args:
        engine: a vLLM ``LLMEngine`` without any requests.
        add: a function that adds the requests to the engine.

    Returns:
        The ``time.perf_counter()`` at which the engine was let go on.
    """
    call = getattr(engine.engine_core, "call_utility", None)
    if call is None:
        add()
        return time.perf_counter()
    call("pause_scheduler", "keep", False)
    try:
        add()
    finally:
        released = time.perf_counter()
        call("resume_scheduler")
    return released


def set_acceptance(worker: Worker, rates: tuple[float, ...]) -> None:
    """Change the synthetic acceptance of a running engine.

    Args:
        worker: vLLM's worker.
        rates: for each draft position the share of requests that accept the draft there and all
            drafts before it.
    """
    sampler = worker.model_runner.rejection_sampler
    before = (1.0, *rates)
    given = [rate / last if last else 0.0 for rate, last in zip(rates, before, strict=False)]
    for number, rate in enumerate(given):
        sampler.synthetic_conditional_rates[number].fill_(rate)


def reported_requests(engine: VllmEngine) -> float:
    """Return how many requests of the longest length fit into the cache, as vLLM reports it.

    Args:
        engine: an ``LLMEngine`` whose core is in this process.
    """
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config as most

    config = engine.engine_core.engine_core.scheduler.kv_cache_config
    return float(most(engine.vllm_config, config))


def running_requests(engine: VllmEngine) -> int:
    """Return how many requests have their blocks now, and take part in steps.

    Args:
        engine: an ``LLMEngine`` whose core is in this process.
    """
    return len(engine.engine_core.engine_core.scheduler.running)


def switch_windows(worker: Worker, on: bool) -> None:
    """Switch the windows of a running engine's steps on or off; without windows it runs as stock.

    Either way the random numbers drawn from now on are the same, and with them the drafts that
    synthetic acceptance accepts.
    """
    numpy.random.seed(0)
    torch.manual_seed(0)
    runner = worker.model_runner
    steps = worker.__dict__.setdefault("kvtxn_steps", runner.kvtxn)
    if getattr(steps, "deferred", False):  # on a GPU
        steps.windows.mark(None)  # captured graphs read this buffer
    runner.kvtxn = steps if on else None


def occupied(worker: Worker) -> dict[str, int]:
    """Read what a worker that rests has, after a collection of garbage.

    Returns:
        ``device``: bytes of tensors on the GPU, 0 on a CPU; ``open``: 1 if a window is open that
        nobody ended, else 0.
    """
    give_back()
    steps = getattr(worker.model_runner, "kvtxn", None)
    device = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    return {
        "device": int(device),
        "open": 0 if steps is None or steps.manager.current is None else 1,
    }


def give_back() -> None:
    """Give memory of this process back that Python and the C library have freed already."""
    gc.collect()
    with suppress(AttributeError):  # a C library other than GNU's
        ctypes.CDLL(None).malloc_trim(0)
