"""An engine's process, with a vLLM that only pretends: every way to fail ends in a sentence."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kvtxn.benchmarks.engines.load import Work
from kvtxn.benchmarks.engines.process import Engine, EngineError, EngineSpec
from kvtxn.integrations.vllm_plugin.seam.measuring import set_acceptance, together

from kvtxn.cli import main

#: Stands in for vLLM in the engine's process; ``model`` says how it behaves.
PRETENDED = '''
import os, sys, time
from types import SimpleNamespace
from . import sampling_params
from .sampling_params import SamplingParams

def orphan():
    """A process that holds on to all that was inherited, as a worker of an engine might."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
    print("orphan", child, flush=True)

class Engine:
    def __init__(self, model):
        self.waiting, self.model, self.seen = [], model, []
        active = [{"kvtxn_active": 0.0 if model == "inactive" else 1.0}]
        audited = [{"kvtxn_active": 0.0, "kvtxn_audit_active": 1.0}]
        self.engine_core = SimpleNamespace(
            shutdown=lambda: None,
            collective_rpc=lambda call: (
                [[]] if call == "kvtxn_audit_report" else audited if "audit" in model else active
            ),
        )
    def add_request(self, name, prompt, params, arrival_time):
        self.waiting.append((name, params, arrival_time))
    def has_unfinished_requests(self):
        return bool(self.waiting)
    def step(self):
        time.sleep(600 if self.model == "hangs later" else 0.01)
        if self.model == "dies later":
            print("about to die", flush=True)
            os._exit(4)
        name, params, arrival = self.waiting.pop()
        ids = [int(name)] * params.max_tokens
        stats = SimpleNamespace(
            first_token_latency=time.time() - arrival, first_token_ts=1.0, last_token_ts=2.0
        )
        done = SimpleNamespace(
            request_id=name, finished=True, metrics=stats,
            outputs=[SimpleNamespace(token_ids=ids)],
        )
        return [done, SimpleNamespace(finished=False)]

class LLM:
    def __init__(self, *, model, disable_log_stats, additional_config, **others):
        if model != "hangs":
            print("loading", model, additional_config, os.environ.get("TOLD"), flush=True)
        if model == "audit announces":
            print("info kvtxn.audit_active groups=1", flush=True)
        if "announces" in model:
            print("info 'kvtxn.active' policy='undo'", flush=True)
            print("(Worker) kvtxn.active policy='deferred'", flush=True)
        if model == "refuses":
            raise ValueError("no such model\\nand more")
        if model == "hangs":
            print("process", os.getpid(), flush=True)
            time.sleep(600)
        if model == "dies":
            orphan()
            os._exit(3)
        self.llm_engine, self.model, self.drafted = Engine(model), model, 0
    def get_metrics(self):
        self.drafted += 7
        return [SimpleNamespace(name="vllm:spec_decode_num_draft_tokens", value=self.drafted)]
    def collective_rpc(self, call, args):
        print(call.__name__, args[0], flush=True)
