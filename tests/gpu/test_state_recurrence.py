"""The oracle of recurrent layers finds states that are off, and names those of another count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kvtxn.backends.gated_delta import DeltaLayers, DeltaRows, advance_gated_delta
from kvtxn.integrations.vllm_plugin.policy.engine_facts import GATED_DELTA, MAMBA2
from kvtxn.integrations.vllm_plugin.seam.replayed_rows import REPLAYED
from kvtxn.integrations.vllm_plugin.seam.state_commits import StateTables

HEADS, KEY_HEADS, SIZE, WIDTH = 4, 2, 16, 5


class Net:
    """A layer with its states, one verify step, and the oracle's copies of it."""

    def __init__(self, kind: str, dtype: torch.dtype, lengths: list[int]) -> None:
        from state_recurrence import GIVEN, compare, watch_launches

        torch.manual_seed(0)
        self.compare, count, total = compare, len(lengths), sum(lengths)
        self.module = SimpleNamespace(
            kv_cache=(None, torch.randn(9, HEADS, SIZE, SIZE).to(dtype)),
            A_log=torch.randn(HEADS),
            dt_bias=torch.randn(HEADS),
            head_k_dim=SIZE,
            A=-torch.rand(HEADS) - 0.1,
            D=torch.randn(HEADS),
        )
        self.tables = StateTables.build(1, 8, WIDTH, torch.device("cpu"), replay=True)
        self.tables.name_sources(0, torch.arange(1, count + 1).int()[:, None])
        rows = DeltaRows.build(8 * WIDTH, KEY_HEADS, HEADS, SIZE, SIZE, torch.device("cpu"))
        self.layer = REPLAYED[kind](self.module, self.tables, 0, rows, WIDTH)
        self.starts = torch.tensor([0, *lengths]).cumsum(0)
        self.before = self.module.kv_cache[1][1 : count + 1].clone()
        first, second = torch.randn(2, total, KEY_HEADS, SIZE).bfloat16()
        value = torch.randn(total, HEADS, SIZE).bfloat16()
        a, b = torch.randn(2, total, HEADS).bfloat16()
        given = (first, second, value, a, b) if kind == GATED_DELTA else (value, a, first, second)
        own = {each: each.launch for each in REPLAYED.values()}
        GIVEN.clear()  # copies are found by a layer's address, which the next layer may have
        watch_launches()
        try:
            self.layer.launch(*given, self.starts.int(), torch.zeros_like(value))
        finally:
            for each, launch in own.items():
                each.launch = launch
        assert {part.shape[0] for part in GIVEN[id(self.layer)]} == {8 * WIDTH}

    def commit(self, counts: list[int]) -> None:
        """Let the states take rows in."""
        delta = DeltaLayers.build([self.module.kv_cache[1]], [self.layer.rows])
        self.tables.name_commits(torch.tensor(counts), self.starts)
        sources = self.tables.sources[:, : len(counts), -1]
        advance_gated_delta(
            delta, sources, self.tables.counts[: len(counts)], self.starts.int(), longest=WIDTH
        )

    def seen(self, kept: list[int]) -> tuple[dict[str, int], float]:
        """Compare with the states after these counts."""
        from state_recurrence import COUNTS, added

        now = self.module.kv_cache[1][1 : len(kept) + 1]
        most = int(self.starts.diff().max())
        found = self.compare(*(self.layer, self.before, now, self.starts, torch.tensor(kept), most))
        *counts, worst = added(torch.zeros(5, dtype=torch.float64), found).tolist()
        return dict(zip(COUNTS, map(int, counts), strict=True)), worst


@pytest.mark.parametrize("kind", [GATED_DELTA, MAMBA2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_after_the_kept_rows_are_right(kind, dtype):
    from state_recurrence import TOLERANCE

    net = Net(kind, dtype, [5, 1, 3, 4])
    net.commit([5, 1, 2, 1])
    counts, worst = net.seen([5, 1, 2, 1])
    assert counts == {"states": 4, "off": 0, "mistaken": 0, "blind": 0}
    assert 0 < worst <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", [GATED_DELTA, MAMBA2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_after_another_count_is_seen(kind, dtype):
    """Also one that took no row in."""
    net = Net(kind, dtype, [5, 3, 3, 4])
    net.commit([4, 2, 2, 2])
    net.module.kv_cache[1][4] = net.before[3]
    counts, _ = net.seen([5, 1, 2, 2])
    assert counts == {"states": 4, "off": 3, "mistaken": 3, "blind": 0}


@pytest.mark.parametrize("kind", [GATED_DELTA, MAMBA2])
def test_a_state_that_is_wrong_in_one_number_is_off(kind):
    net = Net(kind, torch.float32, [5, 3])
    net.commit([5, 3])
    net.module.kv_cache[1][1, 0, 0, 0] += 1e-2
    counts, _ = net.seen([5, 3])
    assert (counts["off"], counts["mistaken"]) == (1, 0)


def test_states_that_counts_do_not_change_are_named():
    """Where a row writes nothing, the comparison says nothing of the count."""
    net = Net(GATED_DELTA, torch.float32, [5])
    from state_recurrence import GIVEN

    *_, a, b = GIVEN[id(net.layer)]
    a[1], b[1] = -1e4, -1e4
    counts, _ = net.seen([1])
    assert counts["blind"] == 1


def test_every_block_of_a_cache_has_a_number():
    from state_recurrence import words_of_blocks

    pages = torch.randn(6, 100)
    state = pages[:, 20:68].unflatten(1, (3, 4, 4))
    before = words_of_blocks(state)
    pages[2, 50] += 1.0
    pages[4, 5] += 1.0  # beside the states
    assert (words_of_blocks(state) != before).nonzero().flatten().tolist() == [2]


def test_counts_add_up_and_the_largest_difference_stays():
    from state_recurrence import added

    first, second = (torch.tensor(each).double() for each in ([4, 1, 0, 0, 0.2], [3, 0, 1, 2, 0.1]))
    assert added(first, second).tolist() == [7, 1, 1, 2, first[-1].item()]
