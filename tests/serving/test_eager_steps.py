"""EagerSteps as windows, without vLLM: what every failure ends in."""

from __future__ import annotations

import pytest
import torch
from kvtxn.integrations.serving.eager_steps import EagerSteps, Plan

from kvtxn import LayerRef, TransactionManager, TxnConfig

SLOTS = {"default": torch.tensor([3, 4, 5, 8, 9, 10, 11])}
DRAFTS, ENDS = [2, 0, 3], [3, 4, 7]  # rows 1, 2 and 4, 5, 6 are drafts; row 3 decodes plainly
ROWS = [1, 2, 4, 5, 6]


def make(policy="undo", **settings):
    caches = [torch.randn(4, 4, 2, 8) for _ in range(4)]
    layers = [LayerRef(f"layer.{i}", *caches[2 * i : 2 * i + 2]) for i in range(2)]
    manager = TransactionManager(layers, TxnConfig(policy=policy, max_rows=8, **settings))
    return EagerSteps(manager, vocab_size=50), caches


def ids(*accepted):
    """Sampled ids: accepted drafts, one more token, then placeholders."""
    return torch.tensor([[7] * (n + 1) + [-1] * (4 - n) for n in accepted])


def overwrite(caches, rows=range(7)):
    """Write every row, as stock does in the forward."""
    for cache in caches:
        cache.view(16, 2, 8)[SLOTS["default"][list(rows)]] = 1.0


def started(steps):
    steps.plan(lambda: (DRAFTS, ENDS))
    steps.begin(lambda: SLOTS)
    return steps


def test_plan_takes_the_last_rows_of_speculating_requests():
    plan = Plan.build(DRAFTS, ENDS, torch.device("cpu"))
    assert plan is not None
    assert plan.rows.tolist() == ROWS
    assert plan.requests.tolist() == [0, 2]
    assert plan.draft_len == (2, 3)
    assert Plan.build([0, 0], [1, 2], torch.device("cpu")) is None


def test_undo_restores_exactly_the_rejected_rows():
    steps, caches = make()
    before = [cache.clone() for cache in caches]
    started(steps)
    overwrite(caches)
    steps.commit(lambda: ids(1, 0, 2))
    kept = [0, 1, 3, 4, 5]
    for cache, old in zip(caches, before, strict=True):
        old.view(16, 2, 8)[SLOTS["default"][kept]] = 1.0
        assert torch.equal(cache, old)
    counts = steps.manager.snapshot()
    assert counts["kvtxn_rows_committed_total"] == 3
    assert counts["kvtxn_rows_rejected_total"] == 2
    assert steps.window is None


def test_deferred_masks_a_copy_of_the_slots_and_writes_what_is_kept():
    steps, caches = make("deferred", staging="reference")
    before = [cache.clone() for cache in caches]
    started(steps)
    shared = SLOTS["default"].clone()
    assert steps.without_drafts("default", shared).tolist() == [3, -1, -1, 8, -1, -1, -1]
    assert torch.equal(shared, SLOTS["default"])
    batch = torch.ones(7, 2, 8)
    for ref in steps.manager.layers.values():
        steps.stage(ref, batch, batch)
    assert all(torch.equal(now, old) for now, old in zip(caches, before, strict=True))
    steps.commit(lambda: ids(2, 0, 0))
    for cache, old in zip(caches, before, strict=True):
        old.view(16, 2, 8)[SLOTS["default"][[1, 2]]] = 1.0
        assert torch.equal(cache, old)


@pytest.mark.parametrize("ids_after", [2, 60])
def test_ids_outside_the_vocabulary_are_no_tokens(ids_after):
    steps, _ = make()
    started(steps)
    sampled = torch.tensor([[7, ids_after, -1], [7, -1, -1], [7, 7, 7]])
    steps.commit(lambda: sampled)
    expected = 3 if ids_after < 50 else 2
    assert steps.manager.snapshot()["kvtxn_rows_committed_total"] == expected


