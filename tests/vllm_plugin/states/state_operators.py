"""vLLM's operators of Mamba-2 layers and short convolutions as they are on a GPU, in torch.

They know drafts: a request's state is read from the column of its last accepted row, and after each
row a state is written to that row's column, unless the column names no block. Its past is a window
that moves by the accepted rows. vLLM's operators for CPUs know nothing of this.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus


def install() -> None:
    """Let the layers of this process call these operators, in the forwards that GPUs have."""
    from vllm.model_executor.layers.mamba import mamba_mixer2, short_conv

    for module in (mamba_mixer2, short_conv):
        module.causal_conv1d_fn = convolve_prompts  # type: ignore[assignment]
        module.causal_conv1d_update = convolve_rows  # type: ignore[assignment]
    mamba_mixer2.selective_state_update = advance  # type: ignore[assignment]
    mamba_mixer2.mamba_chunk_scan_combined_varlen = scan_prompts  # type: ignore[assignment]
    short_conv.ShortConv.forward_native = short_conv.ShortConv.forward_cuda


def _convolve(past: Tensor, rows: Tensor, weight: Tensor, bias: Any, activation: Any) -> Tensor:
    """Convolve rows ``[channels, num_rows]`` after ``past``, ``[channels, width - 1]``."""
    windows = torch.cat([past, rows], 1).float().unfold(1, weight.shape[1], 1)
    out = (windows * weight.float()[:, None]).sum(-1)
    out = out if bias is None else out + bias.float()[:, None]
    return (silu(out) if activation in ("silu", "swish", True) else out).to(rows.dtype)


def convolve_prompts(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    query_start_loc: Any = None,
    cache_indices: Any = None,
    has_initial_state: Any = None,
    conv_states: Any = None,
    activation: Any = "silu",
    **_: object,
) -> Tensor:
    """Convolve prompts; vLLM's ``causal_conv1d_fn``."""
    out, taps = torch.empty_like(x), weight.shape[1] - 1
    for number, (first, end) in enumerate(pairwise(query_start_loc.tolist())):
        window = conv_states[int(cache_indices[number])][:, :taps]
        past = window.clone() if bool(has_initial_state[number]) else torch.zeros_like(window)
        out[:, first:end] = _convolve(past, x[:, first:end], weight, bias, activation)
        window.copy_(torch.cat([past, x[:, first:end]], 1)[:, -taps:])
    return out


def convolve_rows(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Any = None,
    activation: Any = None,
    conv_state_indices: Any = None,
    num_accepted_tokens: Any = None,
    query_start_loc: Any = None,
    max_query_len: int = -1,
    **_: object,
) -> Tensor:
    """Convolve settled rows and drafts; vLLM's ``causal_conv1d_update``."""
    out, taps = x.clone(), weight.shape[1] - 1
    blocks = conv_state_indices.flatten(1)[:, 0] if conv_state_indices.ndim > 1 else (
        conv_state_indices
    )  # fmt: skip
    ends = range(len(blocks) + 1) if query_start_loc is None else query_start_loc.tolist()
    for number, (first, end) in enumerate(pairwise(ends)):
        if int(blocks[number]) <= 0 or first == end:
            continue
        window, offset = conv_state[int(blocks[number])], 0
        if num_accepted_tokens is not None:
            offset = int(num_accepted_tokens[number]) - 1
        past, rows = window[:, offset : offset + taps].clone(), x[first:end].t()
        out[first:end] = _convolve(past, rows, weight, bias, activation).t()
        both = torch.cat([past, rows], 1)
        kept = both[:, -taps:] if num_accepted_tokens is None else both[:, 1:]
        assert kept.shape[1] < taps + max(max_query_len, 1)
        window[:, : kept.shape[1]] = kept
    return out


def _take_in(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Take one row into a state ``[heads, head_size, state_size]``; returns it, and the output."""
    each = x.shape[0] // b.shape[0]
    rate = softplus(dt.float() + bias.float())
    b, c = (part.float().repeat_interleave(each, 0) for part in (b, c))
    decay = torch.exp(rate * a.float())[:, None, None]
    after = state * decay + (rate[:, None] * x.float())[:, :, None] * b[:, None]
    return after, (after * c[:, None]).sum(-1) + d.float()[:, None] * x.float()


def advance(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool = True,
    state_batch_indices: Any = None,
    dst_state_batch_indices: Any = None,
    out: Any = None,
    num_accepted_tokens: Any = None,
    cu_seqlens: Any = None,
    **_: object,
) -> None:
    """Take settled rows and drafts in; vLLM's ``selective_state_update``."""
    assert dt_softplus
    count = state_batch_indices.shape[0]
    source = state_batch_indices.view(count, -1)
    to = dst_state_batch_indices.view(count, -1)
    ends = range(count + 1) if cu_seqlens is None else cu_seqlens.tolist()
    for number, (first, end) in enumerate(pairwise(ends)):
        drafts = num_accepted_tokens is not None
        block = int(source[number, int(num_accepted_tokens[number]) - 1 if drafts else 0])
        if block <= 0 or first == end:
            continue
        now = state[block].float()
        for row in range(first, end):
            given = x[row], dt[row, :, 0], a[:, 0, 0], b[row], c[row], d[:, 0], dt_bias[:, 0]
            now, found = _take_in(now, *given)
            out[row] = found.to(out.dtype)
            written = int(to[number, row - first if drafts else 0])
            if written > 0:
                state[written] = now.to(state.dtype)


def scan_prompts(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    D: Any = None,
    dt_bias: Any = None,
    cu_seqlens: Any = None,
    initial_states: Any = None,
    out: Any = None,
    state_dtype: Any = None,
    **_: object,
) -> Tensor:
    """Take prompts in; vLLM's ``mamba_chunk_scan_combined_varlen``."""
    found = []
    for number, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        now = torch.zeros(*x.shape[1:], b.shape[-1])
        now = now if initial_states is None else initial_states[number].float()
        for row in range(first, end):
            now, made = _take_in(now, x[row], dt[row], a, b[row], c[row], D, dt_bias)
            out[row] = made.to(out.dtype)
        found.append(now.to(state_dtype))
    return torch.stack(found)
