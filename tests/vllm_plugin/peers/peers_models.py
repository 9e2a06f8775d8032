"""A cache of the hub in which small models have the names that vLLM's tests ask for."""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
DEMO = HERE.parents[2] / "integrations" / "demo" / "model"

#: Names under which the demo's model is found: small, trained, with a tokenizer.
TARGETS = (
    "JackFram/llama-160m",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-8B",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "amd/PARD-Llama-3.2-1B",
    "distilbert/distilgpt2",
    "facebook/opt-125m",
    "hmellor/tiny-random-LlamaForCausalLM",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Meta-Llama-3-8B-Instruct",
)
#: Drafters for them, with random weights.
EAGLE = ("yuhuili/EAGLE-LLaMA3-Instruct-8B", "yuhuili/EAGLE-LLaMA3.1-Instruct-8B")
#: A configuration and a tokenizer, for tests that load no weights.
IMAGES = ("llava-hf/llava-1.5-7b-hf",)
EAGLE3 = ("nm-testing/Llama3_2_1B_speculator.eagle3", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")

#: Some tests ask for longer ones than the model was trained for, none writes so much.
LENGTH = 16384


def fake_hub(folder: Path) -> None:
    """Make the cache; models of the same kind share their files."""
    models = folder / "files"
    shutil.copytree(DEMO, models / "target")
    config = json.loads((DEMO / "config.json").read_text()) | {"max_position_embeddings": LENGTH}
    (models / "target" / "config.json").write_text(json.dumps(config))
    write_drafter(models / "eagle", config, inputs=2)
    write_drafter(models / "eagle3", config, inputs=3)
    kinds = {"target": TARGETS, "eagle": EAGLE, "eagle3": EAGLE3}
    if find_spec("torchvision"):  # or else vLLM cannot look at such a model
        write_configuration(models / "images")
        kinds["images"] = IMAGES
    for kind, names in kinds.items():
        for name in names:
            model = folder / f"models--{name.replace('/', '--')}"
            (model / "snapshots").mkdir(parents=True)
            os.symlink(models / kind, model / "snapshots" / "one")
            (model / "refs").mkdir()
            (model / "refs" / "main").write_text("one")


def write_configuration(folder: Path) -> None:
    """Write the configuration of a model that sees images, by transformers' defaults."""
    from transformers import LlavaConfig

    config = LlavaConfig()
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)


def write_drafter(folder: Path, target: dict[str, object], inputs: int) -> None:
    """One layer for EAGLE, or EAGLE-3, in the target's shape.

    Args:
        folder: where to.
        target: the target's configuration.
        inputs: hidden vectors that ``fc`` takes in: for EAGLE the token's embedding and the
            target's last one, for EAGLE-3 three of the target's.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(inputs)
    config = LlamaConfig(**target | {"num_hidden_layers": 1, "tie_word_embeddings": False})
    size, eagle3 = config.hidden_size, inputs == 3
    weights = LlamaForCausalLM(config).to(torch.bfloat16).state_dict()
    weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    weights["fc.weight"] = torch.randn(size, inputs * size, dtype=torch.bfloat16) / size
    settings = config.to_dict()
    if eagle3:  # its layer sees the embedding beside the hidden vector, and has its own names
        weights = {name.replace("layers.0", "midlayer"): weight for name, weight in weights.items()}
        for part in "qkv":
            name = f"midlayer.self_attn.{part}_proj.weight"
            weights[name] = torch.cat([weights[name]] * 2, dim=1)
        weights["midlayer.hidden_norm.weight"] = weights["midlayer.input_layernorm.weight"].clone()
        settings |= {"architectures": ["LlamaForCausalLMEagle3"]}
        settings |= {"draft_vocab_size": config.vocab_size}
    else:
        settings |= {"architectures": ["LlamaForCausalLM"]}
        for name in ("norm", "lm_head", "layers.0.input_layernorm"):  # which it has not
            del weights[f"{name}.weight"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({name: weight.contiguous() for name, weight in weights.items()},
              folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
