"""Hooks into vLLM's gated delta nets on a GPU: their kernels of a verify step are replaced.

vLLM has two kernels for such a step. Where no request prefills, and the layer's sizes allow it, a
fused one also applies the layer's gated norm; elsewhere a Triton kernel leaves that to the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Final

from .hooks import method_of, with_globals
from .protocols.layers import GatedDeltaLayer

#: The method that launches the Triton kernel.
_FORWARD: Final = "_forward_core"

#: The method that launches the fused kernel.
FUSED: Final = "_forward_core_decode_spec_post_conv_fused_norm"

#: The methods that contain the launches, with their parameters.
METHODS: Final = {
    _FORWARD: ("mixed_qkv", "b", "a", "core_attn_out"),
    FUSED: ("mixed_qkv", "b", "a", "output_gate", "core_attn_out", "attn_metadata"),
    "_can_use_fused_gdn_mtp_decode": ("attn_metadata",),
}

#: By method, the global name under which it finds the Triton kernel.
KERNEL: Final = {_FORWARD: "fused_sigmoid_gating_delta_rule_update"}

#: The method that splits rows for the Triton kernel, into copies; with its parameters.
SPLIT: Final = {"rearrange_mixed_qkv": ("mixed_qkv",)}

#: The method that applies the gated norm where the Triton kernel ran, with its parameters.
NORM: Final = {"_rms_norm_gated_cuda": ("x", "output_gate", "out")}


def hook_kernels(
    module: GatedDeltaLayer,
    triton: Callable[..., object],
    fused: Callable[..., None] | None,
    split: Callable[..., object] | None = None,
) -> None:
    """Let other functions run in place of a layer's kernels.

    Args:
        module: the layer.
        triton: called with vLLM's Triton kernel, and with all that this kernel is given; in steps
            that verify no drafts, too.
        fused: called with the arguments of the method ``FUSED``; None leaves that method alone.
        split: in place of the method of ``SPLIT``; None leaves it alone.
    """
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as own

    kernel = own.fused_sigmoid_gating_delta_rule_update
    forward = with_globals(
        method_of(module, _FORWARD),
        fused_sigmoid_gating_delta_rule_update=partial(triton, kernel),
    )
    setattr(module, _FORWARD, MethodType(forward, module))
    if fused is not None:
        setattr(module, FUSED, fused)
    for name in SPLIT if split is not None else ():
        setattr(module, name, split)


def unhook_kernels(module: GatedDeltaLayer) -> None:
    """Give a layer its own methods back."""
    for name in (_FORWARD, FUSED, *SPLIT):
        vars(module).pop(name, None)
