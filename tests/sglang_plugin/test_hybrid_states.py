"""Recurrent states of hybrids, beside a toy of SGLang: what steps continue, keep and copy."""

from __future__ import annotations

import pytest
import torch
from kvtxn.integrations.sglang_plugin.seam.pools import STATES
from toy_sglang import counters_of_clean_steps
from toy_states import GDNAttnBackend, HybridLinearAttnBackend, Mamba2AttnBackend, ToyHybrid

STRATEGIES = [("no_buffer", False), ("extra_buffer", False), ("extra_buffer", True)]
DRAFTS = [(0, False), (3, False), (5, True)]


def serve_turns(toy, turns=2):
    """Serve requests, and then requests that go on with what was said."""
    toy.serve(8)
    for _ in range(turns):
        said = [req.tokens for req in toy.done[-8:]]
        for number, tokens in enumerate(said):
            if len(tokens) < 60:
                toy.offer([*tokens, *range(1, 4 + number)], 6 + number)
        toy.serve(0)


@pytest.mark.parametrize(("strategy", "overlap"), STRATEGIES)
@pytest.mark.parametrize(("drafts", "trees"), DRAFTS)
@pytest.mark.parametrize("linear", [GDNAttnBackend, Mamba2AttnBackend])
def test_clean_steps_give_no_alarm(hooks, strategy, overlap, drafts, trees, linear):
    """Hits, chunks, retraction, aborts, snapshots, commits, slots that change hands, flushes."""
    toy = ToyHybrid(
        hooks.around(), strategy=strategy, overlap=overlap, drafts=drafts, trees=trees,
        linear=linear, seed=3,
    )  # fmt: skip
    toy.retracts = 0.1
    for _ in range(2):
        serve_turns(toy)
        assert toy.flush()
    assert toy.backend.wrong == 0
    counted = counters_of_clean_steps(hooks)
    assert counted["kvtxn_audit_states_checked_total"] > 150
    assert min(toy.events[event] for event in ("states hit", "states kept", "retracted")) > 2
    assert bool(toy.events["more"]) == overlap


class AdaptiveHybrid(ToyHybrid):
    """Its number of drafts changes, and each number has an attention backend of its own."""

    def __init__(self, *args, **more) -> None:
        super().__init__(*args, drafts=3, **more)
        self.server_args.speculative_adaptive = True
        self.backends = {
            1: HybridLinearAttnBackend(self, self.backend.linear_attn_backend),
            3: self.backend,
        }

    def decode(self):
        self.drafts, runner = self.random.choice([*self.backends]), self.tp_worker.model_runner
        self.backend = runner.attn_backend = runner.states = self.backends[self.drafts]
        return super().decode()


def test_drafts_that_adapt_give_no_alarm(hooks, caplog):
    """Their states are left out: commits of a backend that is taken up later are not heard."""
    toy = AdaptiveHybrid(hooks.around(), overlap=False, seed=3)
    serve_turns(toy)
    assert [backend.wrong for backend in toy.backends.values()] == [0, 0]
    report = hooks.report()
    assert report["violations"] == []
    assert report["counters"]["kvtxn_audit_active"] == 1
    assert report["counters"]["kvtxn_audit_unwatched_groups"] == 1
    assert "where the number of drafts adapts" in caplog.text


# -- faults ----------------------------------------------------------------------------------


def lost_clear(toy, batch):
    """A request begins with what another one has left in its slot."""
    forward = batch.forward_batch
    if forward.mamba_clear_indices is None:
        return None
    slot = int(forward.mamba_clear_indices[0])
    forward.mamba_clear_indices = None
    return next(req.rid for req in batch.reqs if toy.held[req.rid].slot == slot)


def lost_copy(toy, batch):
    """A hit's state is not copied."""
    forward = batch.forward_batch
    if forward.mamba_cow_dst_indices is None:
        return None
    slot = int(forward.mamba_cow_dst_indices[0])
    forward.mamba_cow_src_indices = forward.mamba_cow_dst_indices = None
    return next(req.rid for req in batch.reqs if toy.held[req.rid].slot == slot)


def another_copy(toy, batch):
    """A hit gets another prefix's state."""
    forward = batch.forward_batch
    if forward.mamba_cow_src_indices is None:
        return None
    right, slot = int(forward.mamba_cow_src_indices[0]), int(forward.mamba_cow_dst_indices[0])
    forward.mamba_cow_src_indices[0] = next(s for s in toy.kept.values() if s != right)
    return next(req.rid for req in batch.reqs if toy.held[req.rid].slot == slot)


def swapped_slots(toy, batch):
    """Two requests continue each other's state."""
    if batch.forward_batch.forward_mode.name == "EXTEND" or len(batch.reqs) < 2:
        return None
    lines = batch.forward_batch.req_pool_indices[:2]
    mapping = toy.req_to_token_pool.req_index_to_mamba_index_mapping
    mapping[lines] = mapping[lines].flip(0)
    return batch.reqs[0].rid


