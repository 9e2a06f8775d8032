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
    """Return what the configuration of a hybrid has beside a Llama's: Qwen3.5, dense."""
    states = _states(shape)
    every = shape.layers // (shape.layers - states.layers)
    full = ["full_attention" if (n + 1) % every == 0 else "linear_attention"
            for n in range(shape.layers)]  # fmt: skip
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": shape.head,
        "layer_types": full,
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
        "mamba_ssm_dtype": "float32",
    }


def arguments() -> dict[str, Any]:
    """Return arguments of ``vllm.LLM`` for hybrids: what kvtxn's states need."""
    return {
        "enable_prefix_caching": False,
        "gdn_prefill_backend": "triton",  # vLLM's own choice on Hopper wants a package more
        "mamba_ssm_cache_dtype": "float32",
    }


def cache_bytes(shape: Shape, requests: int, tokens: int, drafts: int, policy: str) -> int:
    """Return the bytes of a cache that holds so many requests, with a little more.

    Args:
        shape: a hybrid's.
        requests: that run at once.
        tokens: of each of them.
        drafts: per request and step.
        policy: of the engine: stock has a state for each draft as well.
    """
    each, page = _pages(shape, tokens, drafts, policy)
    return (requests * (each + 1) + 2) * page * 17 // 16


def equal_cache_bytes(shape: Shape, requests: int, tokens: int, drafts: int) -> int:
    """Return the bytes of a cache in which stock holds so many requests, and no more.

    Args:
        shape: a hybrid's.
        requests: that stock runs at once.
        tokens: of each of them.
        drafts: per request and step.
    """
    each, page = _pages(shape, tokens, drafts, "stock")
    return (requests * each + 2) * page  # one block is nobody's


def _pages(shape: Shape, tokens: int, drafts: int, policy: str) -> tuple[int, int]:
    """Return the pages of a request, and the bytes of a page in all layers of a group."""
    states = _states(shape)
    attention = shape.layers - states.layers
    size = states.heads * states.value_size * states.key_size * 4
    channels = 2 * states.key_heads * states.key_size + states.heads * states.value_size
    page = size + (TAPS - 1 + drafts) * channels * _BYTES
    blocks = 1 if policy in RECURRENT else 1 + drafts
    rows = math.ceil(page / shape.row_bytes / 16) * 16  # vLLM makes both kinds of pages alike
    each = states.layers // attention * blocks + math.ceil(tokens / rows)
    return each, attention * rows * shape.row_bytes


def _states(shape: Shape) -> States:
    if shape.states is None:
        raise ConfigError("bench vllm", "this model has no recurrent layers", got=shape)
    return shape.states
