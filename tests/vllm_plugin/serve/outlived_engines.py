"""One process: two engines side by side, read before and after their end."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from engine_starts import build
from model_files import VOCAB, write


def generate(llm: Any, tokens: int) -> None:
    """Some drafts right, some wrong."""
    from vllm import SamplingParams, TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=[i % 5 % VOCAB for i in range(20)])
    settings = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    llm.generate([prompt], settings, use_tqdm=False)


def counters(folder: Path) -> dict[str, Any]:
    """Report each engine's counters while it lives, after its end, and when it is forgotten."""
    from kvtxn.integrations.vllm_plugin import last_snapshots, snapshots

    report: dict[str, Any] = {}
    model = write("llama", folder)
    one = build(model, {"policy": "undo"}, processes=True)
    other = build(model, {"policy": "deferred"}, processes=False)
    generate(one, 24)
    generate(other, 48)
    report["living"] = [snapshots(one), snapshots(other)]
    generate(one, 24)  # nobody reads these before the end
    one.llm_engine.engine_core.shutdown()
    report["one shut down"] = [snapshots(one), snapshots(one), snapshots(other)]
    del other
    gc.collect()
    report["all gone"] = last_snapshots()
    return report
