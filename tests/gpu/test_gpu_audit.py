"""The judge of the audit's engines on GPUs; the engines themselves are started by hand."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")

import gpu_audit
import gpu_planted


def report(**changes):
    """The report of an engine in which all is well."""
    counters = {"kvtxn_audit_active": 1.0, "kvtxn_audit_rows_checked_total": 9.0}
    cell = {
        "exact": True,
        "same": "8 of 8",
        "counters": [counters | changes.pop("counters", {})],
        "violations": [changes.pop("violations", [])],
        "facts": {"compared": 5, "ahead": False},
    } | changes.pop("cell", {})
    facts = {"graphs": "FULL", "ahead": False, "groups": [], "windows": False, "reserved": 0}
    return {
        "facts": [facts | {"memory": 1}],
        "healthy": {"eight": cell},
        "seconds": [1, 2],
    } | changes


JOB = gpu_audit.ENGINES["llama-bytes"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"counters": {"kvtxn_audit_active": 0}}, "not watched"),
        ({"counters": {"kvtxn_audit_rows_checked_total": 0}}, "has read no row"),
        ({"counters": {"kvtxn_audit_violations_total": 2.0}}, "found 2"),
        ({"counters": {"kvtxn_audit_unjudged_total": 1}}, "could not judge"),
        ({"violations": [{"kind": "foreign"}]}, "foreign"),
        ({"cell": {"idle": [[{"kind": "foreign"}]]}}, "while nothing was watched"),
        ({"cell": {"exact": False, "same": "7 of 8"}}, "7 of 8 texts are the same"),
        ({"cell": {"facts": {"compared": 0, "ahead": False}}}, "no bytes"),
        ({"time": {"waits": {"step: there": 3}}}, "waits"),
        ({"planted": {"healthy": [], "found": {}, "again": [True, [1]]}}, "after faults"),
    ],
)
def test_what_is_not_well_is_said(changes, says):
    found = list(gpu_audit.wrong(JOB, report(**changes)))
    assert found == [] if says is None else says in found[0]


STRUCK = {"request": "1.0", "position": 3, "slot": 35, "step": 7}


@pytest.mark.parametrize(
    ("found", "well"),
    [
        ({"struck": STRUCK, "violations": [STRUCK | {"step": 8}]}, True),
        ({"struck": STRUCK, "violations": [STRUCK | {"step": 9}]}, False),
        ({"struck": STRUCK, "violations": [STRUCK | {"slot": 36}]}, False),
        ({"struck": STRUCK | {"slot": None}, "violations": [STRUCK | {"slot": 97}]}, True),
        ({"struck": STRUCK | {"slot": None}, "violations": [STRUCK | {"position": 4}]}, False),
        ({"struck": STRUCK, "violations": []}, False),
        ({"struck": None, "violations": []}, False),
        ({"error": "it died"}, False),
    ],
)
def test_a_fault_is_found_where_it_struck(found, well):
    planted = {"healthy": [], "found": {"fault": found}, "again": [True, []]}
    assert well == (not list(gpu_audit.unfound(planted)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"violations": [{"kind": "foreign"}]}, "foreign"),
        ({"answers": False}, "other answers"),
        ({"awake": False}, "other answers"),
        ({"same": False}, "other texts"),
        ({"forgotten": []}, "were read, found"),
    ],
)
def test_what_an_engine_that_slept_reports(changes, says):
    lost = changes.pop("forgotten", [{"kind": "unwritten"}])
    way = {"violations": [], "answers": True, "awake": True, "same": True} | changes
    found = list(gpu_audit.restless({"ways": {"level 1": way}, "forgotten": lost}, ahead=False))
    assert [says in each for each in found] == ([] if says is None else [True])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"failed": False}, "a hit of 64"),
        ({"hit": 0}, "a hit of 0"),
        ({"violations": []}, "its rows were read"),
        ({"violations": [{"kind": "unwritten", "request": "2"}]}, "its rows were read"),
        ({"again": [{"kind": "foreign"}]}, "then same True, found"),
        ({"same": False}, "then same False"),
    ],
)
def test_what_an_engine_whose_forward_failed_reports(changes, says):
    told = [{"kind": "unwritten", "request": "1"}]
    way = {"failed": True, "ways": ["graph"], "hit": 64, "request": "1", "violations": told}
    found = list(gpu_audit.unheard({"late": way | {"again": [], "same": True} | changes}))
    assert [says in each for each in found] == ([] if says is None else [True])


@pytest.mark.parametrize(
    ("harmless", "well"), [([True, []], True), ([False, []], False), ([True, [1]], False)]
)
def test_what_nobody_reads_is_reported_nowhere(harmless, well):
    planted = {"healthy": [], "found": {}, "again": [True, []], "harmless": {"fault": harmless}}
    assert well == (not list(gpu_audit.unfound(planted)))


def test_engines_share_the_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = gpu_audit.jobs([], 2)
    assert set(two) == set(gpu_audit.ENGINES)
    places = [job.get("environment", {}).get("CUDA_VISIBLE_DEVICES") for job in two.values()]
    alone = [place for job, place in zip(two.values(), places, strict=True) if "gpus" not in job]
    assert abs(alone.count("0") - alone.count("1")) <= 1
    assert places.count(None) == len(places) - len(alone)
    assert not {"tp2", "pp2"} & set(gpu_audit.jobs([], 1))


def test_each_fault_has_a_name_of_its_own(monkeypatch):
    """Two faults with one name: the engine would plant one of them in place of the other."""
    for v2, faults in ((False, gpu_planted.V1), (True, gpu_planted.V2)):
        known = gpu_planted.by_name(v2=v2)
        assert len({fault.__name__ for fault in faults}) == len(faults) > 15
        assert all(known[fault.__name__] is fault for fault in faults)
    planted = {name for job in gpu_audit.ENGINES.values() for name in job.get("faults", ())}
    assert planted <= {*gpu_planted.by_name(v2=False), *gpu_planted.by_name(v2=True)}

    def lost_write(rig):
        """Another fault."""

    monkeypatch.setattr(gpu_planted, "BYTES", (lost_write,))
    with pytest.raises(ValueError, match="two faults are named lost_write"):
        gpu_planted.by_name(v2=True)


@pytest.mark.parametrize(
    ("ranks", "well"),
    [
        ([[["ranks", 7]], [["foreign", 6], ["ranks", 7]]], True),
        ([[["ranks", 7]], [["ranks", 8]]], False),
        ([[["ranks", 7], ["foreign", 8]], [["ranks", 7]]], False),
        ([[["ranks", 7]], []], False),
        ([[], []], False),
    ],
)
def test_ranks_that_differ_both_say_so(ranks, well):
    assert well == (not list(gpu_audit.undistinguished(ranks)))


def test_what_an_engine_reported_before_it_was_ended_is_judged(tmp_path):
    whole = report(planted={"healthy": [], "found": {}, "again": "it did not come to that"})
    whole["planted"]["found"]["lost"] = {"struck": None, "violations": []}
    kept = tmp_path / "partial.json"
    said = gpu_audit.until_then(JOB, json.dumps(whole), gpu_audit, kept)
    assert said[0] == "until then: eight; 1 faults planted"
    assert said[1:] == ["fault lost has not struck", "after faults: it did not come to that"]
    assert json.loads(kept.read_text()) == whole
    assert gpu_audit.until_then(JOB, "", gpu_audit, kept) == []
