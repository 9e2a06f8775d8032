"""One process: two engines side by side, read before and after their end.

python vllm_endings.py result.json
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm_models import VOCAB, write
from vllm_server import ENVIRONMENT, SPECULATION


def build(model: str, policy: str, *, processes: bool) -> Any:
    """An engine, in this process or in others."""
    from vllm import LLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(processes))
    return LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=26,
        max_model_len=288,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        speculative_config=SPECULATION,
        additional_config={"kvtxn": {"policy": policy}},
    )


def generate(llm: Any, tokens: int) -> None:
    """Some drafts right, some wrong."""
    from vllm import SamplingParams, TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=[i % 5 % VOCAB for i in range(20)])
    settings = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    llm.generate([prompt], settings, use_tqdm=False)


def main() -> None:
    """Report each engine's counters while it lives, after its end, and when it is forgotten."""
    os.environ.update(ENVIRONMENT)
    from kvtxn.integrations.vllm_plugin import last_snapshots, snapshots

    report: dict[str, Any] = {}
    folder = Path(sys.argv[1]).parent
    model = write("llama", folder)
    one = build(model, "undo", processes=True)
    other = build(model, "deferred", processes=False)
    generate(one, 24)
    generate(other, 48)
    report["living"] = [snapshots(one), snapshots(other)]
    generate(one, 24)  # nobody reads these before the end
    one.llm_engine.engine_core.shutdown()
    report["one shut down"] = [snapshots(one), snapshots(one), snapshots(other)]
    del other
    gc.collect()
    report["all gone"] = last_snapshots()
    Path(sys.argv[1]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
