"""Every hook into vLLM is undone: classes, attributes and registries are as they were."""

from __future__ import annotations

import logging
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import attrs
import pytest
import torch
from engine_jobs import missing
from step_rig import anywhere  # noqa: F401  # autouse

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

from flash_rig import Batch
from kernels_here import importing_kernels

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.gpu.windows import unhook_attention

from kvtxn.integrations.vllm_plugin import engine_calls, plugin, starting
from kvtxn.integrations.vllm_plugin.cpu import attention
from kvtxn.integrations.vllm_plugin.runners.hooked_runner import show_log, unhook_runner
from kvtxn.integrations.vllm_plugin.runners.runner_v2 import AdapterV2
from kvtxn.integrations.vllm_plugin.seam import backends, frontend, workers
from kvtxn.integrations.vllm_plugin.seam.hooks import is_swapped, swap_class
from kvtxn.integrations.vllm_plugin.seam.layers import TargetLayer

from kvtxn import KVTxnError, LayerError

PATH = starting.WINDOW_ATTENTION["FLASH_ATTN"]


def vllms_own() -> dict[str, dict[str, int]]:
    """Every class of vLLM's and every module, by name: the identity of each attribute.

    Modules that a module imports later are no changes of kvtxn's.
    """
    found = {}
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("vllm.") or not isinstance(module, ModuleType):
            continue
        found[name] = {k: id(v) for k, v in vars(module).items() if not isinstance(v, ModuleType)}
        for key, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == name:
                found[f"{name}.{key}"] = {k: id(v) for k, v in vars(value).items()}
    from vllm.v1.attention.backends import registry

    found["overrides"] = {backend.name: 1 for backend in registry._ATTN_OVERRIDES}
    return found


@pytest.fixture
def clean():
    """A process in which vLLM has not loaded the plug-in; afterwards it has, if it had before."""
    was_registered = bool(plugin._undo)
    plugin.unregister()
    import vllm.v1.attention.backends.flash_attn  # whatever hooking would import
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.worker_base  # noqa: F401

    yield
    plugin.unregister()
    if was_registered:
        plugin.register()


def changes(before, after):
    """Names of classes and modules that differ."""
    return sorted(name for name in before | after if before.get(name) != after.get(name))


def test_unregister_leaves_vllm_as_it_was(clean):
    """Workers, engines, schedulers, the attention backend; the comparison sees each of them."""
    before = vllms_own()
    plugin.register()
    starting._undo_engines.append(backends.register("FLASH_ATTN", PATH))
    assert changes(before, vllms_own()) == [
        "overrides",
        "vllm.v1.core.sched.scheduler.Scheduler",
        "vllm.v1.engine.async_llm.AsyncLLM",
        "vllm.v1.engine.llm_engine.LLMEngine",
        "vllm.v1.worker.worker_base.WorkerWrapperBase",
    ]
    plugin.register()  # vLLM may call it again: nothing is hooked twice
    plugin.unregister()
    assert changes(before, vllms_own()) == []
    plugin.unregister()
    assert changes(before, vllms_own()) == []


def test_nothing_is_hooked_twice(clean):
    """By whatever way: the first hook would become the second one's original."""
    plugin.register()
    before = vllms_own()
    with pytest.raises(KVTxnError, match="workers are hooked already"):
        workers.hook_workers(lambda wrapper: None, {})
    with pytest.raises(KVTxnError, match="engines are hooked already"):
        frontend.hook_engines(lambda config: None, lambda engine: None)
    assert changes(before, vllms_own()) == []


@pytest.mark.parametrize("release", ["0.28", "0.32"])
def test_a_worker_that_sleeps_is_heard(release):
    """Releases up to 0.29 have no ``discard``; of it, the KV cache alone matters."""
    said = []
    own = {"sleep": lambda level=1: level, "wake_up": lambda tags=None: said.append("up")}
    if release == "0.32":
        own["discard"] = said.append
    worker = SimpleNamespace(**own)
    heard = {name: partial(said.append, name) for name in ("asleep", "lost", "awake")}
    undo = workers.around_sleep(SimpleNamespace(worker=worker), **heard)
    assert worker.sleep(level=2) == 2
    worker.wake_up(tags=["weights"])
    assert said == ["asleep", "lost", "up", "awake"]
    if release == "0.32":
        worker.discard(("weights",))
        worker.discard(("kv_cache",))
        assert said[4:] == [("weights",), "lost", ("kv_cache",)]
    undo()
    assert vars(worker) == own


