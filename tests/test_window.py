"""A window's life, as a caller sees it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from small_caches import changed_slots, copies, make_layers, rows

from kvtxn import (
    AcceptanceError,
    IncompleteWindowError,
    KVTxnError,
    LayerError,
    LayerRef,
    TransactionManager,
    TxnConfig,
    UnresolvedWindowError,
    WindowState,
    WindowStateError,
)

SLOTS = torch.tensor([0, 1, 2, 10, 11, 12])  # two requests: one settled row, two drafts each


def manager_of(layers, policy="deferred", **settings):
    return TransactionManager(layers, TxnConfig(policy=policy, **settings))


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_commit_leaves_settled_and_accepted_rows_only(layers, stage_all, policy):
    """Exactly the accepted tokens exist afterwards, in every layer."""
    manager, before = manager_of(layers, policy), copies(layers)
    with manager.window(2, SLOTS, settled=1) as w:
        staged = stage_all(w, layers)
        assert w.state is WindowState.STAGED
        w.commit([1, 0])
    assert w.state is WindowState.COMMITTED
    assert changed_slots(layers, before) == [{0, 1, 10}] * 6
    for ref, (key, value) in zip(layers, staged, strict=True):
        assert torch.equal(ref.key_cache[0, 1], key[1])
        assert torch.equal(ref.value_cache[2, 2], value[3])


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_abort_leaves_settled_rows_only(layers, stage_all, policy):
    """No draft row's byte is left behind."""
    manager, before = manager_of(layers, policy), copies(layers)
    with manager.window(2, SLOTS) as w:
        stage_all(w, layers)
        w.abort()
    assert w.state is WindowState.ABORTED
    assert changed_slots(layers, before) == [{0, 10}] * 6


def test_deferred_writes_no_draft_before_commit(layers, stage_all):
    """Isolation: settled rows are there at staging, drafts are not."""
    manager, before = manager_of(layers), copies(layers)
    with manager.window(2, SLOTS) as w:
        stage_all(w, layers)
        assert changed_slots(layers, before) == [{0, 10}] * 6
        w.commit(2)
    assert changed_slots(layers, before) == [{0, 1, 2, 10, 11, 12}] * 6


def test_direct_is_stock(layers, stage_all):
    """The control writes everything and takes nothing back."""
    manager, before = manager_of(layers, "direct"), copies(layers)
    with manager.window(2, SLOTS) as w:
        stage_all(w, layers)
        w.commit([0, 1])
    assert w.state is WindowState.COMMITTED
    assert changed_slots(layers, before) == [set(SLOTS.tolist())] * 6


@pytest.mark.parametrize(
    "accepted",
    [
        [2, 1],
        (2, 1),
        torch.tensor([2, 1]),
        torch.tensor([2, 1], dtype=torch.int32),
        torch.tensor([False, True, True, False, True, False]),
        torch.tensor([True, True, True, True, True, False]),
        [False, True, True, False, True, False],
    ],
    ids=["list", "tuple", "int64", "int32", "mask", "mask with settled", "list of bool"],
)
def test_acceptance_has_many_spellings(layers, stage_all, accepted):
    """Counts or rows, on the host or as a tensor, mean the same."""
    manager, before = manager_of(layers), copies(layers)
    with manager.window(2, SLOTS) as w:
        stage_all(w, layers)
        w.commit(accepted)
    assert changed_slots(layers, before) == [{0, 1, 2, 10, 11}] * 6


@pytest.mark.parametrize(
    "accepted",
    [
        3,
        -1,
        [1],
        [1, 3],
        [1, -1],
        [1.0, 1.0],
        torch.tensor([1.0, 1.0]),
        torch.tensor([True, False]),
        torch.tensor([[1, 1]]),
        None,
        "11",
        True,
    ],
)
def test_bad_acceptance_is_refused_and_the_window_goes_on(layers, stage_all, accepted):
    """Nothing is lost by a mistake: the right call still works."""
    manager, before = manager_of(layers), copies(layers)
    with manager.window(2, SLOTS) as w:
        stage_all(w, layers)
        with pytest.raises(AcceptanceError):
            w.commit(accepted)
        assert w.state is WindowState.STAGED
        assert changed_slots(layers, before) == [{0, 10}] * 6
        w.commit([1, 1])
    assert changed_slots(layers, before) == [{0, 1, 10, 11}] * 6


def test_a_missing_layer_stops_the_commit(layers):
    """All or nothing: no layer is written while one is missing."""
    manager, before = manager_of(layers), copies(layers)
    with manager.window(2, SLOTS, settled=0 + 1) as w:
        w.stage(layers[2], *rows(6))
        w.stage(layers[0], *rows(6))
        with pytest.raises(IncompleteWindowError, match=r"1 of 3 layers.*'layer\.1'"):
            w.commit(1)
        assert w.state is WindowState.OPEN
        assert w.missing == ("layer.1",)
        assert changed_slots(layers, before)[2:4] == [set(), set()]
        w.stage(layers[1], *rows(6))
        w.commit(1)
    assert changed_slots(layers, before) == [{0, 1, 10, 11}] * 6


