"""Real servers on GPUs: the page counts what vLLM counts, for every engine and rank."""

from __future__ import annotations

import json
import math

import gpu_serve
import pytest
from gpu_jobs import missing
from gpu_judge import beyond
from gpu_serve import SERVERS, gpus, serve


def misread(found):
    """The numbers of one server's page, once it had caught up, that vLLM's own do not allow."""
    drafted, accepted, steps = found["drafted"], found["accepted"], found["steps"]
    ranks = found["engines"] * found["ranks"]
    loaded = "--kv-transfer-config" in found["options"]
    curled = found["curl"] or {"tokens": 8, "page": [""]}
    return beyond(
        {
            "accepted": (accepted, 1, drafted - 1),
            "staged": (found["staged"], drafted, drafted),
            "committed": (found["committed"], accepted, accepted),
            "rejected": (found["rejected"], drafted - accepted, drafted - accepted),
            # One request at a time.
            "windows": (found["windows"] + found["bypassed"], steps, steps),
            "bypassed": (found["bypassed"], -math.inf, 0.1 * steps),
            "fallbacks": (found["fallbacks"], 0, 0),
            "active": (found["active"], ranks, ranks),
            "lost": (len(found["lost"]), 0, 0),
            "loaded": (found["loaded"], float(loaded), math.inf if loaded else 0),
            "curled": (curled["tokens"], 8, 8),
            "curled page": (len(curled["page"]), 1, math.inf),
        }
    )


@pytest.mark.parametrize("name", SERVERS)
def test_a_server(name, tmp_path, monkeypatch):
    """A server's page counts the same tokens as vLLM does, for every engine and rank."""
    reason = missing(count=gpus(name))
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    assert misread(serve(name, tmp_path)) == {}


def test_it_can_fail():
    """The page fails with a row that kvtxn missed, on a rank without kvtxn, with no row loaded."""
    good = {
        **{"staged": 429, "committed": 228, "rejected": 201, "drafted": 429, "accepted": 228},
        **{"windows": 134, "steps": 134, "bypassed": 0, "fallbacks": 0, "lost": []},
        **{"active": 2, "engines": 1, "ranks": 2, "options": "", "loaded": 0, "curl": None},
    }
    assert misread(good) == {}
    for name, wrong in (("staged", 428), ("active", 1), ("fallbacks", 1), ("lost", ["vllm:x"])):
        assert list(misread(good | {name: wrong})) == [name]
    connected = good | {"options": "--kv-transfer-config {}"}
    assert list(misread(connected)) == ["loaded"]
    assert misread(connected | {"loaded": 64}) == {}
    bad = {"tokens": 8, "page": []}
    assert list(misread(good | {"curl": bad})) == ["curled page"]


def test_a_server_that_does_not_serve_is_a_failure(tmp_path, monkeypatch):
    """Those that need more GPUs than there are do not count, unless they are asked for."""
    for name in ("VLLM_USE_FLASHINFER_SAMPLER", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "1")  # so that what main sets is gone afterwards
    monkeypatch.setattr(gpu_serve, "serve", lambda name, folder: {"served": name})
    record = tmp_path / "servers.json"
    assert gpu_serve.main(record, [], 1) == 0
    assert sorted(json.loads(record.read_text())) == ["connected", "many", "one"]
    monkeypatch.setattr(gpu_serve, "serve", lambda name, folder: {}[name])
    assert gpu_serve.main(record, ["tp2"], 1) == 1
    assert "KeyError" in json.loads(record.read_text())["tp2"]["error"]
