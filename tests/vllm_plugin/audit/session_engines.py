"""One process: streaming sessions in an engine under audit; returns what was found."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from engine_options import options
from model_files import VOCAB, write


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
        for most in range(2, 36):
            phrase = [chance.randrange(VOCAB) for _ in range(12)]
            new = [chance.randrange(VOCAB) for _ in range(12)]
            turns = [(phrase * 3, most), (new, 8)]
            await asyncio.wait_for(_session(engine, f"session {most}", turns), 60)
        (counts,) = await engine.collective_rpc("kvtxn_snapshot")
        (report,) = await engine.collective_rpc("kvtxn_audit_report")
    finally:
        engine.shutdown()
    return {"counts": counts, "report": report}


def sessions_with_drafts(folder: Path) -> Any:
    """Run the sessions with speculation, whose fault the audit finds."""
    return asyncio.run(sessions(folder, {"audit": "ledger"}))


def plain_sessions(folder: Path) -> Any:
    """Run the sessions without speculation."""
    return asyncio.run(sessions(folder, {"audit": "ledger"}, speculative_config=None))
