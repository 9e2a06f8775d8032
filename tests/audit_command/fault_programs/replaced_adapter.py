"""A LoRA adapter is replaced by another one of its name and path; its old rows are read on.

    python tests/audit_command/fault_programs/replaced_adapter.py [--json]

vLLM's prefix cache knows an adapter by its name and path, and loading one leaves the cache as it
is. A request that comes after the new weights reads rows that the old ones computed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fault_engine import Played, SmallEngine, main, tokens


def write_adapter(folder: Path, seed: int) -> None:
    """Write weights of an adapter for the queries and values of the tiny Llama."""
    import torch
    from safetensors.torch import save_file

    chance = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        for name, size in (("q_proj", 128), ("v_proj", 64)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, 64, generator=chance) * 0.3
            weights[f"{place}.lora_B.weight"] = torch.randn(size, 8, generator=chance) * 0.3
    folder.mkdir(exist_ok=True)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
    settings |= {"target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def play(folder: Path, cached: bool) -> Played:
    """Ask before and after the adapter is replaced; ``cached``: its old rows are still there."""
    from vllm.lora.request import LoRARequest

    small = SmallEngine(
        folder, num_gpu_blocks_override=64, enable_lora=True, max_lora_rank=8, max_loras=1
    )
    text = tokens(200, seed=5)
    for number, name in enumerate(("before", "after"), 1):
        write_adapter(folder / "adapter", seed=number)
        adapter = LoRARequest("tuned", number, str(folder / "adapter"))
        small.send(name, text, lora_request=adapter)
        small.finish()
        small.engine.remove_lora(number)
        if not cached:
            small.llm.reset_prefix_cache()
    return small.played()


if __name__ == "__main__":
    sys.exit(main(play, ("after",), "an empty prefix cache"))
