"""vLLM's layers with recurrent states: which are the target's, one block for each request, kernels.

On a GPU other functions can run in place of a layer's kernels of a verify step. For gated delta
nets vLLM has two. Where no request prefills, and the layer's sizes allow it, a fused one also
applies the layer's gated norm; elsewhere a Triton kernel leaves that to the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..policy.engine_facts import GATED_DELTA, MAMBA2, OLMO_DELTA, SHORT_CONV
from . import Foreign
from .engine_protocols import KVCacheSpec
from .hooks import method_of, with_globals
from .runner_protocols import Runner, RunnerV1

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

    def __init__(self, layer: object, **own: object) -> None:
        vars(self).update(own, _layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def kind_of(module: object) -> str | None:
    """Name the kind of a recurrent layer that kvtxn knows, by its class or a base of it.

    None for other layers.
    """
    names = (base.__name__ for base in type(module).__mro__)
    return next((KINDS[name] for name in names if name in KINDS), None)


def modules_of(runner: Runner) -> dict[str, Foreign]:
    """Return the recurrent layers of a loaded model, by name, whose kind kvtxn knows."""
    found = runner.compilation_config.static_forward_context
    return {name: module for name, module in found.items() if kind_of(module) is not None}


def state_dtype(runner: Runner) -> str:
    """Name the dtype of a model's states; if layers differ, one that is not float32.

    "float32" without recurrent layers.
    """
    modules = modules_of(runner).values()
    names = [str(module.get_state_dtype()[-1]).removeprefix("torch.") for module in modules]
    return max(names, key=lambda name: name != "float32", default="float32")


def leaves_inner_states(runner: Runner) -> bool:
    """Tell whether prompts leave states of gated delta nets in their middle, for the prefix cache.

    FlashInfer's kernel does that since vLLM 0.33. Mamba-2 layers, which did before, do not count.
    """
    delta = (module for module in modules_of(runner).values() if kind_of(module) == GATED_DELTA)
    specs = [module.get_kv_cache_spec(runner.vllm_config) for module in delta]
    return any(getattr(spec, "num_prefill_checkpoint_blocks", 0) for spec in specs)


def state_layers(runner: Runner) -> list[StateLayer]:
    """Find the recurrent layers of a runner that has caches, in the order of their groups.

    Kinds that kvtxn does not know are left out. Pasts are views with the channels last, however
    vLLM keeps them.
    """
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
    """Let recurrent layers ask for the caches of an engine without speculation: ``num_spec`` is 0.

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
    """Return cache specifications in which recurrent layers have one block per request.

    Args:
        specs: the result of ``get_kv_cache_spec``, by layer, which stays as it is.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    return {
        name: replace(spec, num_speculative_blocks=0) if isinstance(spec, MambaSpec) else spec
        for name, spec in specs.items()
    }


def state_slots(runner: RunnerV1, groups: Sequence[str]) -> dict[str, Tensor]:
    """Return the first block of each request, int64 ``[num_requests]``, by group.

    It has the request's state.
    """
    tables, count = runner.input_batch.block_table, runner.input_batch.num_reqs
    return {
        group: tables[int(group.partition(".")[2])].get_cpu_tensor()[:count, 0].to(torch.int64)
        for group in groups
    }


# -- kernels on a GPU that are replaced ---------------------------------------------------

#: The method of gated delta nets that launches the fused kernel.
FUSED: Final = "_forward_core_decode_spec_post_conv_fused_norm"

#: vLLM's methods that contain a kernel's launch, by kind of layer, with their parameters.
LAUNCHES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    GATED_DELTA: {
        "_forward_core": ("mixed_qkv", "b", "a", "core_attn_out"),
        FUSED: ("mixed_qkv", "b", "a", "output_gate", "core_attn_out", "attn_metadata"),
        "_can_use_fused_gdn_mtp_decode": ("attn_metadata",),
    },
    OLMO_DELTA: {"_forward_core": ("mixed_qkv", "b", "a", "core_attn_out")},
    MAMBA2: {"conv_ssm_forward": ("projected_states", "output")},
}

#: The global name under which such a method finds its Triton kernel, by kind of layer and method.
KERNELS: Final[Mapping[str, Mapping[str, str]]] = {
    GATED_DELTA: {"_forward_core": "fused_sigmoid_gating_delta_rule_update"},
    OLMO_DELTA: {"_forward_core": "fused_recurrent_gated_delta_rule"},
    MAMBA2: {"conv_ssm_forward": "selective_state_update"},
}

#: The method that splits rows for the Triton kernel of gated delta nets, into copies; with its
#: parameters.
GATED_DELTA_SPLIT: Final = {"rearrange_mixed_qkv": ("mixed_qkv",)}

#: The method that applies the gated norm where that kernel ran, with its parameters.
GATED_DELTA_NORM: Final = {"_rms_norm_gated_cuda": ("x", "output_gate", "out")}


def hook_kernel(module: Any, kind: str, run: Callable[..., object]) -> None:
    """Let a function run in place of the Triton kernel that a layer launches.

    Args:
        module: vLLM's layer.
        kind: a key of ``KERNELS``.
        run: called with vLLM's kernel, and with all that this kernel is given; in steps that verify
            no drafts, too.
    """
    for method, name in KERNELS[kind].items():
        own: Any = method_of(module, method)
        kernel = own.__globals__[name]
        forward = with_globals(own, **{name: partial(run, kernel)})
        setattr(module, method, MethodType(forward, module))


def unhook_kernels(module: Any, kind: str) -> None:
    """Give a layer its own methods back: of its launches, and of the split of rows."""
    for name in (*LAUNCHES[kind], *GATED_DELTA_SPLIT):
        vars(module).pop(name, None)
