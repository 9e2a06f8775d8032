"""``kvtxn audit --engine sglang`` over the toy of SGLang: the same workloads, verdict and page."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
from types import SimpleNamespace

import pytest
from kvtxn.integrations.audit_command import command, engine, page, sglang_engine
from kvtxn.integrations.audit_command.jobs import Job, Refused
from kvtxn.integrations.audit_command.verdict import judge
from kvtxn.integrations.audit_command.workloads import WORKLOADS
from kvtxn.integrations.serving.audit_settings import AuditSettings
from kvtxn.integrations.sglang_plugin import starting
from kvtxn.integrations.sglang_plugin.seam import frontend
from served_toy import ServedToy

from kvtxn.errors import ConfigError

PLAYED = [name for name in WORKLOADS if name not in sglang_engine.NOT_PLAYED]


@pytest.fixture
def served(on_a_cpu, monkeypatch):
    """Makes the engine that the next audit starts."""

    def make(settings=None, **more):
        hooks = starting.Hooks(settings or AuditSettings(audit="ledger", record=True))
        toy = ServedToy(hooks, **more)
        monkeypatch.setattr(frontend, "start", lambda arguments: frontend.Frontend(toy))
        return toy

    return make


def audited(*workloads, requests=12):
    """Play workloads in this process; returns the last answer."""
    job = Job(
        engine_args={"model_path": "M"}, engine="sglang", workloads=workloads, requests=requests
    )
    _, theirs = multiprocessing.Pipe()
    return asyncio.run(engine._serve(job, theirs))


def verdict(found):
    violations = [each for one in found.recordings for each in one["violations"]]
    return judge(found.counters, violations, found.requests, len(found.failed))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("workload", PLAYED)
def test_a_healthy_engine_is_called_healthy(served, workload, drafts):
    toy = served(drafts=drafts)
    found = audited(workload)
    assert found.failed == []
    assert verdict(found).word == "healthy", verdict(found)
    assert found.requests >= 12
    assert found.counters[0]["kvtxn_audit_rows_checked_total"] > 200
    assert toy.stopped
    assert found.engine["model"] == "M"


def test_the_page_shows_every_step(served):
    """Requests have the client's names; some left."""
    served()
    found = audited("chat", requests=40)
    data = page.data("kvtxn audit", verdict(found), found, "kvtxn audit")
    recording = data["recording"]
    assert len(recording["steps"]) == found.counters[0]["kvtxn_audit_steps_total"]
    names = [life["name"] for life in recording["requests"]]
    assert 0 < found.aborted <= sum(name.startswith("aborted") for name in names)
    assert all(name.split()[-1].isdecimal() for name in names)
    assert data["engine"]["windows"] == "none"
    assert "SGLang" in data["engine"]
    json.dumps(data)


def test_a_wrong_row_is_told(served):
    """A row is written for another token once; its reader is named as the client names it."""
    toy = served()

    def wrong_token(scheduler, batch):
        mode = batch.forward_batch.forward_mode.name
        if mode == "DECODE" and scheduler.events["steps"] > 20:
            batch.forward_batch.input_ids[0] += 1
            scheduler.fault = None

    toy.toy.fault = wrong_token
    found = audited("chat", requests=40)
    said = verdict(found)
    assert said.exit_code == 1
    assert said.kinds.keys() == {"foreign"}
    violation = found.recordings[0]["violations"][0]
    assert violation["request"].split()[0] in ("request", "aborted")
    assert not violation["request"].endswith(".")


def test_an_abort_ends_one_request_alone():
    """SGLang ends each request whose name begins with the given one."""
    toy = ServedToy(SimpleNamespace(around=dict, opens=lambda *_: None))
    client = frontend.Frontend(toy)

    async def play():
        asked = [
            client.generate(frontend.prompt([1, 2, 3]), frontend.sampling(9, None, None), name)
            for name in ("request 1", "request 10")
        ]
        first = await anext(asked[0])
        await client.abort("request 1")
        await asked[0].aclose()
        tokens = first.outputs[0].token_ids
        rest = [output.outputs[0] async for output in asked[1]]
        return tokens, rest

    tokens, rest = asyncio.run(play())
    assert len(tokens) == 1
    assert len([token for part in rest for token in part.token_ids]) == 9
    assert rest[-1].finish_reason == "length"


