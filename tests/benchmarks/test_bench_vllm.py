"""``kvtxn bench vllm`` on the CPU: real engines, a tiny model, all that it leaves behind."""

from __future__ import annotations

import json

import pytest
from engine_jobs import missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.engines("command-bench"),
]

LABELS = ["stock", "undo", "deferred", "ledger", "bytes"]
WINDOWS, AUDITS = LABELS[1:3], LABELS[3:]

#: What the JSON has to have: names, and the type of each value or another level of names.
SHAPE = {
    "format": int,
    "machine": {"command": str, "commit": str, "python": str, "processor": str, "torch": str},
    "settings": {"model": str, "drafter": str, "drafts": int, "rounds": int, "policies": list},
    "conditions": {
        "started": str,
        "seconds": float,
        "engines": int,
        "processors": int,
        "announced": dict,
        "arguments": {"max_num_seqs": int, "speculative_config": dict},
        "environment": {"OMP_NUM_THREADS": str},
    },
    "cells": list,
}
ENGINE = {
    "tokens_per_s": {"median": float, "lowest": float, "highest": float},
    "first_token_ms": {"p50": float, "p95": float},
    "per_token_ms": {"p50": float, "p95": float},
    "rounds": list,
    "counters": list,
}
ROUND = {"seconds": float, "generated": int, "drafted": int, "accepted": int, "digest": str}
ROUND |= {"first_token_ms": float, "per_token_ms": float}
CLOCK = {"steps": int, **dict.fromkeys(("begin", "commit", "both", "lower", "upper"), float)}
AUDIT = dict.fromkeys(("steps", "rows", "states", "violations", "unjudged"), int)
AUDIT |= {"kinds": dict, "first": list}
MEMORY = dict.fromkeys(("taken", "formula", "slots", "positions", "checksums", "constant"), int)
RATIO = {"median": float, "low": float, "high": float, "confidence": float, "rounds": int}


def check(found: dict, shape: dict, where: str = "") -> None:
    """Every name of the shape is there, with its type."""
    for name, kind in shape.items():
        assert name in found, f"{where}{name} is missing"
        if isinstance(kind, dict):
            check(found[name], kind, f"{where}{name}.")
        else:
            assert isinstance(found[name], kind), f"{where}{name} is {found[name]!r}"


def results(end, folder):
    """The folder with the files of a run that ended well."""
    assert end.code == 0, end.out + end.err
    assert end.out.split() == [f"results/smoke.{kind}" for kind in ("json", "md")]
    return folder / "results"


@pytest.fixture
def folder(ended):
    """The folder in which the run of all engines left its files."""
    return results(*ended("bench"))


@pytest.fixture
def result(folder):
    return json.loads((folder / "smoke.json").read_text())


def test_the_json_has_its_shape(result):
    """Machine, settings, conditions, and for each cell and engine what was measured."""
    check(result, SHAPE)
    assert [cell["scenario"] for cell in result["cells"]] == ["short", "mixed"]
    for cell in result["cells"]:
        assert (cell["context"], cell["tokens"], cell["requests"]) == (40, 16, 3)
        assert list(cell["engines"]) == LABELS
        for label, engine in cell["engines"].items():
            check(engine, ENGINE)
            assert len(engine["rounds"]) == 2
            more = 3 if cell["scenario"] == "short" else 0
            assert len(engine["new_prompts_ms"]) == more
            for each in engine["rounds"]:
                check(each, ROUND)
            if label != "stock":
                check(engine["of_stock"]["tokens_per_s"], RATIO)
                check(engine["of_stock"]["per_token_ms"], RATIO)
                check(engine["of_stock"]["first_token_ms"], RATIO)
                [clocked] = engine["host_us"]
                check(clocked, CLOCK)
                assert 0 < max(clocked["begin"], clocked["commit"]) < clocked["both"]
                assert clocked["lower"] <= clocked["both"] <= clocked["upper"]


def test_policies_accept_what_stock_accepts(result):
    """Drafts, accepted drafts and tokens, in every round of every scenario; and there are some."""
    for cell in result["cells"]:
        stock = cell["engines"]["stock"]
        assert all(each["accepted"] > 0 for each in stock["rounds"])
        for label in LABELS[1:]:
            beside = cell["engines"][label]["of_stock"]
            assert (beside["same_accepted"], beside["same_tokens"]) == (True, True)


def test_audits_read_rows_and_find_nothing_wrong(result):
    """Of stock vLLM, in every cell; both audits are of the same work."""
    for cell in result["cells"]:
        for label in AUDITS:
            found = cell["engines"][label]["audit"]
            check(found, AUDIT)
            assert found["rows"] > 0
            assert (found["violations"], found["unjudged"], found["first"]) == (0, 0, [])
            counted = cell["engines"][label]["counters"][0]["kvtxn_audit_rows_checked_total"]
            assert 0 < counted < found["rows"]
        assert all("audit" not in cell["engines"][label] for label in ("stock", *WINDOWS))


def test_an_audits_memory_is_that_of_the_formula(result):
    """Of the tensors that exist, and of the sizes alone; bytes take a checksum a row and layer."""
    found = result["conditions"]["audit_memory"]
    assert list(found) == AUDITS
    (ledger,), (scrubbed,) = (found[label] for label in AUDITS)
    for each in (ledger, scrubbed):
        check(each, MEMORY)
        assert each["taken"] == each["formula"] == sum(list(each.values())[2:])
    assert ledger["checksums"] == 0
    layers = 2
    assert (
        scrubbed["checksums"] > (layers + 1) * scrubbed["slots"] == (layers + 1) * ledger["slots"]
    )


def test_counters_are_vllms(result):
    """The windows staged and committed as many rows as vLLM drafted and accepted."""
    for cell in result["cells"]:
        for label in WINDOWS:
            engine = cell["engines"][label]
            (count,) = engine["counters"]
            drafted = sum(each["drafted"] for each in engine["rounds"])
            accepted = sum(each["accepted"] for each in engine["rounds"])
            assert count["kvtxn_rows_staged_total"] >= drafted
            assert count["kvtxn_rows_committed_total"] >= accepted
            assert count["kvtxn_fallbacks_total"] == 0
            assert engine["coverage"] == 1


def test_each_engine_said_what_it_does(result):
    """The plug-in's own line, with its policy; the batch is as asked for."""
    announced = result["conditions"]["announced"]
    assert announced["stock"] is None
    assert "policy='undo'" in announced["undo"]
    assert "policy='deferred'" in announced["deferred"]
    assert all("groups=1" in announced[label] for label in AUDITS)
    assert result["conditions"]["arguments"]["max_num_seqs"] == 2
