"""Real engines that run at one time and share a store of identities and a connector's directory."""

from __future__ import annotations

import pytest
from engine_jobs import missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.engines("audit-at-once"),
]

#: Rows of a prompt that the connector brings, and of a round's prompts.
ROWS = 96
ALL = 3 * ROWS


@pytest.fixture
def report(reports):
    return reports("audit-at-once")["alone"]


def result(brought, found=()):
    return {"brought": brought, "unverified": 0, "found": [*found]}


def imported(differs, writer, prompts=1):
    return [["imported", differs, at, writer] for _ in range(prompts) for at in range(0, ROWS, 32)]


@pytest.mark.parametrize("turn", [0, 1])
def test_each_verifies_what_the_other_has_computed(report, turn):
    assert report[f"computed {turn}"] == {"mine": result(0), "other": result(0)}
    assert report[f"right {turn}"] == {"mine": result(ALL), "other": result(ALL)}


def test_rows_of_other_tokens_are_found_while_right_ones_are_read(report):
    found = report["swapped"]
    assert found["mine"] == result(ROWS)
    assert found["other"]["brought"] == ALL
    assert found["other"]["unverified"] == 0
    assert sorted(found["other"]["found"]) == sorted(imported("unknown", report["me"], 2))


def test_rows_without_the_readers_adapter_are_found(report):
    """The connector stores and finds them whatever the adapter."""
    found = report["adapter"]
    assert found == {
        "mine": result(ALL),
        "other": result(ROWS, imported("unknown", report["me"])),
    }


def test_rows_of_the_weights_before_are_found(report):
    found = report["other weights"]
    assert found["mine"] == result(ALL)
    assert sorted(found["other"]["found"]) == sorted(imported("weights", report["me"], 2))
    assert found["other"]["unverified"] == 0


def test_an_engine_that_is_killed_leaves_what_it_has_written(report):
    assert report["killed"] == result(0)
    assert report["after"] == result(2 * ALL)
