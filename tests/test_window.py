"""A window's life, as a caller sees it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from small_caches import changed_slots, copies, make_layers, rows

from kvtxn import (
    AcceptanceError,
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
def test_a_failing_abort_does_not_hide_that_the_body_ended_unresolved(layers, stage_all, policy):
    """The caller's mistake is told; what the abort raised is its cause and a note."""
    manager = manager_of(layers, policy, on_error="raise")

    def fails(ended):
        raise ZeroDivisionError("in a hook")

    manager.on_abort(fails)
    with (
        pytest.raises(UnresolvedWindowError, match="STAGED") as caught,
        manager.window(2, SLOTS) as w,
    ):
        stage_all(w, layers)
    assert w.state is WindowState.ABORTED
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "in a hook" in "".join(caught.value.__notes__)
    assert (caught.value.expected, caught.value.got) == (
        "commit(accepted) or abort() in the block",
        "neither",
    )


MISTAKES = {
    "a layer missing": lambda w, layers: w.commit(1),
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
        with pytest.raises(WindowStateError, match=r"'layer\.0' was modified in place") as caught:
            w.commit([1, 0])
        assert (caught.value.state, caught.value.expected is None) == ("STAGED", False)
        w.abort()


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


def test_copies_survive_a_reused_buffer(layers):
    """Rows are copied if tensors cannot tell whether they changed."""
    manager = manager_of(layers)
    with torch.inference_mode():
        key, value = rows(6)
        wanted = key.clone()
        with manager.window(2, SLOTS) as w:
            for ref in layers:
                w.stage(ref, key, value)
            key.zero_()
            w.commit(2)
    assert torch.equal(layers[0].key_cache.flatten(0, 1)[SLOTS], wanted)


def test_repr_says_where_it_stands(layers):
    """For the debugger's sake."""
    w = manager_of(layers).window(2, SLOTS)
    assert repr(w) == "<Window 0 OPEN, 3 layers missing>"
    w.abort()
    assert repr(w) == "<Window 0 ABORTED, 3 layers missing>"


@pytest.mark.parametrize("how", ["unresolved", "commit", "stage"])
def test_an_error_keeps_no_tensor_of_the_failed_step(how, monkeypatch):
    """The caller's tensors are gone with the error: a retry may need their memory at once."""
    (ref,) = one = make_layers(1)
    manager, seen = manager_of(one, "undo", on_error="raise"), []

    def broken(*_: object) -> None:
        raise RuntimeError("the executor failed")

    def step() -> None:
        own = torch.zeros(1)
        seen.append(weakref.ref(own))
        with manager.window(1, [0, 1]) as window:
            if how != "unresolved":
                monkeypatch.setattr(manager.executor, how, broken)
                window.stage(ref, *rows(2))
                window.commit(1)

    gc.collect()
    gc.disable()
    try:
        with pytest.raises((UnresolvedWindowError, RuntimeError)):
            step()
        assert seen[0]() is None
    finally:
        gc.enable()
