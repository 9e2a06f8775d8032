"""``on_violation="contain"``: a wrong block is read by nobody else, and its reader starts again."""

from __future__ import annotations

import pytest
from engine_jobs import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.engines("audit-contained")
def test_every_text_is_right(reports):
    """The same requests in an engine without faults say the same, healed requests included."""
    report = reports("audit-contained")["alone"]
    assert len(report["healed"]) >= 8
    for fault, found in report["healed"].items():
        assert found["violations"] > 0, fault
        assert found["contained"] > 0, fault
        assert found["texts"] == report["stock"], fault


@pytest.mark.engines("audit-contained")
def test_logprobs_of_a_prompt_come_again(reports):
    """Those of the step that read a wrong row are dropped with its token."""
    (_, right), (struck, healed) = reports("audit-contained")["alone"]["prompt_logprobs"]
    assert struck
    assert len(right) > 60
    assert healed == right


@pytest.mark.engines("audit-contained")
def test_without_it_a_text_is_wrong(reports):
    """The same faults change texts where violations are logged alone."""
    report = reports("audit-contained")["alone"]
    assert any(texts != report["stock"] for texts in report["logged"].values())


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(name, marks=pytest.mark.engines(f"audit-contained-{name}"))
        for name in ("process", "ranks")
    ],
)
def test_every_text_is_right_across_processes(reports, engine):
    """The worker, or one of two, has a process of its own, and so has the scheduler.

    Of the two ranks each one has faults that the other one does not see. The engine of one worker
    has groups with blocks of different sizes.
    """
    jobs = reports(f"audit-contained-{engine}")
    report = jobs["alone"]
    for fault, found in report["healed"].items():
        assert found["struck"], fault
        assert found["violations"] > 0, fault
        assert found["texts"] == report["stock"], fault
    assert jobs.log("alone").count("kvtxn.audit_contained") == len(report["healed"]) == 4


@pytest.mark.parametrize(
    "connector",
    [
        pytest.param(name, marks=pytest.mark.engines(f"audit-contained-{name}"))
        for name in ("offloading", "example", "several")
    ],
)
def test_nobody_ends_beside_a_connector(reports, connector):
    """vLLM ends requests whose rows a connector could not load; wrong reads are no such loads.

    A client that hangs up in the step that is contained, or right after it, ends no request but
    its own.
    """
    report = reports(f"audit-contained-{connector}")["alone"]
    for case, found in report.items():
        assert found["violations"] > 0, case
        assert found["ended"] == [], case
        assert found["wrong"] == [], case
        assert (found["left"] is not None) == ("leaves" in case), case
