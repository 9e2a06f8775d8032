"""The number of requests that a hybrid's cache holds with one state block each, of stock's number.

From the configuration alone, so that every process of an engine, and the doctor, find one number.
"""

from __future__ import annotations

import math
from typing import Any, Final

from .protocols.engine import VllmConfig

#: Bytes of a number, by the name of its dtype or cache format; formats of eight bits have one.
_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}

#: A page of attention has a multiple of so many tokens, on a GPU.
_TOKENS: Final = 16


def state_dtype(config: VllmConfig) -> str:
    """Name the dtype of a gated delta net's or a Mamba-2 layer's states, by the configuration."""
    asked = str(config.cache_config.mamba_ssm_cache_dtype)
    return _past_dtype(config) if asked == "auto" else asked


def one_state_gain(config: VllmConfig, drafts: int, tokens: int) -> float:
    """Return how many times as many requests fit with one state block each as in stock.

    Every page of a hybrid's cache has the same bytes: a state with its past, or the rows of as many
    tokens of attention as need that much room. So requests are counted in pages. A drafter's layers
    are left out.

    Args:
        config: the ``VllmConfig`` of a model with gated delta nets.
        drafts: the most drafts of a request; stock has a state block for each.
        tokens: of each request.

    Returns:
        1.0 or more; 1.0 if the model's configuration does not name its layers, or has no attention
        beside them.
    """
    model: Any = config.model_config.hf_text_config  # settings of a hybrid's alone
    cache = config.cache_config
    kinds = list(getattr(model, "layer_types", None) or ())
    states, attention = kinds.count("linear_attention"), kinds.count("full_attention")
    if not states or not attention:
        return 1.0
    taps = model.linear_conv_kernel_dim - 1 + drafts
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    values = model.linear_num_value_heads * model.linear_value_head_dim
    past = taps * (2 * keys + values) * _BYTES[_past_dtype(config)]
    state = values * model.linear_key_head_dim * _BYTES[state_dtype(config)]
    heads, size = config.model_config.get_total_num_kv_heads(), config.model_config.get_head_size()
    number = str(cache.cache_dtype)
    number = _model_dtype(config) if number == "auto" else number
    row = 2 * heads * size * _BYTES.get(number, 1)
    page = math.ceil((past + state) / row / _TOKENS) * _TOKENS
    rows = attention * math.ceil(tokens / page)
    own = 1 if cache.mamba_cache_mode == "none" else 2  # "align" keeps one at a block's end
    return float((states * (own + drafts) + rows) / (states * own + rows))


def _past_dtype(config: VllmConfig) -> str:
    asked = str(config.cache_config.mamba_cache_dtype)
    return _model_dtype(config) if asked == "auto" else asked


def _model_dtype(config: VllmConfig) -> str:
    return str(config.model_config.dtype).removeprefix("torch.")