'''

PARAMETERS = """
from types import SimpleNamespace
RequestOutputKind = SimpleNamespace(FINAL_ONLY=2)
class SamplingParams:
    def __init__(self, *, max_tokens, temperature, **others):
        self.max_tokens = max_tokens
        print("temperature", temperature, flush=True)
"""


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """A pretended vLLM is what every new process finds."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(PRETENDED)
    (package / "sampling_params.py").write_text(PARAMETERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def start(pretended):
    """Start an engine of the pretended vLLM; it is stopped afterwards."""
    engines = []

    def begin(model: str, policy: str = "stock", **others) -> Engine:
        engines.append(Engine(EngineSpec(policy=policy, arguments={"model": model}, **others)))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.stop()


def gone(process: int) -> bool:
    """Tell whether it has ended; nobody may have reaped it yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] in "ZX"
    except OSError:
        return True


def until(holds) -> None:
    """Wait, at most a minute, on a machine that may be busy."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_repetition(start):
    """Requests in order, counts as differences, latency from arrival, what was asked for."""
    engine = start("announces", "undo", environment={"TOLD": "so"})
    engine.ready()
    assert "{'kvtxn': {'policy': 'undo'}} so" in engine.log()
    found = engine.run(Work(prompts=[[1], [2], [3]], max_tokens=[3, 2, 1], rates=[0.5]))
    assert "set_acceptance (0.5,)" in engine.log()
    assert "temperature 0.0" in engine.log()
    ids = repr([[0, 0, 0], [1, 1], [2]]).encode()
    assert found.digest == hashlib.sha256(ids).hexdigest()[:16]
    assert (found.generated, found.drafted, found.accepted) == (6, 7, 0)
    assert found.per_token == [0.5, 1.0]
    assert len(found.first_token) == 3
    assert engine.announced() == "policy='deferred'"  # the last line that says so


def test_requests_arrive_when_they_should(start):
    """Not before; the engine sleeps until then, and latency counts from there."""
    engine = start("works")
    engine.ready()
    found = engine.run(Work(prompts=[[1], [2]], max_tokens=1, arrivals=[0.0, 0.4]))
    assert found.seconds > 0.4
    # The second one's first token comes before the end, and counts from its own arrival.
    assert found.first_token[1] < found.seconds - 0.4 + 0.1
    assert engine.announced() is None  # it is stock


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("refuses", "the engine 'stock' failed while it started: ValueError: no such model;"),
        ("dies", "the engine 'stock' ended while it started, exit code 3;"),
        ("hangs", "the engine 'stock' gave no answer within 2 s while it started;"),
    ],
)
def test_failures_at_the_start(start, model, message):
    """Refused, dead (with a process of its own that lives on), or stuck: said, with the log."""
    engine = start(model, timeout=2 if model == "hangs" else 120)
    with pytest.raises(EngineError) as caught:
        engine.ready()
    assert message in str(caught.value)
    if model != "hangs":  # which may not even have begun
        assert f"its log says last:\nloading {model}" in str(caught.value)
    engine.stop()
    if model == "dies":  # nothing is left behind; a container may have nobody to reap it
        orphan = int(engine.log().split()[-1])
        until(lambda: gone(orphan))


@pytest.mark.parametrize(
    ("model", "message"),
    [("dies later", "ended during a repetition, exit code 4"), ("hangs later", "no answer within")],
)
def test_failures_later(start, model, message):
    """In the middle of a run; after that the engine takes no more commands."""
    engine = start(model)
    engine.ready()
    engine.process.timeout = 1 if model == "hangs later" else 60
    with pytest.raises(EngineError, match=message):
        engine.run(Work(prompts=[[1]], max_tokens=1))
    if model == "dies later":
        with pytest.raises(EngineError, match="ended"):
            engine.snapshot()


def test_an_engine_without_kvtxn_is_not_measured(start):
    """The plug-in stayed out, so a policy's numbers would be stock's."""
    with pytest.raises(EngineError, match="'deferred' runs without kvtxn"):
        start("inactive", "deferred").ready()


@pytest.mark.parametrize("audit", ["ledger", "bytes"])
def test_an_engine_without_its_audit_is_not_measured(start, audit):
    """It cannot be watched, or the audit failed: its numbers would be stock's."""
    with pytest.raises(EngineError, match=f"'{audit}' runs without its audit"):
        start("inactive", audit).ready()


def test_an_audited_engine_is_asked_what_it_found(start):
    """By the plug-in's own functions; a stock engine is not asked."""
    engine = start("audit announces", "ledger")
    engine.ready()
    assert "{'kvtxn': {'audit': 'ledger'}}" in engine.log()
    [rank] = engine.audited()
    assert rank.counters == {"kvtxn_active": 0.0, "kvtxn_audit_active": 1.0}
    assert rank.report == []
    assert engine.announced() == "groups=1"  # the audit's line, and none of windows
    other = start("works")
    other.ready()
    assert other.audited() == []


def test_the_command_ends_with_a_sentence(pretended, tmp_path, capsys):
    """An engine that cannot start, here for an argument that users gave: no result, no hang."""
    out = tmp_path / "out"
    arguments = ["--engine-args", '{"model": "refuses"}', "--folder", str(out)]
    assert main(["bench", "vllm", "--policies", "stock", *arguments]) == 2
    error = capsys.readouterr().err
    assert "kvtxn bench: bench vllm: the engine 'stock' failed while it started" in error
    assert "ValueError: no such model" in error
    assert not out.exists()


def test_a_time_limit_from_outside_leaves_nothing_behind(pretended, tmp_path):
    """As by `timeout`: the command ends by SIGTERM, and its engines with it."""
    command = "import sys; from kvtxn.cli import main; sys.exit(main(sys.argv[1:]))"
    given = ["--policies", "stock", "--engine-args", '{"model": "hangs"}', "--folder", "out"]
    bench = subprocess.Popen(
        [sys.executable, "-c", command, "bench", "vllm", *given],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    until(lambda: any("process" in log.read_text() for log in tmp_path.glob("*.log")))
    (log,) = tmp_path.glob("*.log")
    engine = int(log.read_text().split()[1])
    assert not gone(engine)
    bench.terminate()
    assert bench.wait(timeout=60) == 128 + signal.SIGTERM
    until(lambda: gone(engine))
    assert not (tmp_path / "out").exists()


def test_rates_are_set_given_those_before():
    """vLLM keeps the chance of each draft given that the one before was accepted."""
    rates = torch.zeros(3)
    sampler = SimpleNamespace(synthetic_conditional_rates=rates)
    worker = SimpleNamespace(model_runner=SimpleNamespace(rejection_sampler=sampler))
    set_acceptance(worker, (0.8, 0.4, 0.0))
    assert rates.tolist() == pytest.approx([0.8, 0.5, 0.0])
    set_acceptance(worker, (0.0, 0.0, 0.0))
    assert rates.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("fails", [False, True])
def test_requests_that_come_at_once_begin_together(fails):
    """A core in another process makes no step until it has all of them, and goes on in any case."""
    calls = []
    core = SimpleNamespace(call_utility=lambda name, *args: calls.append((name, *args)))

    def add() -> None:
        calls.append("add")
        if fails:
            raise RuntimeError("no such request")

    before = time.perf_counter()
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        assert before <= together(SimpleNamespace(engine_core=core), add) <= time.perf_counter()
    assert calls == [("pause_scheduler", "keep", False), "add", ("resume_scheduler",)]
    calls.clear()
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        together(SimpleNamespace(engine_core=SimpleNamespace()), add)
    assert calls == ["add"]
