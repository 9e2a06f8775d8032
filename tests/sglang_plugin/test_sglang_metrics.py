"""The ledger's counters as metrics of the scheduler's process."""

from __future__ import annotations

import pytest
from kvtxn.integrations.serving import metrics_page
from kvtxn.integrations.serving.audit_settings import AuditSettings
from kvtxn.integrations.sglang_plugin import metrics, starting
from metrics_registry import own_registry
from toy_sglang import ToySglang


@pytest.fixture(autouse=True)
def value(monkeypatch):
    """A metric of a model in a registry of this test's, as the page has it; None without."""
    registry = own_registry(monkeypatch)
    yield lambda name, model, **labels: registry.get_sample_value(
        name, {"model_name": model, "engine": "0", "rank": "0", **labels}
    )
    metrics_page._metric.cache_clear()


@pytest.fixture
def toy(monkeypatch, hooks):
    """A server with metrics, which are brought up to date in each step."""
    monkeypatch.setattr(metrics, "INTERVAL", 0.0)
    toy = ToySglang(hooks.around(), seed=4)
    toy.server_args.enable_metrics, toy.server_args.served_model_name = True, "toy"
    toy.retracts = toy.aborts = 0
    return toy


def test_counters_are_shown(toy, hooks, value):
    """As they were some steps ago; they grow from then on."""
    toy.serve(4)
    first = value("kvtxn_audit_rows_checked_total", "toy")
    toy.serve(4)
    rows = value("kvtxn_audit_rows_checked_total", "toy")
    assert 0 < first < rows <= hooks.report()["counters"]["kvtxn_audit_rows_checked_total"]
    assert value("kvtxn_audit_active", "toy") == 1
    assert value("kvtxn_audit_violations_total", "toy", kind="foreign") == 0


def test_violations_and_the_end_of_the_audit_are_shown(toy, value):
    """By kind; the server goes on."""
    toy.server_args.served_model_name = "at fault"

    def fault(toy, batch):
        forward = batch.forward_batch
        if toy.events["steps"] == 9:
            forward.input_ids[0] = forward.input_ids[0] % 40 + 1
        if toy.events["steps"] == 20:
            forward.seq_lens = forward.seq_lens[:-1]

    toy.fault = fault
    toy.serve(8)
    assert value("kvtxn_audit_violations_total", "at fault", kind="foreign") >= 1
    assert value("kvtxn_audit_active", "at fault") == 0


def test_an_engine_that_is_not_watched_is_shown(value):
    """Its gauge is 0, for which an alert can wait."""
    hooks = starting.Hooks(AuditSettings(audit="ledger"))
    toy = ToySglang(hooks.around(), seed=4)
    toy.server_args.enable_metrics, toy.server_args.served_model_name = True, "unwatched"
    toy.serve(2)
    assert value("kvtxn_audit_active", "unwatched") == 0


def test_without_metrics_nothing_is_shown(hooks, value):
    """SGLang has none, unless its user asks for them."""
    toy = ToySglang(hooks.around(), seed=4)
    toy.server_args.served_model_name = "silent"
    toy.serve(4)
    assert value("kvtxn_audit_active", "silent") is None
