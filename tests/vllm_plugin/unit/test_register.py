"""``register``: what it brings into a process, and that its hooks stop no engine of others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace

import pytest
from kvtxn.integrations.vllm_plugin import engine_calls, plugin, starting
from kvtxn.integrations.vllm_plugin.policy import RequiredError
from kvtxn.integrations.vllm_plugin.seam.hooks import when_imported

from kvtxn import ConfigError

#: All that ``register`` imports, beside modules of Python's own.
LIGHT = {
    "kvtxn",
    "kvtxn.errors",
    "kvtxn.integrations",
    "kvtxn.integrations.pytest_audit",
    "kvtxn.integrations.pytest_audit.engines",
    "kvtxn.integrations.serving",
    "kvtxn.integrations.serving.given_settings",
    "kvtxn.integrations.vllm_plugin",
    "kvtxn.integrations.vllm_plugin.seam",
    "kvtxn.integrations.vllm_plugin.seam.frontend",
    "kvtxn.integrations.vllm_plugin.seam.hooks",
    "kvtxn.integrations.vllm_plugin.seam.prefix_lookups",
    "kvtxn.integrations.vllm_plugin.seam.workers",
    "kvtxn.integrations.vllm_plugin.plugin",
    "kvtxn.integrations.vllm_plugin.policy",
    "kvtxn.lazy",
}


def test_register_brings_next_to_nothing():
    """vLLM calls it in every process; torch, vLLM and the rest of kvtxn come when it is asked."""
    code = (
        "import json, sys\n"
        "before = {*sys.modules, *sys.stdlib_module_names}\n"
        "from kvtxn.integrations.vllm_plugin import plugin, register\n"
        "register()\n"
        "assert len(plugin._undo) == 3\n"
        "new = {*sys.modules} - before\n"
        "print(json.dumps([n for n in new if n.partition('.')[0] not in before]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(json.loads(done.stdout))
    assert {name for name in found if name.partition(".")[0] not in ("attr", "attrs")} == LIGHT


# -- modules that are imported later ---------------------------------------------------------


@pytest.fixture
def late(tmp_path, monkeypatch):
    """The name of a module that nobody has imported."""
    (tmp_path / "kvtxn_late.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield "kvtxn_late"
    sys.modules.pop("kvtxn_late", None)
    assert sys.meta_path == before


def doubled(module):
    module.VALUE *= 2

    def undo():
        module.VALUE //= 2

    return undo


@pytest.mark.parametrize("imported", [True, False])
def test_a_module_is_hooked_once_whenever_it_is_imported(late, imported):
    if imported:
        __import__(late)
    undo = when_imported(late, doubled)
    assert (late in sys.modules) == imported
    module = __import__(late)
    assert module.VALUE == 2
    assert module.__spec__.loader.get_source(late) == "VALUE = 1\n"  # its own loader
    undo()
    assert module.VALUE == 1
    undo()
    assert module.VALUE == 1


def test_hooks_of_one_module_follow_each_other(late):
    undo = [when_imported(late, doubled) for _ in range(3)]
    assert __import__(late).VALUE == 8
    for each in undo:
        each()
    assert __import__(late).VALUE == 1


def test_a_hook_that_waits_can_be_undone(late):
    when_imported(late, doubled)()
    assert __import__(late).VALUE == 1


def test_looking_for_a_module_does_not_hook_it(late):
    from importlib.util import find_spec

    undo = when_imported(late, doubled)
    assert find_spec(late) is not None
    assert late not in sys.modules
    assert __import__(late).VALUE == 2
    undo()


def test_a_hook_that_raises_does_not_end_the_import(late, lines):
    def broken(module):
        raise AttributeError("gone")

    when_imported(late, broken)
    assert __import__(late).VALUE == 1
    assert "kvtxn.inactive" in lines[0]
    assert f"{late} cannot be hooked: AttributeError('gone')" in lines[0]
    with pytest.raises(AttributeError, match="gone"):  # for ``register`` to say
        when_imported(late, broken)


# -- the hooks -------------------------------------------------------------------------------


@pytest.fixture
def vllm(monkeypatch):
    """Stand-ins for vLLM's classes, hooked by ``register``."""

    def init(self, *args, **kwargs):
        if args or "vllm_config" in kwargs:
            self.vllm_config = args[0] if args else kwargs["vllm_config"]

    class LLMEngine:
        __init__ = init

    class AsyncLLM:
        __init__ = init

    class Scheduler:
        __init__ = init

    class WorkerWrapperBase:
        def __init__(self, *args, **kwargs):
            init(self, *args, **kwargs)
            self.init_device()

        def init_device(self):
            return None

    homes = {
        "vllm.v1.engine.llm_engine": LLMEngine,
        "vllm.v1.engine.async_llm": AsyncLLM,
        "vllm.v1.core.sched.scheduler": Scheduler,
        "vllm.v1.worker.worker_base": WorkerWrapperBase,
    }
    for name, owner in homes.items():
        module = ModuleType(name)
        setattr(module, owner.__name__, owner)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "_undo", [])
    monkeypatch.setattr(starting, "_undo_engines", [])
    plugin.register()
    assert len(plugin._undo) == 3
    yield {owner.__name__: owner for owner in homes.values()}
    while plugin._undo:
        plugin._undo.pop()()


