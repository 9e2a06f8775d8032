"""A forward that fails leaves rows that nobody computed; the prefix cache has their blocks."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from kernels_here import importing_kernels

pytest.importorskip("vllm")

from test_audit_v2 import engine_facts, prompt  # noqa: F401  # a fixture
from test_audit_watch import Room, arrival, come, watch
from v2_rig import Rig
from watched_rows import GROUP, rows, unknown

with importing_kernels():
    from kvtxn.integrations.serving.ledger.watch import Watch

from kvtxn.integrations.vllm_plugin import runner_parts
from kvtxn.integrations.vllm_plugin.audit import runner_steps
from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts
from kvtxn.integrations.vllm_plugin.policy.settings import settings
from kvtxn.integrations.vllm_plugin.seam.batches import PlannedV1

TOKENS = [1, 2, 3, 4, 5]


class Failing:
    """Stands for vLLM's V1 runner; its forward and its sampling fail if they are told to."""

    fails = ""

    def _model_forward(self):
        if self.fails == "forward":
            raise RuntimeError("a kernel failed")

    def sample_tokens(self, grammar_output):
        if self.fails == "sampling":
            raise RuntimeError("a kernel failed")


WATCHED = settings({"kvtxn": {"audit": "ledger"}}, 1, "cpu")


def hooked(monkeypatch, device):
    """A hooked runner with a ledger, before a forward that was prepared."""
    made = Failing()
    monkeypatch.setattr(runner_parts.audited_requests, "AUDITED_METHODS", {})
    monkeypatch.setattr(runner_parts.audited_requests, "samples", lambda runner: True)
    runner_parts.attach(made, WATCHED, 0, EngineFacts(device=device, runner="v1"), windows=False)
    made.kvtxn_planned = PlannedV1(made, (torch.tensor([4]),), None)
    return made


def read(steps, planned, inputs):
    """Read the step of a prompt."""
    return rows("a", 0, TOKENS, [4, 5, 6, 7, 8], [1, 2]), None


def on_cpu(monkeypatch):
    """A hooked runner of a CPU, whose watch is told of a prompt's step before its forward."""
    monkeypatch.setattr(runner_steps.CpuSteps, "read", read)
    return hooked(monkeypatch, "cpu")


def on_gpu(monkeypatch):
    """The same in the way of GPUs."""
    monkeypatch.setattr(runner_steps.DeviceSteps, "read", read)
    return hooked(monkeypatch, "cuda")


def device_watch():
    made = Watch(
        {"group.0": GROUP}, Room(2, 32, caches_prefixes=True), 0, "log",
        device=torch.device("cpu"), drafts=2,
    )  # fmt: skip
    made.begin()
    return made


WAYS = [(on_cpu, watch), (on_gpu, device_watch)]


def read_again(w):
    """Another request hits the first block; returns what is found."""
    w.change(come(arrival("b", [1, 2, 3, 4, 6], [1, 3], computed=4), gone=["a"]))
    w._forward(rows("b", 4, [6], [12], [1, 3]), unknown, None)
    w.take_back()  # nobody hears of it in vain
    return [(v["kind"], v["request"], v["position"]) for v in w.report()]


@pytest.mark.parametrize(("runner_on", "make"), WAYS)
@pytest.mark.parametrize(
    ("fails", "late", "wrong"),
    [("", False, False), ("forward", False, True), ("sampling", False, False),
     ("sampling", True, True)],
)  # fmt: skip
def test_the_next_reader_is_told(monkeypatch, runner_on, make, fails, late, wrong):
    """Where sampling fails the rows are there, but for those of a drafter."""
    runner, w = runner_on(monkeypatch), make()
    w.change(come(arrival("a", TOKENS, [1, 2])))
    runner.kvtxn_audit, runner.fails, w.drafts_late = w, fails, late
    with suppress(RuntimeError):
        runner._model_forward()
        runner.sample_tokens(None)
    w.drafts_late = False
    assert read_again(w) == ([("unwritten", "b", 0)] if wrong else [])


def test_a_forward_of_nobodys_takes_nothing_back(monkeypatch):
    runner, w = on_cpu(monkeypatch), watch()
    w.change(come(arrival("a", TOKENS, [1, 2])))
    runner.kvtxn_audit = w
    runner._model_forward()
    runner.fails = "forward"
    with pytest.raises(RuntimeError, match="a kernel failed"):
        runner._model_forward()  # nothing was prepared
    assert read_again(w) == []


def test_a_step_of_the_v2_runner():
    rig = Rig()
    rig.start()
    one = rig.add("one", prompt(1, 9))
    for _ in range(3):
        rig.step()
    position = one.computed

    def failing(given):
        raise RuntimeError("a kernel failed")

    rig._sample = failing
    rig.runner.forward = rig.step
    with pytest.raises(RuntimeError, match="a kernel failed"):
        rig.runner.execute_model(None)
    del rig._sample
    one.computed += 1  # as vLLM's scheduler does when it schedules a step
    one.tokens.append(7)
    for _ in range(3):
        rig.step()
    found = [(v["kind"], v["request"], v["position"]) for v in rig.watch.report()]
    assert found[0] == ("unwritten", "one", position)
    assert rig.watch.counters()["kvtxn_audit_active"] == 1


def test_what_fails_before_a_step_is_told_takes_nothing_back():
    rig = Rig()
    rig.start()
    rig.add("one", prompt(1, 9))
    rig.runner.forward = rig.step
    for _ in range(3):
        rig.runner.execute_model(None)
    step = rig.step
    rig.runner.forward = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        rig.runner.execute_model(None)
    step()
    assert rig.watch.report() == []