def test_a_worker_that_cannot_sleep_is_heard_awake():
    """Nobody wakes up a worker whose sleep failed: its answers are those of now."""
    said = []

    def sleep(level=1):
        raise ValueError(f"no level {level}")

    worker = SimpleNamespace(sleep=sleep, wake_up=lambda tags=None: None)
    heard = {name: partial(said.append, name) for name in ("asleep", "lost", "awake")}
    workers.around_sleep(SimpleNamespace(worker=worker), **heard)
    with pytest.raises(ValueError, match="no level 3"):
        worker.sleep(3)
    assert said == ["asleep", "lost", "awake"]


def test_an_attention_backend_of_somebody_elses_stays(clean):
    """Another plug-in's backend is neither replaced nor removed; kvtxn's is registered once."""
    undo = backends.register("FLASH_ATTN", "somebody.elses.Backend")
    with pytest.raises(KVTxnError, match=r"replaced already.*somebody\.elses\.Backend"):
        backends.register("FLASH_ATTN", PATH)
    undo()
    undo = backends.register("FLASH_ATTN", PATH)
    backends.register("FLASH_ATTN", PATH)()  # an engine later, whose undo leaves it to the first
    assert vllms_own()["overrides"] == {"FLASH_ATTN": 1}
    undo()
    assert vllms_own()["overrides"] == {}


def test_a_backend_that_somebody_else_replaced_is_named(clean, caplog, monkeypatch):
    """The others are kvtxn's all the same."""
    monkeypatch.setattr(logging.getLogger("kvtxn"), "propagate", True)
    undo = backends.register("TRITON_MLA", "somebody.elses.Backend")
    starting._register_attention(0, list(starting.WINDOW_ATTENTION))
    said = [record.getMessage() for record in caplog.records]
    (taken,) = {message for message in said if "kvtxn.attention_taken" in message}
    assert "backend='TRITON_MLA'" in taken
    assert "somebody.elses.Backend" in taken
    assert vllms_own()["overrides"] == dict.fromkeys(starting.WINDOW_ATTENTION, 1)
    undo()


def test_the_log_is_given_back(monkeypatch):
    """Handlers, level, propagation; handlers that the user set up stay."""
    ours, theirs = logging.getLogger("kvtxn"), logging.getLogger("vllm")
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "propagate", True)
    monkeypatch.setattr(theirs, "handlers", [logging.NullHandler()])
    level = ours.level
    undo = show_log()
    assert ours.handlers == theirs.handlers
    assert not ours.propagate
    show_log()()  # the second worker of this process: not its handlers to take away
    assert ours.handlers == theirs.handlers
    undo()
    assert (ours.handlers, ours.propagate, ours.level) == ([], True, level)


# -- objects, on stand-ins ------------------------------------------------------------


class Runner:
    """Has the methods of vLLM's V2 runner."""

    def initialize_kv_cache(
        self, kv_cache_config, is_profiling=False, kv_cache_allocation_context=None
    ): ...

    def prepare_inputs(self, scheduler_output, batch_req_state, batch_desc, num_active_loras): ...
    def prepare_attn(self, input_batch): ...

    def sample(self, hidden_states, input_batch, grammar_output): ...

    def postprocess_sampled(
        self, idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc=None
    ): ...

    def update_pp_decode_requests(self): ...


class Worker:
    """A worker, and its wrapper's configuration."""

    def __init__(self, monkeypatch, facts) -> None:
        monkeypatch.setattr(starting, "_most_rows", lambda config, found: 8)
        monkeypatch.setattr(
            "kvtxn.integrations.vllm_plugin.seam.engine_config.config_facts",
            lambda config: facts,
        )
        self.model_runner = Runner()
        asked = {"kvtxn": {"policy": "deferred"}}
        config = SimpleNamespace(additional_config=asked, speculative_config=None)
        self.wrapper = SimpleNamespace(vllm_config=config, worker=self, rpc_rank=0)

    def determine_available_memory(self):
        return 1 << 30

    def compile_or_warm_up_model(self):
        return "warm"