def test_an_engine_that_is_not_watched_is_refused(on_a_cpu, monkeypatch, served):
    monkeypatch.setattr(starting, "cannot_watch", lambda facts: "it is a hybrid")
    toy = served()
    found = audited("chat")
    assert isinstance(found, Refused)
    assert found.why.startswith("the ledger does not watch this engine")
    assert toy.stopped


@pytest.mark.parametrize("workload", sglang_engine.NOT_PLAYED)
def test_a_workload_that_cannot_be_played_is_refused(workload):
    found = audited(workload)
    assert isinstance(found, Refused)
    assert f"the workload {workload!r} cannot be played here" in found.why


def test_an_engine_that_does_not_start_is_refused(monkeypatch):
    def start(arguments):
        raise ValueError(f"no such model as {arguments['model_path']}\nmore")

    monkeypatch.setattr(frontend, "start", start)
    why = "SGLang refuses these engine arguments: no such model as M"
    assert audited("chat") == Refused(why)


def test_outputs_are_forced_by_their_logits():
    assert frontend.sampling(5, [7, 3, 7], None) == {
        **{"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True},
        "logit_bias": {"3": frontend._BIAS, "7": frontend._BIAS},
    }
    assert frontend.sampling(5, None, 9)["stop_token_ids"] == [9]
    assert "ignore_eos" not in frontend.sampling(5, None, 9)
    assert frontend.prompt("text") == {"prompt": "text"}
    with pytest.raises(NotImplementedError):
        sglang_engine.SGLangRequests().turn([1], {})


def test_needs_of_a_workload_have_sglangs_names():
    assert sglang_engine.needs("chat", {}) == {}
    few = {"max_running_requests": 16, "max_total_tokens": 1600}
    assert sglang_engine.needs("preempt", {}) == few
    assert sglang_engine.needs("preempt", {"context_length": 512})["max_total_tokens"] == 832
    assert sglang_engine.needs("preempt", few) == {}


# -- the command --------------------------------------------------------------------------


def job(monkeypatch, given=None, settings=None, workload="chat"):
    monkeypatch.delenv("KVTXN_SGLANG", raising=False)
    if settings is not None:
        monkeypatch.setenv("KVTXN_SGLANG", settings)
    args = argparse.Namespace(
        **{"workload": workload, "engine": "sglang", "engine_args": given},
        **{"requests": 9, "seed": 0, "log_level": "error"},
    )
    return command.job_of(args)


def test_the_environment_asks_for_an_audit_with_a_recording(monkeypatch):
    """The user's own settings stay."""
    found = job(monkeypatch, {"model_path": "M"}, '{"weights_every": 8}')
    assert found.engine_args == {"model_path": "M"}
    (text,) = engine.front("sglang").environment(found).values()
    assert json.loads(text) == {"weights_every": 8, "audit": "ledger", "record": True}
    found = job(monkeypatch, {"model_path": "M"}, '{"audit": "bytes"}')
    assert json.loads(found.settings)["audit"] == "bytes"


def test_all_are_those_that_can_be_played(monkeypatch):
    assert job(monkeypatch, {"model_path": "M"}, workload="all").workloads == tuple(PLAYED)


@pytest.mark.parametrize(
    ("given", "settings", "why"),
    [
        (None, None, "is not a JSON object with a model_path, which SGLang needs"),
        ({"model": "M"}, None, "with a model_path"),
        ({"model_path": "M"}, '{"on_violation": "raise"}', "would end the engine before"),
        ({"model_path": "M"}, '{"policy": "undo"}', "kvtxn opens no windows in it"),
    ],
)
def test_what_cannot_be_audited_is_refused(monkeypatch, given, settings, why):
    with pytest.raises(ConfigError, match=why):
        job(monkeypatch, given, settings)