def lost_state(toy, batch):
    """The tree takes a slot in which its state was never kept; a later hit reads it."""
    mask = batch.forward_batch.mamba_track_mask
    if mask is None or not mask.any():
        return None
    mask.zero_()
    return "later"


def steps_by(change):
    """Change the row behind which a commit takes a request's state."""

    def plant(toy, batch):
        if batch.accepted is None or len(batch.reqs) < 2:
            return None
        goes_on = [len(r.output_ids) + 2 * toy.drafts + 4 < r.limit for r in batch.reqs]
        fits = (1 < kept <= toy.drafts for kept in batch.accepted)
        chosen = [a and b for a, b in zip(goes_on, fits, strict=True)]
        if not any(chosen):
            return None
        number = chosen.index(True)
        last = batch.paths[number][-1]
        batch.wrong_steps = {number: change(last)}
        return batch.reqs[number].rid

    return plant


class Commits(ToyHybrid):
    """Commits what a fault says."""

    def commit(self, batch):
        wrong = getattr(batch, "wrong_steps", None)
        if wrong is None:
            super().commit(batch)
            return
        number, step = next(iter(wrong.items()))
        if step is None:  # no commit at all
            batch.due = [None] * len(batch.reqs)
            return
        right, batch.paths[number] = batch.paths[number], [*batch.paths[number][:-1], step]
        super().commit(batch)
        batch.paths[number] = right


PLANTS = {
    "lost_clear": (lost_clear, 0, False), "lost_copy": (lost_copy, 0, False),
    "another_copy": (another_copy, 0, False), "swapped_slots": (swapped_slots, 0, False),
    "lost_state": (lost_state, 0, False),
    "lost_copy, drafts": (lost_copy, 3, False), "swapped_slots, drafts": (swapped_slots, 3, False),
    "lost_commit": (steps_by(lambda last: None), 3, False),
    "lost_commit, trees": (steps_by(lambda last: None), 5, True),
    "one_less": (steps_by(lambda last: last - 1), 3, False),
    "one_more": (steps_by(lambda last: last + 1), 3, False),
    "root, trees": (steps_by(lambda last: 0), 5, True),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANTS)
@pytest.mark.parametrize(("strategy", "overlap"), STRATEGIES)
def test_a_planted_fault_is_found(hooks, case, strategy, overlap):
    """By the request that continues the state, in the group of states alone."""
    plant, drafts, trees = PLANTS[case]
    if plant is lost_state and strategy == "no_buffer":
        pytest.skip("no forward keeps states for the tree")
    toy = Commits(
        hooks.around(), strategy=strategy, overlap=overlap, drafts=drafts, trees=trees, seed=4
    )
    toy.retracts = toy.aborts = 0

    def fits(batch):
        late = toy.events["steps"] > 3
        assert not late or hooks.report()["violations"] == []
        return late

    planted = toy.plants(plant, fits)
    serve_turns(toy, 3)
    (request,) = planted
    found = hooks.report()["violations"]
    assert toy.backend.wrong
    assert {(each["kind"], each["group"]) for each in found} == {("state", STATES)}
    assert request in {"later", *(each["request"] for each in found)}


def test_a_kernel_that_ignores_the_slot_needs_no_clear(hooks):
    """A state that is not read is nobody's fault."""
    toy = ToyHybrid(hooks.around(), linear=Mamba2AttnBackend, seed=4)
    toy.retracts = toy.aborts = 0
    cleared = []

    def fault(toy, batch):
        if lost_clear(toy, batch) is not None:
            cleared.append(batch)

    toy.fault = fault
    serve_turns(toy)
    assert cleared
    assert toy.backend.wrong == 0
    assert hooks.report()["violations"] == []


def test_a_copy_for_the_tree_that_is_wrong_is_found(hooks):
    """A prompt's state is copied for the tree: here from another request's slot."""
    toy = ToyHybrid(hooks.around(), strategy="no_buffer", overlap=False, seed=4)
    toy.retracts = toy.aborts = 0
    toy.offer([*range(21, 33)], 9)
    toy.step()
    pool, other = toy.req_to_token_pool.mamba_pool, toy.held["r1"].slot
    copy = pool.copy_from
    pool.copy_from = lambda source, target: copy(torch.full_like(source, other), target)
    toy.offer([*range(1, 13)], 9)
    toy.step()
    pool.copy_from = copy
    toy.serve(0)
    assert hooks.report()["violations"] == []
    reader = toy.offer([*range(1, 13), 40], 3)
    toy.serve(0)
    found = hooks.report()["violations"]
    assert toy.backend.wrong
    assert {(each["kind"], each["request"]) for each in found} == {("state", reader.rid)}
