"""Rows that differ by more than the tokens, found under a hash of the tokens alone.

    python tests/audit_command/fault_programs/left_out_of_hashes.py [--json]

Three times a request reads rows of another one of the same tokens. In the first case the prefix
cache does not look which positions have tokens, and which have vectors. In the others vLLM's
``ExampleConnector`` names a stored prompt by its tokens, whatever the adapter and the vectors are.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from fault_engine import Played, SmallEngine, main, tokens
from replaced_adapter import write_adapter

#: Positions that may have vectors: two blocks.
VECTORS = 64


def prompt(text: list[int], seed: int, *, used: bool) -> dict[str, Any]:
    """Return a prompt that begins with vectors, or with as many tokens 0 if they are not used."""
    import torch

    vectors = torch.zeros(VECTORS + len(text), 64)
    vectors[:VECTORS] = torch.randn(VECTORS, 64, generator=torch.Generator().manual_seed(seed))
    return {
        "prompt_embeds": vectors,
        "prompt_token_ids": [0] * VECTORS + text,
        "prompt_is_token_ids": [not used] * VECTORS + [True] * len(text),
    }


def play(folder: Path, cached: bool) -> Played:
    """Ask twice with the same tokens in each case; ``cached``: the first one's rows are there."""
    from vllm.lora.request import LoRARequest

    stored = folder / "stored"
    small = SmallEngine(
        folder,
        num_gpu_blocks_override=64,
        enable_prompt_embeds=True,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        kv_transfer_config={
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(stored)},
        },
    )

    def forget(*, cache: bool, store: bool) -> None:
        if cache:
            small.llm.reset_prefix_cache()
        if store:
            shutil.rmtree(stored, ignore_errors=True)
            stored.mkdir(parents=True)

    text = tokens(40, seed=5)
    small.send("tokens", prompt(text, 1, used=False))
    small.finish()
    forget(cache=not cached, store=True)
    small.send("vectors", prompt(text, 1, used=True))
    small.finish()

    forget(cache=True, store=True)
    small.send("one", prompt(text, 2, used=True))
    small.finish()
    forget(cache=True, store=not cached)
    small.send("another", prompt(text, 3, used=True))
    small.finish()

    forget(cache=True, store=True)
    for number, name in enumerate(("poet", "lawyer"), 1):
        write_adapter(folder / name, seed=number)
        adapter = LoRARequest(name, number, str(folder / name))
        small.send(name, tokens(104, seed=6), lora_request=adapter)
        small.finish()
        forget(cache=True, store=not cached)
    return small.played()


if __name__ == "__main__":
    sys.exit(main(play, ("vectors", "another", "lawyer"), "empty caches"))
