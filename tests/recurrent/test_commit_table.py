"""Commits that one launch names: the lines of the tables are the reference's."""

from __future__ import annotations

import pytest
import torch
from kernel_driver import Driver
from kernels_here import ON_GPU, importing_kernels
from kvtxn.integrations.vllm_plugin.seam.state_commits import StateTables

with importing_kernels():
    from kvtxn.backends.launching import kernel_call
    from kvtxn.backends.state_tables import commit_table

DEVICE = "cuda" if ON_GPU else "cpu"
REQUESTS, GROUPS = 70, 2


class Tables:
    """Tables on the device, which the launch fills, and the same ones on the host."""

    def __init__(self, most: int, *, aligned: bool) -> None:
        torch.manual_seed(most)
        sizes = GROUPS, REQUESTS, most
        self.most, self.there, self.here = (
            most,
            *(
                StateTables.build(*sizes, torch.device(device), aligned=aligned)
                for device in (DEVICE, "cpu")
            ),
        )
        there = self.there
        self.launch = commit_table.CommitNames(
            *(there.sources[:, :, -1], there.commits, there.kept, there.counts),
            *(there.boundary, there.snapshots),
        )
        self.first = torch.full((REQUESTS + 1,), 7, dtype=torch.int32, device=DEVICE)

    def assert_step(self, count: int, lines: int, dtype: torch.dtype = torch.int32) -> None:
        here, there, most = self.here, self.there, self.most
        here.sources[:, :, -1] = torch.randint(1, 99, (GROUPS, REQUESTS))
        there.sources.copy_(here.sources)
        if here.boundary is not None:
            here.boundary.copy_(torch.randint(1, most + 4, (REQUESTS,)))
            here.snapshots.copy_(torch.randint(0, 3, (GROUPS, REQUESTS)) * 50)
            there.boundary.copy_(here.boundary)
            there.snapshots.copy_(here.snapshots)
        sampled = torch.randint(-1, most + 3, (count,), dtype=dtype)
        rows = torch.randint(1, most + 1, (count,))
        starts = torch.nn.functional.pad(rows.cumsum(0), (1, 3), value=10**6).int()
        starts[0] = 0
        first = torch.zeros(REQUESTS + 1, dtype=torch.int32)
        self.first.fill_(7)
        here.name_commits(sampled, starts, lines, first)
        self.launch.run(sampled.to(DEVICE), starts.to(DEVICE), lines, self.first)
        assert torch.equal(self.first[: lines + 1].cpu(), first[: lines + 1])
        assert torch.equal(there.commits[:, : 2 * lines].cpu(), here.commits[:, : 2 * lines])
        assert torch.equal(there.kept[: 2 * lines + 1].cpu(), here.kept[: 2 * lines + 1])
        assert torch.equal(there.counts[:count].cpu(), here.counts[:count])
        assert bool((self.first[lines + 1 :] == 7).all())


@pytest.mark.parametrize("aligned", [False, True], ids=["alone", "with ends of blocks"])
@pytest.mark.parametrize("most", [1, 5, 8])
def test_lines_are_the_references(most, aligned):
    """Of all requests, of some with and without padding, and of fewer than the step before."""
    tables = Tables(most, aligned=aligned)
    for count, lines in ((40, 64), (5, 5), (1, 2), (33, 40)):
        tables.assert_step(count, lines)
    tables.assert_step(3, 4, torch.int64)


def test_all_requests():
    Tables(4, aligned=True).assert_step(REQUESTS, REQUESTS)


def test_what_the_driver_is_given(monkeypatch):
    """Addresses and numbers of the step alone differ; other alignments are Triton's."""

    def launched(*given, num_warps):
        made.append(given)
        return "compiled"

    made = []
    monkeypatch.setattr(commit_table, "names_of", {(2, 2, 1): launched})
    monkeypatch.setattr(kernel_call, "RepeatedLaunch", Driver)
    tables = Tables(4, aligned=False)
    launch = tables.launch
    sampled = torch.ones(40, dtype=torch.int32)
    starts, first = torch.arange(48, dtype=torch.int32), tables.first
    for tensor in (sampled, starts, first):
        assert not tensor.data_ptr() % 16
    launch.run(sampled, starts, 40, first)
    driver = launch.again
    before = list(driver.words)
    launch.run(sampled[4:30], starts[8:], 32, first)
    [(words, programs)] = driver.launched
    assert [at for at in range(len(words)) if words[at] != before[at]] == [0, 1, 9, 10]
    step = sampled[4:].data_ptr(), starts[8:].data_ptr(), 26, 32
    assert ([words[at] for at in (0, 1, 9, 10)], programs[0]) == ([*step], 1)
    launch.run(sampled[1:], starts, 39, first)  # not aligned
    assert (len(driver.launched), len(made)) == (1, 2)
    assert launch.again is driver
