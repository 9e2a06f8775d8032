"""The engine's side of ``vllm_engine``: runs in a process of its own."""

from __future__ import annotations

import hashlib
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import attrs
import numpy
import torch

from .vllm_clock import clock
from .vllm_work import Work


@attrs.frozen(kw_only=True)
class Measured:
    """What came out of one repetition.

    Attributes:
        seconds: wall time from the first request's arrival to the last token.
        generated: tokens.
        drafted: by vLLM's own counter.
        accepted: likewise.
        digest: of all generated ids.
        first_token: seconds from arrival to first token, per request.
        per_token: seconds per token after the first, per request with more than one.
        token_ids: per request, where asked for.
    """

    seconds: float
    generated: int
    drafted: int
    accepted: int
    digest: str
    first_token: Sequence[float]
    per_token: Sequence[float]
    token_ids: list[list[int]] | None


def main() -> None:
    """The engine's process: commands come in, and ``(failed, answer)`` goes out.

    The only argument is the descriptor of a pipe. First comes what ``vllm.LLM`` is given and its
    ``additional_config``.
    """
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        arguments, config = pipe.recv()
        from vllm import LLM

        llm = LLM(**arguments, disable_log_stats=False, additional_config=config)
        pipe.send((False, None))
        while _obey(llm, pipe, active=bool(config)):
            pass
    except (EOFError, BrokenPipeError):  # whoever asked is gone
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send((True, f"{type(error).__name__}: {error}".splitlines()[0]))


def _obey(llm: Any, pipe: Connection[Any, Any], active: bool) -> bool:
    """Carry out one command; False after the last."""
    command, work = pipe.recv()
    if command == "stop":
        llm.llm_engine.engine_core.shutdown()
        return False
    if command == "switch":
        llm.collective_rpc(switch, args=(work,))
        pipe.send((False, None))
    elif command == "snapshot":
        from ..integrations.vllm_plugin import snapshots

        pipe.send((False, snapshots(llm) if active else []))
    elif command == "clock":
        llm.collective_rpc(clock, args=(True,))
        repeat(llm, work)
        pipe.send((False, llm.collective_rpc(clock, args=(False,))))
    else:
        pipe.send((False, repeat(llm, work)))
    return True


def repeat(llm: Any, work: Work) -> Measured:
    """One repetition on an ``LLM``."""
    if work.rates is not None:
        llm.collective_rpc(_set_rates, args=(tuple(work.rates),))
    before = _counts(llm)
    seconds, outputs = _generate(llm.llm_engine, work)
    after = _counts(llm)
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    stats = [(output.metrics, len(own) - 1) for output, own in zip(outputs, ids, strict=True)]
    return Measured(
        seconds=seconds,
        generated=sum(map(len, ids)),
        drafted=after[0] - before[0],
        accepted=after[1] - before[1],
        digest=hashlib.sha256(repr(ids).encode()).hexdigest()[:16],
        first_token=[each.first_token_latency for each, _ in stats],
        per_token=[
            (each.last_token_ts - each.first_token_ts) / later for each, later in stats if later
        ],
        token_ids=ids if work.tokens else None,
    )


def _generate(engine: Any, work: Work) -> tuple[float, list[Any]]:
    """What ``LLM.generate`` does, but that a request comes when it arrives."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = [
        SamplingParams(
            temperature=work.temperature,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for length in work.lengths()
    ]
    arrivals = work.arrivals or [0.0] * len(work.prompts)
    waiting = deque(sorted(range(len(work.prompts)), key=lambda number: arrivals[number]))
    finished: dict[int, Any] = {}
    begin, clock = time.perf_counter(), time.time()
    while waiting or engine.has_unfinished_requests():
        while waiting and arrivals[waiting[0]] <= time.perf_counter() - begin:
            number = waiting.popleft()
            engine.add_request(
                str(number),
                {"prompt_token_ids": list(work.prompts[number])},
                sampling[number],
                arrival_time=clock + arrivals[number],
            )
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, arrivals[waiting[0]] - (time.perf_counter() - begin)))
            continue
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = output
    seconds = time.perf_counter() - begin
    return seconds, [finished[number] for number in range(len(work.prompts))]


def _counts(llm: Any) -> tuple[int, int]:
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return (
        int(counts.get("vllm:spec_decode_num_draft_tokens", 0)),
        int(counts.get("vllm:spec_decode_num_accepted_tokens", 0)),
    )


def switch(worker: Any, on: bool) -> None:
    """Let the steps of a running engine have windows or be stock's.

    Either way what is drawn from now on is the same, and so is which drafts are accepted by lot.
    """
    numpy.random.seed(0)
    torch.manual_seed(0)
    runner = worker.model_runner
    steps = worker.__dict__.setdefault("kvtxn_steps", runner.kvtxn)
    if getattr(steps, "deferred", False):  # on a GPU
        steps.window.show(None)  # graphs read it
    runner.kvtxn = steps if on else None


def _set_rates(worker: Any, rates: tuple[float, ...]) -> None:
    """Change the synthetic acceptance of a running engine; each rate given the one before."""
    sampler = worker.model_runner.rejection_sampler
    before = (1.0, *rates)
    given = [rate / last if last else 0.0 for rate, last in zip(rates, before, strict=False)]
    for number, rate in enumerate(given):
        sampler.synthetic_conditional_rates[number].fill_(rate)
