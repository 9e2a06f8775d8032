"""The engine's side of ``engines.process``, which runs in its own process."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import attrs

from ...integrations.vllm_plugin.seam import frontend
from ...integrations.vllm_plugin.seam.measuring import (
    reported_requests,
    running_requests,
    set_acceptance,
    together,
)
from .audits import Audited, memory
from .host_timer import clock
from .load import Work


@attrs.frozen(kw_only=True)
class Measured:
    """The outcome of one repetition.

    Attributes:
        seconds: wall time from the first request's arrival to the last token. Requests that come
            at once arrive when the engine has all of them.
        generated: number of generated tokens.
        drafted: draft tokens proposed, by vLLM's own counter.
        accepted: draft tokens accepted, by vLLM's own counter.
        digest: a hash of all generated token ids.
        first_token: seconds from arrival to first token, per request.
        per_token: seconds per token after the first, per request with more than one.
    """

    seconds: float
    generated: int
    drafted: int
    accepted: int
    digest: str
    first_token: Sequence[float]
    per_token: Sequence[float]


def serve(pipe: Connection[Any, Any]) -> None:
    """Run an engine that obeys commands from a pipe until "stop", see ``engine_process.calling``.

    First comes what ``vllm.LLM`` is given and its ``additional_config``.
    """
    arguments, config = pipe.recv()
    from vllm import LLM

    llm = LLM(**arguments, disable_log_stats=False, additional_config=config)
    pipe.send((False, None))
    while _obey(llm, pipe, active=bool(config)):
        pass


def _obey(llm: Any, pipe: Connection[Any, Any], active: bool) -> bool:
    """Receive one command, carry it out and send its answer; return False after the last one.

    "stop" shuts the engine down and sends nothing.
    """
    command, work = pipe.recv()
    if command == "stop":
        frontend.shut_down(llm)
        return False
    if command == "snapshot":
        from ...integrations.vllm_plugin import snapshots

        pipe.send((False, snapshots(llm) if active else []))
    elif command == "audited":
        from ...integrations.vllm_plugin import audit_report, snapshots

        reports = audit_report(llm)  # compares the ranks first; the counters then have it
        ranks = zip(snapshots(llm), reports, strict=True)
        pipe.send((False, [Audited(counters=count, report=found) for count, found in ranks]))
    elif command == "memory":
        pipe.send((False, llm.collective_rpc(memory)))
    elif command == "reported":
        pipe.send((False, reported_requests(llm.llm_engine)))
    elif command == "hold":
        pipe.send((False, hold(llm, work)))
    elif command == "clock":
        llm.collective_rpc(clock, args=(True,))
        repeat(llm, work)
        pipe.send((False, llm.collective_rpc(clock, args=(False,))))
    else:
        pipe.send((False, repeat(llm, work)))
    return True


def repeat(llm: Any, work: Work) -> Measured:
    """Run the work's requests once on an ``LLM``; return seconds, counts, digest of the tokens.

    The work's rates of acceptance are set before, and stay.
    """
    if work.rates is not None:
        llm.collective_rpc(set_acceptance, args=(tuple(work.rates),))
    before = _counts(llm)
    seconds, held, outputs = _generate(llm.llm_engine, work)
    after = _counts(llm)
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    stats = [(output.metrics, len(own) - 1) for output, own in zip(outputs, ids, strict=True)]
    return Measured(
        seconds=seconds,
        generated=sum(map(len, ids)),
        drafted=after[0] - before[0],
        accepted=after[1] - before[1],
        digest=hashlib.sha256(repr(ids).encode()).hexdigest()[:16],
        first_token=[each.first_token_latency - held for each, _ in stats],
        per_token=[
            (each.last_token_ts - each.first_token_ts) / later for each, later in stats if later
        ],
    )


@attrs.frozen(kw_only=True)
class Held:
    """The number of requests that an engine held at once.

    Attributes:
        most: that took part in one step.
        preempted: how often one of them lost its blocks to another.
        finished: that were answered.
    """

    most: int
    preempted: int
    finished: int


def hold(llm: Any, work: Work) -> Held:
    """Run requests that arrive together to their end, and count them.

    The most that took part in one step, those preempted meanwhile, and those finished.
    """
    engine, lengths = llm.llm_engine, work.lengths()
    before = _preempted(llm)
    for number, prompt in enumerate(work.prompts):
        _add(engine, number, prompt, lengths[number], time.time())
    most = finished = 0
    while engine.has_unfinished_requests():
        finished += sum(output.finished for output in engine.step())
        most = max(most, running_requests(engine))
    return Held(most=most, preempted=_preempted(llm) - before, finished=finished)


def _preempted(llm: Any) -> int:
    """Return how many preemptions the engine has counted so far."""
    found = (metric for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    return int(sum(metric.value for metric in found))


def _add(engine: Any, number: int, prompt: Sequence[int], length: int, arrival: float) -> None:
    """Add one request to the engine, of just ``length`` output tokens, sampled greedily.

    Its one output comes at its end, without text. ``arrival`` is in seconds, of ``time.time()``.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine.add_request(
        str(number),
        {"prompt_token_ids": list(prompt)},
        SamplingParams(
            temperature=0.0,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        ),
        arrival_time=arrival,
    )


def _generate(engine: Any, work: Work) -> tuple[float, float, list[Any]]:
    """Run requests as ``LLM.generate`` does, but add each request at its time of arrival.

    Returns:
        Seconds from the first arrival to the last token; seconds by which vLLM takes requests that
        come at once to have arrived too early; and vLLM's outputs, in the order of the prompts.
    """
    lengths, clock, start = work.lengths(), time.time(), time.perf_counter()

    def add(number: int, arrival: float = 0.0) -> None:
        """Add the request of a number, with its time of arrival after the start."""
        _add(engine, number, work.prompts[number], lengths[number], clock + arrival)

    def add_all() -> None:
        """Add all requests, as arrived at the start."""
        for number in range(len(work.prompts)):
            add(number)

    finished: dict[int, Any] = {}
    held = 0.0 if work.arrivals else together(engine, add_all) - start
    arrivals = work.arrivals
    waiting = deque(sorted(range(len(arrivals)), key=arrivals.__getitem__))
    begin = start + held
    while waiting or engine.has_unfinished_requests():
        while waiting and arrivals[waiting[0]] <= time.perf_counter() - begin:
            number = waiting.popleft()
            add(number, arrivals[number])
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, arrivals[waiting[0]] - (time.perf_counter() - begin)))
            continue
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = output
    seconds = time.perf_counter() - begin
    return seconds, held, [finished[number] for number in range(len(work.prompts))]


def _counts(llm: Any) -> tuple[int, int]:
    """Return the draft tokens proposed and accepted so far, by vLLM's own counters.

    0 without one.
    """
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return (
        int(counts.get("vllm:spec_decode_num_draft_tokens", 0)),
        int(counts.get("vllm:spec_decode_num_accepted_tokens", 0)),
    )
