"""Random weights for the small models of SGLang's engines.

The next token follows from the last one and, less, from the context; ties are rare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

#: A model's configuration.
Config = Mapping[str, Any]


def weights(name: str, config: Config) -> dict[str, Tensor]:
    """Draw the weights of a model.

    Args:
        name: of ``sglang_models.MODELS``, one of ``DRAWN``.
        config: the model's.
    """
    torch.manual_seed(0)
    return DRAWN[name](config)


def _ends(config: Config, norm: float) -> dict[str, Tensor]:
    """Draw embeddings, and a head that makes a fixed token follow each."""
    embed = torch.randn(config["vocab_size"], config["hidden_size"])
    head = embed[torch.randperm(config["vocab_size"])]
    ends = {"model.embed_tokens": embed, "lm_head": head}
    ends["model.norm"] = torch.full((config["hidden_size"],), norm)
    return {f"{part}.weight": each for part, each in ends.items()}


def _matrices(
    shapes: Mapping[str, tuple[int, int]], scale: float, outward: float
) -> Iterator[tuple[str, Tensor]]:
    """Draw matrices, those that add to the layer's input by a scale of their own."""
    for part, (rows, columns) in shapes.items():
        factor = outward if part.endswith(("o_proj", "down_proj", "out_proj")) else scale
        yield f"{part}.weight", torch.randn(rows, columns) * (factor / columns**0.5)


def _llama(config: Config) -> dict[str, Tensor]:
    tensors = _ends(config, 1.0)
    for number in range(config["num_hidden_layers"]):
        tensors |= _layer(config, f"model.layers.{number}.", 0.6)
    return tensors


def _layer(config: Config, prefix: str, outward: float) -> dict[str, Tensor]:
    """Draw a layer of attention and a dense MLP."""
    hidden = config["hidden_size"]
    shapes = {**_attention(config), **_mlp("mlp.", hidden, config["intermediate_size"])}
    drawn = dict(_matrices(shapes, 1.5, outward))
    for norm in ("post_attention_layernorm", "input_layernorm"):
        drawn[f"{norm}.weight"] = torch.ones(hidden)
    return {f"{prefix}{part}": each for part, each in drawn.items()}


