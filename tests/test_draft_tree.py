"""Draft trees: what they are, where they are refused, and what a path means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvtxn.backends.torch_executor import TorchExecutor
from small_caches import rows

from kvtxn import (
    AcceptanceError,
    BackendUnavailableError,
    CapacityError,
    ConfigError,
    LayerError,
    LayerRef,
    TransactionManager,
    TreeError,
    TxnConfig,
    WindowStateError,
)
from kvtxn.accepted_forms import as_accepted
from kvtxn.draft_tree import as_parents
from kvtxn.executor import Capabilities, SampledIds
from kvtxn.layout import RowLayout
from kvtxn.testing import registered

CPU = torch.device("cpu")
TREE = (-1, -1, 0, 1, 3)


@pytest.mark.parametrize(
    "tree",
    [[0], [-2], [-1, 1], [-1, 0.0], [-1, True], [[-1], 3], "ab", 7, [[-1], "a"], [-1, None]],
)
def test_parents_come_before_their_children(tree):
    """Anything else is refused on the host, naming the row."""
    with pytest.raises(TreeError):
        as_parents(tree)


def test_trees_come_as_lists_arrays_or_host_tensors():
    """One for all requests, or one each."""
    assert as_parents(np.array([-1, 0])) == (-1, 0)
    assert as_parents(torch.tensor([[-1, 0], [-1, -1]])) == ((-1, 0), (-1, -1))
    assert as_parents([np.array([-1]), []]) == ((-1,), ())
    assert as_parents([np.int64(-1), torch.tensor(0)]) == (-1, 0)
    assert as_parents([[np.int64(-1), 0], torch.tensor([-1])]) == ((-1, 0), (-1,))
    with pytest.raises(TreeError, match="on a device"):
        as_parents(torch.tensor([-1], device="meta"))


def test_a_tree_has_one_parent_per_draft(layers):
    """The same for all requests where it is one sequence; late slots say how many there are."""
    manager = TransactionManager(layers)
    for draft_len, tree in ((4, TREE), ([5, 4], TREE), ([5, 2], [TREE, (-1,)]), ([5], [TREE] * 2)):
        with pytest.raises(TreeError, match="one parent per draft row"):
            manager.window(draft_len, tree=tree)
    assert manager.current is None
    with manager.window(5, tree=TREE) as w:
        for ref in layers:
            w.stage(ref, *rows(12), list(range(12)))
        w.commit([[1, 3], []])
    assert manager.snapshot()["kvtxn_rows_committed_total"] == 2


def test_what_a_tree_window_cannot_be(layers):
    """Written by the caller, or fallen back by the caller."""
    undo = TransactionManager(layers, TxnConfig(policy="undo"))
    with pytest.raises(ConfigError, match="written by the caller"):
        undo.window(5, list(range(6)), tree=TREE, written_by="caller")
    with undo.window(5, list(range(6)), tree=TREE) as w:
        with pytest.raises(WindowStateError, match="draft tree"):
            w.fall_back("runner", RuntimeError())
        w.abort()


def on_host(accepted, parents):
    """Return what a commit of two requests with two drafts each makes of its argument."""
    return as_accepted(accepted, RowLayout.build([2, 2], 1, CPU, parents=parents), CPU).tolist()


@pytest.mark.parametrize("parents", [None, [-1, 0]], ids=["without a tree", "chain"])
def test_counts_and_masks_of_scalars(parents):
    """Scalars of numpy and torch count as Python numbers; a chain does not take them for a path."""
    for counts in ([np.int64(1), np.int64(2)], [torch.tensor(1), 2]):
        assert on_host(counts, parents) == [1, 2]
    for drafts in ([np.bool_(True)] * 6, [torch.tensor(True)] * 6):
        assert on_host(drafts, parents) == [True] * 6
    for wrong in ([np.int64(1), np.int64(3)], [np.float64(1), np.float64(1)]):
        with pytest.raises(AcceptanceError, match="accepted"):
            on_host(wrong, parents)


@pytest.mark.parametrize("parents", [[-1, -1], [-1, 0]], ids=["branches", "chain"])
def test_paths_of_arrays_and_scalars(parents):
    """Each request's path is a sequence, an array or a tensor on the host."""
    for make in (np.array, torch.tensor, lambda path: list(map(np.int64, path))):
        assert on_host([make([0, -1]), make([0])], parents) == [[0], [0]]
    for wrong in ([np.array([0.0])] * 2, [torch.tensor([0], device="meta")] * 2, [[0], 0]):
        with pytest.raises(AcceptanceError, match="is not a path"):
            on_host(wrong, parents)


