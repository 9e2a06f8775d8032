"""vLLM's layers with recurrent states: which are the target's, and one block for each request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..policy.engine import GATED_DELTA, MAMBA2, OLMO_DELTA, SHORT_CONV
from . import Foreign
from .protocols.layers import KVCacheSpec
from .protocols.runners import Runner, RunnerV1

#: Methods of the runner that states need, beside those in ``batches.V1_METHODS``.
METHODS: Final = {"get_kv_cache_spec": ()}

#: By the name of vLLM's class, since not every release has its module.
KINDS: Final[Mapping[str, str]] = {
    "QwenGatedDeltaNetAttention": GATED_DELTA,
    "OlmoHybridGatedDeltaNetAttention": OLMO_DELTA,
    "MambaMixer2": MAMBA2,
    "ShortConv": SHORT_CONV,
}


@attrs.frozen(eq=False)
class StateLayer:
    """A recurrent layer of the target model, and its caches.

    Attributes:
        name: vLLM's name of the layer.
        group: name of its KV-cache group, such as ``"group.0"``.
        kind: one of ``KINDS``.
        module: vLLM's layer.
        past: ``[num_blocks, width - 1, channels]``, the past of the convolution.
        state: of gated delta nets ``[num_blocks, num_heads, key_size, value_size]``, of Mamba-2
            layers ``[num_blocks, num_heads, head_size, state_size]``; None in short convolutions.
    """

    name: str
    group: str
    kind: str
    module: Foreign
    past: Tensor
    state: Tensor | None


class Substitute:
    """A layer with some attributes of its own, for a function of vLLM's that is given a layer."""

    def __init__(self, layer: Foreign, **own: object) -> None:
        vars(self).update(own, _layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def kind_of(module: object) -> str | None:
    """Name the kind of a recurrent layer whose operator kvtxn knows; None for other layers."""
    names = (base.__name__ for base in type(module).__mro__)
    return next((KINDS[name] for name in names if name in KINDS), None)


def modules_of(runner: Runner) -> dict[str, Foreign]:
    """Return the recurrent layers of a loaded model by name."""
    found = runner.compilation_config.static_forward_context
    return {name: module for name, module in found.items() if kind_of(module) is not None}


def state_dtype(runner: Runner) -> str:
    """Name the dtype of the states, or, if they differ, one that is not float32."""
    modules = modules_of(runner).values()
    names = [str(module.get_state_dtype()[-1]).removeprefix("torch.") for module in modules]
    return max(names, key=lambda name: name != "float32", default="float32")


def leaves_inner_states(runner: Runner) -> bool:
    """Tell whether prompts leave states of gated delta nets in their middle, for the prefix cache.

    FlashInfer's kernel does that since vLLM 0.33. (Mamba-2 layers did before, and are checked.)
    """
    delta = (module for module in modules_of(runner).values() if kind_of(module) == GATED_DELTA)
    specs = [module.get_kv_cache_spec(runner.vllm_config) for module in delta]
    return any(getattr(spec, "num_prefill_checkpoint_blocks", 0) for spec in specs)


def state_layers(runner: Runner) -> list[StateLayer]:
    """Find the recurrent layers of a runner that has caches, in the order of their groups."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    modules, layers = modules_of(runner), []
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            if name in modules:
                module = modules[name]
                past, *state = module.kv_cache
                past = past.transpose(1, 2) if is_conv_state_dim_first() else past
                kind = kind_of(module)
                assert kind is not None
                layers.append(
                    StateLayer(
                        *(name, f"group.{number}", kind, module, past),
                        state=state[0] if state else None,
                    )
                )
    return layers


def hold_one_state(runner: Runner) -> Callable[[], None]:
    """Let the caches of recurrent layers be those of an engine without speculation.

    Returns:
        A function that undoes it, for caches that are made later.
    """
    modules = list(modules_of(runner).values())
    before = [module.num_spec for module in modules]
    for module in modules:
        module.num_spec = 0  # the length of the convolution's past depends on it, and nothing else

    def undo() -> None:
        for module, number in zip(modules, before, strict=True):
            module.num_spec = number

    return undo


def one_block_each(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Change the result of ``get_kv_cache_spec``: one block per request for layers with states."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return {
        name: replace(spec, num_speculative_blocks=0) if isinstance(spec, MambaSpec) else spec
        for name, spec in specs.items()
    }


def state_slots(runner: RunnerV1, groups: Sequence[str]) -> dict[str, Tensor]:
    """Return the block of each request's state, int64 ``[num_requests]``, by group."""
    tables, count = runner.input_batch.block_table, runner.input_batch.num_reqs
    return {
        group: tables[int(group.partition(".")[2])].get_cpu_tensor()[:count, 0].to(torch.int64)
        for group in groups
    }
