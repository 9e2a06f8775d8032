"""Engines in which the audit can contain nothing say so, or do not start if it is required."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvtxn.integrations.vllm_plugin import starting
from kvtxn.integrations.vllm_plugin.audit.audited_scheduler import follow_scheduler
from kvtxn.integrations.vllm_plugin.policy import RequiredError
from kvtxn.integrations.vllm_plugin.seam.audited_requests import uncontained
from test_audit_watch import CONTAIN, STAGES, asked, config


def test_pipeline_stages_are_watched_and_not_contained():
    assert uncontained(config()) is None
    assert "pipeline stages" in uncontained(config(**STAGES))


def test_pooling_engines_and_schedulers_of_others_are_not_contained(lines):
    assert uncontained(config(work="pooling")).startswith("a pooling engine ends a request")
    pytest.importorskip("vllm")
    from vllm.v1.core.sched.scheduler import Scheduler

    class Derived(Scheduler):
        pass

    assert uncontained(config(scheduler=Derived)) is None
    given = config(scheduler=SimpleNamespace)
    assert "SimpleNamespace does not derive from" in uncontained(given)
    wanted = asked(**CONTAIN)
    assert starting._audited(given, wanted, 0) is wanted  # its scheduler is not told, so that it
    assert "audit_cannot_contain" in lines[0]  # would say so
    with pytest.raises(RequiredError, match="does not derive"):
        starting._audited(given, asked(**CONTAIN, required=True), 0)
    assert starting._audited(config(work="pooling"), wanted, 0) is wanted
    assert len(lines) == 1  # vLLM's own scheduler says it
    with pytest.raises(RequiredError, match="a pooling engine"):
        starting._audited(config(work="pooling"), asked(**CONTAIN, required=True), 0)


def test_a_scheduler_of_pipeline_stages_says_that_it_contains_nothing(lines):
    """Where the user requires kvtxn, it does not start."""
    stages = config(**STAGES)
    scheduler = SimpleNamespace()
    follow_scheduler(scheduler, stages, contains=True, required=False)
    assert "audit_cannot_contain" in lines[0]
    assert "pipeline stages" in lines[0]
    with pytest.raises(RequiredError, match="pipeline stages"):
        follow_scheduler(scheduler, stages, contains=True, required=True)
    assert type(scheduler) is SimpleNamespace
