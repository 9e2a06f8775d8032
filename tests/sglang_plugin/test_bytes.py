"""Audit "bytes": checksums of rows, beside a toy of SGLang's scheduler."""

from __future__ import annotations

import pytest
import torch
from kvtxn.integrations.serving.audit_settings import AuditSettings
from kvtxn.integrations.sglang_plugin import starting
from kvtxn.integrations.sglang_plugin.seam.pools import layer_refs, slot_spaces
from toy_pools import SLOTS
from toy_sglang import ToySglang

from kvtxn import LayerError


@pytest.fixture
def hooks(on_a_cpu):
    """The hooks of a process whose user asks for bytes, each slot in each step."""
    return starting.Hooks(AuditSettings(audit="bytes", audit_every=1))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_clean_rows_give_no_alarm(hooks, drafts, overlap):
    """Each has the bytes that its step has left."""
    toy = ToySglang(hooks.around(), drafts=drafts, overlap=overlap, seed=1)
    for _ in range(2):
        toy.serve(12)
        assert toy.flush()
    report = hooks.report()
    assert report["violations"] == []
    assert report["counters"]["kvtxn_audit_active"] == 1
    assert report["counters"]["kvtxn_audit_bytes_compared_total"] > 1000


@pytest.mark.parametrize("part", ["k_buffer", "v_buffer"])
def test_a_row_that_somebody_else_wrote_is_found(hooks, part):
    """By its layer, its slot and whoever reads it."""
    toy = ToySglang(hooks.around(), seed=4)
    toy.retracts = toy.aborts = 0
    planted = []

    def fault(toy, batch):
        if batch.forward_batch.forward_mode.name == "DECODE" and not planted:
            slot = int(toy.row(batch.reqs[0])[3])
            getattr(toy.token_to_kv_pool_allocator.pool, part)[1][slot, 0, 2] += 1
            planted.append((batch.reqs[0].rid, 3, slot, "layers.1"))

    toy.fault = fault
    toy.serve(6)
    found = hooks.report()["violations"]
    assert {each["kind"] for each in found} == {"changed"}
    places = [(e["request"], e["position"], e["slot"], e["layer"]) for e in found]
    assert planted[0] in places
    assert {place[2:] for place in places} == {planted[0][2:]}


def test_rows_of_8_bits_are_left_to_the_digests(hooks, caplog):
    """And the log says so."""
    toy = ToySglang(hooks.around(), seed=1)
    pool = toy.token_to_kv_pool_allocator.pool
    pool.k_buffer = [rows.to(torch.uint8) for rows in pool.k_buffer]
    toy.serve(4)
    report = hooks.report()
    assert report["counters"]["kvtxn_audit_active"] == 1
    assert "kvtxn_audit_bytes_compared_total" not in report["counters"]
    assert "audit_without_bytes" in caplog.text
    assert "do not lie by slot" in caplog.text


def test_latent_rows_are_one_plane():
    """As the pool of MLA has them."""
    pool = type("MLATokenToKVPool", (), {})()
    pool.kv_buffer, pool.start_layer = [torch.zeros(SLOTS + 1, 1, 6) for _ in range(3)], 2
    toy = ToySglang()
    toy.token_to_kv_pool_allocator.pool = pool
    refs = layer_refs(slot_spaces(toy))
    assert [ref.name for ref in refs] == ["layers.2", "layers.3", "layers.4"]
    assert {len(ref.planes) for ref in refs} == {1}
    pool.kv_buffer = [torch.zeros(SLOTS + 1, 6)]
    with pytest.raises(LayerError, match="do not lie by slot"):
        layer_refs(slot_spaces(toy))