def _attention(config: Config, gates: int = 1) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of an attention's matrices; 2 gates: queries have one each."""
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = (config[f"num_{each}_heads"] * size for each in ("attention", "key_value"))
    return {
        "self_attn.q_proj": (gates * queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
    }


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    return {
        f"{prefix}gate_proj": (inner, hidden),
        f"{prefix}up_proj": (inner, hidden),
        f"{prefix}down_proj": (hidden, inner),
    }


def _drafter(config: Config) -> dict[str, Tensor]:
    """Draw a drafter that sees the last token through some noise: some drafts are rejected."""
    hidden = config["hidden_size"]
    tensors = _layer(config, "layers.0.", 0.9)
    del tensors["layers.0.input_layernorm.weight"]
    return tensors | {"fc.weight": _joined(hidden), "fc.bias": torch.zeros(hidden)}


def _drafter_of_layers(config: Config) -> dict[str, Tensor]:
    """Draw a drafter of EAGLE-3, which sees the states of three layers of the target.

    They are its noise: it attends to the last token itself, whose vector goes through as it is.
    """
    hidden, ends = config["hidden_size"], _ends(config, 1.0)
    drawn = _layer(config, "midlayer.", 0.3)
    keys = torch.zeros(hidden, 2 * hidden)
    keys[:, :hidden] = torch.randn(hidden, hidden) * (1.5 / hidden**0.5)
    same = torch.eye(hidden)
    values = torch.cat((same, torch.zeros(hidden, hidden)), dim=1)
    for part, matrix in (("q", keys), ("k", keys.clone()), ("v", values), ("o", same)):
        drawn[f"midlayer.self_attn.{part}_proj.weight"] = matrix
    drawn["midlayer.hidden_norm.weight"] = torch.ones(hidden)
    joined = {"fc.weight": 0.1 * torch.randn(hidden, 3 * hidden), "norm.weight": torch.ones(hidden)}
    return drawn | joined | {"lm_head.weight": ends["lm_head.weight"]}


def _joined(hidden: int) -> Tensor:
    """Draw the matrix that joins a drafter's token and hidden state."""
    joined = 0.11 * torch.randn(hidden, 2 * hidden)
    joined[:, :hidden] += torch.eye(hidden)
    return joined


def _windows(config: Config) -> dict[str, Tensor]:
    """Draw a model whose queries and keys have norms, too."""
    tensors = _llama(config)
    for number in range(config["num_hidden_layers"]):
        for norm in ("q_norm", "k_norm"):
            name = f"model.layers.{number}.self_attn.{norm}.weight"
            tensors[name] = torch.ones(config["head_dim"])
    return tensors


# -- gated delta nets and attention ------------------------------------------------------------


def _hybrid(config: Config) -> dict[str, Tensor]:
    """Draw a model and its drafter; a norm's weight of 0 stands for 1."""
    hidden, tensors = config["hidden_size"], _ends(config, 0.0)
    for number in range(config["num_hidden_layers"]):
        full = (number + 1) % config["full_attention_interval"] == 0
        kind = _gated_attention if full else _delta_net
        tensors |= _hybrid_layer(config, f"model.layers.{number}.", kind, 0.5)
    tensors |= _hybrid_layer(config, "mtp.layers.0.", _gated_attention, 0.7)
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    tensors |= {f"mtp.{norm}.weight": torch.zeros(hidden) for norm in norms}
    return tensors | {"mtp.fc.weight": _joined(hidden)}


def _hybrid_layer(
    config: Config, prefix: str, mixer: Callable[[Config, float], dict[str, Tensor]], outward: float
) -> dict[str, Tensor]:
    """Draw a layer: its mixer of tokens, and experts."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes = {"mlp.gate": (config["num_experts"], hidden), "mlp.shared_expert_gate": (1, hidden)}
    shapes |= _mlp("mlp.shared_expert.", hidden, config["shared_expert_intermediate_size"])
    for number in range(config["num_experts"]):
        shapes |= _mlp(f"mlp.experts.{number}.", hidden, inner)
    drawn = {**mixer(config, outward), **dict(_matrices(shapes, 1.5, outward))}
    for norm in ("post_attention_layernorm", "input_layernorm"):
        drawn[f"{norm}.weight"] = torch.zeros(hidden)
    return {f"{prefix}{part}": each for part, each in drawn.items()}


def _gated_attention(config: Config, outward: float) -> dict[str, Tensor]:
    drawn = dict(_matrices(_attention(config, 2), 1.5, outward))
    for norm in ("q_norm", "k_norm"):
        drawn[f"self_attn.{norm}.weight"] = torch.zeros(config["head_dim"])
    return drawn


def _delta_net(config: Config, outward: float) -> dict[str, Tensor]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    shapes = {
        "in_proj_qkvz": (2 * keys + 2 * values, hidden),
        "in_proj_ba": (2 * heads, hidden),
        "out_proj": (hidden, values),
    }
    drawn = dict(_matrices(shapes, 1.0, outward))
    width = config["linear_conv_kernel_dim"]
    drawn["conv1d.weight"] = torch.randn(2 * keys + values, 1, width) / width**0.5
    drawn["A_log"] = torch.rand(heads)
    drawn["dt_bias"] = torch.randn(heads) - 2
    drawn["norm.weight"] = torch.ones(config["linear_value_head_dim"])
    return {f"linear_attn.{part}": each for part, each in drawn.items()}


# -- Mamba-2 and attention ---------------------------------------------------------------------


def _nemotron(config: Config) -> dict[str, Tensor]:
    """Draw a model whose layers are a mixer each: Mamba-2, attention, or a dense MLP."""
    names = {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f"}
    ends = {key.removesuffix(".weight"): each for key, each in _ends(config, 1.0).items()}
    tensors = {f"{names.get(key, key)}.weight": each for key, each in ends.items()}
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for number, kind in enumerate(config["layers_block_type"]):
        if kind == "mamba":
            drawn = _mamba(config, 0.5)
        elif kind == "attention":
            shapes = {key.partition(".")[2]: each for key, each in _attention(config).items()}
            drawn = dict(_matrices(shapes, 1.5, 0.6))
        else:
            drawn = dict(
                _matrices({"up_proj": (inner, hidden), "down_proj": (hidden, inner)}, 1, 0.3)
            )
        tensors[f"backbone.layers.{number}.norm.weight"] = torch.ones(hidden)
        tensors |= {f"backbone.layers.{number}.mixer.{part}": each for part, each in drawn.items()}
    return tensors


def _mamba(config: Config, outward: float) -> dict[str, Tensor]:
    hidden, heads = config["hidden_size"], config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    rows = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    shapes = {"in_proj": (inner + rows + heads, hidden), "out_proj": (hidden, inner)}
    drawn = dict(_matrices(shapes, 1.0, outward))
    width = config["conv_kernel"]
    drawn["conv1d.weight"] = torch.randn(rows, 1, width) / width**0.5
    drawn["conv1d.bias"] = torch.zeros(rows)
    drawn["A_log"], drawn["D"] = torch.rand(heads), torch.ones(heads)
    drawn["dt_bias"] = torch.randn(heads) - 2
    drawn["norm.weight"] = torch.ones(inner)
    return drawn


#: Models with drawn weights, by name; SGLang makes dummy ones for others.
DRAWN: Final[Mapping[str, Callable[[Config], dict[str, Tensor]]]] = {
    "llama": _llama,
    "eagle": _drafter,
    "eagle3": _drafter_of_layers,
    "mamba2": _nemotron,
    "windows": _windows,
    "next": _hybrid,
}
