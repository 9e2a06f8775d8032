"""An EAGLE drafter for the demo's model, fitted in seconds: one linear map.

The map takes the embedding of the last token and the model's last hidden state to the next hidden
state, by least squares over sentences that the model reads, and over its answers to random prompts.
The drafter's layer adds nothing to it. So windows keep some rows and reject others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

#: Tokens that the model reads at a time.
_TOKENS: Final = 512
#: Random prompts, the tokens of each, and the tokens of each answer: a soak's texts are like that.
_PROMPTS, _PROMPT, _ANSWER = 48, 24, 72
#: Weight of the penalty on large factors, in units of a row's mean square.
_RIDGE: Final = 1e-3


def fit(model: Path, folder: Path) -> str:
    """Fit a drafter for the Llama in ``model``; write it into ``folder``, as vLLM reads an EAGLE.

    A linear map of embedding and hidden state to the next hidden state, by least squares over the
    model's prompts and its own answers. The prompts are in the file ``prompts.json`` beside
    ``model``.

    Returns:
        The folder.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    target: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    texts = json.loads((model.parent / "prompts.json").read_text())
    tokens = torch.tensor([token for text in texts for token in tokenizer(text).input_ids])
    given, wanted = [], []
    chance = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        embeddings = target.get_input_embeddings().weight
        random = torch.randint(3, len(embeddings) // 2, (_PROMPTS, _PROMPT), generator=chance)
        answers = target.generate(random, max_new_tokens=_ANSWER, do_sample=False)
        for ids in (*tokens.split(_TOKENS), *answers):
            hidden = target.model(ids[None]).last_hidden_state[0]
            given.append(torch.cat([embeddings[ids[1:]], hidden[:-1]], dim=1))
            wanted.append(hidden[1:])
        x, y = torch.cat(given).double(), torch.cat(wanted).double()
        square = x.T @ x
        square += _RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=square.dtype)
        factors = torch.linalg.solve(square, x.T @ y).T.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    layer = target.model.layers[0].state_dict()
    weights = {
        f"layers.0.{name}": torch.zeros_like(part) if "proj" in name else part.clone()
        for name, part in layer.items()
        if name != "input_layernorm.weight"  # an EAGLE's first layer has none
    }
    weights["fc.weight"] = factors.float()
    save_file(
        {name: part.to(torch.bfloat16) for name, part in weights.items()},
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )
    return str(folder)
