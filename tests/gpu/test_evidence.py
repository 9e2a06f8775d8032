"""Parts of the evidence run by turns on each GPU, resume, and are taken over."""

from __future__ import annotations

import json
from collections import Counter

import pytest

pytest.importorskip("vllm")

import evidence
import evidence_record
from evidence_parts import PARTS, Part, slices
from kvtxn.benchmarks import documents
from kvtxn.benchmarks.common.machine import RESULTS

#: Notes when it ran and where; with the name of another part it waits until that one runs, too.
SEEN = """
import json, os, pathlib, sys, time
out, code, other, lasts = pathlib.Path(sys.argv[1]), *sys.argv[2:]
begun = time.time()
(out / "begun").touch()
while other and not (out.parent / other / "begun").exists():
    time.sleep(0.02)
time.sleep(float(lasts))
found = dict(gpus=os.environ["CUDA_VISIBLE_DEVICES"], begun=begun, ended=time.time())
found["cores"] = sorted(os.sched_getaffinity(0))
(out / "seen.json").write_text(json.dumps(found))
sys.exit(int(code))
"""


def part(name, *, beside="", lasts=0, code=0, seconds=1, **more):
    words = ("{python}", "-c", SEEN, "{out}", str(code), beside, str(lasts))
    return Part(name, words, seconds, engine="", **more)


@pytest.fixture
def machine():
    cores = sorted(evidence.os.sched_getaffinity(0))
    return evidence.Machine(["3", "5"], cores, {"vllm": "/site"})


@pytest.fixture
def folder(tmp_path):
    return evidence.Evidence(tmp_path / "found", "abc")


def seen(folder, name):
    return json.loads((folder.folder / name / "seen.json").read_text())


def test_one_part_at_a_time_on_each_gpu(folder, machine):
    """A part that needs both has both, and nothing runs beside it."""
    parts = [part("a", beside="b"), part("b", beside="a"), part("both", gpus=2), part("c")]
    assert evidence.conduct(folder, parts, machine, 120.0) == []
    found = {each.name: seen(folder, each.name) for each in parts}
    assert found["both"]["gpus"] == "3,5"
    assert found["a"]["begun"] >= found["both"]["ended"]
    assert {found[name]["gpus"] for name in "ab"} == {"3", "5"}
    if len(machine.cores) > 1:
        assert not {*found["a"]["cores"]} & {*found["b"]["cores"]}
    assert {name: each["rc"] for name, each in folder.ended.items()} == dict.fromkeys(found, 0)


def test_two_parts_share_a_gpu_if_they_may(folder, machine):
    """Each waits until the other runs; nothing runs beside what may not share."""
    one = evidence.Machine(["3"], machine.cores, {})
    parts = [part("a", beside="b", shares=True), part("alone"), part("b", beside="a", shares=True)]
    parts += [part("c", shares=True)]
    assert evidence.conduct(folder, parts, one, 120.0) == []
    found = {each.name: seen(folder, each.name) for each in parts}
    assert {found[name]["gpus"] for name in found} == {"3"}
    assert found["a"]["cores"] == found["b"]["cores"] == [*machine.cores]
    alone = found.pop("alone")
    for each in found.values():
        assert each["ended"] <= alone["begun"] or alone["ended"] <= each["begun"]


def test_what_measures_times_shares_no_gpu():
    """By the names of parts: those of speeds, of costs, and of long lives."""
    timed = (
        "bench-",
        "turns-",
        "soak-",
        "graph-bounds",
        "sglang-cost",
        "sglang-rings",
        "sglang-mamba",
    )
    assert not [each.name for each in PARTS if each.name.startswith(timed) and each.shares]
    assert not [each.name for each in PARTS if each.gpus == 0 and each.shares]


def test_what_has_ended_is_not_run_again(folder, machine):
    parts = [part("a"), part("bad", code=4)]
    evidence.conduct(folder, parts[:1], machine, 120.0)
    before = seen(folder, "a")
    later = evidence.Evidence(folder.folder, "abc")
    assert [each.name for each in later.left(parts)] == ["bad"]
    evidence.conduct(later, parts, machine, 120.0)
    assert seen(folder, "a") == before
    assert later.ended["bad"]["rc"] == 4
    with pytest.raises(SystemExit, match="evidence of abc, these sources are def"):
        evidence.Evidence(folder.folder, "def")


def test_no_part_begins_that_would_not_end_in_time(folder, machine):
    parts = [part("long", seconds=100), part("short", seconds=1)]
    evidence.conduct(folder, parts, machine, 20.0)
    assert [*folder.ended] == ["short"]


def test_a_part_that_is_over_the_time_begins_again_later(folder, machine):
    """Its processes are gone, and nothing is noted of it."""
    slow = part("slow", lasts=60, seconds=0)
    assert evidence.conduct(folder, [slow], machine, 0.5) == ["slow"]
    assert not folder.ended
    assert not (folder.folder / "slow" / "seen.json").exists()
    assert folder.left([slow]) == [slow]


