"""Hybrid models for engines: their configuration, and the cache that their requests need."""

from __future__ import annotations

import math
from typing import Any, Final

from ...errors import ConfigError
from ..common.model_shapes import Shape, States

#: How recurrent states are held, as the setting ``recurrent`` has it; engines are named so.
RECURRENT: Final = ("exact", "fast")

#: Width of the convolution before the recurrence, and bytes of a number of its past.
TAPS: Final = 4
_BYTES: Final = 2


def configuration(shape: Shape) -> dict[str, Any]:
    """Return the fields of a hybrid's configuration that a Llama's lacks.

    The configuration is Nemotron-H's for states of Mamba-2, Qwen3-Next's for a mixture of experts,
    and else Qwen3.5's.
    """
    states = _states(shape)
    if states.kind == "mamba2":
        return _nemotron_h(shape, states)
    every = shape.layers // shape.attention
    common = {
        "head_dim": shape.head,
        "layer_types": [
            "full_attention" if (n + 1) % every == 0 else "linear_attention"
            for n in range(shape.layers)
        ],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
        },
        "linear_conv_kernel_dim": TAPS,
        "linear_key_head_dim": states.key_size,
        "linear_value_head_dim": states.value_size,
        "linear_num_key_heads": states.key_heads,
        "linear_num_value_heads": states.heads,
    }
    if shape.experts is None:
        return common | {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
        }
    return common | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_experts": shape.experts.number,
        "num_experts_per_tok": shape.experts.chosen,
        "moe_intermediate_size": shape.experts.inner,
        "shared_expert_intermediate_size": shape.experts.inner,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _nemotron_h(shape: Shape, states: States) -> dict[str, Any]:
    """Return a configuration of Nemotron-H: attention ends each run of states and MLPs."""
    run = ["linear_attention", "mlp"] * (states.layers // shape.attention) + ["full_attention"]
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "layers_block_type": run * shape.attention,
        "head_dim": shape.head,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "attention_bias": False,
        "mamba_num_heads": states.heads,
        "mamba_head_dim": states.value_size,
        "ssm_state_size": states.key_size,
        "n_groups": states.key_heads,
        "conv_kernel": TAPS,
        "chunk_size": 128,
        "expand": 2,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "layer_norm_epsilon": 1e-5,
        "mamba_ssm_cache_dtype": "float32",
        "num_nextn_predict_layers": 0,
    }


def arguments() -> dict[str, Any]:
    """Return arguments of ``vllm.LLM`` for hybrids: no prefix caching, float32 states, Triton."""
    return {
        "enable_prefix_caching": False,
        "gdn_prefill_backend": "triton",  # vLLM's own choice on Hopper wants a package more
        "mamba_ssm_cache_dtype": "float32",
    }


def cache_bytes(shape: Shape, requests: int, tokens: int, drafts: int, policy: str) -> int:
    """Return the bytes of a cache for so many requests of so many tokens, with a little more.

    Unless ``policy`` is one of ``RECURRENT``, each request has a state for each draft as well.
    """
    each, page = _pages(shape, tokens, drafts, policy)
    return (requests * (each + 1) + 2) * page * 17 // 16


def equal_cache_bytes(shape: Shape, requests: int, tokens: int, drafts: int) -> int:
    """Return the bytes of a cache in which stock holds so many requests, and no more."""
    each, page = _pages(shape, tokens, drafts, "stock")
    return (requests * each + 2) * page  # block 0 belongs to no request


def _pages(shape: Shape, tokens: int, drafts: int, policy: str) -> tuple[int, int]:
    """Return the pages of a request, and the bytes of a page in all layers of a group.

    Unless ``policy`` is one of ``RECURRENT``, there are pages for the drafts' states, too.
    """
    states = _states(shape)
    size = states.heads * states.value_size * states.key_size * 4
    channels = 2 * states.key_heads * states.key_size + states.heads * states.value_size
    page = size + (TAPS - 1 + drafts) * channels * _BYTES
    blocks = 1 if policy in RECURRENT else 1 + drafts
    rows = math.ceil(page / shape.row_bytes / 16) * 16  # vLLM makes both kinds of pages alike
    each = states.layers // shape.attention * blocks + math.ceil(tokens / rows)
    return each, shape.attention * rows * shape.row_bytes


def _states(shape: Shape) -> States:
    """Return the states of a hybrid's shape.

    Raises:
        ConfigError: the model has no recurrent layers.
    """
    if shape.states is None:
        raise ConfigError("bench vllm", "this model has no recurrent layers", got=shape)
    return shape.states
