"""Real servers on GPUs: the page counts what vLLM counts, for every engine and rank."""

from __future__ import annotations

import pytest
from gpu_jobs import missing
from gpu_serve import SERVERS, gpus, serve


def judge(found):
    """One server's page, once it had caught up."""
    assert 0 < found["accepted"] < found["drafted"]
    assert found["staged"] == found["drafted"]
    assert found["committed"] == found["accepted"]
    assert found["rejected"] == found["drafted"] - found["accepted"]
    assert found["windows"] + found["bypassed"] == found["steps"]  # one request at a time
    assert found["bypassed"] <= 0.1 * found["steps"]
    assert found["fallbacks"] == 0
    assert found["active"] == found["engines"] * found["ranks"]
    assert found["lost"] == []


@pytest.mark.parametrize("name", SERVERS)
def test_a_server(name, tmp_path, monkeypatch):
    """A server's page counts the same tokens as vLLM does, for every engine and rank."""
    reason = missing(count=gpus(name))
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    judge(serve(name, tmp_path))


def test_it_can_fail():
    """The judge fails on a row that kvtxn missed, and on a rank without kvtxn."""
    good = {
        **{"staged": 429, "committed": 228, "rejected": 201, "drafted": 429, "accepted": 228},
        **{"windows": 134, "steps": 134, "bypassed": 0, "fallbacks": 0, "lost": []},
        **{"active": 2, "engines": 1, "ranks": 2},
    }
    judge(good)
    for wrong in ({"staged": 428}, {"active": 1}, {"fallbacks": 1}, {"lost": ["vllm:x"]}):
        with pytest.raises(AssertionError):
            judge(good | wrong)
