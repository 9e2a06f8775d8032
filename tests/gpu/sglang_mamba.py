"""Mamba-2 with one state per request, beside SGLang's states of each draft: time and memory.

python tests/gpu/sglang_mamba.py OUT

A step of each is what SGLang launches for the drafts of a verify step between the convolution and
the gated norm, of all layers, and at the commit; the convolution is in neither:

- SGLang: ``selective_state_update`` per layer, which writes the state behind each draft, then
  ``fused_mamba_state_scatter_with_mask``, which copies that of the last accepted one
  (mamba.py:750, hybrid_linear_attn_backend.py:1514 of 0.5.23).
- kvtxn: ``verify_mamba2`` per layer, which writes no state and keeps the rows, then
  ``advance_gated_delta``, which takes the accepted rows in, once for all layers.

Shapes of Nemotron-H 8B. Two sets of requests in turns, as in ``sglang_rings.py``: L2 is cold. Both
are held against the recurrence in float64. OUT gets ``mamba.json``.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from kvtxn.backends.gated_delta import DeltaLayers, DeltaRows, advance_gated_delta
from kvtxn.backends.mamba2 import verify_mamba2
from sglang_machine import where
from sglang_rings import PARTS, SETS, calls, compared
from torch import Tensor

REQUESTS: Final = (8, 32, 128)
DRAFTS: Final = (3, 7)
DTYPE: Final = torch.bfloat16
#: SGLang's modules.
KERNELS: Final = "sglang.kernels.ops.mamba"
CHECKED: Final = 4


@attrs.frozen
class Sizes:
    """Sizes of a model's layers."""

    layers: int = 8
    heads: int = 128
    head_size: int = 64
    groups: int = 8
    state_size: int = 128

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of a request's state in one layer."""
        return self.heads, self.head_size, self.state_size

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's states, of all layers."""
        return 4 * self.layers * self.heads * self.head_size * self.state_size

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that kvtxn keeps, of all layers."""
        sizes = self.groups, self.heads, self.state_size, self.head_size
        return self.layers * DeltaRows.row_bytes(*sizes)


class Inputs:
    """Rows of all layers, as the convolution leaves them; both implementations read the same."""

    def __init__(self, sizes: Sizes, requests: int, drafts: int, steps: int, device: str) -> None:
        self.sizes, self.requests, self.width = sizes, requests, drafts + 1
        self.steps, self.rows, self.device = steps, requests * (drafts + 1), device
        generator = torch.Generator(device=device).manual_seed(7)

        def drawn(*size: int) -> Tensor:
            return torch.randn(*size, device=device, generator=generator)

        rows, heads = self.rows, sizes.heads
        self.layers = [
            (
                drawn(rows, heads, sizes.head_size).to(DTYPE),
                drawn(rows, heads).to(DTYPE),
                drawn(rows, sizes.groups, sizes.state_size).to(DTYPE),
                drawn(rows, sizes.groups, sizes.state_size).to(DTYPE),
                -torch.exp(drawn(heads) * 0.5),
                drawn(heads),
                drawn(heads) - 2.0,
            )
            for _ in range(sizes.layers)
        ]
        host = torch.Generator().manual_seed(requests * 100 + drafts)
        lots = torch.randint(1, self.width + 1, (steps, SETS, requests), generator=host)
        self.counts = [[self.ints(each) for each in step] for step in lots]
        self.slots = [self.ints(1 + t * requests + torch.arange(requests)) for t in range(SETS)]
        self.starts = self.ints(torch.arange(requests + 1) * self.width)

    def ints(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.device, torch.int32).clone()

    def states(self) -> Tensor:
        generator = torch.Generator(device=self.device).manual_seed(3)
        shape = (self.sizes.layers, 1 + SETS * self.requests, *self.sizes.state)
        made = torch.empty(shape, device=self.device)
        return made.normal_(std=0.3, generator=generator)

    def outs(self) -> list[Tensor]:
        shape = (self.rows, self.sizes.heads, self.sizes.head_size)
        return [torch.zeros(shape, dtype=DTYPE, device=self.device) for _ in self.layers]


class Stock:
    """SGLang's steps, and its pool of the states behind each draft."""

    def __init__(self, given: Inputs) -> None:
        self.given, self.states, self.layer_outs = given, given.states(), given.outs()
        self.update = importlib.import_module(
            f"{KERNELS}.triton_ops.mamba_ssm"
        ).selective_state_update
        self.scatter = importlib.import_module(
            f"{KERNELS}.mamba_state_scatter_triton"
        ).fused_mamba_state_scatter_with_mask
        sizes, shape = given.sizes, (given.requests, given.width)
        self.between = torch.zeros(
            sizes.layers, *shape, *sizes.state, device=given.device, dtype=torch.float32
        )
        self.numbers = given.ints(torch.arange(given.requests))
        self.last = [[count - 1 for count in step] for step in given.counts]

    def verify(self, turn: int, step: int) -> None:
        given, sizes = self.given, self.given.sizes
        shape = (given.requests, given.width)
        for layer, (x, dt, b, c, a, d, bias) in enumerate(given.layers):
            self.update(
                self.states[layer],
                x.view(*shape, sizes.heads, sizes.head_size),
                dt.view(*shape, sizes.heads)[..., None].expand(-1, -1, -1, sizes.head_size),
                a[:, None, None].expand(sizes.state),
                b.view(*shape, sizes.groups, -1),
                c.view(*shape, sizes.groups, -1),
                d[:, None].expand(-1, sizes.head_size),
                z=None,
                dt_bias=bias[:, None].expand(-1, sizes.head_size),
                dt_softplus=True,
                state_batch_indices=given.slots[turn],
                out=self.layer_outs[layer].view(*shape, sizes.heads, sizes.head_size),
                disable_state_update=True,
                intermediate_states_buffer=self.between[layer],
                cache_steps=given.width,
                retrieve_parent_token=None,
                intermediate_state_indices=self.numbers,
            )

    def commit(self, turn: int, step: int) -> None:
        slots, last = self.given.slots[turn], self.last[step][turn]
        self.scatter(self.states, self.between, slots, last)

    @property
    def beside(self) -> int:
        """Bytes beside the requests' own states."""
        return self.between.numel() * self.between.element_size()


