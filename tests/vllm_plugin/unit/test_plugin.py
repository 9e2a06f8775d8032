"""Hooking and unhooking, on stand-ins for vLLM's worker and runner."""

from __future__ import annotations

import logging
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from engine_jobs import missing
from kvtxn.integrations.vllm_plugin import plugin as vllm_plugin
from kvtxn.integrations.vllm_plugin import starting, worker_answers
from kvtxn.integrations.vllm_plugin.policy import RequiredError
from kvtxn.integrations.vllm_plugin.runners.hooked_runner import unhook_runner
from kvtxn.integrations.vllm_plugin.seam import engine_config as engine_config
from kvtxn.integrations.vllm_plugin.seam import workers
from worker_rig import OtherRunner, Runner, wrapper

from kvtxn import BackendUnavailableError, ConfigError, LayerRef, TransactionManager

needs_vllm = pytest.mark.skipif(missing() is not None, reason=str(missing()))


LAYERS = SimpleNamespace(kv_connector="LMCacheConnectorV1")
OTHER = SimpleNamespace(kv_connector="OtherConnector")


#: How the settings of a worker's engine are read, by where.
START = {
    "engine": lambda worker: vllm_plugin._before_engine(worker.vllm_config),
    "worker": lambda worker: vllm_plugin._on_worker(worker),
}