def test_a_body_that_ends_unresolved_aborts_and_says_so(layers, stage_all):
    """The number of accepted tokens is the caller's to say."""
    manager, before = manager_of(layers, "undo"), copies(layers)
    with pytest.raises(UnresolvedWindowError, match="STAGED"), manager.window(2, SLOTS) as w:
        stage_all(w, layers)
    assert w.state is WindowState.ABORTED
    assert changed_slots(layers, before) == [{0, 10}] * 6


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_a_failing_abort_does_not_hide_that_the_body_ended_unresolved(layers, stage_all, policy):
    """The caller's mistake is told; what the abort raised is its cause and a note."""
    manager = manager_of(layers, policy, on_error="raise")

    def fails(ended):
        raise ZeroDivisionError("in a hook")

    manager.on_abort(fails)
    with pytest.raises(UnresolvedWindowError) as caught, manager.window(2, SLOTS) as w:
        stage_all(w, layers)
    assert w.state is WindowState.ABORTED
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "in a hook" in "".join(caught.value.__notes__)
    assert (caught.value.expected, caught.value.got) == (
        "commit(accepted) or abort() in the block",
        "neither",
    )


MISTAKES = {
    "staged twice": lambda w, layers: w.stage(layers[0], *rows(6)),
    "no layer": lambda w, layers: w.stage(None, None),
    "misshapen rows": lambda w, layers: w.stage(layers[1], torch.zeros(1), torch.zeros(1)),
    "other slots": lambda w, layers: w.stage(layers[1], *rows(6), slots=SLOTS.flip(0)),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_an_error_about_a_window_names_its_state(layers, mistake):
    with manager_of(layers).window(2, SLOTS) as w:
        w.stage(layers[0], *rows(6))
        with pytest.raises(KVTxnError) as caught:
            mistake(w, layers)
        assert caught.value.state == "OPEN"
        assert caught.value.expected is not None
        assert caught.value.got is not None
        w.abort()


def test_an_error_about_a_commit_names_the_windows_state(layers, stage_all):
    with manager_of(layers).window(2, SLOTS) as w:
        staged = stage_all(w, layers)
        with pytest.raises(AcceptanceError) as caught:
            w.commit([3, 0])
        assert caught.value.state == "STAGED"
        staged[0][0].add_(1)
        with pytest.raises(WindowStateError, match="modified in place") as caught:
            w.commit([1, 0])
        assert (caught.value.state, caught.value.expected is None) == ("STAGED", False)
        w.abort()


def test_the_bodys_exception_wins(layers, stage_all):
    """An exception aborts, and it is the one the caller sees."""
    manager, before = manager_of(layers), copies(layers)
    w = manager.window(2, SLOTS)
    stage_all(w, layers)
    with pytest.raises(ZeroDivisionError), w:
        raise ZeroDivisionError
    assert w.state is WindowState.ABORTED
    assert changed_slots(layers, before) == [{0, 10}] * 6
    assert manager.current is None


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_window_is_single_use(layers, stage_all, end):
    """Each call on a finished window says: open a new one."""
    manager = manager_of(layers)
    w = manager.window(2, SLOTS)
    stage_all(w, layers)
    w.commit(0) if end == "commit" else w.abort()
    for call in (
        lambda: w.stage(layers[0], *rows(6)),
        lambda: w.commit(0),
        lambda: w.abort(),
        lambda: w.attend(layers[0], torch.zeros(6, 2, 8), torch.zeros(2, 3), torch.zeros(2)),
    ):
        with pytest.raises(WindowStateError, match=f"in state {w.state.name}.*open a new one"):
            call()


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (lambda w, ref: w.stage(ref, *rows(5)), r"expected \[6, 2, 8\], got \[5, 2, 8\]"),
        (lambda w, ref: w.stage(ref, rows(6)[0]), "needs a value"),
        (lambda w, ref: w.stage(ref, *(t.long() for t in rows(6))), "dtype"),
        (lambda w, ref: w.stage(ref, rows(6)[0], "value"), "must be a tensor"),
        (lambda w, _: w.stage(make_layers()[0], *rows(6)), "another object named"),
        (lambda w, _: w.stage("layer.0", *rows(6)), "not a layer of this manager"),
    ],
    ids=["rows", "value", "dtype", "type", "other object", "name"],
)
def test_bad_rows_are_refused_and_can_be_staged_again(layers, stage_all, stage, message):
    """The window is as it was, and goes on."""
    manager, before = manager_of(layers), copies(layers)
    with manager.window(2, SLOTS) as w:
        with pytest.raises(LayerError, match=message):
            stage(w, layers[0])
        assert len(w.missing) == 3
        assert changed_slots(layers, before) == [set()] * 6
        stage_all(w, layers)
        w.commit(0)


