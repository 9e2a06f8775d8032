"""Weights that change in a running engine: rows of the earlier ones are counted by age."""

from __future__ import annotations

import pytest
from engine_jobs import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

#: Rows of the prompt's whole blocks, which a second request finds in the cache.
HIT = 96


@pytest.mark.engines("audit-stale")
@pytest.mark.parametrize("way", ["reload", "load", "told", "in_place"])
def test_a_hit_on_rows_of_earlier_weights_is_counted(reports, way):
    """However the weights have changed; in each step that reads the rows, for each request."""
    found = reports("audit-stale")["alone"][way]
    rows = found["first"].pop("rows_read_by_age_1")
    assert found["first"] == {}
    assert rows >= HIT
    assert rows % HIT == 0
    (reader,) = [each for each in found["read"] if each["request"] == found["request"]]
    assert reader["rows"] == {"1": rows}
    assert (reader["draft_rows"], reader["states"]) == ({}, {})
    assert found["second"]["rows_read_by_age_1"] >= HIT  # by the next one again


@pytest.mark.engines("audit-stale")
def test_counting_is_no_alarm_but_weights_that_nobody_told_of_are_one(reports):
    for way, found in reports("audit-stale")["alone"].items():
        kinds = [each["kind"] for each in found["found"]]
        assert kinds == (["weights"] if way == "in_place" else []), way


@pytest.mark.engines("audit-stale")
def test_the_age_is_the_number_of_updates(reports):
    found = reports("audit-stale")["alone"]["twice"]
    assert found["first"]["rows_read_by_age_2"] >= HIT


@pytest.mark.engines("audit-stale")
def test_an_empty_cache_has_no_stale_rows(reports):
    found = reports("audit-stale")["alone"]["and_reset"]
    assert found["first"] == found["second"] == {}


@pytest.mark.engines("audit-stale")
def test_a_reset_that_is_refused_while_a_request_runs_leaves_the_rows(reports):
    """The running request reads its own, and the new one finds them."""
    found = reports("audit-stale")["alone"]["while_a_request_runs"]
    readers = [each["request"] for each in found["read"] if each["rows"]]
    assert readers[-2:] == ["runs", found["request"]]


@pytest.mark.engines("audit-stale-alarm")
def test_an_alarm_names_reader_writer_and_age(reports):
    report = reports("audit-stale-alarm")["alone"]
    first, *others = report["reload"]["found"]
    assert [each["position"] for each in (first, *others)] == [0, 32, 64]
    assert {each["kind"] for each in (first, *others)} == {"stale"}
    assert (first["request"], first["written_request"]) == (report["reload"]["request"], "1.0")
    assert (first["age"], first["weights"], first["found"]) == (1, "target", "stale")
    assert report["and_reset"]["found"] == []


@pytest.mark.engines("audit-stale-contain")
def test_what_is_contained_is_read_by_no_later_request(reports):
    """Nobody starts again: the first reader goes on, and blocks leave the prefix cache."""
    jobs = reports("audit-stale-contain")
    for way, found in jobs["alone"].items():
        assert {each["kind"] for each in found["found"]} == {"stale"}, way
        assert found["second"].get("rows_read_by_age_1", 0) == 0, way
        assert found["said"][1] == found["said"][2], way
    assert "kvtxn.audit_contained" not in jobs.log("alone")


@pytest.mark.engines("audit-stale-connector")
def test_rows_keep_their_epoch_in_a_connector_s_store(reports):
    """ExampleConnector has no ``reset_cache``, which vLLM counts as success."""
    found = reports("audit-stale-connector")["alone"]["and_reset_all"]
    assert found["first"]["rows_read_by_age_1"] >= HIT
    assert found["found"] == []


@pytest.mark.engines("audit-stale-states")
def test_a_state_is_as_stale_as_its_rows(reports):
    found = reports("audit-stale-states")["alone"]["in_the_middle"]
    assert found["first"]["states_read_by_age_1"] >= 1
    assert found["first"]["rows_read_by_age_1"] >= HIT
    (reader,) = [each for each in found["read"] if each["request"] == "runs"]
    assert reader["states"]["1"] == found["first"]["states_read_by_age_1"]
    assert found["found"] == []
