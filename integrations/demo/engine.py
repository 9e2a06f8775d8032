"""One engine, one policy, one process: what the demo compares.

Each run has a process of its own, so that no run can help or hurt another,
and reports back over a pipe: progress first, then its result.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs

MODEL = Path(__file__).parent / "model"


@attrs.frozen(kw_only=True)
class Job:
    """What to generate, and how.

    Attributes:
        policy: a kvtxn policy, or "off" for stock vLLM without the plugin's windows.
        prompts: the texts to continue.
        model: a model's folder, with its tokenizer.
        max_tokens: tokens to generate per prompt.
        repetition_penalty: of greedy decoding; above 1 it avoids loops.
        draft_tokens: most draft tokens per verify pass, by n-gram lookup.
        log_level: of kvtxn and vLLM in the engine's process; "debug" shows them.
    """

    policy: str
    prompts: tuple[str, ...]
    model: str
    max_tokens: int
    repetition_penalty: float
    draft_tokens: int
    log_level: str = "error"


@attrs.frozen
class Result:
    """What came out.

    Attributes:
        token_ids: generated ids per prompt.
        texts: the same as text.
        drafted: draft tokens proposed, by vLLM's own counter.
        accepted: draft tokens accepted, by vLLM's own counter.
        seconds: wall time of generation, engine start not included.
        counters: ``snapshots(llm)`` of rank 0; empty when kvtxn is off.
    """

    token_ids: list[list[int]]
    texts: list[str]
    drafted: int
    accepted: int
    seconds: float
    counters: dict[str, float]


def run(job: Job, progress: Callable[[int], None]) -> Result:
    """Generate in a fresh process; ``progress`` is told how many prompts are done.

    Raises:
        RuntimeError: the engine's process failed; the message ends with its last words.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", suffix=".log", errors="replace") as log:
        process = context.Process(target=_work, args=(job, theirs, log.name))
        process.start()
        theirs.close()
        result: Result | None = None
        try:
            while result is None:
                message = ours.recv()
                if isinstance(message, int):
                    progress(message)
                else:
                    result = message
        except EOFError:
            pass
        finally:
            process.join()
        if result is None:
            last_words = "".join(log.readlines()[-15:])
            raise RuntimeError(
                f"the engine for policy {job.policy!r} ended with exit code {process.exitcode}:\n"
                f"{last_words}"
            )
    return result


def _work(job: Job, pipe: Connection, log: str) -> None:
    """The engine's process: settings for a small CPU engine, then generate and report."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["VLLM_LOGGING_LEVEL"] = job.log_level.upper()
    if job.log_level != "debug":  # the engine's chatter would drown the progress bar
        sink = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
    from vllm import LLM, SamplingParams

    settings = {} if job.policy == "off" else {"kvtxn": {"policy": job.policy}}
    llm = LLM(
        model=job.model,
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        disable_log_stats=False,
        additional_config=settings,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": job.draft_tokens,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        },
    )
    sampling = SamplingParams(
        temperature=0.0,
        repetition_penalty=job.repetition_penalty,
        max_tokens=job.max_tokens,
        ignore_eos=True,
    )
    bar = _progress_class(pipe)
    begin = time.perf_counter()
    outputs = llm.generate(list(job.prompts), sampling, use_tqdm=bar)
    seconds = time.perf_counter() - begin
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    pipe.send(
        Result(
            token_ids=[list(output.outputs[0].token_ids) for output in outputs],
            texts=[output.outputs[0].text for output in outputs],
            drafted=int(counts.get("vllm:spec_decode_num_draft_tokens", 0)),
            accepted=int(counts.get("vllm:spec_decode_num_accepted_tokens", 0)),
            seconds=seconds,
            counters=_counters(llm) if settings else {},
        )
    )
    pipe.close()


def _counters(llm: Any) -> dict[str, float]:
    from ..vllm_plugin import snapshots

    return snapshots(llm)[0]


def _progress_class(pipe: Connection) -> Any:
    """A tqdm that draws nowhere and tells the parent how many prompts are done."""
    from tqdm import tqdm

    class Reporter(tqdm):  # type: ignore[misc]  # untyped base
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            pipe.send(int(self.n))

    return Reporter