class One:
    """kvtxn's steps, and the rows that it keeps."""

    def __init__(self, given: Inputs) -> None:
        self.given, self.states, self.layer_outs = given, given.states(), given.outs()
        sizes = given.sizes
        self.kept = [
            DeltaRows.build(
                *(given.rows, sizes.groups, sizes.heads, sizes.state_size, sizes.head_size),
                torch.device(given.device),
            )
            for _ in given.layers
        ]
        self.layers = DeltaLayers.build(list(self.states), self.kept)

    def verify(self, turn: int, step: int) -> None:
        given = self.given
        for layer, rows in enumerate(given.layers):
            verify_mamba2(
                *rows,
                self.states[layer],
                given.slots[turn],
                given.starts,
                self.layer_outs[layer],
                self.kept[layer],
                longest=given.width,
            )

    def commit(self, turn: int, step: int) -> None:
        given = self.given
        slots, counts = given.slots[turn][None], given.counts[step][turn]
        advance_gated_delta(self.layers, slots, counts, given.starts, longest=given.width)

    @property
    def beside(self) -> int:
        return self.given.rows * self.given.sizes.row_bytes


class Exact:
    """The recurrence in float64, of one layer and the first set of requests."""

    def __init__(self, given: Inputs, layer: int, state: Tensor) -> None:
        sizes, shape = given.sizes, (given.requests, given.width)
        x, dt, b, c, a, self.skip, bias = (part.double() for part in given.layers[layer])
        self.steps = torch.nn.functional.softplus(dt + bias).unflatten(0, shape)
        self.decay = torch.exp(self.steps * a)
        self.x = x.unflatten(0, shape)
        per = sizes.heads // sizes.groups
        self.b, self.c = (part.repeat_interleave(per, dim=1).unflatten(0, shape) for part in (b, c))
        self.state = state.double()

    def step(self, counts: Tensor) -> Tensor:
        """Return the outputs, ``[rows, heads, head_size]``; keep the counted rows' state."""
        now, kept, outs = self.state, self.state, []
        for row in range(self.x.shape[1]):
            x, b, c = self.x[:, row], self.b[:, row], self.c[:, row]
            more = (x * self.steps[:, row, :, None])[..., None] * b[:, :, None, :]
            now = now * self.decay[:, row, :, None, None] + more
            outs.append((now * c[:, :, None, :]).sum(-1) + self.skip[:, None] * x)
            kept = torch.where((counts > row)[:, None, None, None], now, kept)
        self.state = kept
        return torch.stack(outs, dim=1).flatten(0, 1)


