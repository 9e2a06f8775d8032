"""Engines that have rows of a request in their prefix cache and compute them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtxn.integrations.vllm_plugin import snapshots
from planting import Rig, texts

_NAME = "kvtxn_audit_cached_rows_unused_total"


def find(llm: Any, engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Ask for beginnings of one text, by their lengths in blocks; what each of them loses."""
    rig = Rig(llm)
    size = rig.manager.coordinator.scheduler_block_size
    (text,) = texts(3, 1, 5 * size)
    asked = {
        "first": (3, 0),
        "again": (3, 0),
        "longer": (3, 9),
        "longest": (4, 9),
        "shorter": (2, 1),
    }
    found = {
        name: _ask(llm, text[: blocks * size + more]) for name, (blocks, more) in asked.items()
    }
    found["logprobs"] = _ask(llm, text[: 3 * size + 9], prompt_logprobs=1)
    return {"block": size, "asked": found, "violations": rig.found()}


def _ask(llm: Any, tokens: list[int], **changes: Any) -> dict[str, Any]:
    """Return what vLLM reuses of a prompt, and by reason what it does not."""
    from vllm import SamplingParams, TokensPrompt

    before = snapshots(llm)[0]
    params = SamplingParams(
        temperature=0, max_tokens=3, ignore_eos=True, detokenize=False, **changes
    )
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=tokens)], params, use_tqdm=False)
    after = snapshots(llm)[0]
    names = [name for name in after if name.startswith(_NAME) and after[name] > before[name]]
    lost = {name.removeprefix(_NAME): after[name] - before[name] for name in names}
    return {"used": output.num_cached_tokens, "lost": lost}