def test_each_layer_once(layers):
    """The second time is a mistake, not a merge."""
    with manager_of(layers).window(2, SLOTS) as w:
        w.stage(layers[0], *rows(6))
        with pytest.raises(LayerError, match="in this window already"):
            w.stage(layers[0], *rows(6))
        w.abort()


def test_rows_modified_after_staging_are_refused(layers, stage_all):
    """By reference is checked, not assumed."""
    manager, before = manager_of(layers), copies(layers)
    with manager.window(2, SLOTS) as w:
        staged = stage_all(w, layers)
        staged[1][0].zero_()
        with pytest.raises(WindowStateError, match=r"'layer\.1' was modified in place"):
            w.commit(2)
        w.abort()
    assert changed_slots(layers, before) == [{0, 10}] * 6


def test_a_staged_view_of_the_cache_is_named_as_one():
    """The user modified nothing: the window's own write of the settled row did."""
    ref = LayerRef("l", *torch.zeros(2, 8, 4, 1, 8).unbind())
    other = LayerRef("m", *torch.zeros(2, 8, 4, 1, 8).unbind())
    manager = manager_of([ref, other])
    with manager.window(2, [1, 2, 3]) as window:
        window.stage(other, ref.key_cache[0, :3], ref.value_cache[0, :3])
        window.stage(ref, *torch.ones(2, 3, 1, 8))
        problem = r"staged for 'm' lies in a cache that the window writes, that of 'l'.*clone"
        with pytest.raises(WindowStateError, match=problem):
            window.commit(2)
        window.abort()


def test_a_staged_view_of_a_state_is_refused_at_once():
    """Its commit writes the settled state first."""
    ref = LayerRef.recurrent("s", torch.zeros(4, 3))
    with manager_of([ref]).window(1, [1]) as window:
        with pytest.raises(WindowStateError, match=r"stage: .*lies in a cache.*'s'"):
            window.stage(ref, ref.states[0][1:3])
        window.stage(ref, ref.states[0][1:3].clone())
        window.commit(1)


@pytest.mark.parametrize(
    ("staging", "mode"), [("copy", nullcontext), ("auto", torch.inference_mode)]
)
def test_copies_survive_a_reused_buffer(layers, staging, mode):
    """Rows are copied if asked to, and if tensors cannot tell whether they changed."""
    manager = manager_of(layers, staging=staging)
    with mode():
        key, value = rows(6)
        wanted = key.clone()
        with manager.window(2, SLOTS) as w:
            for ref in layers:
                w.stage(ref, key, value)
            key.zero_()
            w.commit(2)
    assert torch.equal(layers[0].key_cache.flatten(0, 1)[SLOTS], wanted)


def test_written_by_the_caller_needs_no_staging(layers):
    """Undo around foreign writes: save, let them write, take the rejected rows back."""
    manager, before = manager_of(layers, "undo"), copies(layers)
    with manager.window([2, 1], torch.tensor([3, 4, 9]), settled=0, written_by="caller") as w:
        assert w.state is WindowState.STAGED
        for ref in layers:
            ref.key_cache.flatten(0, 1)[[3, 4, 9]] = 7.0
        w.commit([1, 0])
    assert changed_slots(layers, before) == [{3}, set()] * 3
    assert manager.snapshot()["kvtxn_rows_rejected_total"] == 2


def test_latent_layers_take_one_tensor_or_its_two_halves():
    """MLA code has the compressed part and the rotary part apart."""
    cache = torch.randn(4, 4, 12)
    ref = LayerRef.latent("mla", cache)
    manager = manager_of([ref])
    latent = torch.randn(3, 12)
    for parts in ((latent,), (latent[:, :8], latent[:, 8:])):
        cache.zero_()
        with manager.window(2, torch.tensor([4, 5, 6])) as w:
            w.stage(ref, *parts)
            w.commit(1)
        assert torch.equal(cache.flatten(0, 1)[4:7], torch.cat([latent[:2], torch.zeros(1, 12)]))


def test_empty_window(layers):
    """A step without requests is a window like any other."""
    manager, before = manager_of(layers), copies(layers)
    with manager.window([], torch.empty(0, dtype=torch.int64), settled=[]) as w:
        for ref in layers:
            w.stage(ref, *rows(0))
        w.commit([])
    assert w.state is WindowState.COMMITTED
    assert changed_slots(layers, before) == [set()] * 6


def test_repr_says_where_it_stands(layers):
    """For the debugger's sake."""
    w = manager_of(layers).window(2, SLOTS)
    assert repr(w) == "<Window 0 OPEN, 3 layers missing>"
    w.abort()
    assert repr(w) == "<Window 0 ABORTED, 3 layers missing>"
