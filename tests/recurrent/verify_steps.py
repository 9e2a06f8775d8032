"""Verify steps of gated delta nets and Mamba-2 layers, and their recurrences in float64.

Both stage rows of one kind, and commit them by the same kernel; a recurrence is written for itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_here import ON_GPU
from kvtxn.backends.gated_delta import DeltaRows, verify_gated_delta
from kvtxn.backends.mamba2 import verify_mamba2
from torch import Tensor

#: A step of five requests: one has no rows, and one no state.
LENGTHS = [5, 1, 0, 3, 2]
SOURCES = [3, 1, 4, 0, 7]

#: Of a key, of a value, and how far apart rows lie.
SIZES = ((32, 16, 5), (64, 32, 64), (48, 20, 8), (48, 20, 5), (24, 40, 8))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass
class Case:
    """One layer's step.

    Attributes:
        given: the arguments up to ``starts``, by name.
        kept: room for the staged rows, filled with NaN.
        out: room for the outputs, filled with NaN.
        more: further arguments: the scale of a gated delta net.
    """

    given: dict[str, Tensor]
    kept: DeltaRows
    out: Tensor
    more: dict[str, float]


@dataclasses.dataclass
class Family:
    """A family of layers.

    Attributes:
        draw: the arguments of a verify that are no states, and those that follow, from rows,
            sizes, dtype of rows and the elements between the last part of a row and the next row.
        rows: the names of those arguments.
        reference: the verify in torch.
        step: one row in float64: state and row by name -> state and output.
    """

    draw: Callable[..., tuple[dict[str, Tensor], dict[str, float]]]
    rows: tuple[str, ...]
    reference: Callable[..., None]
    step: Callable[..., tuple[Tensor, Tensor]]

    def make(
        self,
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
    ) -> Case:
        """Make a step; rows are views of one tensor, states lie apart in their blocks.

        Args:
            lengths: rows of each request.
            sources: the slot of each request.
            padding: rows beyond those of all requests.
            apart: elements between the last part of a row and the first one of the next row.
            dtype: of the states.
            rows_dtype: of all parts of rows.
        """
        torch.manual_seed(seed)
        rows, size = sum(lengths) + padding, (heads, value_size, key_size)
        with torch.device(device):
            given, more = self.draw(rows, key_heads, size, rows_dtype, apart)
            states = (0.3 * torch.randn(slots, math.prod(size) + 64)).to(dtype)
            ends = [0, *itertools.accumulate(lengths)]
            given |= {
                "state": states[:, : math.prod(size)].unflatten(1, size),
                "sources": torch.tensor(sources, dtype=torch.int32),
                "starts": torch.tensor(ends, dtype=torch.int32),
            }
            out = torch.full((rows, heads, value_size), math.nan, dtype=rows_dtype)
        kept = DeltaRows.build(rows, key_heads, heads, key_size, value_size, torch.device(device))
        for part in (kept.key, kept.corrected, kept.decay):
            part.fill_(math.nan)
        return Case(given, kept, out, more)

    def verify(self, case: Case, **other: Any) -> None:
        """Verify a case by the specification, with other arguments where they are given."""
        self.reference(**case.given | {"out": case.out, "kept": case.kept} | case.more | other)

    def exact(self, case: Case, number: int, rows: int, **settings: Any) -> tuple[Tensor, Tensor]:
        """Compute one request's first rows in float64 on the host.

        Returns:
            The outputs ``[rows, heads, value_size]``, and the state after them.
        """
        every = {name: part.cpu() for name, part in case.given.items()}
        first = int(every["starts"][number])
        state = every["state"][int(every["sources"][number])].double()
        outputs = []
        for row in range(first, first + rows):
            own = {
                name: (part[row] if part.ndim > 1 else part).double()  # else it is by head
                for name, part in every.items()
                if name in self.rows
            }
            state, output = self.step(state, own, **case.more | settings)
            outputs.append(output)
        return torch.stack(outputs), state


def _draw_delta(rows: int, key_heads: int, size: tuple[int, ...], dtype: torch.dtype, apart: int):
    heads, value_size, key_size = size
    keys, values = key_heads * key_size, heads * value_size
    mixed = torch.randn(rows, 2 * keys + values + apart).to(dtype)
    gates = torch.randn(2, rows, heads + 3).to(dtype)
    gates[0, :, 0] += 95  # whose exponential is above all float32 numbers
    logs = torch.randn(heads)
    logs[0] = -5
    given = {
        "query": mixed[:, :keys].unflatten(1, (key_heads, key_size)),
        "key": mixed[:, keys : 2 * keys].unflatten(1, (key_heads, key_size)),
        "value": mixed[:, 2 * keys : 2 * keys + values].unflatten(1, (heads, value_size)),
        "a": gates[0, :, :heads],
        "b": gates[1, :, :heads],
        "A_log": logs,
        "dt_bias": torch.randn(heads),
    }
    return given, {"scale": key_size**-0.5}


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x <= 20, x.exp().log1p(), x)


def _step_delta(state: Tensor, row: dict[str, Tensor], *, scale: float, normalise: bool = True):
    q, k = row["query"], row["key"]
    if normalise:
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    q, k = (each.repeat_interleave(len(state) // len(each), 0) for each in (q * scale, k))
    decay = (-row["A_log"].exp() * _softplus(row["a"] + row["dt_bias"])).exp()
    state = state * decay[:, None, None]
    seen = torch.einsum("hvk,hk->hv", state, k)
    fresh = row["b"].sigmoid()[:, None] * (row["value"] - seen)
    state = state + torch.einsum("hv,hk->hvk", fresh, k)
    return state, torch.einsum("hvk,hk->hv", state, q)


def _draw_mamba2(rows: int, groups: int, size: tuple[int, ...], dtype: torch.dtype, apart: int):
    heads, head_size, state_size = size
    keys, values = groups * state_size, heads * head_size
    mixed = torch.randn(rows, values + 2 * keys + apart).to(dtype)
    steps = torch.randn(rows, heads + 3).to(dtype)
    steps[:, 0] += 95  # whose exponential is above all float32 numbers
    rates = -torch.rand(heads) - 0.1
    rates[0] = -0.005
    given = {
        "x": mixed[:, :values].unflatten(1, (heads, head_size)),
        "dt": steps[:, :heads],
        "B": mixed[:, values : values + keys].unflatten(1, (groups, state_size)),
        "C": mixed[:, values + keys : values + 2 * keys].unflatten(1, (groups, state_size)),
        "A": rates,
        "D": torch.randn(heads),
        "dt_bias": torch.randn(heads),
    }
    return given, {}


def _step_mamba2(state: Tensor, row: dict[str, Tensor]):
    b, c = (row[name].repeat_interleave(len(state) // len(row[name]), 0) for name in ("B", "C"))
    step = _softplus(row["dt"] + row["dt_bias"])
    fresh = torch.einsum("h,hp,hn->hpn", step, row["x"], b)
    state = state * (step * row["A"]).exp()[:, None, None] + fresh
    return state, torch.einsum("hpn,hn->hp", state, c) + row["x"] * row["D"][:, None]


DELTA = Family(
    _draw_delta,
    ("query", "key", "value", "a", "b", "A_log", "dt_bias"),
    verify_gated_delta,
    _step_delta,
)
MAMBA2 = Family(
    _draw_mamba2, ("x", "dt", "B", "C", "A", "D", "dt_bias"), verify_mamba2, _step_mamba2
)

FAMILIES = [pytest.param(DELTA, id="delta"), pytest.param(MAMBA2, id="mamba2")]


def verify_cases(shift: int = 0) -> list[Any]:
    """Dtypes of states and of rows, and sizes: all on a GPU; interpreted, each two that there are.

    Args:
        shift: 0 to 2; another takes others.
    """
    numbered = [list(enumerate(each)) for each in (DTYPES, DTYPES, SIZES)]
    return [
        pytest.param(state, rows, sizes, id=f"{state}-{rows}-{sizes}")
        for (i, state), (j, rows), (k, sizes) in itertools.product(*numbered)
        if ON_GPU or (i + j + k) % 3 == shift
    ]


def assert_near(found: Tensor, expected: Tensor, error: float) -> None:
    """Assert that NaN stands at the same places, and that the rest is near.

    Args:
        found: any shape.
        expected: the same shape.
        error: the largest difference, as a part of the largest number expected.
    """
    assert torch.equal(found.isnan(), expected.isnan())
    largest = expected.nan_to_num().abs().max().item() + 1e-9
    off = (found.float() - expected.float()).nan_to_num().abs().max().item()
    assert off <= error * largest
