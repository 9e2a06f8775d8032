"""Marks that several captured forwards share, and tensors that windows over a forward refuse."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from small_caches import HEAD_SIZE, HEADS, make_layers

from kvtxn import LayerError, LayerRef, TransactionManager, TxnConfig, WindowStateError
from kvtxn.errors import AcceptanceError
from kvtxn.layout import RowLayout

MAX_ROWS = 8
build = partial(RowLayout.build, device=torch.device("cpu"))


class Graphs:
    """Two forwards that stand for graphs of two batch sizes; they share their marks and slots."""

    def __init__(self) -> None:
        self.layers = make_layers(2)
        self.manager = TransactionManager(
            self.layers, TxnConfig(policy="deferred", max_rows=MAX_ROWS)
        )
        self.slots = torch.full((1, MAX_ROWS), -1)
        self.position = torch.full((MAX_ROWS,), -1)
        self.windows = [
            self.manager.captured_windows(self.slots, given_rows(self.layers), self.position)
            for _ in range(2)
        ]

    def step(self, graph: int, layout: RowLayout, slots: list[int], value: float) -> None:
        """One step in which every draft is rejected."""
        windows = self.windows[graph]
        self.slots.fill_(-1)
        self.slots[0, : len(slots)] = torch.tensor(slots)
        window = windows.begin(windows.plan(layout))
        for row, place in enumerate(self.position.tolist()):
            slot = int(self.slots[0, row])
            for ref in self.layers if slot >= 0 else ():
                for part, cache in enumerate((ref.key_cache, ref.value_cache)):
                    if place >= 0:
                        windows.rows[ref.name][part][row] = value
                    else:
                        cache.view(-1, HEADS, HEAD_SIZE)[slot] = value
        window.commit_sampled(torch.ones(layout.num_requests, dtype=torch.int32))


def given_rows(layers, dtype=torch.float32):
    """A tensor for each plane."""
    make = partial(torch.zeros, MAX_ROWS, HEADS, HEAD_SIZE, dtype=dtype)
    return {ref.name: (make(), make()) for ref in layers}


def test_graphs_that_share_their_marks():
    """The marks are those of the step that is under way, whichever graph ran before."""
    graphs = Graphs()
    two, one = build([2, 2], 1), build([3], 1)
    graphs.step(0, two, [0, 1, 2, 4, 5, 6], 1.0)
    graphs.step(1, one, [0, 1, 2, 3], 2.0)
    before = [ref.key_cache.clone() for ref in graphs.layers]
    graphs.step(0, two, [0, 1, 2, 4, 5, 6], 3.0)
    for ref, cache in zip(graphs.layers, before, strict=True):
        cache.view(-1, HEADS, HEAD_SIZE)[[0, 4]] = 3.0
        assert torch.equal(ref.key_cache, cache)


def test_marks_are_not_taken_from_an_open_window():
    """They would all become -1 under it."""
    graphs = Graphs()
    windows = graphs.windows[0]
    with windows.begin(windows.plan(build([2], 1))) as window:
        marked = graphs.position.clone()
        with pytest.raises(WindowStateError, match="is still OPEN"):
            graphs.manager.captured_windows(graphs.slots, position=graphs.position)
        assert torch.equal(graphs.position, marked)
        window.abort()


def test_marks_beside_the_slots():
    """A line of the slots holds no marks."""
    graphs = Graphs()
    with pytest.raises(LayerError, match="beside the slots"):
        graphs.manager.captured_windows(graphs.slots, position=graphs.slots[0])
    assert not (graphs.slots + 1).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint16])
def test_rows_of_another_dtype(dtype):
    """Their bits would be read as numbers of the cache's dtype; bits may be given as integers."""
    cache = partial(torch.zeros, 4, 16, HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    layers = [LayerRef("one", cache(), cache())]
    manager = TransactionManager(layers, TxnConfig(policy="deferred", max_rows=MAX_ROWS))
    slots = torch.full((1, MAX_ROWS), -1)
    with pytest.raises(LayerError, match=r"expected one tensor per plane: torch.bfloat16 \[8, "):
        manager.captured_windows(slots, given_rows(layers, dtype))
    for known in (torch.bfloat16, torch.int16):
        manager.captured_windows(slots, given_rows(layers, known))


def test_a_refused_tensor_is_named_by_its_shape():
    """Not by its content."""
    graphs = Graphs()
    one = torch.zeros(MAX_ROWS, HEADS, HEAD_SIZE)
    with pytest.raises(LayerError, match=r"got \[8, \d, \d+\] torch.float32 on cpu"):
        graphs.manager.captured_windows(graphs.slots, dict.fromkeys(graphs.manager.layers, one))
    sparse = {ref.name: (one.to_sparse(), one) for ref in graphs.layers}
    with pytest.raises(LayerError, match="do not fit the layer"):
        graphs.manager.captured_windows(graphs.slots, sparse)


def test_a_mistake_leaves_the_window_as_it_was():
    """No layer, and counts that are sparse: refused, and the right call still works."""
    graphs = Graphs()
    windows = graphs.windows[0]
    window = windows.begin(windows.plan(build([2], 1)))
    with pytest.raises(LayerError):
        window.note_staged(None)
    with pytest.raises(AcceptanceError):
        window.commit_sampled(torch.tensor([2]).to_sparse())
    assert window.state.name == "OPEN"
    assert window.commit_sampled(torch.tensor([2])).name == "COMMITTED"


def test_layouts_take_the_forms_that_windows_take():
    """Lists, and one number of settled rows for all requests."""
    assert build([3, 2], 1).settled == build((3, 2), (1, 1)).settled == (1, 1)