@pytest.fixture
def lines(monkeypatch):
    """Lines of the ``kvtxn`` logger."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("kvtxn")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setattr(workers, "version", lambda: "0.32.0")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=SimpleNamespace()))
    return said


@pytest.mark.parametrize(("device", "counts"), [("cuda", True), ("cpu", False)])
def test_graphs_that_write_rows(lines, device, counts):
    """Whole forwards in graphs are ours to fill; of parts vLLM leaves out its writer, or not."""
    speculation = SimpleNamespace(
        num_speculative_tokens=4,
        method="ngram",
        enable_adaptive_verification=False,
        num_speculative_tokens_per_batch_size=None,
    )
    compilation = SimpleNamespace(use_inductor_graph_partition=False)
    config = wrapper(
        speculative_config=speculation,
        device_config=SimpleNamespace(device_type=device),
        compilation_config=compilation,
    ).vllm_config
    assert not engine_config.config_facts(config).graph_writes
    compilation.use_inductor_graph_partition = True
    assert engine_config.config_facts(config).graph_writes == counts
    compilation.use_inductor_graph_partition = False
    compilation.pass_config = SimpleNamespace(fuse_rope_kvcache_cat_mla=True)
    config.model_config.use_mla = True  # latents are written by the kernel that rotates them
    assert engine_config.config_facts(config).graph_writes == counts
    config.model_config.use_mla = False
    assert not engine_config.config_facts(config).graph_writes
    sys.modules["vllm"].envs.VLLM_USE_BREAKABLE_CUDAGRAPH = True
    assert engine_config.config_facts(config).graph_writes == counts


def test_a_worker_that_asks_is_hooked_and_can_be_unhooked(lines):
    worker = wrapper({"policy": "undo"})
    runner = worker.worker.model_runner
    vllm_plugin._on_worker(worker)
    hooked = type(runner)
    assert hooked is not Runner
    assert isinstance(runner, Runner)
    vllm_plugin._on_worker(worker)
    assert type(runner) is hooked  # never twice
    assert runner.kvtxn_config.max_rows == 40  # 8 requests of 4 drafts and a settled row
    assert (runner._update_states(None), runner._sample(None, None)) == ("updated", "sampled")
    assert runner._model_forward() == "hidden"
    assert worker_answers._snapshot(worker) == {"kvtxn_active": 0.0}
    unhook_runner(runner)
    assert type(runner) is Runner


@pytest.mark.parametrize(
    ("settings", "changes", "why"),
    [
        (
            {"policy": "undo"},
            {"use_v2_model_runner": True},
            "runner v2 is not supported",
        ),
        ({"policy": "undo"}, {"speculative_config": None}, "does not speculate"),
        ({"policy": "undo"}, {"kv_transfer_config": LAYERS}, "LMCacheConnectorV1 may copy draft"),
        ({"policy": "undo"}, {"kv_transfer_config": OTHER}, "with connector OtherConnector"),
    ],
)
def test_refusals_are_said_and_the_engine_runs_stock(lines, settings, changes, why):
    worker = wrapper(settings, **changes)
    vllm_plugin._on_worker(worker)
    assert type(worker.worker.model_runner) is Runner
    assert len(lines) == 1
    assert "kvtxn.inactive" in lines[0]
    assert why in lines[0]


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"policy": "undoo"}, ConfigError, "policy is not valid"),
        ({"polcy": "undo"}, ConfigError, "there is no setting 'polcy'"),
        ({"policy": "undo", "max_rows": "9"}, ConfigError, "max_rows is not valid"),
        ({"policy": "undo", "backend": "abacus"}, BackendUnavailableError, "abacus"),
        ("undo", ConfigError, "the settings are not valid"),
        ({"audit": "yes"}, ConfigError, "audit is not valid.*; leave audit out for 'off'"),
        ({"policy": "undo", "required": 1}, ConfigError, "leave required out for false"),
        ({"policy": "undo", "on_violation": "raise"}, ConfigError, "no effect without an audit"),
        ({"policy": "undo", "record": True}, ConfigError, "no effect without an audit"),
    ],
)
@pytest.mark.parametrize("where", ["engine", "worker"])
def test_a_mistake_of_the_users_stops_the_start(lines, settings, error, says, where):
    """Before any worker starts, and in a worker that starts all the same; one sentence, no log."""
    worker = wrapper(settings)
    with pytest.raises(error, match=says):
        START[where](worker)
    assert type(worker.worker.model_runner) is Runner
    assert lines == []


@pytest.mark.parametrize(
    ("runner", "changes", "says"),
    [
        (Runner, {"speculative_config": None}, "does not speculate"),
        (Runner, {"use_v2_model_runner": True}, "runner v2 is not supported"),
        (OtherRunner, {}, "this model runner is unknown: OtherRunner._sample takes"),
    ],
)
def test_what_is_required_and_cannot_be_had_stops_the_start(lines, runner, changes, says):
    """Without ``required`` the same engine runs stock, see below."""
    worker = wrapper({"policy": "undo", "required": True}, runner(), **changes)
    with pytest.raises(RequiredError, match=f"kvtxn is required, but .*{says}"):
        vllm_plugin._on_worker(worker)
    assert type(worker.worker.model_runner) is runner
    assert lines == []


@pytest.mark.parametrize("asked", [{"policy": "undo"}, {"audit": "ledger"}])
@pytest.mark.parametrize("where", ["engine", "worker"])
def test_an_engine_that_vllm_does_not_run_is_called_that(lines, where, asked):
    """To leave ``required`` out would not help, so nobody advises it."""
    worker = wrapper({**asked, "required": True}, head_size=16)
    with pytest.raises(RequiredError, match="no kernel for heads of 16 numbers") as caught:
        START[where](worker)
    assert str(caught.value).startswith("vLLM: ")
    assert str(caught.value).endswith("with or without kvtxn; choose another model or device")


def test_required_holds_for_caches_that_cannot_be_understood(lines):
    """Here it is the model that is missing; the error's cause says so."""
    worker = wrapper({"policy": "undo", "required": True})
    vllm_plugin._on_worker(worker)
    with pytest.raises(RequiredError, match="kvtxn is required, but") as caught:
        worker.worker.model_runner.initialize_kv_cache(None)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("error", [None, ConfigError("x", "named what it must not")])
def test_errors_in_the_middle_of_hooking_leave_stock(lines, monkeypatch, error):
    """Errors while hooking leave stock vLLM running, except errors in the user's settings."""
    failing = error or RuntimeError("something else")

    def broken(*_):
        raise failing

    monkeypatch.setattr(starting, "_attach", broken)
    worker = wrapper({"policy": "undo"})
    if error is not None:
        with pytest.raises(ConfigError, match="named what it must not"):
            vllm_plugin._on_worker(worker)
        return
    vllm_plugin._on_worker(worker)
    assert "kvtxn.inactive" in lines[0]
    assert "something else" in lines[0]
    with pytest.raises(RuntimeError, match="something else"):
        vllm_plugin._on_worker(wrapper({"policy": "undo", "on_error": "raise"}))
    with pytest.raises(RequiredError, match="something else"):
        vllm_plugin._on_worker(wrapper({"policy": "undo", "required": True}))


