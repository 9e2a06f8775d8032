"""Hook into vLLM's Mamba-2 layers on a GPU: another function runs in place of their kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Final

from .hooks import method_of, with_globals
from .protocols.layers import Mamba2Layer

_FORWARD: Final = "conv_ssm_forward"
#: The method that contains the launch, with its parameters.
METHODS: Final = {_FORWARD: ("projected_states", "output")}

#: By method, the global name under which it finds the kernel.
KERNEL: Final = {_FORWARD: "selective_state_update"}


def hook_kernel(module: Mamba2Layer, update: Callable[..., object]) -> None:
    """Let ``update`` run in place of a layer's kernel.

    Args:
        module: the layer.
        update: called with vLLM's kernel, and with all that this kernel is given; in steps that
            verify no drafts, too.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2 as own

    forward = with_globals(
        method_of(module, _FORWARD),
        selective_state_update=partial(update, own.selective_state_update),
    )
    setattr(module, _FORWARD, MethodType(forward, module))


def unhook_kernel(module: Mamba2Layer) -> None:
    """Give a layer its own method back."""
    vars(module).pop(_FORWARD, None)