def test_a_worker_of_a_running_engine_is_given_back(clean, monkeypatch):
    """Its runner, its warm-up, the backend that it registered, the log's handlers."""
    from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts

    worker = Worker(monkeypatch, EngineFacts(device="cuda", runner="v2"))
    runner, ours = worker.model_runner, logging.getLogger("kvtxn")
    before = dict(vars(worker)), dict(vars(runner)), vllms_own(), list(ours.handlers)
    plugin._on_worker(worker.wrapper)
    plugin._on_worker(worker.wrapper)  # once is enough
    assert isinstance(runner, AdapterV2)
    assert "compile_or_warm_up_model" in vars(worker)
    assert vllms_own()["overrides"] == dict.fromkeys(starting.WINDOW_ATTENTION, 1)
    plugin.unregister()
    assert type(runner) is Runner
    assert (dict(vars(worker)), dict(vars(runner)), vllms_own(), list(ours.handlers)) == before
    assert worker.compile_or_warm_up_model() == "warm"
    unhook_runner(runner)
    assert type(runner) is Runner


def test_buffers_that_graphs_read_outlive_the_hooks(clean, monkeypatch):
    """A captured graph holds addresses; it finds no drafts there any more."""
    from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts

    worker = Worker(monkeypatch, EngineFacts(device="cuda", runner="v2"))
    plugin._on_worker(worker.wrapper)
    said = []
    steps = SimpleNamespace(
        deferred=True,
        abandon=lambda: said.append("abandoned"),
        windows=SimpleNamespace(mark=lambda layout: said.append(layout)),
    )
    worker.model_runner.kvtxn = steps
    plugin.unregister()
    assert said == ["abandoned", None]
    assert vars(worker.model_runner) == {"kvtxn_kept": [steps]}


def test_attention_on_a_gpu_is_given_back(monkeypatch):
    """Layers and the builders of their metadata; also where hooking stopped half-way."""
    batch = Batch(monkeypatch, [3], [3])
    hooked = [*(layer.impl for layer in batch.layers), batch.builder]
    assert all("kvtxn" in vars(each) for each in hooked)
    for _ in range(2):
        unhook_attention(batch.layers, [batch.builder])
        assert not any("kvtxn" in vars(each) for each in hooked)


class Attention:
    """Has the methods of vLLM's attention on a CPU."""

    scale, sliding_window, logits_soft_cap = 0.5, -1, 0

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping): ...

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
        output_block_scale=None,
    ): ...  # fmt: skip


class LatentAttention:
    """Has the method of vLLM's latent attention, as 0.33 has it."""

    def do_kv_cache_update(
        self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale=False
    ):
        self.wrote = kv_cache_dtype, k_scale, skip_scale


@pytest.mark.parametrize("skip", [(), (False,), (True,)])
def test_latent_attention_is_told_what_vllm_tells_it(skip):
    """Whether rows are scaled as they are written is told to vLLM's own writer, if it is told."""
    impl = LatentAttention()
    layer = TargetLayer("b", "group.0", None, impl, torch.zeros(2, 4, 8), (8,), torch.float32)
    steps = SimpleNamespace(manager=SimpleNamespace(layers={"b": "ref"}), deferring=False)
    attention.hook_attention(steps, [layer])
    impl.do_kv_cache_update("c", "pe", "cache", "slots", "fp8", 1.0, *skip)
    assert impl.wrote == ("fp8", 1.0, skip == (True,))


