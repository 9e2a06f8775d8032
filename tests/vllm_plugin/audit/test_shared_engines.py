"""Rows that another process has computed and a connector brings, in real engines."""

from __future__ import annotations

import pytest
from engine_jobs import missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.engines("audit-shared-store"),
]


def test_rows_of_another_process_are_verified(reports):
    found = reports("audit-shared-store")["alone"]["same"]
    assert (found["unverified"], found["found"]) == (0, [])


def test_rows_of_other_weights_in_the_same_place_are_found(reports):
    """Of another checkpoint, revision or update: reader, writer and positions are named."""
    found = reports("audit-shared-store")["alone"]["other"]
    assert found["unverified"] == 0
    assert [each["position"] for each in found["found"]] == [0, 32, 64]
    for each in found["found"]:
        assert (each["kind"], each["differs"]) == ("imported", "weights")
        assert each["request"].partition("-")[0] == found["request"]
        assert each["written_request"].startswith("process ")
        assert ", request #" in each["written_request"]
        assert each["expected"] == each["written_for"] == []


def test_a_store_has_no_name_of_a_request(reports):
    report = reports("audit-shared-store")["alone"]
    assert report["store"] > 0
    assert not report["names"]
