"""A name that vLLM's code no longer uses is not replaced: the engine runs without windows."""

from __future__ import annotations

from types import MethodType, SimpleNamespace

import pytest
import torch
from engine_jobs import missing
from held_layers import DELTAS
from kernels_here import importing_kernels

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

with importing_kernels():
    from held_rig import Rig
    from kvtxn.integrations.vllm_plugin.cpu.states import operators_differ
    from kvtxn.integrations.vllm_plugin.policy.engine_facts import GATED_DELTA, MAMBA2, OLMO_DELTA
    from kvtxn.integrations.vllm_plugin.seam import cpu_states, held_states, hooks
    from kvtxn.integrations.vllm_plugin.seam.hooks import not_used, with_globals

    from kvtxn import LayerError


def outer():
    return 1


def uses(given):
    """Uses ``outer`` inside of a function, and another name as an attribute alone."""

    def inner():
        return outer()

    return inner() + given.attribute


def test_a_name_is_replaced_where_the_code_uses_it():
    assert with_globals(uses, outer=lambda: 5)(SimpleNamespace(attribute=2)) == 7
    assert uses(SimpleNamespace(attribute=2)) == 3


@pytest.mark.parametrize("name", ["attribute", "missing", "given"])
def test_a_name_that_is_no_global_of_the_code_is_refused(name):
    """Its replacement would change nothing."""
    with pytest.raises(LayerError, match=f"uses does not use {name}"):
        with_globals(uses, **{name: None})
    assert not_used(len, "x") == "len does not use x"


@pytest.mark.parametrize("kind", [GATED_DELTA, OLMO_DELTA, MAMBA2])
def test_a_layer_whose_kernel_has_another_name_is_not_hooked(kind, monkeypatch):
    """The reason is known before the caches get one block per state; a hook raises."""
    rig = Rig(kind, torch.float32, monkeypatch)
    layer = rig.sides[1].layer
    name = "_forward_core" if kind in DELTAS else "conv_ssm_forward"
    rig.runner.model_config = SimpleNamespace(is_hybrid=True, runner_type="generate")
    rig.runner.get_model = lambda: SimpleNamespace(modules=lambda: [layer])
    rig.runner.vllm_config.mamba_config = SimpleNamespace(backend=SimpleNamespace(value="triton"))
    methods = {name: held_states.LAUNCHES[kind][name]}
    monkeypatch.setattr(held_states, "LAUNCHES", {kind: methods})
    assert held_states.launches_differ(rig.runner) is None
    own = getattr(type(layer), name)
    changed = own.__code__.replace(
        co_names=tuple("another" if each == held_states.KERNELS[kind][name] else each
                       for each in own.__code__.co_names)
    )  # fmt: skip
    monkeypatch.setattr(own, "__code__", changed)
    said = held_states.launches_differ(rig.runner)
    assert said.endswith(f"does not use {held_states.KERNELS[kind][name]}")
    with pytest.raises(LayerError, match="does not use"):
        rig.states.hook()
    rig.states.unhook()
    assert not [name for name, each in vars(layer).items() if isinstance(each, MethodType)]


def test_methods_and_functions_that_nothing_calls_are_not_hooked(monkeypatch):
    """Those of vLLM's operators on a CPU, and those of layers on a GPU."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    rig = Rig(GATED_DELTA, torch.float32, monkeypatch)
    owner = type(rig.sides[1].layer)
    assert cpu_states.core_differs() is None
    assert operators_differ([MambaMixer2.__new__(MambaMixer2)]) is None
    monkeypatch.setattr(hooks, "_used_in", lambda module: frozenset())
    assert "uses _cpu_gdn_attention_nonspec" in cpu_states.core_differs()
    assert "uses MambaMixer2.conv_ssm_forward" in operators_differ(
        [MambaMixer2.__new__(MambaMixer2)]
    )
    monkeypatch.setattr(held_states, "LAUNCHES", {GATED_DELTA: {"_forward_core": ()}})
    assert "_forward_core" in held_states._unused(owner, GATED_DELTA)
