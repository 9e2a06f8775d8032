"""What the record says of the ledger beside SGLang is clean, and the pages say the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import seen_sglang
from gpu_seen import PAGE, RECORD

SEEN = json.loads(RECORD.read_text())
ENGINES, COST, RINGS = (SEEN[kind] for kind in ("sglang", "sglang_cost", "sglang_rings"))
BEGINS = ("state_clear", "state_copy", "state_other")
HOST = ("host_page", "host_slot", "host_write")
PAGES = Path(__file__).parents[2] / "integrations"


def words(page):
    return " ".join((PAGES / page).read_text().split())


@pytest.mark.parametrize("engine", ENGINES)
def test_no_row_is_wrong_where_nothing_was_planted(engine):
    """The tokens are those of the same engine without kvtxn; every row was judged."""
    found = ENGINES[engine]
    assert found["rows"] > 200_000
    assert found["unjudged"] == 0
    assert found["same"] == found["tokens"]
    assert bool(found["faults"]) == bool(found["wrong"])
    assert bool(found["bytes"]) == engine.startswith("bytes")


@pytest.mark.parametrize("engine", [name for name in ENGINES if ENGINES[name]["faults"]])
def test_every_fault_is_found(engine):
    """A violation names the request, the position, the slot, and the writer if there is one."""
    for fault in ENGINES[engine]["faults"]:
        assert fault["found"], fault
        named = [fault[key] for key in ("request", "position", "slot", "writer")]
        begins = fault["fault"] in BEGINS  # of a state that belongs to no request
        assert {named[0], named[2]} <= {"yes", "named"}, fault
        assert named[1] in ("yes", "named") or begins, fault
        # The host's rows outlive what is known of their writers.
        nobody = fault["found"] == "unwritten" or begins or fault["fault"] in HOST
        assert named[3] in (("-", "named") if nobody else ("yes", "named"))


@pytest.mark.parametrize("engine", [name for name in ENGINES if ENGINES[name].get("contained")])
def test_a_request_is_given_up_at_most_after_it_was_computed_again(engine):
    assert ENGINES[engine]["given_up"] < ENGINES[engine]["contained"]
    assert ENGINES[engine]["tokens"] > 1000


@pytest.mark.parametrize("cell", COST)
def test_the_ledger_costs_at_most_a_fiftieth(cell):
    found = COST[cell]
    assert found["same"] == found["compared"]
    assert found["engines"]["ledger"]["rate_ratio"][0] >= 0.98


@pytest.mark.parametrize("cell", RINGS)
def test_a_step_takes_no_longer_than_with_the_ring(cell):
    assert RINGS[cell]["ratio"][0] <= 1.0


@pytest.mark.parametrize("kind", ["sglang", "sglang_cost", "sglang_rings", "sglang_mamba"])
def test_a_record_says_where_it_is_from(kind):
    for found in SEEN[kind].values():
        assert found["commit"]
        assert found["machine"].startswith("NVIDIA H200, driver ")
        script = found["command"].split()[1]
        assert (Path(__file__).parents[2] / script).is_file()


def test_pages_have_the_records_numbers():
    """The costs, the ratios of the kernels, the faults; each links to the section."""
    ledger, canary = (
        " and ".join(f"{cell['engines'][who]['rate_ratio'][0]:.3f}" for cell in COST.values())
        for who in ("ledger", "canary")
    )
    requests = " and ".join(str(cell["requests"]) for cell in COST.values())
    of_stock = f"of stock's tokens a second with {requests} requests"
    assert f"| time | {canary} {of_stock} | {ledger} {of_stock} |" in words("KV_CANARY.md")
    ratios = [cell["ratio"][0] for cell in RINGS.values()]
    verify = [cell["parts"]["verify"] for cell in RINGS.values() if cell["parts"]]
    says = words("SGLANG.md")
    assert f"whole step takes {min(ratios):.2f} to {max(ratios):.2f} of the time" in says
    assert f"verify takes {min(verify):.2f} to {max(verify):.2f} of the time" in says
    mamba = SEEN["sglang_mamba"].values()
    states = [cell["ratio"][0] for cell in mamba]
    assert f"takes {min(states):.2f} to {max(states):.2f} of the time of SGLang's" in says
    kept = [cell["beside_mib"]["sglang"] / cell["beside_mib"]["kvtxn"] for cell in mamba]
    assert f"{min(kept):.0f} times the memory" in says
    faults = [fault for each in ENGINES.values() for fault in each["faults"]]
    assert f"All {len(faults)} were found" in says
    for page in ("KV_CANARY.md", "SGLANG.md"):
        for target in ("sglang", "cost-beside-sglang"):
            assert f"../tests/gpu/SEEN.md#{target}" in words(page)
    assert {"## SGLang", "### Cost beside SGLang"} <= set(PAGE.read_text().splitlines())


def fault(planted, **violation):
    found = {"kind": "foreign", "request": "a", "position": 3, "slot": 9, **violation}
    return seen_sglang._fault(
        {"fault": "f", "planted": planted, "exact": 1, "fits": 1, "found": [found]}
    )


def test_a_fault_that_is_named_otherwise_is_noticed():
    planted = {"request": "a", "position": 3, "slot": [8, 9], "writer": "b"}
    good = fault(planted, written_request="b")
    assert [good[key] for key in ("request", "position", "slot", "writer")] == ["yes"] * 4
    bad = fault(planted, request="c", position=4, slot=7, written_request="a")
    assert [bad[key] for key in ("request", "position", "slot", "writer")] == ["no"] * 4
    assert fault({}, position=None)["position"] == "-"
    lost = {"fault": "f", "planted": planted, "exact": 0, "fits": 0, "found": []}
    assert seen_sglang._fault(lost)["found"] is None
