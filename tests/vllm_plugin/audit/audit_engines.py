"""One process: an engine of real vLLM under audit; each job returns what was found."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from engine_options import options
from kvtxn.integrations.vllm_plugin import audit_report, snapshots
from model_files import VOCAB, write


def healthy(folder: Path, model: str, kvtxn: dict[str, Any], rows: int, **more: Any) -> Any:
    """Shared prefixes, repetitions, more requests than fit: until so many rows were compared."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(**options(write(model, folder), kvtxn, **more))
    chance = random.Random(0)
    texts = [[chance.randrange(VOCAB) for _ in range(96)] for _ in range(3)]
    counts: dict[str, float] = {}
    while counts.get("kvtxn_audit_rows_checked_total", 0) < rows:
        prompts = []
        for _ in range(24):
            phrase = [chance.randrange(VOCAB) for _ in range(chance.randint(3, 12))]
            start = chance.choice(texts)[: chance.randint(0, 96)]
            prompts.append([*start, *phrase * chance.randint(1, 4)])
        parameters = [
            SamplingParams(temperature=0, max_tokens=chance.randint(1, 90), ignore_eos=True)
            for _ in prompts
        ]
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        llm.generate(given, parameters, use_tqdm=False)
        (counts,) = snapshots(llm)
        if chance.random() < 0.3:
            llm.reset_prefix_cache()
    preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    (report,) = audit_report(llm)
    return {"counts": counts, "report": report, "preempted": preempted}


async def _session(engine: Any, name: str, turns: list[tuple[list[int], int]]) -> list[int]:
    """Run a streaming session, turn by turn; the next one begins when the last one has ended."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.engine.protocol import StreamingInput

    ended, lengths = asyncio.Event(), []

    async def inputs() -> Any:
        for tokens, most in turns:
            parameters = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
            yield StreamingInput(
                prompt=TokensPrompt(prompt_token_ids=tokens), sampling_params=parameters
            )
            await ended.wait()
            ended.clear()

    count = 0
    first = SamplingParams(temperature=0, max_tokens=turns[0][1], ignore_eos=True)
    async for output in engine.generate(inputs(), first, name):
        count += len(output.outputs[0].token_ids)
        lengths.append(count)
        if output.outputs[0].finish_reason or output.finished or count >= turns[0][1]:
            ended.set()
    return lengths


async def sessions(folder: Path, kvtxn: dict[str, Any], **more: Any) -> Any:
    """Sessions whose first turn ends at a limit in the middle of accepted drafts."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    given = options(write("llama", folder), kvtxn, **more)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
    chance = random.Random(0)
    try:
        for most in range(2, 58):
            phrase = [chance.randrange(VOCAB) for _ in range(12)]
            new = [chance.randrange(VOCAB) for _ in range(12)]
            turns = [(phrase * 3, most), (new, 8)]
            await asyncio.wait_for(_session(engine, f"session {most}", turns), 60)
        (counts,) = await engine.collective_rpc("kvtxn_snapshot")
        (report,) = await engine.collective_rpc("kvtxn_audit_report")
    finally:
        engine.shutdown()
    return {"counts": counts, "report": report}


def llama(folder: Path) -> Any:
    """Run a model whose layers all read the whole context."""
    return healthy(folder, "llama", {"audit": "ledger"}, 120_000)


def gemma3(folder: Path) -> Any:
    """Run a model of two KV-cache groups, one of sliding windows."""
    return healthy(folder, "gemma3", {"audit": "ledger"}, 60_000, num_gpu_blocks_override=34)


def windows(folder: Path) -> Any:
    """Let the steps have windows as well."""
    return healthy(folder, "llama", {"audit": "ledger", "policy": "undo"}, 30_000)


def sessions_with_drafts(folder: Path) -> Any:
    """Run the sessions with speculation, whose fault the audit finds."""
    return asyncio.run(sessions(folder, {"audit": "ledger"}))


def plain_sessions(folder: Path) -> Any:
    """Run the sessions without speculation."""
    return asyncio.run(sessions(folder, {"audit": "ledger"}, speculative_config=None))
