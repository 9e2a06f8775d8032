"""vLLM's operators as benchmarks call them, beside kvtxn's own.

No engine runs these functions, so their operators are no hook points of a release.
"""

from __future__ import annotations

import contextlib
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

#: Module and class of each attention backend's implementation, by vLLM's name.
_ATTENTION: Final = {
    "TRITON_ATTN": ("triton_attn", "TritonAttentionImpl"),
    "TRITON_MLA": ("mla.triton_mla", "TritonMLAImpl"),
    "FLASH_ATTN_MLA": ("mla.flashattn_mla", "FlashAttnMLAImpl"),
}


@cache
def _of_vllm(name: str) -> Any:
    return import_module(f"vllm.{name}")


# -- writing rows -----------------------------------------------------------------------


def write_rows(
    rows: tuple[Tensor, Tensor], caches: tuple[Tensor, Tensor], slots: Tensor, scale: Tensor
) -> None:
    """Write keys and values to their slots, in the dtype that they have."""
    ops = _of_vllm("_custom_ops")
    ops.reshape_and_cache_flash(*rows, *caches, slots, "auto", scale, scale)


def write_latents(
    rows: tuple[Tensor, Tensor], latents: Tensor, slots: Tensor, scale: Tensor
) -> None:
    """Write latents and their rotary parts to their slots, in the dtype that they have."""
    _of_vllm("_custom_ops").concat_and_cache_mla(*rows, latents, slots, "auto", scale)


# -- attention --------------------------------------------------------------------------


def attend(query: Tensor, key: Tensor, value: Tensor, *sizes: object, **how: object) -> None:
    """Call FlashAttention; arguments are those of ``flash_attn_varlen_func``."""
    _of_vllm("vllm_flash_attn").flash_attn_varlen_func(query, key, value, *sizes, **how)


def schedule(*sizes: object, **how: object) -> Tensor:
    """Make FlashAttention's schedule; arguments are those of ``get_scheduler_metadata``."""
    made: Tensor = _of_vllm("vllm_flash_attn").get_scheduler_metadata(*sizes, **how)
    return made


def attention_of(backend: str) -> Any:
    """Return the class of a layer's attention, by the backend's name: one of ``_ATTENTION``."""
    module, name = _ATTENTION[backend]
    return getattr(_of_vllm(f"v1.attention.backends.{module}"), name)


def num_compute_units() -> int:
    """Return the number of the GPU's multiprocessors, as vLLM counts them."""
    return int(_of_vllm("utils.platform_utils").num_compute_units())


# -- recurrent states -------------------------------------------------------------------


def verify_gated_delta(**given: object) -> None:
    """Call the Triton kernel that verifies gated delta nets."""
    own = _of_vllm("model_executor.layers.mamba.gdn.qwen_gdn_linear_attn")
    own.fused_sigmoid_gating_delta_rule_update(**given)


def verify_gated_delta_fused(**given: object) -> None:
    """Call the kernel that verifies gated delta nets and applies their gated norm."""
    _of_vllm("_custom_ops").fused_gdn_decode_post_conv_mtp(**given)


def has_gated_delta_fused() -> bool:
    """Tell whether this release has the fused kernel."""
    for library in ("_C_stable_libtorch", "_C"):
        with contextlib.suppress(ImportError):
            _of_vllm(library)
    return hasattr(torch.ops._C, "fused_gdn_decode_post_conv_mtp")


def choose_mamba2_kernel() -> None:
    """Let vLLM choose its kernel of Mamba-2 layers, as an engine does for its caches."""
    spec = _of_vllm("v1.kv_cache_interface").MambaSpec(
        block_size=1, shapes=((1,),), dtypes=(torch.float32,)
    )
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    settings = _of_vllm("config.mamba").MambaConfig()
    dispatch = _of_vllm("model_executor.layers.mamba.ops.ssu_dispatch")
    dispatch.initialize_mamba_ssu_backend(settings, caches)


def verify_mamba2(*given: object, **more: object) -> None:
    """Call the Triton kernel that verifies Mamba-2 layers."""
    own = _of_vllm("model_executor.layers.mamba.mamba_mixer2")
    own.selective_state_update(*given, **more)
