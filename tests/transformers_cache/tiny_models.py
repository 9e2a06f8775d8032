"""Tiny random models, whose greedy texts repeat themselves often enough for drafts to be right."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import torch
from kvtxn.integrations.transformers_cache import TxnCache
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

VOCAB = 24
WINDOW = 16
NEW_TOKENS = 40
PROMPT = torch.randint(1, VOCAB, (1, 20), generator=torch.Generator().manual_seed(3))

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GEMMA = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 8,
    "tie_word_embeddings": False,
}
SLIDING = {"head_dim": 8, "sliding_window": WINDOW}


def build(kind: str) -> PreTrainedModel:
    """One of "llama" (full attention), "mistral" (all layers slide), "gemma3" (some do)."""
    torch.manual_seed(1 if kind == "mistral" else 0)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**COMMON, num_hidden_layers=2))
    elif kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**COMMON, **SLIDING, num_hidden_layers=2))
    else:
        config = Gemma3TextConfig(**COMMON, **SLIDING, **GEMMA, num_hidden_layers=3)
        model = Gemma3ForCausalLM(config)
    return model.eval()


def assistant_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that is a little off, and drafts four tokens each time."""
    other = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.numel() > 1 and weight.std() > 0:
                weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=noise)
    other.generation_config.num_assistant_tokens = 4
    other.generation_config.num_assistant_tokens_schedule = "constant"
    other.generation_config.assistant_confidence_threshold = 0.0
    return other


def drafting(model: PreTrainedModel, method: str) -> dict[str, Any]:
    """The arguments of ``generate`` for a way to draft."""
    if method == "lookup":
        return {"prompt_lookup_num_tokens": 4}
    return {"assistant_model": assistant_of(model)} if method == "assistant" else {}


@attrs.define
class Steps:
    """The outside of an assisted generation: rows fed and tokens kept.

    A streamer sees the tokens of each step, a hook the rows of each forward.
    """

    prompt: int = 0
    fed: list[int] = attrs.Factory(list)
    kept: list[int] = attrs.Factory(list)

    def put(self, tokens: Tensor) -> None:
        """The prompt first, then the valid tokens of each step."""
        if not self.prompt:
            self.prompt = tokens.numel()
        else:
            self.kept.append(tokens.numel())

    def end(self) -> None:
        """Nothing is held back."""

    @property
    def drafted(self) -> int:
        """Candidates that were verified."""
        return sum(self.fed) - self.prompt - (len(self.fed) - 1)

    @property
    def accepted(self) -> int:
        """Candidates that were kept."""
        return sum(self.kept) - len(self.kept)


def run(model: PreTrainedModel, prompt: Tensor = PROMPT, **settings: Any) -> tuple[Any, Steps]:
    """``generate`` with logits, greedy unless told, and what was seen on the way."""
    steps = Steps()
    hook = model.register_forward_pre_hook(
        lambda _, __, inputs: steps.fed.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS} | settings
    try:
        out = model.generate(
            prompt,
            streamer=None if prompt.shape[0] > 1 else steps,
            return_dict_in_generate=True,
            output_logits=True,
            **settings,
        )
    finally:
        hook.remove()
    return out, steps


class RecordedCache(TxnCache):
    """A ``TxnCache`` that remembers what it was given, and replays it at every crop.

    Attributes:
        forwards: per forward the key and value tensors of each layer, kept rows only.
        exact: per crop whether every byte was as in the replay, before it and after it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forwards: list[list[tuple[Tensor, Tensor]]] = []
        self.exact: list[tuple[bool, bool]] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Note the rows, then go on."""
        if layer_idx == 0:
            self.forwards.append([])
        self.forwards[-1].append((key_states.clone(), value_states.clone()))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Compare, forget the rows that are taken back, and compare again."""
        before = self.is_exact(self.forwards[:-1])
        keep = self.forwards[-1][0][0].shape[2] + tokens_to_remove
        self.forwards[-1] = [
            (key[:, :, :keep], value[:, :, :keep]) for key, value in self.forwards[-1]
        ]
        super().crop(tokens_to_remove)
        self.exact.append((before, self.is_exact(self.forwards)))

    def is_exact(self, forwards: list[list[tuple[Tensor, Tensor]]]) -> bool:
        """Tell whether every byte is as after these forwards alone, their rows written in order."""
        for cache, rows in zip(self.tensors(), self._rows(forwards), strict=True):
            expected = torch.zeros_like(cache).flatten(0, 1)
            run_length = expected.shape[0] // rows.shape[0]
            last = torch.arange(rows.shape[2])[-run_length:]  # later rows overwrite earlier ones
            for sequence, kept in enumerate(rows.transpose(1, 2)):
                expected[sequence * run_length + last % run_length] = kept[last]
            if not torch.equal(expected.view(torch.uint8), cache.flatten(0, 1).view(torch.uint8)):
                return False
        return True

    def _rows(self, forwards: list[list[tuple[Tensor, Tensor]]]) -> list[Tensor]:
        none = [tuple(part[:, :, :0] for part in layer) for layer in self.forwards[0]]
        return [
            torch.cat([forward[layer][part] for forward in [none, *forwards]], dim=2)
            for layer in range(len(none))
            for part in range(2)
        ]

    def tensors(self) -> list[Tensor]:
        """Key and value cache of each layer, in order."""
        refs = self.manager.layers.values()
        return [cache for ref in refs for cache in (ref.key_cache, ref.value_cache)]