def test_sampled_ids_do_not_say_which_branch(layers):
    """A chain takes them, a tree refuses."""
    manager = TransactionManager(layers)
    ids = SampledIds(torch.tensor([[7, 8, -1]]))
    with manager.window(2, [0, 1, 2], tree=[-1, -1]) as w:
        for ref in layers:
            w.stage(ref, *rows(3))
        with pytest.raises(AcceptanceError, match="is not a path"):
            w.commit(ids)
        w.commit([[1]])
    with manager.window(2, [0, 1, 2], tree=[-1, 0]) as w:
        for ref in layers:
            w.stage(ref, *rows(3))
        w.commit(ids)
    assert manager.snapshot()["kvtxn_rows_committed_total"] == 2


def test_an_executor_without_trees_says_so(layers):
    """Executors made before there were trees are not asked for one."""

    class Plain(TorchExecutor):
        name = "plain"
        capabilities = Capabilities(attention=True)

    with registered(Plain) as name:
        manager = TransactionManager(layers, TxnConfig(backend=name))
        with pytest.raises(BackendUnavailableError, match="plain executor cannot do draft trees"):
            manager.window(5, list(range(6)), tree=TREE)
        assert manager.current is None


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_attention_in_a_tree_needs_blocks_of_what_it_reads(policy):
    """The rows of the window come from its tensors, so that the table ends with the past."""
    torch.manual_seed(0)
    outputs = []
    for blocks in ([[1]], [[1, 5]]):
        ref = LayerRef("l", *torch.ones(2, 8, 4, 1, 8).unbind())
        manager = TransactionManager([ref], TxnConfig(policy=policy))
        rows = torch.arange(32.0).view(4, 1, 8)
        with manager.window(3, [6, 7, -1, -1], tree=[-1, -1, -1]) as window:
            window.stage(ref, rows, rows)
            outputs.append(window.attend(ref, rows, torch.tensor(blocks), torch.tensor([6])))
            with pytest.raises(LayerError, match=r"4 .* to 8 .*and those rows\), got 9"):
                window.attend(ref, rows, torch.tensor([[1]]), torch.tensor([9]))
            window.commit([[2]])
    assert torch.equal(*outputs)


def test_a_ring_under_undo_counts_rows_with_slots():
    """Nodes without a slot evict nothing: twelve nodes of depth two fit a ring of six."""
    slots = [2, 3, 4, *[-1] * 10]
    tree = [-1] * 4 + [0] * 8
    ref = LayerRef.ring("r", *torch.zeros(2, 2, 4, 1, 8).unbind(), window=4, ring_size=6)
    manager = TransactionManager([ref], TxnConfig(policy="undo"))
    rows = torch.randn(13, 1, 8)
    with manager.window(12, slots, tree=tree) as window:
        window.stage(ref, rows, rows)
        window.attend(ref, rows, torch.tensor([[0, 1]]), torch.tensor([15]))
        window.commit([[1]])
    assert torch.equal(ref.key_cache.view(8, 1, 8)[2:4], rows[[0, 2]])
    assert not ref.key_cache.view(8, 1, 8)[4:].any()
    with pytest.raises(CapacityError, match=r"more rows than its ring .* 6 rows with slots.* 13"):
        manager.window(12, [*slots[:-1], 2], tree=tree)
    narrow = LayerRef.ring("r", *torch.zeros(2, 2, 4, 1, 8).unbind(), window=5, ring_size=6)
    manager = TransactionManager([narrow], TxnConfig(policy="undo"))
    with manager.window(12, slots, tree=tree) as window:
        window.stage(narrow, rows, rows)
        with pytest.raises(LayerError, match=r"ring_size >= window \+ rows - 1 = 7"):
            window.attend(narrow, rows, torch.tensor([[0, 1]]), torch.tensor([15]))
        window.abort()
