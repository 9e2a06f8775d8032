"""vLLM's Triton kernels, through Triton's interpreter on a CPU.

On a CPU vLLM replaces Triton, so its modules of kernels are loaded once more, under other names.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from kernels_here import importing_kernels

with importing_kernels():
    import triton
    import triton.language as tl

    @triton.jit
    def softplus(dt):
        """vLLM's, by functions that the interpreter has."""
        return tl.where(dt <= 20.0, tl.log(tl.exp(dt) + 1), dt)

    @triton.jit
    def fast_exp(x):
        """vLLM's, by functions that the interpreter has."""
        return tl.exp(x)


def _with(name: str, **own: object) -> ModuleType:
    """A copy of an imported module in which some names stand for other objects."""
    made = ModuleType(name)
    vars(made).update({**vars(sys.modules[name]), **own})
    return made


@cache
def _keep_truth_values() -> None:
    """Let the interpreter spread a truth value over a block as one: it makes a number of it."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    spread = builder.create_splat

    def create_splat(self: Any, kind: Any, given: Any) -> Any:
        made = spread(self, kind, given)
        made.data = made.data.astype(given.data.dtype) if given.data.dtype == bool else made.data
        return made

    builder.create_splat = create_splat


@cache
def load(path: str, parts: tuple[str, ...] = ()) -> Any:
    """Load one of vLLM's modules of kernels.

    ``path`` is inside of the package ``vllm``; ``parts``: modules of kernels that it imports.
    """
    import vllm
    import vllm.platforms
    import vllm.triton_utils

    import_module(".".join(("vllm", *Path(path).with_suffix("").parts)))  # and all it imports
    loaded = {".".join(("vllm", *Path(part).with_suffix("").parts)): load(part) for part in parts}
    with importing_kernels():
        _keep_truth_values()
        platform = SimpleNamespace(
            is_cpu=lambda: False,
            is_arch_support_pdl=lambda: False,
            is_rocm=lambda: False,
            is_cuda=lambda: False,
            is_xpu=lambda: False,
            is_cuda_alike=lambda: False,
            is_device_capability_family=lambda family: False,
            fp8_dtype=lambda: torch.float8_e4m3fn,
        )
        others = {
            "vllm.triton_utils": _with("vllm.triton_utils", tl=tl, triton=triton, HAS_TRITON=True),
            "vllm.platforms": _with("vllm.platforms", current_platform=platform),
        }
        others |= loaded
        file = Path(vllm.__file__).parent / path
        spec = importlib.util.spec_from_file_location(f"interpreted_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        module.__package__ = ".".join(("vllm", *Path(path).parent.parts))
        with mock.patch.dict(sys.modules, others):
            spec.loader.exec_module(module)
    return module


def gated_delta() -> Any:
    """The kernel of gated delta nets."""
    path = "third_party/flash_linear_attention/ops/fused_sigmoid_gating.py"
    return load(path).fused_sigmoid_gating_delta_rule_update


def mamba2() -> Any:
    """The kernel of Mamba-2 layers; two functions that the interpreter lacks are written out."""
    module = load("model_executor/layers/mamba/ops/mamba_ssm.py")
    module.softplus, module.fast_exp = softplus, fast_exp
    return module.selective_state_update


def olmo_delta() -> Any:
    """The kernel of gated delta nets of OLMo hybrid."""
    module = load("third_party/flash_linear_attention/ops/fused_recurrent.py")
    module.exp = fast_exp
    return module.fused_recurrent_gated_delta_rule
