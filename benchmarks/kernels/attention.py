"""Attention of a verify pass: stock write and attention, against two ways to read a window.

All layers of a model, FlashAttention 3 from vLLM's wheel where it is called, over caches larger
than the L2. ``attention`` alone, with no write at all, is the floor of all candidates that call it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ...executor import AttentionArgs
from ...integrations.vllm_plugin.seam import measuring
from ...layers import LayerRef
from ..common import conformance_gate as gate
from ..common import machine
from ..common.model_shapes import BLOCK_SIZE, MODELS, Case
from .timer import measure_all, medians

#: Requests and tokens of context.
SHAPES: Final = ((1, 2048), (8, 2048), (16, 2048), (64, 2048), (128, 1024))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the suite's arguments."""
    parser.add_argument("--model", choices=MODELS, default="llama3-8b")
    parser.add_argument("--accepted", type=float, default=0.3)
    machine.add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every shape, print its lines, and with ``--save`` write the results.

    Returns:
        The exit code: 1 if a shape was left out; 2 without a CUDA device or vLLM.
    """
    if not torch.cuda.is_available():
        print("the attention benchmark needs a CUDA device")
        return 2
    if find_spec("vllm") is None:
        print("the attention benchmark needs vLLM's own operators: FlashAttention and the write")
        return 2
    passed = gate.passed() if args.save else ""
    cases = (PassCase(args.model, n, 4, args.accepted, context) for n, context in SHAPES)
    return measure_all({"suite": "attention", "gate": passed}, cases, measure, lines, args.save)


def lines(row: Mapping[str, Any]) -> list[str]:
    """Return one line of text for a shape: microseconds and ratios."""
    us = row["us"]
    ratios = (
        f"{way}/{than} {us[way] / us[than]:.3f}"
        for way in ("slots", "own")
        for than in ("stock", "attention")
    )
    times = (f"{name} {value:.1f}" for name, value in us.items())
    return [f"{row['requests']:>4} x {row['context']}: {'  '.join((*times, *ratios))}"]


@attrs.frozen
class PassCase(Case):
    """A window, and the tokens of each request before it."""

    context: int


class Pass:
    """A verify pass over all layers, in each way to read a window.

    Args:
        case: the window.
    """

    def __init__(self, case: PassCase) -> None:
        from ...backends.move_rows.selection import Select
        from ...integrations.vllm_plugin.seam.gpu_cache_layout import waiting_rows
        from .workload import Workload

        length = case.context + case.drafts + 1
        per_request = -(-length // BLOCK_SIZE)
        model, device = MODELS[case.model], torch.device("cuda")
        rows, requests = case.rows, case.requests
        self._spare = requests * per_request * BLOCK_SIZE
        blocks = requests * per_request + -(-rows // BLOCK_SIZE)
        self.load = Workload(case, blocks=blocks, windows=1, by_rows=True)
        self.window = self.load.windows[0]
        table = torch.randperm(requests * per_request, device=device).view(requests, per_request)
        at = case.context + torch.arange(case.drafts + 1, device=device)
        slots = table[:, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        self.window.slots.copy_(slots.reshape(-1))
        self.table = table.to(torch.int32)
        size = (rows, model.q_heads, model.head_size)
        self.query = torch.randn(size, device=device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.query)
        self.own_out = self.out
        self.starts = torch.arange(requests + 1, device=device, dtype=torch.int32) * (
            case.drafts + 1
        )
        self.lengths = torch.full((requests,), length, device=device, dtype=torch.int32)
        self._longest = length
        self._schedule = measuring.schedule(
            requests,
            case.drafts + 1,
            length,
            model.q_heads,
            model.kv_heads,
            model.head_size,
            self.lengths,
            cu_seqlens_q=self.starts,
            page_size=BLOCK_SIZE,
            causal=True,
        )
        self.args = AttentionArgs(
            block_table=self.table, seq_lens=self.lengths, scale=model.head_size**-0.5
        )
        self._plan = self.load.plan(self.window)
        refs = self.load.refs
        waiting = [waiting_rows(ref, self._spare, rows) for ref in refs]
        rows_of_all = [part for parts in waiting for part in parts]
        self._waiting = self.load.executor.plan_move("spare", refs, rows_of_all, Select.KEPT)
        self._by_slot = [[side.flatten(0, 1).unsqueeze(1) for side in _sides(ref)] for ref in refs]
        self._one = torch.ones(1, device=device)

    def _attend(self, key: Tensor, value: Tensor, table: Tensor) -> None:
        """Run FlashAttention 3 of one layer over a block table, into ``out``."""
        measuring.attend(
            self.query,
            key,
            value,
            self.load.case.drafts + 1,
            self.starts,
            self._longest,
            seqused_k=self.lengths,
            softmax_scale=self.args.scale,
            causal=True,
            block_table=table,
            out=self.out,
            scheduler_metadata=self._schedule,
            fa_version=3,
        )

    def attention(self) -> None:
        """Run only the attention, over rows that are in the caches already."""
        for ref in self.load.refs:
            self._attend(*_sides(ref), self.table)

    def stock(self) -> None:
        """Write all rows, then attend, layer by layer, by vLLM's kernels."""
        for ref in self.load.refs:
            self._write(ref, self.window.slots)
            self._attend(*_sides(ref), self.table)

    def slots(self) -> None:
        """Write and attend by vLLM's kernels, drafts in spare slots, and then commit them.

        The output of the last layer is in ``self.out``.
        """
        from ...backends.graphs.slot_block_table import slot_tables

        table, written = slot_tables(
            *(self.starts, self.lengths, self.table, self.window.slots),
            self.load.layout.position,
            spare=self._spare,
            block_size=BLOCK_SIZE,
            longest=self._longest,
        )
        for ref, (key, value) in zip(self.load.refs, self._by_slot, strict=True):
            self._write(ref, written)
            self._attend(key, value, table)
        self.load.commit(self.window, self._waiting)

    def _write(self, ref: LayerRef, slots: Tensor) -> None:
        """Write the window's rows of one layer to ``slots`` by vLLM's own operator."""
        key, value = self.window.staged[ref.name].rows
        measuring.write_rows((key, value), _sides(ref), slots, self._one)

    def own(self) -> None:
        """Stage and attend, layer by layer, into ``own_out``; then commit once.

        These are the calls of a window's user.
        """
        executor, txn = self.load.executor, self.load.txn(self.window)
        executor.use_slots(self.window.slots)
        for layer in self.window.staged.values():
            executor.stage(txn, layer)  # writes the settled rows
            self.own_out = executor.attend(txn, layer, self.query, self.args)
        self.load.commit(self.window, self._plan)


