"""A forward fails in a running engine, which goes on: whoever reads its rows is told."""

from __future__ import annotations

import pytest
from engine_jobs import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.engines("audit-fails")
@pytest.mark.parametrize(("way", "hit", "position"), [("prompt", 64, 0), ("decode", 96, 95)])
def test_the_next_reader_of_rows_that_nobody_computed_is_told(reports, way, hit, position):
    """A prompt fails as a whole; a step that decodes has one row in the block that it fills."""
    found = reports("audit-fails")["alone"][way]
    assert (found["failed"], found["ways"], found["hit"]) == (True, ["model"], hit)
    first = found["violations"][0]
    assert (first["kind"], first["request"], first["position"]) == (
        "unwritten", found["request"], position,
    )  # fmt: skip


@pytest.mark.engines("audit-fails")
@pytest.mark.parametrize("way", ["prompt", "decode", "late"])
def test_a_request_that_computes_all_rows_again_is_right(reports, way):
    found = reports("audit-fails")["alone"][way]
    assert found["again"] == []
    assert found["same"]
