"""Verify steps of gated delta nets, and their recurrence in float64, written for itself."""

from __future__ import annotations

import dataclasses
import math

import torch
from kvtxn.backends.gated_delta import DeltaRows
from torch import Tensor


@dataclasses.dataclass
class DeltaCase:
    """One layer's step.

    Attributes:
        given: the arguments from ``query`` to ``starts``, by name.
        kept: room for the staged rows, filled with NaN.
        out: room for the outputs, filled with NaN.
    """

    given: dict[str, Tensor]
    kept: DeltaRows
    out: Tensor
    scale: float


def make_case(
    lengths: list[int],
    sources: list[int],
    *,
    device: str = "cpu",
    key_heads: int = 2,
    heads: int = 4,
    key_size: int = 32,
    value_size: int = 16,
    dtype: torch.dtype = torch.float32,
    rows_dtype: torch.dtype = torch.bfloat16,
    slots: int = 9,
    padding: int = 3,
    apart: int = 5,
    seed: int = 0,
) -> DeltaCase:
    """Make a step; rows are views of one tensor, states lie apart in their blocks.

    Args:
        lengths: rows of each request.
        sources: the slot of each request.
        padding: rows beyond those of all requests.
        apart: elements between the values of a row and the queries of the next one.
        dtype: of the states.
        rows_dtype: of queries, keys, values, a and b.
    """
    torch.manual_seed(seed)
    rows = sum(lengths) + padding
    keys, values = key_heads * key_size, heads * value_size
    mixed = torch.randn(rows, 2 * keys + values + apart).to(rows_dtype).to(device)
    gates = torch.randn(2, rows, heads + 3).to(rows_dtype).to(device)
    gates[0, :, 0] += 95  # whose exponential is above all float32 numbers
    logs = torch.randn(heads)
    logs[0] = -5
    states = (0.3 * torch.randn(slots, heads * value_size * key_size + 64)).to(dtype).to(device)
    size = heads, value_size, key_size
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    given = {
        "query": mixed[:, :keys].unflatten(1, (key_heads, key_size)),
        "key": mixed[:, keys : 2 * keys].unflatten(1, (key_heads, key_size)),
        "value": mixed[:, 2 * keys : 2 * keys + values].unflatten(1, (heads, value_size)),
        "a": gates[0, :, :heads],
        "b": gates[1, :, :heads],
        "A_log": logs.to(device),
        "dt_bias": torch.randn(heads).to(device),
        "state": states[:, : math.prod(size)].unflatten(1, size),
        "sources": torch.tensor(sources, dtype=torch.int32, device=device),
        "starts": torch.tensor(ends, dtype=torch.int32, device=device),
    }
    kept = DeltaRows.build(rows, key_heads, heads, key_size, value_size, torch.device(device))
    for part in (kept.key, kept.corrected, kept.decay):
        part.fill_(math.nan)
    out = torch.full((rows, heads, value_size), math.nan, dtype=rows_dtype, device=device)
    return DeltaCase(given, kept, out, key_size**-0.5)


def exact_step(
    case: DeltaCase, number: int, rows: int, *, normalise: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute one request's first rows in float64 on the host.

    Returns:
        The outputs ``[rows, heads, value_size]``, and the state after them.
    """
    every = {name: part.cpu() for name, part in case.given.items()}
    first = int(every["starts"][number])
    state = every["state"][int(every["sources"][number])].double()
    heads = state.shape[0]
    outputs = []
    for row in range(first, first + rows):
        q, k = (every[name][row].double() for name in ("query", "key"))
        if normalise:
            q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        q, k = (each.repeat_interleave(heads // each.shape[0], 0) for each in (q * case.scale, k))
        x = every["a"][row].double() + every["dt_bias"].double()
        softplus = torch.where(x <= 20, x.exp().log1p(), x)
        decay = (-every["A_log"].double().exp() * softplus).exp()
        beta = every["b"][row].double().sigmoid()
        state = state * decay[:, None, None]
        seen = torch.einsum("hvk,hk->hv", state, k)
        fresh = beta[:, None] * (every["value"][row].double() - seen)
        state = state + torch.einsum("hv,hk->hvk", fresh, k)
        outputs.append(torch.einsum("hvk,hk->hv", state, q))
    return torch.stack(outputs), state
