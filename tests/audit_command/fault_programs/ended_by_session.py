"""Two streaming sessions of a client that end vLLM's engine, and every other client's request.

    python tests/audit_command/fault_programs/ended_by_session.py [--json]

vLLM does not compare a session's length with ``max_model_len`` when a later turn comes: the runner
has no room for its tokens. And drafts that were accepted past a turn's stop count as computed, so
that a next turn with fewer new tokens has nothing left to compute, which the scheduler asserts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # an engine's last words are long
import fault_engine  # noqa: F401 - vLLM reads variables that it sets

#: The new tokens of a turn, and the output tokens that it asks for.
Turns = Sequence[tuple[list[int], int]]

PHRASE = [7, 8] * 10
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
#: By name: sessions that one engine has in turn, and the engine's arguments.
STORIES: dict[str, tuple[list[Turns], dict[str, Any]]] = {
    "a session longer than max_model_len (64)": (
        [[(PHRASE * 2, 10), (PHRASE, 4)]],
        {"max_model_len": 64},
    ),
    "a turn of one token after accepted drafts": (
        [[(PHRASE, most), ([9], 4)] for most in range(3, 9)],  # some of them stop among drafts
        {"max_model_len": 512, "speculative_config": NGRAM},
    ),
}


def play(folder: Path, name: str) -> str:
    """Return how vLLM's engine took a story's sessions: "goes on", or the error's class."""
    import model_files

    sessions, options = STORIES[name]
    return asyncio.run(_play(model_files.write("llama", folder), sessions, options))


async def _play(model: str, sessions: Sequence[Turns], options: dict[str, Any]) -> str:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model, dtype="float32", enforce_eager=True, block_size=32, skip_tokenizer_init=True,
        num_gpu_blocks_override=64, **options,
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        for number, turns in enumerate(sessions):
            await _talk(engine, f"session {number}", turns)
    except Exception as error:
        return type(error).__name__
    finally:
        engine.shutdown()
    return "goes on"


async def _talk(engine: Any, name: str, turns: Turns) -> None:
    """Give each turn once the one before has come to its end."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    ended = asyncio.Event()

    def sampling(most: int) -> SamplingParams:
        return SamplingParams(
            temperature=0, max_tokens=most, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA, allowed_token_ids=[7, 8],
        )  # fmt: skip

    async def inputs() -> AsyncIterator[StreamingInput]:
        for tokens, most in turns:
            yield StreamingInput(TokensPrompt(prompt_token_ids=tokens), sampling(most))
            await ended.wait()
            ended.clear()

    async for output in engine.generate(inputs(), sampling(turns[0][1]), name):
        if output.outputs[0].finish_reason is not None:
            ended.set()


def main() -> int:
    """Play each story in an engine of its own; the exit code is 1 if an engine ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for number, name in enumerate(STORIES):
            # Each engine gets a process of its own, which may start others.
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
                found[name] = pool.submit(play, Path(folder, str(number)), name).result()
    if wanted.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name}: {ending}" for name, ending in found.items()))
    return int(any(ending != "goes on" for ending in found.values()))


if __name__ == "__main__":
    sys.exit(main())
