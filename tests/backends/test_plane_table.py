"""The host's work before a launch: word widths, tiles, and rows that recur."""

from __future__ import annotations

import pytest
import torch
from kvtxn.backends.move_rows import plane_table
from kvtxn.backends.move_rows.plane_table import FIELDS, RowsAt, build_plane_table, most_lines
from kvtxn.backends.move_rows.planner import AddressBook
from kvtxn.backends.move_rows.tile_sizes import tile_for

from kvtxn import LayerRef, TransactionManager, TxnConfig
from kvtxn.testing import registered


def _table(ref, stride, aligned=True):
    rows = [RowsAt(stride, aligned)] * len(ref.planes)
    return build_plane_table(ref.planes, rows, [0] * len(ref.planes))


def _field(table, name):
    return table.table[:, FIELDS.index(name)].tolist()


def test_kernels_find_every_column_by_its_name():
    """The constants that kernels use stand where the host writes."""
    names = [f"AT_{name.upper()}" for name in FIELDS]
    assert [getattr(plane_table, name).value for name in names] == list(range(len(FIELDS)))
    assert plane_table.NUM_FIELDS.value == len(FIELDS)


def test_whole_rows_move_in_wide_words_as_one_run():
    """Contiguous on both sides: heads do not matter."""
    cache = torch.zeros(2, 4, 8, 16, 128, dtype=torch.bfloat16)
    table = _table(LayerRef("layer", cache[0], cache[1]), (16 * 128, 128, 1))
    assert (table.wide, table.narrow) == (True, 0)
    assert table.row_units == table.run_units == 16 * 128 * 2 // 16


def test_heads_apart_are_runs():
    """K and V side by side per head, as engines pack them."""
    cache = torch.zeros(4, 2, 8, 32, dtype=torch.bfloat16).permute(0, 2, 1, 3)
    table = _table(LayerRef("layer", cache[..., :16], cache[..., 16:]), (6 * 16, 16, 1))
    assert table.wide
    assert (table.row_units, table.run_units) == (4, 2)


@pytest.mark.parametrize(
    ("size", "stride", "aligned", "word"),
    [(16, 16, False, 2), (16, 17, True, 2), (7, 7, True, 2), (20, 20, True, 8), (6, 6, True, 4)],
)
def test_words_shrink_to_what_is_aligned(size, stride, aligned, word):
    cache = torch.zeros(4, 8, 1, size, dtype=torch.bfloat16)
    ref = LayerRef("layer", cache, cache.clone())
    table = _table(ref, (stride, stride, 1), aligned)
    assert not table.wide
    assert table.narrow == word
    assert set(_field(table, "unit_bytes")) == {word}


def test_one_plan_for_layers_that_differ():
    """Numbers that they do not share are read from the table."""
    wide = LayerRef("a", torch.zeros(4, 8, 1, 32), torch.zeros(4, 8, 1, 32))
    odd = LayerRef.latent("b", torch.zeros(4, 4, 9))
    rows = [RowsAt((32, 32, 1), True)] * 2 + [RowsAt((9, 1), True)]
    table = build_plane_table([*wide.planes, *odd.planes], rows, [0, 0, 1])
    assert (table.num_lines, table.wide, table.narrow) == (3, True, 4)
    assert (table.row_units, table.block_size) == (0, 0)
    assert _field(table, "group") == [0, 0, 1]


@pytest.mark.parametrize("rows", [1, 5, 80, 320, 5120])
def test_tiles_cover_every_row(rows):
    cache = torch.zeros(2, 4, 8, 8, 128, dtype=torch.bfloat16)
    table = _table(LayerRef("layer", cache[0], cache[1]), (1024, 128, 1))
    tile = tile_for(table, rows, 1320)
    assert tile.programs >= 1
    assert tile.rows & (tile.rows - 1) == 0
    assert (tile.programs - 1) * tile.rows < rows


