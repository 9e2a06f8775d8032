"""Block tables by slot, against plain loops."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernels_here import importing_kernels

with importing_kernels():
    from kvtxn.backends.graphs.slot_block_table import slot_tables

MAX_ROWS, SPARE = 12, 1000


@st.composite
def batches(draw):
    """Rows before the step, rows of it, which of all rows wait, and which are padding."""
    count = draw(st.integers(1, 5))
    before = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    lengths = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    marked = draw(st.lists(st.booleans(), min_size=MAX_ROWS, max_size=MAX_ROWS))
    padding = draw(st.integers(0, 3))
    sizes = draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from([1, 3]))
    return before, lengths, marked, padding, sizes, draw(st.booleans())


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(batch=batches())
@example(batch=([1500, 3], [5, 9], [True] * MAX_ROWS, 2, (16, 1), True))  # more than one step
@example(batch=([0], [0], [False] * MAX_ROWS, 0, (4, 1), False))  # padding alone
def test_rows_are_read_and_written_where_they_wait(kernel_device, batch):
    """Each row of a request leads to its slot, or to a spare one of its own while it waits."""
    before, lengths, marked, padding, (block_size, lines), spacious = batch
    totals = [old + new for old, new in zip(before, lengths, strict=True)]
    blocks = max(1, -(-max(totals) // block_size)) + (3 if spacious else 0)
    numbers = {"dtype": torch.int32, "device": kernel_device}
    shape = (len(totals), blocks)
    given = torch.randperm(len(totals) * blocks).to(**numbers).view(shape)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(**numbers)
    own = [
        int(given[r, place // block_size]) * block_size + place % block_size
        for r, (old, total) in enumerate(zip(before, totals, strict=True))
        for place in range(old, total)
    ]
    slots = torch.tensor([*own, *[-1] * padding], dtype=torch.int64, device=kernel_device)
    position = torch.tensor([r if wait else -1 for r, wait in enumerate(marked)]).to(kernel_device)
    table, written = slot_tables(
        *(starts, torch.tensor(totals).to(**numbers), given, slots, position),
        spare=SPARE,
        block_size=block_size,
        longest=max(totals) + (5 if spacious else 0),
        lines=lines,
    )
    waits = [*marked, *[False] * len(slots)]
    wanted = [SPARE + row if waits[row] else slot for row, slot in enumerate(own)]
    assert written.tolist() == wanted + [-1] * padding
    assert table.shape == (len(totals) * lines, blocks * block_size)
    row = 0
    for r, (old, total) in enumerate(zip(before, totals, strict=True)):
        led = table[r * lines, :total].tolist()
        assert all(table[r * lines + n, :total].tolist() == led for n in range(lines))
        place = torch.arange(old, device=kernel_device)
        there = given[r, place // block_size] * block_size + place % block_size
        assert led[:old] == there.tolist()
        assert led[old:] == wanted[row : row + total - old]
        row += total - old


def test_a_table_is_no_larger_than_the_longest_request(kernel_device):
    """However long a request may become; it still is as wide as the engine's own."""
    numbers = {"dtype": torch.int32, "device": kernel_device}
    blocks = torch.zeros(64, 1000, **numbers)
    starts, totals = torch.arange(65).to(**numbers), torch.full((64,), 9, **numbers)
    slots = torch.arange(64, device=kernel_device)
    table, _ = slot_tables(
        *(starts, totals, blocks, slots, slots), spare=SPARE, block_size=16, longest=9
    )
    assert table.shape == (64, 16_000)
    assert table.untyped_storage().nbytes() == 4 * (64 * 16 + 16_000 - 16 + 128)


def test_a_request_longer_than_was_said_stays_in_its_line(kernel_device):
    """Nobody's table is overwritten."""
    numbers = {"dtype": torch.int32, "device": kernel_device}
    blocks = torch.tensor([[0, 1, 2], [3, 4, 5]], **numbers)
    starts, totals = torch.tensor([0, 1, 2], **numbers), torch.tensor([3, 12], **numbers)
    slots = torch.tensor([2, 23], device=kernel_device)
    waits = torch.full((2,), -1, device=kernel_device)
    for first, second in ((totals, [12, 13, 14, 15]), (totals.flip(0), [12, 13, 14])):
        table, _ = slot_tables(
            starts, first, blocks, slots, waits, spare=SPARE, block_size=4, longest=4
        )
        assert table[0, :3].tolist() == [0, 1, 2]
        assert table[1, : len(second)].tolist() == second
