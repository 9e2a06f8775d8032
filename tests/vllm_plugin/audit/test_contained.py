"""``on_violation="contain"``: a wrong block is read by nobody else, and its reader starts again."""

from __future__ import annotations

import pytest
from engine_jobs import missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.engines("audit-contained"),
]


@pytest.mark.parametrize("engine", ["contained"])
def test_every_text_is_right(reports, engine):
    """The same requests in an engine without faults say the same, healed requests included."""
    report = reports(f"audit-{engine}")["alone"]
    assert len(report["healed"]) >= 8
    for fault, found in report["healed"].items():
        assert found["violations"] > 0, fault
        assert found["contained"] > 0, fault
        assert found["texts"] == report["stock"], fault


@pytest.mark.parametrize("engine", ["contained"])
def test_without_it_a_text_is_wrong(reports, engine):
    """The same faults change texts where violations are logged alone."""
    report = reports(f"audit-{engine}")["alone"]
    assert any(texts != report["stock"] for texts in report["logged"].values())
