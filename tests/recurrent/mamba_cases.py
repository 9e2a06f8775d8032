"""Verify steps of Mamba-2 layers, and their recurrence in float64, written for itself."""

from __future__ import annotations

import dataclasses
import math

import torch
from kvtxn.backends.gated_delta import DeltaRows
from torch import Tensor


@dataclasses.dataclass
class MambaCase:
    """One layer's step.

    Attributes:
        given: the arguments from ``x`` to ``starts``, by name.
        kept: room for the staged rows, filled with NaN.
        out: room for the outputs, filled with NaN.
    """

    given: dict[str, Tensor]
    kept: DeltaRows
    out: Tensor


def make_case(
    lengths: list[int],
    sources: list[int],
    *,
    device: str = "cpu",
    groups: int = 2,
    heads: int = 4,
    head_size: int = 16,
    state_size: int = 32,
    dtype: torch.dtype = torch.float32,
    rows_dtype: torch.dtype = torch.bfloat16,
    slots: int = 9,
    padding: int = 3,
    apart: int = 5,
    seed: int = 0,
) -> MambaCase:
    """Make a step; rows are views of one tensor, states lie apart in their blocks.

    Args:
        lengths: rows of each request.
        sources: the slot of each request.
        padding: rows beyond those of all requests.
        apart: elements between the C of a row and the x of the next one.
        dtype: of the states.
        rows_dtype: of x, dt, B and C.
    """
    torch.manual_seed(seed)
    rows = sum(lengths) + padding
    keys, values = groups * state_size, heads * head_size
    mixed = torch.randn(rows, values + 2 * keys + apart).to(rows_dtype).to(device)
    steps = torch.randn(rows, heads + 3).to(rows_dtype).to(device)
    steps[:, 0] += 95  # whose exponential is above all float32 numbers
    rates = -torch.rand(heads) - 0.1
    rates[0] = -0.005
    states = (0.3 * torch.randn(slots, heads * head_size * state_size + 64)).to(dtype).to(device)
    size = heads, head_size, state_size
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    given = {
        "x": mixed[:, :values].unflatten(1, (heads, head_size)),
        "dt": steps[:, :heads],
        "B": mixed[:, values : values + keys].unflatten(1, (groups, state_size)),
        "C": mixed[:, values + keys : values + 2 * keys].unflatten(1, (groups, state_size)),
        "A": rates.to(device),
        "D": torch.randn(heads).to(device),
        "dt_bias": torch.randn(heads).to(device),
        "state": states[:, : math.prod(size)].unflatten(1, size),
        "sources": torch.tensor(sources, dtype=torch.int32, device=device),
        "starts": torch.tensor(ends, dtype=torch.int32, device=device),
    }
    kept = DeltaRows.build(rows, groups, heads, state_size, head_size, torch.device(device))
    for part in (kept.key, kept.corrected, kept.decay):
        part.fill_(math.nan)
    out = torch.full((rows, heads, head_size), math.nan, dtype=rows_dtype, device=device)
    return MambaCase(given, kept, out)


def exact_step(case: MambaCase, number: int, rows: int) -> tuple[Tensor, Tensor]:
    """Compute one request's first rows in float64 on the host.

    Returns:
        The outputs ``[rows, heads, head_size]``, and the state after them.
    """
    every = {name: part.cpu() for name, part in case.given.items()}
    first = int(every["starts"][number])
    state = every["state"][int(every["sources"][number])].double()
    heads = state.shape[0]
    outputs = []
    for row in range(first, first + rows):
        b, c = (every[name][row].double() for name in ("B", "C"))
        b, c = (each.repeat_interleave(heads // each.shape[0], 0) for each in (b, c))
        wide = every["dt"][row].double() + every["dt_bias"].double()
        step = torch.where(wide <= 20, wide.exp().log1p(), wide)
        decay = (step * every["A"].double()).exp()
        x = every["x"][row].double()
        fresh = torch.einsum("h,hp,hn->hpn", step, x, b)
        state = state * decay[:, None, None] + fresh
        skip = x * every["D"].double()[:, None]
        outputs.append(torch.einsum("hpn,hn->hp", state, c) + skip)
    return torch.stack(outputs), state
