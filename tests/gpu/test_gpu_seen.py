"""SEEN.md is what the recorded runs say, and the records are clean; no GPU needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu_seen import PAGE, RECORD, draw

SEEN = json.loads(RECORD.read_text())


def test_the_page_is_drawn_from_the_record():
    assert PAGE.read_text() == draw(SEEN)
    changed = json.loads(json.dumps(SEEN))
    changed["audit"]["llama-ledger"]["rows"] += 1
    assert PAGE.read_text() != draw(changed)


@pytest.mark.parametrize("engine", SEEN["states"])
def test_states_are_those_of_stock(engine):
    """Tokens, states and counts, also after faults; one block a request, and more requests."""
    found = SEEN["states"][engine]
    assert (found["same"], found["equal"]) == (found["requests"], found["states"])
    assert found["accepted_alike"]
    assert found["fault"]
    assert not found["strays"]
    stock, ours = found["blocks"]
    assert sum(ours) < sum(stock)
    assert found["at_once"][1] > found["at_once"][0]


#: An engine without rows that the ledger knows.
UNWATCHED = ("mamba2",)


@pytest.mark.parametrize("engine", SEEN["audit"])
def test_the_audit_cries_wolf_nowhere(engine):
    found = SEEN["audit"][engine]
    assert found["wrong"] == 0
    assert found["same"] == found["requests"] > 0
    assert (found["rows"] > 0) == (engine not in UNWATCHED)
    if found["audit"] == "bytes":
        assert found["compared"] > 0


@pytest.mark.parametrize("engine", SEEN["connectors"])
def test_what_leaves_is_durable(engine):
    found = SEEN["connectors"][engine]
    assert found["rejected"] > 0
    if engine.endswith(".stock"):
        assert found["residue"] > 0
        return
    for wrong in ("stored_wrong", "stored_pending", "loaded_wrong"):
        assert found[wrong] == 0
    assert found["bypassed"] or not found["residue"]


def test_the_readme_has_the_records_number():
    stock, ours = SEEN["states"]["nemotron.eager.auto"]["at_once"]
    says = (Path(__file__).parents[2] / "README.md").read_text().split()
    assert f"room for {ours:.0f} requests where vLLM 0.32.0 has room for {stock:.0f}**" in " ".join(
        says
    )
