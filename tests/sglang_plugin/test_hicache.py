"""Rows that HiCache copies to the host and back are the same rows, and wrong copies are found."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from kvtxn.integrations.serving.audit_settings import AuditSettings
from kvtxn.integrations.sglang_plugin import starting, supported
from kvtxn.integrations.sglang_plugin.seam import engine_facts, retraction
from kvtxn.integrations.sglang_plugin.seam.engine_facts import EngineFacts
from toy_contained import sglang_modules
from toy_hicache import HOST, HiCacheToy
from toy_pools import SLOTS
from toy_sglang import counters_of_clean_steps


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", [1, 2])
def test_clean_copies_give_no_alarm(hooks, drafts, overlap, seed):
    toy = HiCacheToy(hooks.around(), drafts=drafts, overlap=overlap, seed=seed)
    toy.retracts = 0.1
    for _ in range(3):
        toy.serve(12)
        assert toy.flush()
    assert counters_of_clean_steps(hooks)["kvtxn_audit_rows_unverified_total"] == 0
    assert toy.events["loaded"] > 1
    assert toy.tree_cache.engine.copies["write"] > 10


def two_texts(hooks):
    """An engine that has served two texts, whose rows the host alone has."""
    toy = HiCacheToy(hooks.around(), seed=2)
    toy.retracts = toy.aborts = 0
    texts = [*range(1, 17)], [*range(21, 37)]
    writers = [toy.offer(text, 3) for text in texts]
    toy.serve(0)
    toy.tree_cache.evict()
    assert toy.tree_cache.slots == {}
    return toy, texts, writers


def test_a_swapped_page_of_the_host_is_found(hooks):
    """With the reader, its position, its slot, and whoever wrote the row."""
    toy, (one, other), writers = two_texts(hooks)
    hosts = toy.tree_cache.hosts
    for end in range(5, 9):
        here, there = (None, *one[:end]), (None, *other[:end])
        hosts[here], hosts[there] = hosts[there], hosts[here]
    reader = toy.offer(one, 3)
    toy.serve(0)
    found = hooks.report()["violations"]
    assert {(v["request"], v["written_request"], v["kind"]) for v in found} == {
        (reader.rid, writers[1].rid, "foreign")
    }
    line = {(v["position"], v["slot"]) for v in found}
    assert line == {(p, toy.tree_cache.slots[None, *one[: p + 1]]) for p in range(4, 8)}
    assert {v["written_position"] for v in found} == {4, 5, 6, 7}


def test_a_page_that_is_loaded_to_a_wrong_slot_is_found(hooks):
    """The right slot has what was there before."""
    toy, (one, _), _ = two_texts(hooks)
    toy.misplaced = lambda slots: [*slots[:3], slots[2] + 500, *slots[4:]]
    reader = toy.offer(one, 3)
    toy.serve(0)
    (found,) = hooks.report()["violations"]
    assert (found["request"], found["position"]) == (reader.rid, 3)
    assert found["slot"] == toy.tree_cache.slots[None, *one[:4]]


def test_rows_of_a_storage_are_taken_for_right_and_counted(hooks):
    """Nobody knows what they are; rows of this engine are compared as before."""
    toy, (one, _), _ = two_texts(hooks)
    toy.tree_cache.cache_controller.enable_storage = True
    stored = [*range(1, 9), 44, 45, 46, 47, 48]
    toy.tree_cache.store(None, stored)
    toy.offer([*stored, 9], 3)
    toy.serve(0)
    report = hooks.report()
    assert report["violations"] == []
    assert report["counters"]["kvtxn_audit_rows_unverified_total"] == 5
    toy.tree_cache.evict()
    toy.offer([*stored, 9], 3)  # the slots of the host are those that a storage has filled
    toy.serve(0)
    report = hooks.report()
    assert report["violations"] == []
    toy.tree_cache.hosts[None, *one[:3]] = toy.tree_cache.hosts[None, *one[:4]]
    toy.tree_cache.evict()
    toy.offer(one, 3)
    toy.serve(0)
    assert [v["position"] for v in hooks.report()["violations"]] == [2]


def test_an_error_while_a_copy_is_noted_ends_the_audit_alone(hooks, caplog):
    toy, (one, _), _ = two_texts(hooks)
    toy.tree_cache.transfer = lambda *slots: [
        SimpleNamespace(host_pool=toy.tree_cache.host_pool, is_draft=False)
    ]
    req = toy.offer(one, 3)
    toy.serve(0)
    assert req in toy.done
    assert hooks.report()["counters"]["kvtxn_audit_active"] == 0
    assert "kvtxn.audit_inactive" in caplog.text


def test_the_host_has_slots_behind_the_devices(hooks):
    toy = HiCacheToy(hooks.around(), seed=1)
    toy.serve(1)
    (group,) = hooks._watching.watch.groups.values()
    assert group.num_blocks == SLOTS + 1 + HOST


def test_bytes_of_copies_are_not_compared(on_a_cpu, caplog):
    hooks = starting.Hooks(AuditSettings(audit="bytes"))
    toy = HiCacheToy(hooks.around(), seed=1)
    toy.serve(6)
    assert "rows of HiCache are copied, and their checksums are not" in caplog.text
    assert hooks.report()["violations"] == []


# -- which engines are followed ---------------------------------------------------------------


def test_the_facts_of_hicache():
    toy = HiCacheToy()
    found = engine_facts.facts(toy, supported.ARGUMENTS)
    assert found.host
    assert supported.cannot_watch(EngineFacts(host=True, settings=found.settings)) is None
    why = supported.cannot_watch(EngineFacts(settings=found.settings))
    assert "HiCache copies to the host are not followed" in str(why)
    controller = toy.tree_cache.cache_controller
    entry = controller.mem_pool_host.entries[0]
    entry.host_pool.dcp_size = 2
    assert not engine_facts.facts(toy, supported.ARGUMENTS).host
    entry.host_pool.dcp_size, pool = 1, entry.device_pool
    entry.device_pool = object()
    assert not engine_facts.facts(toy, supported.ARGUMENTS).host
    entry.device_pool = pool
    assert engine_facts.facts(toy, supported.ARGUMENTS).host
    controller.l2_transfer_engine = None
    assert not engine_facts.facts(toy, supported.ARGUMENTS).host


def test_what_a_storage_brings_is_followed_for_rows_alone():
    stored = frozenset([supported.HOST, supported.STORAGE])
    hybrid = EngineFacts(
        table="HybridReqToTokenPool", states="GDNAttnBackend", host=True, settings=stored
    )
    assert "a storage" in supported.left_out(hybrid)["group.2"]
    assert "a storage" in str(supported.cannot_contain(hybrid))
    assert supported.left_out(EngineFacts(host=True, settings=stored)) == {}
    assert supported.cannot_contain(EngineFacts(settings=frozenset([supported.HOST]))) is None


def test_an_empty_tree_has_no_copies_on_the_host(monkeypatch):
    """Rows that were wrong may have been copied there."""
    for name, module in sglang_modules(lambda: None).items():
        monkeypatch.setitem(sys.modules, name, module)
    left = []
    tree = SimpleNamespace(
        cache_controller=object(), tree_components=["full", "mamba"], evict=left.append,
        supports_prefix_sharing=lambda: True, supports_swa=lambda: True,
        supports_mamba=lambda: True, evictable_size=lambda: 5, full_evictable_size=lambda: 5,
        swa_evictable_size=lambda: 3, mamba_evictable_size=lambda: 2,
        evict_host=lambda number, kind: left.append((number > 1 << 30, kind)),
    )  # fmt: skip
    retraction.empty_tree(SimpleNamespace(tree_cache=tree))
    counts, *hosts = left
    assert vars(counts) == {"num_tokens": 5, "swa_num_tokens": 3, "mamba_num": 2}
    assert hosts == [(True, "full"), (True, "mamba")]


def test_a_pool_is_that_of_its_group():
    from kvtxn.integrations.sglang_plugin.seam.pools import is_of

    inside = torch.zeros(1)
    assert is_of(inside, inside)
    assert is_of(SimpleNamespace(full_kv_pool=inside), inside)
    assert not is_of(SimpleNamespace(), inside)