def _sides(ref: LayerRef) -> tuple[Tensor, Tensor]:
    """Return a layer's caches of keys and values."""
    assert ref.value_cache is not None
    return ref.key_cache, ref.value_cache


def measure(case: PassCase) -> dict[str, Any]:
    """Compare ``slots`` and ``own`` with stock's result at one shape, then time all ways in turn.

    Returns:
        The shape's row of the result file; ``us`` has the medians in microseconds.

    Raises:
        AssertionError: a result is 0.02 or more away from stock's.
    """
    work = Pass(case)
    work.stock()
    expected = work.out.float()
    difference = 0.0
    work.out.zero_()
    work.slots()
    work.own()
    for out in (work.out, work.own_out):
        difference = max(difference, (out.float() - expected).abs().max().item())
    if not difference < 0.02:
        raise AssertionError(f"attention over a window is off by {difference} at {case}")
    candidates: dict[str, list[Callable[[], None]]] = {
        "attention": [work.attention] * 2,
        "stock": [work.stock] * 2,
        "slots": [work.slots] * 2,
        "own": [work.own] * 2,
    }
    times = medians(candidates, rounds=25)
    return {
        "requests": case.requests,
        "context": case.context,
        "accepted": case.accepted,
        "difference": difference,
        "us": {name: round(value, 2) for name, value in times.items()},
    }
