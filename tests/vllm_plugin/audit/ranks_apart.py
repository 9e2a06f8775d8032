"""Engines of two ranks, one of which meets what the other one does not."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from kvtxn.integrations.vllm_plugin import snapshots
from planting import texts


class Planting:
    """An extension of vLLM's worker."""

    rank: int
    model_runner: Any

    def process(self) -> int:
        """Return the number of the rank's process."""
        return os.getpid()

    def fail_audit(self, rank: int) -> None:
        """Let the audit's own code raise in each step of one rank."""
        if self.rank == rank:
            from kvtxn.integrations.vllm_plugin.seam.audited_steps_cpu import StepReader

            StepReader.rows = _fail  # type: ignore[method-assign]

    def fail_commits(self, rank: int) -> None:
        """Let the executor of one rank's windows raise."""
        if self.rank == rank:
            executor = self.model_runner.kvtxn.manager.executor
            executor.commit = executor.restore = executor.write_rows = _fail

    def change_bytes(self, rank: int) -> None:
        """Change the bytes of one rank's cache."""
        if self.rank == rank:
            for cache in self.model_runner.kv_caches:
                cache.mul_(1.5)


def _fail(*args: Any, **kwargs: Any) -> None:
    raise MemoryError("planted")


def _say(llm: Any, outputs: int) -> None:
    """Generate so many tokens for prompts with right drafts."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in texts(1, 2, 70)]
    llm.generate(prompts, params, use_tqdm=False)


def _end(llm: Any, plant: str) -> dict[str, Any]:
    """Plant what ends the engine; report how long it takes, and whether a process stays."""
    processes = llm.collective_rpc("process")
    llm.collective_rpc(plant, args=(1,))
    begin, error = time.monotonic(), None
    try:
        _say(llm, 60)
    except Exception as ended:
        error = type(ended).__name__
    seconds = time.monotonic() - begin
    while any(map(_lives, processes)) and time.monotonic() - begin < 60:
        time.sleep(0.1)
    return {"error": error, "seconds": seconds, "left": [*filter(_lives, processes)]}


def _lives(process: int) -> bool:
    """Tell whether a process runs; one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def raises(llm: Any, engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Let the second rank alone read bytes that changed, where that stops the engine."""
    _say(llm, 8)
    return _end(llm, "change_bytes")


def fails(llm: Any, engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Let the audit fail on the second rank alone, and then its windows, which stop the engine."""
    _say(llm, 8)
    before = [counts["kvtxn_audit_active"] for counts in snapshots(llm)]
    llm.collective_rpc("fail_audit", args=(1,))
    _say(llm, 240)
    after = [counts["kvtxn_audit_active"] for counts in snapshots(llm)]
    return {"before": before, "after": after, **_end(llm, "fail_commits")}
