"""Faults planted in a real vLLM are found: the request, the position and the slot."""

from __future__ import annotations

import planted_engines
import pytest
from engine_jobs import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

FAULTS = [
    pytest.param(
        engine,
        fault.__name__,
        id=f"{engine}-{fault.__name__}",
        marks=pytest.mark.engines(f"audit-{engine}"),
    )
    for engine, faults in {
        "planted-rows": planted_engines.ROWS,
        "planted-blocks": planted_engines.BLOCKS,
        "planted-forwards": planted_engines.FORWARDS,
        "planted-states": planted_engines.STATES,
        "planted-single-states": planted_engines.SINGLE_STATES,
        "planted-transfers": planted_engines.TRANSFERS,
        "planted-bytes": planted_engines.BYTES,
        "device-rows": planted_engines.ROWS,
        "device-states": planted_engines.STATES,
        "device-transfers": planted_engines.TRANSFERS,
    }.items()
    for fault in faults
]


@pytest.mark.parametrize(("engine", "fault"), FAULTS)
def test_it_is_found(reports, engine, fault):
    """In the step in which it can be seen first, or the next one in which the request is run."""
    report = reports(f"audit-{engine}")["alone"]["found"][fault]
    struck, violations = report["struck"], report["violations"]
    assert struck is not None, "the fault has not struck"
    assert violations, "nothing was found"
    places = [(v["request"], v["position"], v["slot"]) for v in violations]
    if struck["slot"] is None:  # where the row lies is not known before the request is scheduled
        places = [(request, position, None) for request, position, _ in places]
    assert (struck["request"], struck["position"], struck["slot"]) in places
    assert violations[0]["step"] <= struck["step"] + 1
    if engine.endswith("-states"):
        assert violations[0]["kind"] == "state"
    if engine == "planted-bytes":
        nan = fault == "not_a_number"
        assert (violations[0]["kind"], violations[0]["found"]) == ("changed", ["bytes", "nan"][nan])
        assert ".1." in violations[0]["layer"]
        name = struck["request"].partition("-")[0]
        assert report["failed"] == report["other_texts"] == ([] if nan else [name])


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(name, marks=pytest.mark.engines(f"audit-{name}"))
        for name in (
            *(f"planted-{kind}" for kind in ("rows", "blocks", "forwards", "transfers", "bytes")),
            "planted-single-states",
            *(f"device-{kind}" for kind in ("rows", "states", "transfers")),
        )
    ],
)
def test_nothing_is_found_before_and_after(reports, engine):
    """The engine without a fault, and again once all faults are gone: same texts, no violation."""
    report = reports(f"audit-{engine}")["alone"]
    assert report["healthy"] == []
    assert report["compared"] > 10_000 if engine == "planted-bytes" else not report["compared"]
    assert report["again"] == [True, []]


def test_there_are_thirty():
    assert len(FAULTS) >= 30
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
