"""kvtxn on the ``/metrics`` page of a real ``vllm serve``, beside vLLM's own metrics."""

from __future__ import annotations

import pytest
from api_server import DRAFTED, Page
from engine_jobs import missing

from kvtxn.metrics import FAMILIES

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
THEIRS = {
    DRAFTED, ACCEPTED, "vllm:spec_decode_num_drafts_total", "vllm:num_requests_running",
    "vllm:generation_tokens_total", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_hits_total",
}  # fmt: skip
ROW_BYTES = 3 * 2 * 2 * 32 * 4  # layers, keys and values, heads, head size, float32


SERVERS = ("served-one", "served-many")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.engines(name)) for name in SERVERS]
)
def served(request, reports):
    """The pages before and after some requests, the policy and the number of ranks."""
    found = reports(request.param)["alone"]
    assert [len(tokens) for tokens in found["tokens"]] == [48] * 4
    return Page(found["first"]), Page(found["last"]), found["policy"], found["ranks"]


def test_rows_are_those_of_vllms_own_counters(served):
    """Once per engine, however many ranks count them."""
    _, page, _, _ = served
    drafted, accepted = page.sum(DRAFTED), page.sum(ACCEPTED)
    assert 0 < accepted < drafted
    assert page.sum("kvtxn_rows_staged_total") == drafted
    assert page.sum("kvtxn_rows_committed_total") == accepted
    assert page.sum("kvtxn_rows_rejected_total") == drafted - accepted
    assert page.sum("kvtxn_acceptance_rate") == pytest.approx(accepted / drafted)
    windows = page.sum("kvtxn_windows_total", outcome="committed")
    assert windows == page.sum("kvtxn_windows_total") > 0
    assert windows == page.sum("vllm:spec_decode_num_drafts_total")  # one request at a time


def test_bytes_add_up_over_ranks(served):
    """Each rank has its share of the heads."""
    _, page, policy, ranks = served
    kept, rejected = (page.sum(f"kvtxn_rows_{kind}_total") for kind in ("committed", "rejected"))
    written = kept + 2 * rejected if policy == "undo" else kept
    assert page.sum("kvtxn_bytes_written_total") == written * ROW_BYTES
    avoided = 0 if policy == "undo" else rejected
    assert page.sum("kvtxn_bytes_avoided_total") == avoided * ROW_BYTES
    assert len(page.series("kvtxn_bytes_written_total")) == 1
    assert page.series("kvtxn_bytes_written_total").total() == ranks


def test_every_family_is_there_with_its_type_and_help(served):
    """Zeros too, from the start: an alert has to see the step from zero to one."""
    first, page, _, _ = served
    for family in FAMILIES:
        if family.name == "kvtxn_bypassed_windows_total":  # its reasons are not known before
            continue
        name = family.name if family.name in page.kinds else family.name.removesuffix("_total")
        assert page.kinds[name] == ("counter" if family.is_counter else "gauge")
        assert page.helps[name]
        labels = {"engine", "model_name"} | {family.label} - {None}
        labels |= {"rank"} if family.per_rank else set()
        assert set(page.series(family.name)) == {tuple(sorted(labels))}
        assert first.series(family.name) == page.series(family.name)
        assert page.sum(family.name) >= first.sum(family.name) == 0


def test_none_of_vllms_own_is_lost(served):
    names = {name for name, _, _ in served[1].samples}
    assert names >= THEIRS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.engines(name)) for name in SERVERS]
)
def test_the_doctor_of_a_running_server(reports, name):
    """It says what the page says, and what to do next: here the audit was not asked for."""
    found = reports(name)["alone"]
    page, said = Page(found["last"]), " ".join(found["doctor"]["said"].split())
    ended, ranks = f"{page.sum('kvtxn_windows_total'):.0f}", found["ranks"]
    windows = f"active in {ranks} of {ranks} ranks; windows that ended: {ended} (committed {ended})"
    assert found["doctor"]["code"] == 0, said
    assert (
        f"server engine: vLLM engine 0 model: {found['model']} engine 0 windows: {windows}; draft"
        in said
    )
    assert "audit: not asked for" in said
    assert "next step: for the audit, start vLLM with" in said


def test_a_page_is_read_as_prometheus_reads_it():
    page = Page(
        '# HELP a_total What.\n# TYPE a_total counter\na_total{x="1",y="u v"} 2.0\na_total 3'
    )
    assert page.sum("a_total") == 5
    assert page.sum("a_total", y="u v") == 2
    assert (page.kinds, page.helps) == ({"a_total": "counter"}, {"a_total": "What."})
