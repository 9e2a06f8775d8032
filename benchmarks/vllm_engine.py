"""One vLLM engine in a process of its own, told what to run over a pipe.

Engines of several policies live side by side and take turns, so that what is compared was
measured within seconds of each other.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class EngineSpec:
    """What to start.

    Attributes:
        policy: a kvtxn policy, or ``"stock"``.
        arguments: of ``vllm.LLM``.
        settings: more of kvtxn's settings.
        environment: set before vLLM is imported.
    """

    policy: str
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}


@attrs.frozen(kw_only=True)
class Work:
    """One repetition.

    Attributes:
        prompts: token ids per request.
        max_tokens: tokens to generate for each.
        temperature: 0 is greedy.
        rates: acceptance per draft position from now on; None leaves it.
        tokens: whether to send the generated ids back.
    """

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    temperature: float = 0.0
    rates: Sequence[float] | None = None
    tokens: bool = False


@attrs.frozen(kw_only=True)
class Measured:
    """What came out of one repetition.

    Attributes:
        seconds: wall time of ``generate``.
        generated: tokens.
        drafted: by vLLM's own counter.
        accepted: likewise.
        digest: of all generated ids.
        token_ids: per request, where asked for.
    """

    seconds: float
    generated: int
    drafted: int
    accepted: int
    digest: str
    token_ids: list[list[int]] | None


class Engine:
    """A handle on the engine's process.

    Args:
        spec: what to start; ``ready`` waits until it has.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115  # lives as long as the engine
            "r", suffix=".log", errors="replace"
        )
        self._process = context.Process(target=_serve, args=(spec, theirs, self._log.name))
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until the engine runs."""
        self._answer()

    def run(self, work: Work) -> Measured:
        """Do one repetition."""
        self._pipe.send(("run", work))
        measured: Measured = self._answer()
        return measured

    def snapshot(self) -> list[dict[str, float]]:
        """The plugin's counters per rank; empty for stock."""
        self._pipe.send(("snapshot", None))
        counters: list[dict[str, float]] = self._answer()
        return counters

    def stop(self) -> None:
        """End the process; its counters have been read by then."""
        if self._process.is_alive():
            self._pipe.send(("stop", None))
        self._process.join(timeout=30)
        if self._process.is_alive():  # an engine's own processes can outlive their work
            self._process.kill()
            self._process.join()

    def log(self) -> str:
        """What the engine printed."""
        self._log.seek(0)
        return self._log.read()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            last_words = "".join(self.log().splitlines(keepends=True)[-60:])
            raise RuntimeError(
                f"the engine for policy {self.spec.policy!r} ended with exit code "
                f"{self._process.exitcode}:\n{last_words}"
            ) from None
        return answer


def _serve(spec: EngineSpec, pipe: Connection, log: str) -> None:
    """The engine's process."""
    os.environ.update(spec.environment)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # rates are set by RPC
    sink = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    from vllm import LLM

    ours = {} if spec.policy == "stock" else {"kvtxn": {"policy": spec.policy, **spec.settings}}
    llm = LLM(**spec.arguments, disable_log_stats=False, additional_config=ours)
    pipe.send("ready")
    while True:
        command, work = pipe.recv()
        if command == "stop":
            llm.llm_engine.engine_core.shutdown()
            return
        if command == "snapshot":
            from ..integrations.vllm_plugin import snapshots

            pipe.send(snapshots(llm) if ours else [])
        else:
            pipe.send(_repeat(llm, work))


def _repeat(llm: Any, work: Work) -> Measured:
    from vllm import SamplingParams

    if work.rates is not None:
        llm.collective_rpc(_set_rates, args=(tuple(work.rates),))
    sampling = SamplingParams(
        temperature=work.temperature,
        max_tokens=work.max_tokens,
        ignore_eos=True,
        detokenize=False,
        seed=None,
    )
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in work.prompts]
    before = _counts(llm)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    after = _counts(llm)
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    return Measured(
        seconds=seconds,
        generated=sum(map(len, ids)),
        drafted=after[0] - before[0],
        accepted=after[1] - before[1],
        digest=hashlib.sha256(repr(ids).encode()).hexdigest()[:16],
        token_ids=ids if work.tokens else None,
    )


def _counts(llm: Any) -> tuple[int, int]:
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return (
        int(counts.get("vllm:spec_decode_num_draft_tokens", 0)),
        int(counts.get("vllm:spec_decode_num_accepted_tokens", 0)),
    )


def _set_rates(worker: Any, rates: tuple[float, ...]) -> None:
    """Change the synthetic acceptance of a running engine; each rate given the one before."""
    sampler = worker.model_runner.rejection_sampler
    before = (1.0, *rates)
    given = [rate / last if last else 0.0 for rate, last in zip(rates, before, strict=False)]
    for number, rate in enumerate(given):
        sampler.synthetic_conditional_rates[number].fill_(rate)