def test_a_runner_hooked_halfway_is_given_back(lines, monkeypatch):
    """An error after the runner's class was swapped leaves stock, and not half of the hooks."""

    def broken(facts):
        raise AttributeError("moved")

    monkeypatch.setattr(starting, "on_trial", broken)
    worker = wrapper({"policy": "undo"})
    vllm_plugin._on_worker(worker)
    assert type(worker.worker.model_runner) is Runner
    assert "kvtxn.inactive" in lines[0]
    assert "moved" in lines[0]


@pytest.mark.parametrize(
    ("asked", "error"),
    [({}, None), ({"required": True}, RequiredError), ({"on_error": "raise"}, ZeroDivisionError)],
)
def test_an_error_after_the_warm_up_leaves_stock(lines, monkeypatch, asked, error):
    worker = wrapper({"policy": "undo", **asked})
    vllm_plugin._on_worker(worker)
    runner = worker.worker.model_runner
    assert type(runner) is not Runner
    lines.clear()
    runner.kvtxn_audit = SimpleNamespace(begin=lambda: 1 / 0)
    if error is None:
        starting._warmed_up(runner, "0")
        assert "kvtxn.inactive" in lines[0]
    else:
        with pytest.raises(error):
            starting._warmed_up(runner, "0")
    assert type(runner) is Runner


def test_an_unknown_release_is_refused_before_anything_is_read(lines, monkeypatch):
    monkeypatch.setattr(workers, "version", lambda: "0.99.0")
    worker = wrapper({"policy": "undo"}, parallel_config=None, model_config=None)
    vllm_plugin._on_worker(worker)
    assert type(worker.worker.model_runner) is Runner
    assert "vLLM 0.99.0 was not checked; supported: 0.31.0, " in lines[0]


@pytest.mark.parametrize("on_error", ["fallback", "raise"])
def test_a_cache_that_cannot_be_understood_leaves_stock(lines, on_error):
    """The first thing that needs vLLM itself fails here: there is no model."""
    worker = wrapper({"policy": "undo", "on_error": on_error})
    vllm_plugin._on_worker(worker)
    runner = worker.worker.model_runner
    if on_error == "raise":
        with pytest.raises((AttributeError, ImportError)):
            runner.initialize_kv_cache(None)
        return
    runner.initialize_kv_cache(None, is_profiling=True)
    assert lines == []
    runner.initialize_kv_cache(None)
    assert "kvtxn.inactive" in lines[0]
    assert runner.kvtxn is None
    assert runner._sample(None, None) == "sampled"


def test_steps_of_vllms_own_warm_up_are_not_counted():
    """Once it is over, counters start from zero; and an engine without steps has none."""
    manager = TransactionManager([LayerRef("a", *torch.zeros(2, 2, 4, 1, 8))])
    runner = SimpleNamespace(kvtxn=SimpleNamespace(manager=manager))

    def warm_up(times):
        for _ in range(times):
            manager.bypass("order")
        return "times"

    for held in (runner, SimpleNamespace(), SimpleNamespace(kvtxn=None)):
        worker = SimpleNamespace(compile_or_warm_up_model=warm_up)
        found = SimpleNamespace(worker=worker)
        workers.after_warm_up(found, partial(starting._warmed_up, held, "0"))
        manager.metrics.restart()
        assert worker.compile_or_warm_up_model(times=3) == "times"
        assert manager.snapshot()["kvtxn_bypassed_windows_total"] == (0 if held is runner else 3)


def test_register_never_raises(monkeypatch):
    """An exception in a plugin would end vLLM's process."""

    def failing(*_):
        raise ImportError("no such module")

    monkeypatch.setattr(vllm_plugin, "_undo", [])
    monkeypatch.setattr(workers, "hook_workers", failing)
    vllm_plugin.register()
    assert vllm_plugin._undo == []
