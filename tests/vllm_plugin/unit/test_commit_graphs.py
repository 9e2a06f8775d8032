"""Branches of captured commits: every layer once, all of them between a fork and a join."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from kvtxn.integrations.vllm_plugin.seam import state_commits
from kvtxn.integrations.vllm_plugin.seam.state_commits import StateTables, VerifyStep

from kvtxn.cuda_graphs import GRAPH_BYTES, GraphCache


class Stream:
    """A stream of the log."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_layers_take_branches_in_turn(monkeypatch, layers):
    log = []
    main, *branches = (Stream(name, log) for name in ("main", "a", "b", "c"))
    current = [main]

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    verified = [
        SimpleNamespace(commit=lambda step, n=n: log.append(f"{n} of {step} on {current[-1].name}"))
        for n in range(layers)
    ]
    state_commits.write_side_by_side(verified, "it", branches)
    forks, joins = log[:3], log[-3:]
    assert forks == ["a waits for main", "b waits for main", "c waits for main"]
    assert joins == ["main waits for a", "main waits for b", "main waits for c"]
    assert log[3:-3] == [f"{n} of it on {'abc'[n % 3]}" for n in range(layers)]


def test_no_gpu_has_no_branches():
    """Layers are committed one after another there."""
    assert state_commits.side_streams(torch.device("cpu"), 24) == []
    seen = []
    verified = [SimpleNamespace(commit=lambda _, n=n: seen.append(n)) for n in range(3)]
    state_commits.write_side_by_side(verified, "it", [])
    assert seen == [0, 1, 2]


def test_lines_beyond_a_step_have_no_rows():
    """However many rows the step counts as padding: those lines name blocks of earlier requests."""
    width, most, seen = 3, 4, []
    tables = StateTables.build(1, most, width, torch.device("cpu"))
    rows = SimpleNamespace(
        may_fuse=False,
        metadata=lambda *_: None,
        was_fused=lambda _: False,
        commit=lambda step: seen.append((step.starts.tolist(), tables.kept.tolist())),
    )
    graphs = state_commits.CommitGraphs([rows], tables, width, most, lambda run: run, GraphCache())
    graphs.capture()
    tables.sources[0, :, -1] = torch.arange(1, most + 1)  # of a step of four requests
    for counted, starts in ((9, [0, 3, 6, 6]), (8, [0, 3, 5, 8]), (9, [0, 3, 6, 9])):
        step = VerifyStep(3, counted, torch.tensor(starts, dtype=torch.int32), None, None)
        graphs.run(step, torch.ones(3, dtype=torch.int32))
        assert seen[-1][0] == [*starts, starts[-1]]
        assert seen[-1][1][-2:] == [starts[-1]] * 2


def test_a_size_whose_graph_had_to_go_is_committed_launch_by_launch():
    """With the same result; other sizes keep their graphs."""
    seen, kept = [], GraphCache(GRAPH_BYTES)
    tables = StateTables.build(1, 2, 3, torch.device("cpu"))
    rows = SimpleNamespace(
        may_fuse=False,
        metadata=lambda *_: None,
        was_fused=lambda _: False,
        commit=lambda step: seen.append(step.requests),
    )

    def make(run):
        return lambda: (seen.append("graph"), run())

    graphs = state_commits.CommitGraphs([rows], tables, 3, 2, make, kept)
    graphs.capture()  # of two requests, and of one, for which the first had to go
    assert len(kept) == 1
    seen.clear()
    for requests in (1, 2):
        starts = torch.arange(requests + 1, dtype=torch.int32) * 3
        step = VerifyStep(requests, 3 * requests, starts, None, None)
        graphs.run(step, torch.ones(requests, dtype=torch.int32))
    assert seen == ["graph", 1, 2]