def check(way: Stock | One, steps: int) -> dict[str, Any]:
    """Run steps of the first set beside the recurrence; first and last layer."""
    given, slots = way.given, way.given.slots[0].long()
    ends = sorted({0, given.sizes.layers - 1})
    exact = {end: Exact(given, end, way.states[end][slots]) for end in ends}
    worst = largest = off = size = 0.0
    for number in range(steps):
        step = number % given.steps
        way.verify(0, step)
        for end in ends:
            wanted = exact[end].step(given.counts[step][0])
            worst = max(worst, float((way.layer_outs[end].double() - wanted).abs().max()))
            largest = max(largest, float(wanted.abs().max()))
        way.commit(0, step)
    for end in ends:
        off = max(off, float((way.states[end][slots].double() - exact[end].state).abs().max()))
        size = max(size, float(exact[end].state.abs().max()))
    ok = worst <= 2e-2 * largest and off <= 1e-2 * size
    return {"output_off": worst, "output": largest, "state_off": off, "state": size, "ok": ok}


def memory(sizes: Sizes, width: int) -> dict[str, float]:
    """Return MiB per running request: states, those of drafts, and rows that are kept."""
    mib, state = 1 << 20, sizes.state_bytes
    return {
        "states_mib": round(state / mib, 2),
        "stock_mib": round((1 + width) * state / mib, 2),
        "one_mib": round((state + width * sizes.row_bytes) / mib, 2),
        "times": round((1 + width) * state / (state + width * sizes.row_bytes), 2),
    }


def cell(sizes: Sizes, drafts: int, requests: int) -> dict[str, Any]:
    """Check and time both with so many drafts and requests."""
    steps = 4
    given = Inputs(sizes, requests, drafts, steps, "cuda")
    ways: Mapping[str, Any] = {"kvtxn": One(given), "sglang": Stock(given)}
    row: dict[str, Any] = {"drafts": drafts, "requests": requests, "sets": SETS}
    row["check"] = {name: check(way, CHECKED) for name, way in ways.items()}
    row["beside_mib"] = {name: round(way.beside / (1 << 20), 1) for name, way in ways.items()}
    whole = {name: calls(way, steps, *PARTS) for name, way in ways.items()}
    row["us_per_step"] = compared(whole, steps * SETS)
    row["parts"] = {
        part: compared({n: calls(way, steps, part) for n, way in ways.items()}, SETS * steps)
        for part in PARTS
    }
    return row


def main() -> None:
    """Measure; write the results after each cell, and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=lambda path: Path(path).resolve(), help="folder")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    sizes = Sizes()
    found: dict[str, Any] = {**where(given.out), "shape": attrs.asdict(sizes), "cells": []}
    found["memory"] = {str(drafts): memory(sizes, drafts + 1) for drafts in DRAFTS}
    for drafts in DRAFTS:
        for requests in REQUESTS:
            row = cell(sizes, drafts, requests)
            found["cells"].append(row)
            (given.out / "mamba.json").write_text(json.dumps(found, indent=1) + "\n")
            near = all(each["ok"] for each in row["check"].values())
            times = {key: each["median"] for key, each in row["us_per_step"].items()}
            print(drafts, requests, times, row["beside_mib"], "" if near else "NOT NEAR")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