@pytest.mark.parametrize(("rows", "planes", "step"), [(160, 64, 8), (640, 64, 64), (640, 8, 8)])
def test_steps_are_large_where_many_are_left(rows, planes, step):
    """Each program checks all slots, so few of them; but two for each of 132 processors."""
    cache = torch.zeros(4, 8, 8, 128, dtype=torch.bfloat16)
    refs = [LayerRef(f"layer.{i}", cache, cache.clone()) for i in range(planes // 2)]
    ends = [RowsAt((1024, 128, 1), True)] * planes
    table = build_plane_table([plane for ref in refs for plane in ref.planes], ends, [0] * planes)
    assert tile_for(table, rows, 1320).rows == step


@pytest.mark.parametrize(("size", "cols", "tail"), [(576, 64, 8), (512, 32, 0), (600, 128, 0)])
def test_a_row_of_two_pieces_is_one_step(size, cols, tail):
    """A latent and its rotary part; what is no two powers of two, or does not fit, is not."""
    ref = LayerRef.latent("layer", torch.zeros(4, 8, size, dtype=torch.bfloat16))
    tile = tile_for(_table(ref, (size, 1)), 320, 1320)
    assert (tile.cols, tile.tail) == (cols, tail)


def test_the_address_book_uploads_only_what_changed():
    book = AddressBook(4, torch.device("cpu"))
    assert book.write([1, 2, 3])[:3].tolist() == [1, 2, 3]
    assert book.write([1, 2, 3]) is book.table
    assert book.version == 1
    book.write([1, 2, 4])
    assert book.version == 2


def test_a_long_state_is_cut_into_lines():
    """Short rows keep one line; the pieces of a state follow each other without a gap."""
    short = LayerRef.latent("a", torch.zeros(4, 4, 512))
    state = LayerRef.recurrent("b", torch.zeros(3, 5, 64, 64))
    numel = 5 * 64 * 64
    rows = [RowsAt((512, 1), True), RowsAt((numel, 1), True)]
    planes = [*short.planes, *state.planes]
    table = build_plane_table(planes, rows, [0, 1])
    assert table.pieces is not None
    assert [plane for plane, _ in table.pieces] == [0, 1, 1, 1]
    assert _field(table, "row_units") == [128, 2048, 2048, 1024]
    starts = [cache - state.states[0].data_ptr() for cache in _field(table, "cache")[1:]]
    assert starts == [start for _, start in table.pieces[1:]] == [0, 2048 * 16, 4096 * 16]
    assert table.spread([7, 1000])[2:] == [1000 + 2048 * 16, 1000 + 4096 * 16]
    assert most_lines(planes) == table.num_lines == 4


@pytest.mark.parametrize("staging", ["copy", "auto"])
def test_a_long_state_is_committed_whole(triton_executor, kernel_device, staging):
    """Every word of every piece, staged at once and committed, beside another layer."""
    states = [torch.randn(3, 17, 1024, device=kernel_device) for _ in range(2)]
    refs = [
        LayerRef.recurrent("long", states[0], group="s"),
        LayerRef.recurrent("both", states[1], torch.randn(3, 7, device=kernel_device), group="s"),
    ]
    with registered(triton_executor) as name:
        manager = TransactionManager(
            refs, TxnConfig(policy="deferred", backend=name, staging=staging)
        )
        rows = [
            [torch.randn(4, *state.shape[1:], device=kernel_device) for state in ref.states]
            for ref in refs
        ]
        before = [[state.clone() for state in ref.states] for ref in refs]
        with manager.window([1, 1], torch.tensor([2, 0], device=kernel_device)) as window:
            for ref, parts in zip(refs, rows, strict=True):
                window.stage(ref, parts)
            window.commit([1, 0])
    for ref, parts, olds in zip(refs, rows, before, strict=True):
        for state, part, old in zip(ref.states, parts, olds, strict=True):
            assert torch.equal(state[2], part[1])
            assert torch.equal(state[0], part[2])
            assert torch.equal(state[1], old[1])


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_a_row_of_two_pieces_is_moved_whole(triton_executor, kernel_device, policy):
    """Both ways: committed, and put back."""
    cache = torch.randn(4, 8, 72, device=kernel_device).half()
    ref, expected = LayerRef.latent("latent", cache), cache.clone().view(-1, 72)
    rows = torch.randn(5, 72, device=kernel_device).half()
    slots = torch.tensor([3, 9, 30, 31, 17], device=kernel_device)
    with registered(triton_executor) as name:
        manager = TransactionManager([ref], TxnConfig(policy=policy, backend=name))
        with manager.window([4], slots) as window:
            window.stage(ref, rows)
            window.commit([2])
    expected[slots[:3]] = rows[:3]
    assert torch.equal(cache.view(-1, 72), expected)
