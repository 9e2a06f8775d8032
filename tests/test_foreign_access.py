"""One package touches vLLM: its modules, and the attributes of its objects."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_access import Sources, looks, read

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "integrations" / "vllm_plugin"
SEAM = sorted((PLUGIN / "seam").rglob("*.py"))
OURS = [path for path in sorted(PLUGIN.rglob("*.py")) if path not in SEAM]
SOURCES = Sources(read(SEAM), read(OURS))


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT)))
def test_objects_of_vllms_are_handed_on(path):
    """And never looked into, see ``foreign_access``."""
    assert looks(SOURCES, path.read_text()) == []


#: vLLM's public API, as far as benchmarks use it.
PUBLIC = frozenset(
    (
        *("llm_engine", "generate", "get_metrics", "collective_rpc", "reset_prefix_cache"),
        *("add_request", "step", "has_unfinished_requests"),
    )
)
PROGRAMS = sorted((ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_benchmarks_use_vllms_public_api(path):
    """And ask ``seam`` for all that lies below."""
    assert looks(SOURCES, path.read_text(), PUBLIC) == []


def test_the_rule_sees_the_plugin():
    """It would hold of nothing."""
    assert len(OURS) > 20
    assert {"client_of", "runner_of", "engine_config", "config_of"} <= SOURCES.returns_foreign
    assert {"metadata_builders"} <= SOURCES.returns_many
    assert {"impl", "module"} <= SOURCES.fields


#: Code that looks into an object of vLLM's, and what of it is found.
PLANTED = {
    "a parameter": ("def f(runner: Foreign): return runner.device", "runner.device"),
    "a parameter by any type": ("def f(thing: Any): return thing.device", "thing.device"),
    "a parameter by name": ("def f(wrapper): return wrapper.worker", "wrapper.worker"),
    "a parameter by its protocol": ("def f(thing: Scheduler): return thing.a", "thing.a"),
    "one that may be None": ("def f(x: Foreign | None): return x.a", "x.a"),
    "a lambda": ("g = lambda config: config.dtype", "config.dtype"),
    "an assignment": ("def f(x: Foreign):\n  x.size = 3", "x.size"),
    "another name": ("def f(x: Foreign):\n  y = x\n  return y.a", "y.a"),
    "an inner function": ("def f(x: Foreign):\n  def g(): return x.a\n  return g", "x.a"),
    "by getattr": ("def f(x: Foreign): return getattr(x, 'a', 1)", "getattr(x, 'a', 1)"),
    "by item": ("def f(prepared: Foreign): return prepared[1]", "prepared[1]"),
    "a method": ("def f(llm: Foreign): return llm.collective_rpc('x')", "llm.collective_rpc"),
    "a result": ("def f(w: Foreign):\n  r = workers.runner_of(w)\n  r.device", "r.device"),
    "a result at once": ("def f(): return flash_module().attend", "flash_module().attend"),
    "an element": ("def f(bs: Sequence[Foreign]):\n  for b in bs: b.size", "b.size"),
    "an element of a result": ("def f():\n  for b in metadata_builders(1, 2): b.a", "b.a"),
    "a field of ours": ("def f(layer: TargetLayer): return layer.impl.scale", "layer.impl.scale"),
    "arguments handed on": ("def f(*args: Foreign): return args[0].x", "args[0].x"),
    "self": ("class A(Mixin):\n  def f(self): return self.query_start_loc", "self.query_start_loc"),
    "super": ("class A(Mixin):\n  def f(self): return super().get_model()", "super().get_model"),
    "what super returns": ("class A:\n  def f(self):\n    r = super().f()\n    return r.a", "r.a"),
}  # fmt: skip


@pytest.mark.parametrize("what", ["llm.llm_engine.engine_core", "worker.model_runner"])
def test_planted_code_is_found_in_programs(what):
    """By the names of parameters alone, since much else there is of any type."""
    text = f"def f(llm: Any, worker: Any, axis: Any):\n  axis.grid(llm.generate())\n  {what}"
    assert looks(SOURCES, text, PUBLIC) == [f"3: {what}"]


@pytest.mark.parametrize("case", PLANTED)
def test_planted_code_is_found(case):
    """Each way of looking."""
    text, what = PLANTED[case]
    assert [line.partition(": ")[2] for line in looks(SOURCES, text)] == [what]


def test_handing_on_is_no_looking():
    """Nor are attributes that kvtxn put there, and objects of its own."""
    text = """
class Mixin:
    kvtxn = None

    def step(self, runner: Foreign, layer: TargetLayer, *args: Any, **kwargs: Any):
        found = super().step(runner, *args, **kwargs)
        for builder in batches.metadata_builders(runner, {layer.name}):
            builder.kvtxn = self.kvtxn
        steps = getattr(runner, "kvtxn", None)
        steps.abandon()
        layer.impl.kvtxn = steps
        write_rows(layer.module, layer.cache.shape, found)
        return [type(runner).__name__, self.step, runner.kvtxn_config.max_rows]
"""
    assert looks(SOURCES, text) == []
