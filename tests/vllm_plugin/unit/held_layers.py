"""Layers of vLLM's with a state, small, and by vLLM's own methods.

The convolution is written out here, and so is the gate of OLMo hybrid; kernels of recurrences run
through Triton's interpreter.
"""

from __future__ import annotations

from types import SimpleNamespace

import interpreted
import torch
from kvtxn.integrations.vllm_plugin.policy.engine_facts import GATED_DELTA, MAMBA2, OLMO_DELTA
from kvtxn.integrations.vllm_plugin.seam.hooks import with_globals
from torch import Tensor

DRAFTS, REQUESTS, BLOCKS = 3, 4, 20
HEADS, KEY_HEADS, SIZE, WIDTH = 2, 1, 16, 4


def convolve(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    conv_state_indices: Tensor,
    num_accepted_tokens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    validate_data: bool = False,
) -> Tensor:
    """Convolve the rows of a verify step as vLLM does: one window, read where drafts ended."""
    assert max_query_len == DRAFTS + 1
    indices = conv_state_indices if conv_state_indices.ndim == 1 else conv_state_indices[:, 0]
    out, width = x.clone(), weight.shape[1]
    for place, block in enumerate(indices.tolist()):
        start, end = query_start_loc[place : place + 2].tolist()
        if not block or start == end:
            continue
        at = int(num_accepted_tokens[place]) - 1
        past = conv_state[block][:, at : at + width - 1]
        window = torch.cat([past, x[start:end].T], 1)
        for row in range(end - start):
            made = (window[:, row : row + width].float() * weight.float()).sum(1)
            out[start + row] = torch.nn.functional.silu(made).to(x.dtype)
        kept = window[:, 1:]
        conv_state[block][:, : kept.shape[1]] = kept
    return out


class Layer(SimpleNamespace):
    """What vLLM's layer has, as far as its methods ask."""


def gated_delta(dtype: torch.dtype) -> tuple[type, dict[str, object], tuple[int, ...]]:
    """A class with vLLM's method, the values of its objects, and the shape of a state."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as own

    keys, values = KEY_HEADS * SIZE, HEADS * SIZE
    channels = 2 * keys + values
    kernel = interpreted.gated_delta()
    names = {
        "causal_conv1d_update": convolve,
        "fused_sigmoid_gating_delta_rule_update": kernel,
        "is_conv_state_dim_first": lambda: False,
    }
    real = own.QwenGatedDeltaNetAttention
    methods = {
        "_forward_core": with_globals(real._forward_core, **names),
        "rearrange_mixed_qkv": real.rearrange_mixed_qkv,
        "get_kv_cache_spec": lambda layer, vllm_config: None,
    }
    kind = type("QwenGatedDeltaNetAttention", (Layer,), methods)
    given = {
        "key_dim": keys,
        "value_dim": values,
        "num_k_heads": KEY_HEADS,
        "num_v_heads": HEADS,
        "head_k_dim": SIZE,
        "head_v_dim": SIZE,
        "A_log": torch.randn(HEADS),
        "dt_bias": torch.randn(HEADS).to(dtype),
        "conv1d": SimpleNamespace(weight=torch.randn(channels, 1, WIDTH).to(dtype), bias=None),
        "activation": "silu",
        "enable_packed_recurrent_decode": True,
        "channels": channels,
    }
    return kind, given, (HEADS, SIZE, SIZE)


def gate(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, allow_neg_eigval: bool
) -> tuple[Tensor, Tensor]:
    """The decay and the step size of each row, as vLLM's kernel computes them."""
    decay = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    size = torch.sigmoid(b.float()) * (2.0 if allow_neg_eigval else 1.0)
    return decay[None], size[None]


def olmo_delta(dtype: torch.dtype) -> tuple[type, dict[str, object], tuple[int, ...]]:
    """The same for a gated delta net of OLMo hybrid, whose values are wider than its keys."""
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as own

    keys, values = KEY_HEADS * SIZE // 2, HEADS * SIZE
    channels = 2 * keys + values
    names = {
        "causal_conv1d_update": convolve,
        "fused_recurrent_gated_delta_rule": interpreted.olmo_delta(),
        "fused_olmo_hybrid_gdn_gating": gate,
        "is_conv_state_dim_first": lambda: False,
    }
    real = own.OlmoHybridGatedDeltaNetAttention
    methods = {
        "_forward_core": with_globals(real._forward_core, **names),
        "rearrange_mixed_qkv": real.rearrange_mixed_qkv,
    }
    kind = type("OlmoHybridGatedDeltaNetAttention", (Layer,), methods)
    given = {
        "key_dim": keys,
        "value_dim": values,
        "num_k_heads": KEY_HEADS,
        "num_v_heads": HEADS,
        "head_k_dim": SIZE // 2,
        "head_v_dim": SIZE,
        "A_log": torch.randn(HEADS),
        "dt_bias": torch.randn(HEADS),
        "allow_neg_eigval": True,
        "conv1d": SimpleNamespace(weight=torch.randn(channels, 1, WIDTH).to(dtype), bias=None),
        "activation": "silu",
        "channels": channels,
    }
    return kind, given, (HEADS, SIZE, SIZE // 2)


def mamba2(dtype: torch.dtype) -> tuple[type, dict[str, object], tuple[int, ...]]:
    """The same for a Mamba-2 layer."""
    from vllm.model_executor.layers.mamba import mamba_mixer2 as own

    inner, groups = HEADS * SIZE, 1
    channels = inner + 2 * groups * SIZE
    names = {
        "causal_conv1d_update": lambda *args, **more: convolve(
            *args[:5], **more, validate_data=False
        ),
        "is_conv_state_dim_first": lambda: False,
    }
    methods = {"conv_ssm_forward": with_globals(own.MambaMixer2.conv_ssm_forward, **names)}
    kind = type("MambaMixer2", (Layer,), methods)
    given = {
        "num_heads": HEADS,
        "head_dim": SIZE,
        "ssm_state_size": SIZE,
        "n_groups": groups,
        "num_spec": DRAFTS,
        "use_replayssm": False,
        "cache_config": SimpleNamespace(),
        "tped_intermediate_size": inner,
        "tped_conv_size": channels,
        "tped_dt_size": HEADS,
        "conv_weights": torch.randn(channels, WIDTH).to(dtype),
        "conv1d": SimpleNamespace(bias=None),
        "activation": "silu",
        "split_hidden_states_B_C_fn": lambda rows: rows.split([inner, SIZE, SIZE], dim=-1),
        "A": -torch.rand(HEADS),
        "D": torch.randn(HEADS),
        "dt_bias": torch.randn(HEADS),
        "is_blackwell": False,
        "channels": channels,
    }
    return kind, given, (HEADS, SIZE, SIZE)


KINDS = {GATED_DELTA: gated_delta, OLMO_DELTA: olmo_delta, MAMBA2: mamba2}
#: Those whose method is ``_forward_core``, and whose metadata is that of gated delta nets.
DELTAS = (GATED_DELTA, OLMO_DELTA)
