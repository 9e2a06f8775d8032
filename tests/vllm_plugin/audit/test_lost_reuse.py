"""Rows that an engine's prefix cache has and that it computes again, in real engines."""

from __future__ import annotations

import pytest
from engine_jobs import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def lost(blocks, rows, **by_reason):
    """What a request uses and loses, in blocks of so many rows."""
    found = {f"_{why}": number * rows for why, number in by_reason.items()}
    total = {"": sum(found.values())} if found else {}
    return {"used": blocks * rows, "lost": total | found}


@pytest.mark.engines("audit-lost-reuse")
def test_the_last_token_and_logprobs_of_prompts(reports):
    report = reports("audit-lost-reuse")["alone"]
    found, rows = report["asked"], report["block"]
    assert found["first"] == lost(0, rows)
    assert found["again"] == lost(2, rows, last_token=1)
    assert found["longer"] == lost(3, rows)
    assert found["longest"] == lost(3, rows)
    assert found["shorter"] == lost(2, rows)
    assert found["logprobs"] == lost(0, rows, prompt_logprobs=3)
    assert report["violations"] == []


@pytest.mark.engines("audit-lost-states")
def test_states_that_are_not_there(reports):
    """vLLM keeps the states of a recurrent layer at few ends of blocks, and not at this one."""
    report = reports("audit-lost-states")["alone"]
    found, rows = report["asked"], report["block"]
    assert found["first"] == lost(0, rows)
    assert found["again"]["lost"]["_last_token"] == rows
    for each in found.values():
        parts = each["lost"].copy()
        assert sum(parts.values()) == 2 * parts.get("", 0)
    assert sum(each["lost"].get("_states", 0) for each in found.values()) >= rows
    assert found["logprobs"]["lost"]["_prompt_logprobs"] >= 3 * rows
    assert report["violations"] == []
