"""Windows beside KV connectors in a real vLLM: tokens, bytes that leave, what they stand for."""

from __future__ import annotations

import pytest
from connected_kinds import KINDS
from engine_jobs import CONNECTED, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

ENGINES = [
    pytest.param(
        kind, policy, marks=pytest.mark.engines(f"connected-{kind}"), id=f"{kind}-{policy}"
    )
    for kind, policies in CONNECTED.items()
    for policy in policies
]
WINDOWS = [each for each in ENGINES if each.values[1] != "stock"]
CONNECTORS = [each for each in WINDOWS if each.values[0] != "bench"]
STOCK = pytest.mark.engines("connected-offload")


def seen(report):
    """The oracle's numbers of a report, over all scenarios."""
    found = [each["oracle"] for each in report.values() if isinstance(each, dict)]
    return {name: sum(each.get(name, 0) for each in found) for name in found[0] | found[-1]
            if name != "told"}  # fmt: skip


@pytest.mark.parametrize(("kind", "policy"), ENGINES)
def test_windows_run_where_they_should(reports, kind, policy):
    found = reports(f"connected-{kind}")[policy]
    assert found["idle"][0]["kvtxn_active"] == (policy != "stock")
    assert found["idle"][0].get("kvtxn_audit_active", 1) == 1


@pytest.mark.engines("connected-plain")
@pytest.mark.parametrize(("kind", "policy"), WINDOWS)
def test_requests_say_what_they_say_without_a_connector(reports, kind, policy):
    """Their rows came back; those that DecodeBenchConnector fills in are no request's own."""
    ours = reports(f"connected-{kind}")[policy]
    plain = reports(f"connected-{KINDS[kind].get('plain', kind)}")["stock"]
    for scenario in KINDS[kind]["scenarios"]:
        assert ours[scenario]["tokens"] == plain[scenario]["tokens"], scenario
        assert ours[scenario]["kvtxn"][0]["kvtxn_fallbacks_total"] == 0
    assert seen(ours)["loaded_blocks"] > 0
    assert sum(ours[scenario]["cached"] for scenario in KINDS[kind]["scenarios"]) > 0


@pytest.mark.parametrize(("kind", "policy"), WINDOWS)
def test_every_byte_that_leaves_is_durable(reports, kind, policy):
    """None is of a rejected draft, nor of one that may be rejected yet; and none stays behind."""
    found = reports(f"connected-{kind}")[policy]
    counts = seen(found)
    assert counts["rejected"] > 0
    for wrong in ("stored_wrong", "stored_pending", "loaded_wrong", "residue"):
        assert counts.get(wrong, 0) == 0, [each["oracle"]["told"] for each in found.values()
                                           if isinstance(each, dict)]  # fmt: skip
    if kind in ("offload", "several"):
        assert counts["stored_bytes"] > 0


@pytest.mark.parametrize(("kind", "policy"), CONNECTORS)
def test_every_block_that_leaves_is_of_the_tokens_it_is_stored_under(reports, kind, policy):
    """Each of its rows, the last of a request's too; by kvtxn's ledger, in the same engine."""
    assert reports(f"connected-{kind}")[policy]["violations"] == []


@STOCK
def test_stock_keeps_rows_of_rejected_drafts(reports):
    """The oracle can fail: a stock engine's cache has rows that no accepted token left there."""
    assert seen(reports("connected-offload")["stock"])["residue"] > 0


@STOCK
def test_stock_stores_no_row_of_a_rejected_draft(reports):
    """Both oracles are quiet over a stock engine, too, so that they blame nobody for nothing."""
    stock = reports("connected-offload")["stock"]
    assert seen(stock)["stored_wrong"] == 0
    assert stock["violations"] == []


@pytest.mark.parametrize(
    "policy", [pytest.param(each, marks=STOCK) for each in CONNECTED["offload"]]
)
def test_requests_lost_their_blocks_while_some_were_stored(reports, policy):
    """Preempted, and all at once; those that are aborted are in the scenario's own assertion."""
    found = reports("connected-offload")[policy]
    assert found["come_back"]["stats"]["preemptions"] > 0
    assert found["interrupted"]["stats"]["preemptions"] >= 8
