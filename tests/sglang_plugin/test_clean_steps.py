"""Clean steps of a toy of SGLang's scheduler give no alarm, and the toy computes what it did."""

from __future__ import annotations

from functools import partial

import pytest
from toy_sglang import ToySglang, counters_of_clean_steps, next_token
from toy_states import ToyHybrid


@pytest.mark.parametrize(("drafts", "trees"), [(0, False), (3, False), (5, True)])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_clean_steps_give_no_alarm(hooks, drafts, trees, overlap, seed):
    """Hits, chunks, retraction, aborts, samples that come later, flushes, one more forward."""
    toy = ToySglang(hooks.around(), drafts=drafts, trees=trees, overlap=overlap, seed=seed)
    toy.retracts = 0.1
    for _ in range(3):
        toy.serve(12)
        assert toy.flush()
    counted = counters_of_clean_steps(hooks)
    assert counted["kvtxn_audit_rows_checked_total"] > 3000
    assert counted["kvtxn_audit_requests_restarted_total"] == toy.events["retracted"]
    assert min(toy.events[event] for event in ("hits", "chunks", "retracted", "flushed")) > 0
    assert bool(toy.events["more"]) == overlap
    assert bool(toy.events["later"]) == (not drafts)


ENGINES = {
    "plain": ToySglang,
    "drafts": partial(ToySglang, drafts=3),
    "trees": partial(ToySglang, drafts=5, trees=True),
    "some windows": partial(ToySglang, drafts=3, kind="windows"),
    "windows": partial(ToySglang, drafts=3, kind="pure"),
    "no_buffer": partial(ToyHybrid, drafts=3, strategy="no_buffer", overlap=False),
    "extra_buffer": partial(ToyHybrid, drafts=3, strategy="extra_buffer", overlap=False),
    "extra_buffer, overlap": partial(ToyHybrid, drafts=3, strategy="extra_buffer"),
}


@pytest.mark.parametrize("kind", ENGINES)
def test_the_engine_computes_what_it_does_without_kvtxn(hooks, kind):
    """And each text is the model's."""
    toys = [ENGINES[kind](around, seed=5) for around in (hooks.around(), {})]
    for toy in toys:
        toy.serve(12)
        toy.serve(12)
    one, other = ([(r.tokens, r.aborted) for r in toy.done] for toy in toys)
    assert one == other
    assert len(one) == 24
    for req in toys[0].done:
        tokens = req.tokens
        for end in range(len(req.origin_input_ids), len(tokens)):
            assert tokens[end] == next_token(tokens[:end])


@pytest.mark.parametrize(("drafts", "trees"), [(0, False), (3, False), (5, True)])
def test_the_rows_of_a_hybrid_are_watched(hooks, drafts, trees, caplog):
    """Even where its states are not, and the log says so."""
    toy = ToySglang(hooks.around(), drafts=drafts, trees=trees, kind="hybrid", seed=1)
    toy.serve(12)
    report = hooks.report()
    assert report["violations"] == []
    assert report["counters"]["kvtxn_audit_rows_checked_total"] > 1000
    assert report["counters"]["kvtxn_audit_unwatched_groups"] == 1
    assert "the recurrent states of another attention are not followed yet" in caplog.text


def test_rows_of_two_adapters_are_not_the_same(hooks):
    """A tree that hands the rows of one adapter to the other is found; SGLang's has two keys."""
    toy = ToySglang(hooks.around(), seed=1)
    prompt = [*range(1, 15)]
    for name in ("a", "a", "b"):
        toy.offer(prompt, 2, lora_id=name)
        toy.serve(0)
    assert hooks.report()["violations"] == []
    toy.tree_cache.slots |= {("c", *key[1:]): slot for key, slot in toy.tree_cache.slots.items()}
    wrong = toy.offer(prompt, 2, lora_id="c")
    toy.serve(0)
    found = hooks.report()["violations"]
    assert {(each["request"], each["differs"]) for each in found} == {(wrong.rid, "extras")}


def test_vectors_in_place_of_tokens_are_nobody_elses(hooks):
    """Their tokens say nothing, so no other request may read their rows."""
    toy = ToySglang(hooks.around(), seed=1)
    toy.aborts = 0
    toy.offer([1] * 12, 4, input_embeds=[[0.5]])
    toy.serve(0)
    assert hooks.report()["violations"] == []
    assert toy.tree_cache.slots
    toy.offer([1] * 12, 4, input_embeds=[[0.25]])
    toy.serve(0)
    assert {each["kind"] for each in hooks.report()["violations"]} == {"foreign"}


def test_an_image_counts_by_the_hash_in_place_of_its_tokens(hooks):
    """The hash has more bits than a token; SGLang's are below ``2**62 + 10**6``."""
    toy = ToySglang(hooks.around(), seed=1)
    toy.aborts, image = 0, (1 << 62) - 12345
    for _ in range(2):
        toy.offer([1, 2, *[image] * 9, 3, 4], 4)
        toy.serve(0)
    report = hooks.report()
    assert toy.events["hits"]
    assert report["violations"] == []
    assert report["counters"]["kvtxn_audit_active"] == 1
    another = image ^ (1 << 20)
    toy.tree_cache.slots |= {
        tuple(another if part == image else part for part in key): slot
        for key, slot in toy.tree_cache.slots.items()
    }
    toy.offer([1, 2, *[another] * 9, 3, 4], 4)
    toy.serve(0)
    assert {each["kind"] for each in hooks.report()["violations"]} == {"foreign"}