def test_a_step_without_drafts_has_no_window():
    steps, _ = make()
    steps.plan(lambda: ([0, 0], [1, 2]))
    steps.begin(lambda: pytest.fail("asked for slots"))
    steps.commit(lambda: pytest.fail("asked for ids"))
    assert steps.manager.snapshot()["kvtxn_windows_total"] == 0


def test_a_forward_that_was_not_planned_has_no_window():
    """Dummy, warm-up and profiling runs prepare no inputs."""
    steps, _ = make()
    steps.begin(lambda: SLOTS)
    assert steps.window is None


def test_what_cannot_have_a_window_is_bypassed_with_the_reason():
    steps, _ = make()
    steps.plan(lambda: (DRAFTS, ENDS))
    steps.begin(lambda: "microbatches")
    steps.commit(lambda: ids(0, 0, 0))
    steps.plan(lambda: ([9], [9]))
    steps.begin(lambda: {"default": torch.arange(9)})
    counts = steps.manager.snapshot()
    assert counts["kvtxn_bypassed_windows_total_microbatches"] == 1
    assert counts["kvtxn_bypassed_windows_total_max_rows"] == 1
    assert counts["kvtxn_fallbacks_total"] == counts["kvtxn_windows_total"] == 0


def failing():
    raise RuntimeError("injected")


@pytest.mark.parametrize("policy", ["undo", "deferred"])
@pytest.mark.parametrize("where", ["plan", "begin", "commit"])
def test_failures_fall_back_and_the_next_step_starts_afresh(policy, where):
    steps, caches = make(policy, staging="reference")
    steps.plan(failing if where == "plan" else lambda: (DRAFTS, ENDS))
    steps.begin(failing if where == "begin" else lambda: SLOTS)
    if steps.deferring:
        ref = next(iter(steps.manager.layers.values()))
        steps.stage(ref, torch.ones(7, 2, 8), torch.ones(7, 2, 8))
    elif policy == "undo":
        overwrite(caches)
    steps.commit(failing)
    counts = steps.manager.snapshot()
    assert counts["kvtxn_fallbacks_total"] == 1
    assert counts[f"kvtxn_fallbacks_total_{'commit' if where == 'commit' else 'begin'}"] == 1
    if where == "commit":  # what was staged or written stays, as in stock
        rows = caches[0].view(16, 2, 8)[SLOTS["default"][ROWS]]
        assert bool((rows == 1.0).all())
    started(steps)
    assert steps.window is not None


def test_a_failing_layer_writes_the_layers_before_it():
    steps, caches = make("deferred", staging="reference")
    started(steps)
    ref = next(iter(steps.manager.layers.values()))
    steps.stage(ref, torch.ones(7, 2, 8), torch.ones(7, 2, 8))
    steps.fail("stage", RuntimeError("injected"))
    assert not steps.deferring
    assert bool((caches[0].view(16, 2, 8)[SLOTS["default"][ROWS]] == 1.0).all())
    steps.commit(lambda: ids(1, 0, 0))
    counts = steps.manager.snapshot()
    assert counts["kvtxn_windows_total_fell_back"] == 1
    assert counts["kvtxn_rows_committed_total"] == 1


@pytest.mark.parametrize("where", ["plan", "begin", "commit"])
def test_on_error_raise_surfaces_and_restores(where):
    steps, caches = make(on_error="raise")
    before = [cache.clone() for cache in caches]

    def step():
        steps.plan(failing if where == "plan" else lambda: (DRAFTS, ENDS))
        steps.begin(failing if where == "begin" else lambda: SLOTS)
        overwrite(caches, ROWS)
        steps.commit(failing)

    with pytest.raises(RuntimeError, match="injected"):
        step()
    if where == "commit":
        assert all(torch.equal(now, old) for now, old in zip(caches, before, strict=True))


def test_an_abandoned_step_is_aborted():
    steps, caches = make()
    before = [cache.clone() for cache in caches]
    started(steps)
    overwrite(caches, ROWS)
    steps.abandon()
    assert all(torch.equal(now, old) for now, old in zip(caches, before, strict=True))
    assert steps.window is None
    assert steps.manager.snapshot()["kvtxn_windows_total_aborted"] == 1
