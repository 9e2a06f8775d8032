"""The demo's runs: each has one engine and one policy, in a process of its own.

Each run has a process of its own, so that no run can help or hurt another,
and reports back over a pipe: progress first, then its result.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import attrs

from ..serving.engine_process import EngineProcess, calling, ending_with

MODEL = Path(__file__).parent / "model"


@attrs.frozen(kw_only=True)
class Job:
    """The prompts and settings of one run.

    Attributes:
        policy: a kvtxn policy, or "off" for stock vLLM without the plugin's windows.
        prompts: the texts to continue.
        model: a model's folder, with its tokenizer.
        chat: answer the prompts by the model's chat template, up to its end, and do not continue
            them.
        max_tokens: tokens to generate per prompt.
        repetition_penalty: the penalty of greedy decoding; a penalty above 1 avoids loops.
        draft_tokens: most draft tokens per verify pass, by n-gram lookup.
        log_level: log level of kvtxn and vLLM in the engine's process; "debug" shows both logs.
    """

    policy: str
    prompts: tuple[str, ...]
    model: str
    chat: bool
    max_tokens: int
    repetition_penalty: float
    draft_tokens: int
    log_level: str = "error"


@attrs.frozen
class Result:
    """The tokens and counters of one run.

    Attributes:
        token_ids: generated ids per prompt.
        texts: the generated text per prompt.
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


#: Settings of a small engine on a CPU, unless the user's own environment has them.
_DEFAULTS: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}


def run(job: Job, progress: Callable[[int], None]) -> Result:
    """Generate in a fresh process, and return the result.

    ``progress`` gets the number of prompts that are done.

    Raises:
        EngineError: the engine's process failed; the message ends with its last words.
    """
    environment = {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()}
    process = EngineProcess(
        calling("kvtxn.integrations.demo.engine"),
        name=job.policy,
        operation="demo",
        timeout=_PATIENCE,
        environment=environment | {"VLLM_LOGGING_LEVEL": job.log_level.upper()},
        quiet=job.log_level != "debug",  # the engine's log would hide the progress bar
        rest="--log-level debug shows the rest",
    )
    with ending_with([process]):
        process.send(job)
        while isinstance(answer := process.answer("while it generated"), int):
            progress(answer)
    result: Result = answer
    return result


#: Seconds that the engine may take to start, or until one more prompt is done.
_PATIENCE: Final = 1800.0


def serve(pipe: Connection[tuple[bool, object], Job]) -> None:
    """Generate in the engine's process: send how many prompts are done, then the result.

    Args:
        pipe: brings the job.
    """
    job = pipe.recv()
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
        ignore_eos=not job.chat,
    )
    bar = _progress_class(pipe)
    begin = time.perf_counter()
    if job.chat:
        said = [[{"role": "user", "content": prompt}] for prompt in job.prompts]
        outputs = llm.chat(said, sampling, use_tqdm=bar)
    else:
        outputs = llm.generate(list(job.prompts), sampling, use_tqdm=bar)
    seconds = time.perf_counter() - begin
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    result = Result(
        token_ids=[list(output.outputs[0].token_ids) for output in outputs],
        texts=[output.outputs[0].text for output in outputs],
        drafted=int(counts.get("vllm:spec_decode_num_draft_tokens", 0)),
        accepted=int(counts.get("vllm:spec_decode_num_accepted_tokens", 0)),
        seconds=seconds,
        counters=_counters(llm) if settings else {},
    )
    pipe.send((False, result))


def _counters(llm: object) -> dict[str, float]:
    """Return kvtxn's counters of rank 0."""
    from ..vllm_plugin import snapshots

    return snapshots(llm)[0]


def _progress_class(pipe: Connection[tuple[bool, object], Job]) -> type:
    """Return a class of tqdm that draws nothing and sends how many prompts are done."""
    from tqdm import tqdm

    class Reporter(tqdm):  # type: ignore[misc]  # untyped base
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            pipe.send((False, int(self.n)))

    return Reporter
