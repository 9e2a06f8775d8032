"""Repeated launches of the window kernel: they pass what a launch of their own would pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels_here import importing_kernels

from kvtxn import LayerRef
from kvtxn.executor import AttentionArgs
from kvtxn.layout import RowLayout

pytest.importorskip("triton")

with importing_kernels():
    from kvtxn.backends.attention_launch import AttentionLauncher
    from kvtxn.backends.attention_shapes import Keep, Prefix, Tail, call_of
    from kvtxn.backends.jobs import Launch
    from kvtxn.backends.window_launch import arranged

HEADS, GROUP, SIZE, BLOCK = 2, 2, 16, 4
HOST = torch.device("cpu")  # nothing is launched here


class Compiled:
    """Stands in for a compiled kernel, and writes down what it is given."""

    def __init__(self, given: list[tuple[Any, ...]]) -> None:
        self.given = given

    def __getitem__(self, grid: tuple[int, int, int]):
        return lambda *arguments: self.given.append(arguments)


@pytest.fixture
def launches(monkeypatch):
    """What is launched from the beginning, and what repeated launches are given."""
    found: tuple[list[Launch], list[tuple[Any, ...]]] = ([], [])

    def run(launch: Launch) -> Compiled:
        found[0].append(launch)
        return Compiled(found[1])

    monkeypatch.setattr(Launch, "run", run)
    return found


class Layers:
    """Layers that attend alike, and batches that the window's rows lead."""

    def __init__(self, count: int) -> None:
        self.layout = RowLayout.build((3, 1), (1, 1), HOST)
        self.launcher = AttentionLauncher(HOST)
        none = torch.empty(0)
        args = AttentionArgs(block_table=none, seq_lens=none, scale=0.3)
        self.all = []
        for number in range(count):
            cache = torch.zeros(8, HEADS, BLOCK, 2 * SIZE)
            ref = LayerRef(f"layer.{number}", *cache.transpose(1, 2).split(SIZE, -1))
            room = torch.empty(2, self.layout.num_rows, HEADS, SIZE)
            self.all.append((ref, args, Keep(None, self.layout.position, (room[0], room[1]))))

    def merge(self, number: int, more: int, tail: Tail | None, lse: torch.Tensor) -> Launch:
        """One layer's launch over new tensors; the same, arranged from the beginning."""
        ref, args, keep = self.all[number]
        count = self.layout.num_rows
        query, output = torch.empty(2, count + more, HEADS * GROUP, SIZE)
        key, value = torch.empty(2, count + more, HEADS, SIZE)
        facts = (self.layout, ref, query, (key, value), output, lse, args, keep, tail)
        self.launcher.merge_into(*facts)
        call = call_of(self.layout, ref, query[:count], args)
        prefix = Prefix.single(output[:count], lse)
        fresh, ones = (key[:count], value[:count]), self.launcher._ones
        return arranged(call, fresh, prefix, keep, tail, output[:count], ones, 1)


def tail(requests: int) -> Tail:
    """At a place of its own, with room for more requests."""
    return Tail(torch.zeros(requests, dtype=torch.int32), torch.zeros(requests, 3).int())


def passed(launch: Launch) -> dict[str, Any]:
    """By name, what a kernel is given."""
    names = launch.kernel.arg_names
    given = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in launch.arguments]
    given += [launch.constants[name] for name in names[len(given) :]]
    return dict(zip(names, given, strict=True))


def test_a_repeated_launch_passes_what_its_own_would(launches):
    """Other layers, addresses and batches; with and without the end of a causal prefix."""
    first, again = launches
    layers = Layers(2)
    for more, causal, number in ((0, 0, 0), (3, 1, 0), (5, 0, 1), (2, 1, 1), (0, 1, 0), (9, 0, 0)):
        end = tail(2 + more) if causal else None
        lse = torch.empty(HEADS * GROUP, layers.layout.num_rows + more)
        own = layers.merge(number, more, end, lse)
        if again:
            wanted = passed(own)
            got = dict(zip(wanted, again.pop(), strict=True))
            unread = {"l_split"} if causal else {"l_split", "seq_lens", "blocks"}
            assert {name for name in wanted if got[name] != wanted[name]} <= unread
    assert len(first) == 2  # one with an end, one without


def test_what_is_compiled_for_other_addresses_is_not_repeated(launches):
    """Triton compiles for multiples of 16; what is none finds its kernel the long way."""
    first, again = launches
    layers = Layers(1)
    rows = layers.layout.num_rows
    for shift, count in ((0, 1), (1, 2), (0, 2)):
        lse = torch.empty(HEADS * GROUP * rows + shift)[shift:].view(HEADS * GROUP, rows)
        layers.merge(0, 0, tail(2), lse)
        assert len(first) == count
    assert len(again) == 1