def test_attention_on_a_cpu_is_given_back():
    """Layers of both kinds are unhooked; if one is not as expected, none is hooked at all."""
    cache = torch.zeros(2, 1, 4, 16)
    layers = [
        TargetLayer("a", "group.0", None, Attention(), cache, (1, 8), torch.float32),
        TargetLayer("b", "group.0", None, LatentAttention(), cache, (8,), torch.float32),
    ]
    steps = SimpleNamespace(manager=SimpleNamespace(layers={"a": "ref", "b": "ref"}))
    own = [type(layer.impl) for layer in layers]
    for _ in range(2):
        attention.hook_attention(steps, layers)
        assert all(is_swapped(layer.impl) for layer in layers)
        with pytest.raises(KVTxnError, match="was swapped before"):
            attention.hook_attention(steps, layers)
        for _ in range(2):
            attention.unhook_attention(layers)
            assert [type(layer.impl) for layer in layers] == own
            assert [vars(layer.impl) for layer in layers] == [{}, {}]
    with pytest.raises(LayerError, match="the attention of 'c' is unknown"):
        attention.hook_attention(steps, [*layers, attrs.evolve(layers[0], name="c", impl=Runner())])
    assert [type(layer.impl) for layer in layers] == own


def test_attention_behind_a_class_of_somebody_else_goes_on():
    """It is refused, and keeps what its hook needs; the other layers are given back."""
    cache = torch.zeros(2, 1, 4, 16)
    layers = [
        TargetLayer(name, "group.0", None, Attention(), cache, (1, 8), torch.float32)
        for name in "abc"
    ]
    steps = SimpleNamespace(manager=SimpleNamespace(layers=dict.fromkeys("abc", "ref")))
    attention.hook_attention(steps, layers)
    theirs = layers[1].impl
    theirs.__class__ = type("Theirs", (type(theirs),), {})
    with pytest.raises(KVTxnError, match="not a class that swap_class made"):
        attention.unhook_attention(layers)
    assert [is_swapped(layer.impl) for layer in layers] == [False, True, False]
    assert theirs.kvtxn.steps is steps


class Client:
    def shutdown(self):
        return "down"

    def collective_rpc(self, method):
        return [{}]


def test_clients_are_given_back(monkeypatch):
    """An ``LLM``'s is its own class again, and asks nothing at its end."""
    monkeypatch.setattr(frontend, "is_async", lambda client: False)
    monkeypatch.setattr(engine_calls, "_ended", [])
    client = Client()
    config = SimpleNamespace(additional_config={"kvtxn": {"policy": "undo"}})
    engine = SimpleNamespace(vllm_config=config, engine_core=client)
    engine_calls.on_engine(engine)
    engine_calls.on_engine(engine)
    assert is_swapped(client)
    engine_calls.unhook_clients()
    assert type(client) is Client
    assert vars(client) == {}
    assert client.shutdown() == "down"
    assert engine_calls.last_snapshots() == []


def test_clients_behind_a_class_of_somebody_else():
    """Such a client is refused, and keeps what its hook needs; the others are given back."""
    clients = [Client() for _ in range(3)]
    for client in clients:
        swap_class(client, engine_calls.RememberingClient)
        client.kvtxn_pid = 0  # another process's: it asks nothing at its end
        engine_calls._hooked.add(client)
    clients[1].__class__ = type("Theirs", (type(clients[1]),), {})
    with pytest.raises(KVTxnError, match="not a class that swap_class made"):
        engine_calls.unhook_clients()
    assert [vars(client) for client in clients] == [{}, {"kvtxn_pid": 0}, {}]
    engine_calls.unhook_clients()


def test_one_hook_that_stays_keeps_no_other(monkeypatch):
    """Each kind of hook is undone, then the error is raised."""
    done = []

    def fail():
        raise KVTxnError("restore_class", "planted")

    monkeypatch.setattr(starting, "unhook_runners", fail)
    monkeypatch.setattr(engine_calls, "unhook_clients", partial(done.append, "clients"))
    monkeypatch.setattr(starting, "unhook_schedulers", partial(done.append, "schedulers"))
    monkeypatch.setattr(starting, "_undo_engines", [partial(done.append, n) for n in "ab"])
    with pytest.raises(KVTxnError, match="planted"):
        starting.unhook()
    assert done == ["clients", "schedulers", "b", "a"]
    assert starting._undo_engines == []