HOOKED = ("LLMEngine", "AsyncLLM", "Scheduler", "WorkerWrapperBase")


class Odd(Mapping):
    """Raises whatever is asked of it."""

    def __getitem__(self, name):
        raise RuntimeError("odd")

    __contains__ = __iter__ = __len__ = __getitem__


class Unreadable:
    @property
    def additional_config(self):
        raise RuntimeError("moved")


NOT_ASKED = {
    "nothing": {},
    "None": None,
    "a list": ["kvtxn"],
    "a string": "kvtxn",
    "a number": 3,
    "an object": object(),
    "another's": {"other": {"kvtxn": 1}},
}


@pytest.mark.parametrize("given", NOT_ASKED.values(), ids=NOT_ASKED)
@pytest.mark.parametrize("name", HOOKED)
def test_an_engine_that_does_not_ask_starts_in_silence(vllm, lines, name, given):
    """Its configuration has nothing else that kvtxn could read."""
    config = SimpleNamespace(additional_config=given)
    vllm[name](config)
    vllm[name](vllm_config=config)
    assert lines == []


UNREADABLE = {
    "no config": ((), {}),
    "another config": ((SimpleNamespace(),), {}),
    "None": ((None,), {}),
    "by another name": ((), {"config": SimpleNamespace(additional_config={})}),
    "one that raises": ((Unreadable(),), {}),
    "an odd mapping": ((SimpleNamespace(additional_config=Odd()),), {}),
}


@pytest.mark.parametrize(("args", "kwargs"), UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("name", HOOKED)
def test_an_engine_of_which_nobody_can_tell_whether_it_asks_starts(vllm, lines, name, args, kwargs):
    vllm[name](*args, **kwargs)
    assert lines
    assert all("whether this engine asks for kvtxn cannot be read" in line for line in lines)


#: What each hook calls once an engine asks.
CALLED = {
    "LLMEngine": (starting, "check_settings"),
    "AsyncLLM": (starting, "check_settings"),
    "LLMEngine after": (engine_calls, "on_engine"),
    "AsyncLLM after": (engine_calls, "on_engine"),
    "Scheduler": (starting, "on_scheduler"),
    "WorkerWrapperBase": (starting, "on_worker"),
}


@pytest.fixture(params=CALLED)
def start(request, vllm, monkeypatch):
    """Starts an engine with these settings; one of the calls raises this error."""
    for owner, called in CALLED.values():
        monkeypatch.setattr(owner, called, lambda *args: None)

    def start(error, asked):
        def broken(*args):
            raise error

        monkeypatch.setattr(*CALLED[request.param], broken)
        vllm[request.param.split()[0]](SimpleNamespace(additional_config={"kvtxn": asked}))

    start.decides = request.param in ("Scheduler", "WorkerWrapperBase")
    return start


class Unshown(Exception):
    def __repr__(self):
        raise RuntimeError("no repr")


@pytest.mark.parametrize("error", [AttributeError("gone"), ImportError("x"), Unshown()], ids=str)
def test_an_exception_of_ours_leaves_the_engine_stock(start, lines, error):
    """With one sentence."""
    start(error, {"policy": "auto"})
    assert len(lines) == 1
    assert type(error).__name__ in lines[0]
    assert "effect=" in lines[0]


def test_a_mistake_of_the_users_stops_the_start(start):
    for error in (ConfigError("x", "wrong"), RequiredError("x", "kvtxn is required")):
        with pytest.raises(type(error)):
            start(error, {"policy": "auto"})


def test_an_engine_that_requires_kvtxn_does_not_start_without(start, lines):
    """A worker and a scheduler decide that; what is before and after them leaves it to them."""
    if not start.decides:
        start(AttributeError("gone"), {"policy": "auto", "required": True})
        assert len(lines) == 1
        return
    with pytest.raises(RequiredError, match=r"kvtxn is required, but AttributeError\('gone'\)"):
        start(AttributeError("gone"), {"policy": "auto", "required": True})
    with pytest.raises(AttributeError, match="gone"):
        start(AttributeError("gone"), {"policy": "auto", "on_error": "raise"})
    assert lines == []


def test_a_release_without_a_setting_that_is_read_starts(vllm, lines, monkeypatch):
    """Of which the audit's containing asks whether the runner is of the second kind."""
    from kvtxn.integrations.vllm_plugin.seam import workers

    monkeypatch.setattr(workers, "version", lambda: "0.32.0")
    parallel = SimpleNamespace(
        decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1
    )
    asked = {"kvtxn": {"audit": "ledger", "on_violation": "contain"}}
    config = SimpleNamespace(
        additional_config=asked,
        parallel_config=parallel,
        device_config=SimpleNamespace(device_type="cpu"),
    )
    vllm["Scheduler"](config)
    assert "kvtxn.scheduler_not_hooked" in lines[-1]
    assert "wrong rows are logged and not contained" in lines[-1]
