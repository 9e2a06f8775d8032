"""Bytes that a GPU's watch compares: a NaN that comes out, states, and what is poisoned."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest
import torch
from kernels_here import importing_kernels

pytest.importorskip("vllm")

from test_audit_watch import Room, arrival, come
from test_failed_forwards import TOKENS, device_watch
from watched_rows import GROUP, rows, unknown

with importing_kernels():
    from kvtxn.integrations.serving.ledger.watch import Watch
    from kvtxn.integrations.vllm_plugin.audit import watch_opening
    from kvtxn.integrations.vllm_plugin.seam import audited_states

from kvtxn.integrations.vllm_plugin.policy.settings import settings

from kvtxn import LayerRef
from kvtxn.audit import Scrub, StateGroup


def watched(*, poison=False):
    """A watch over one layer of 20 blocks of four rows, and its cache."""
    w = device_watch()
    cache = torch.randn(20, 2, 4, 1, 2)
    refs = [LayerRef("layer", cache[:, 0], cache[:, 1], group="group.0")]
    w.scrub = Scrub(w.ledger, refs, every=1, poison=poison)
    w.change(come(arrival("a", TOKENS, [1, 2])))
    return w, cache


def found(w):
    return [(v["kind"], v["request"], v["position"], v["slot"], v["found"]) for v in w.report()]


def rejects(w):
    """A step whose two drafts, in slots 9 and 10, are rejected; then the one without drafts."""
    w._forward(rows("a", 0, TOKENS, [4, 5, 6, 7, 8], [1, 2]), unknown, None)
    w.sampled(torch.tensor([1]), torch.tensor([[6, -1, -1]]))
    w._forward(
        attrs.evolve(rows("a", 5, [6, 7, 8], [9, 10, 11], [1, 2]), drafts=torch.tensor([2])),
        unknown,
        None,
    )
    w.sampled(torch.tensor([1]), torch.tensor([[9, -1, -1]]))
    w._forward(rows("a", 6, [9], [10], [1, 2]), unknown, None)


@pytest.mark.parametrize(("poison", "slot"), [(False, None), (True, 11)])
def test_a_nan_that_comes_out_is_found(poison, slot):
    """Without poison it may be the model's own, and nobody is blamed."""
    w, cache = watched(poison=poison)
    rejects(w)
    dead = cache[2, 0, 3].isnan()
    assert bool(dead.all()) == bool(dead.any()) == poison
    w.came_out(torch.tensor([[0.5, torch.nan]], dtype=torch.bfloat16), torch.tensor([0]))
    assert found(w) == [("changed", "a", 6, slot, "nan")]


def test_outputs_without_a_nan_are_nobodys_fault():
    w, _ = watched(poison=True)
    w.came_out(torch.tensor([[torch.nan]]), torch.tensor([0]))  # no step is under way
    rejects(w)
    w.came_out(torch.zeros(1, 2), torch.tensor([0]))
    assert found(w) == []


PAST, STATE = torch.zeros(6, 5, 8), torch.zeros(6, 2, 4, 4)


def runner_with(asked, *, mode="none", drafts=2, late=(), kind="gated delta net"):
    """A runner, as far as the opening of a scrub reads it."""
    module = SimpleNamespace(kv_cache=(PAST, STATE), kind=kind)
    group = SimpleNamespace(layer_names=["mixer"])
    cache = SimpleNamespace(mamba_cache_mode=mode)
    speculation = None if not drafts else SimpleNamespace(num_speculative_tokens=drafts)
    asked = {"kvtxn": {"audit": "bytes", **asked}}
    return SimpleNamespace(
        kvtxn_rank=0,
        kvtxn_settings=settings(asked, 1, "cuda"),
        speculative_config=speculation,
        vllm_config=SimpleNamespace(cache_config=cache),
        compilation_config=SimpleNamespace(static_forward_context={"mixer": module}),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group, group]),
    )


def device_watch_of_both():
    """A watch over rows and states."""
    return Watch(
        {"group.0": GROUP}, Room(2, 32, caches_prefixes=True), 0, "log",
        device=torch.device("cpu"), drafts=2, states={"group.1": StateGroup("group.1", 6)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "more", "poisoned"),
    [
        ({}, {}, set()),
        ({"poison": True}, {}, {"group.0", "group.1"}),
        ({"poison": True}, {"drafts": 0}, {"group.0"}),
        ({"poison": True}, {"mode": "align"}, {"group.0"}),
        ({"poison": True}, {"kind": None}, {"group.0"}),
        ({"poison": True}, {"late": True}, set()),
    ],
)
def test_what_is_poisoned(monkeypatch, asked, more, poisoned):
    """Rows, and states of steps with drafts whose pasts are known, unless others keep them."""
    late = more.pop("late", False)
    runner = runner_with(asked, **more)
    monkeypatch.setattr(audited_states, "kind_of", lambda module: module.kind)
    rows_ref = LayerRef("rows", torch.zeros(20, 4, 1, 2), torch.zeros(20, 4, 1, 2), group="group.0")
    state = LayerRef.recurrent("mixer", PAST, STATE, group="group.1")
    w = device_watch_of_both()
    w.drafts_late = late
    scrub = watch_opening._new_scrub(runner, w, [rows_ref, state])
    assert scrub.books.poisoned == poisoned
    (layer,) = [
        layer for layers in scrub.books.layers.values() for layer in layers if layer.ref.states
    ]
    assert [part for part, _ in layer.planes] == ([1] if "group.1" in poisoned else [0, 1])
    if "group.1" in poisoned:
        assert (layer.window.state, layer.window.length) == (0, 3)