def test_parts_are_chosen_by_name_gpus_and_engine(monkeypatch):
    parts = [part("grid-0"), part("grid-1", gpus=2), part("cpu-a", gpus=0), part("states-0")]
    monkeypatch.setattr(evidence, "PARTS", parts)
    names = {
        (asked, gpus): [each.name for each in evidence.chosen(list(asked), gpus, [""])]
        for asked in ((), ("grid",))
        for gpus in (0, 1, 2)
    }
    assert names == {
        ((), 0): ["cpu-a"],
        ((), 1): ["grid-0", "states-0"],
        ((), 2): ["grid-0", "grid-1", "states-0"],
        (("grid",), 0): [],
        (("grid",), 1): ["grid-0"],
        (("grid",), 2): ["grid-0", "grid-1"],
    }
    assert evidence.chosen([], 1, ["vllm"]) == []


def test_all_parts():
    """Their names are their own, each is a matter of minutes, and what takes results over knows."""
    assert max(Counter(each.name for each in PARTS).values()) == 1
    assert all(each.seconds <= 570 for each in PARTS if each.gpus)
    kinds = {kind for each in PARTS for kind, _ in each.kept}
    assert kinds - {"grid", "bench"} == {*evidence_record.gpu_seen.REDUCERS}
    for each in PARTS:
        for word in each.command:
            word.format(out="OUT", here="HERE", python="PYTHON")


def test_a_result_is_made_by_a_part_and_shown_by_a_page(monkeypatch):
    """So no page quotes what a later commit does not measure again, and no part is in vain."""
    shown, load = set(), documents.load

    def noted(name):
        shown.add(name)
        return load(name)

    monkeypatch.setattr(documents, "load", noted)
    for make in documents.SECTIONS.values():
        make()
    made = {name for each in PARTS for kind, name in each.kept if kind == "bench"}
    assert {f"{name}.json" for name in shown} == made
    assert {path.name for path in RESULTS.glob("*.json")} == made


def test_slices_hold_every_name_once():
    names = [f"n{i}" for i in range(11)]
    found = list(slices(names, 4))
    assert sorted(name for each in found for name in each) == sorted(names)
    assert {len(each) for each in found} == {2, 3}


def test_results_of_one_name_are_joined():
    first, second = (
        {"machine": {"command": f"bench {name}", "gpu": name}, "cells": cells}
        for name, cells in (("a", [1, 2]), ("b", [3]))
    )
    assert evidence_record.join([first, second, first | {"cells": []}]) == {
        "machine": {"command": "bench a; bench b", "gpu": "a"},
        "cells": [1, 2, 3],
    }
    assert (first["cells"], first["machine"]["command"]) == ([1, 2], "bench a")
    assert evidence_record.join([{"rows": [1]}, {"rows": [2]}]) == {"rows": [1, 2]}


def test_results_are_taken_over(folder, machine, monkeypatch, tmp_path):
    """Only those of parts that have ended; pages are drawn once, at the end."""
    results, told = tmp_path / "results", []
    results.mkdir()
    monkeypatch.setattr(evidence_record, "RESULTS", results)
    monkeypatch.setattr(evidence_record.gpu_seen, "take", lambda *given: told.append(given))
    monkeypatch.setattr(evidence_record.gpu_seen, "redraw", lambda: told.append("seen"))
    monkeypatch.setattr(evidence_record.gpu_table, "redraw", lambda: told.append("table"))
    monkeypatch.setattr(evidence_record.documents, "DOCUMENTS", [])
    kept = [("bench", "seen.json"), ("states", "seen.json"), ("audit", "lost.json")]
    parts = [part("a", kept=kept), part("b", kept=kept)]
    evidence.conduct(folder, parts[:1], machine, 120.0)
    evidence_record.take_over(folder, parts)
    assert told == [("states", folder.folder / "a" / "seen.json", "abc"), "seen", "table"]
    assert json.loads((results / "seen.json").read_text()) == seen(folder, "a")


def test_a_result_names_no_folder_of_the_evidence(folder, machine, monkeypatch, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.setattr(evidence_record, "RESULTS", results)
    for owner in (evidence_record.gpu_seen, evidence_record.gpu_table):
        monkeypatch.setattr(owner, "redraw", lambda: None)
    monkeypatch.setattr(evidence_record.documents, "DOCUMENTS", [])
    one = part("a", kept=[("bench", "seen.json")])
    evidence.conduct(folder, [one], machine, 120.0)
    place = folder.folder / "a" / "seen.json"
    place.write_text(json.dumps({"machine": {"command": f"bench --save {place}"}}))
    evidence_record.take_over(folder, [one])
    assert json.loads((results / "seen.json").read_text())["machine"]["command"] == (
        "bench --save seen.json"
    )
