"""Compile kernels for an H100 or H200, without one; prints counts of instructions as JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

import triton.language as tl
from kvtxn.backends.gated_delta.advance_kernel import advance_rows
from kvtxn.backends.gated_delta.gated_norm import norm_rows
from kvtxn.backends.gated_delta.verify_kernel import verify_rows
from kvtxn.backends.mamba2.verify_kernel import verify_rows as verify_mamba2
from triton import compile as compile_for
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PATTERNS = {
    "loads": r"ld\.global",
    "stores": r"st\.global",
    "wide_loads": r"ld\.global\.v4\.b32",
    "wide_stores": r"st\.global\.v4\.b32",
    "from_shared": r"ld\.shared|ldmatrix",
    "products": r"mma\.sync\.",
    "ahead": r"cp\.async\.(ca|cg)",
}


def facts(
    kernel: Any, kinds: Mapping[str, str], strides: Collection[str], warps: int, **constants: Any
) -> dict[str, int]:
    """Count the instructions of a kernel.

    Args:
        kernel: the kernel.
        kinds: dtypes of arguments; all others are int32.
        strides: arguments that are multiples of 16, as all pointers are.
        warps: of a program.
        constants: arguments that the compiler knows.
    """
    names = kernel.arg_names
    wide = {name for name, kind in kinds.items() if kind.startswith("*")} | {*strides}
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else kinds.get(n, "i32") for n in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in wide if n in names},
    )
    target = GPUTarget("cuda", 90, 32)
    code = compile_for(source, target=target, options={"num_warps": warps}).asm["ptx"]
    return {name: len(re.findall(pattern, code)) for name, pattern in PATTERNS.items()}


#: Arguments of kernels of gated delta nets in an engine, and the strides that are multiples of 16.
DELTA = {
    **dict.fromkeys(("query", "key", "value", "a", "b", "dt_bias", "out"), "*bf16"),
    **dict.fromkeys(("A_log", "kept_key", "kept_value", "kept_decay"), "*fp32"),
    **dict.fromkeys(("sources", "starts", "count", "boundary", "snapshots"), "*i32"),
    **{"table": "*i64", "scale": "fp32"},
}
DELTA_STRIDES = [f"{name}_stride" for name in ("query", "key", "value", "a", "b", "slot", "out")]
DELTA_SIZES = {"KEY_HEADS": 16, "HEADS": 32, "KEY_SIZE": 128, "VALUE_SIZE": 128, "KEYS": 128}
#: By dtype of the states: the tiles of a commit's programs, and their warps.
ADVANCE = {
    "fp32": ({"VALUES": 8, "TILES": 2, "STATE": tl.float32}, 1),
    "bf16": ({"VALUES": 16, "TILES": 1, "STATE": tl.bfloat16}, 2),
}
#: The same of Mamba-2 layers, in the sizes of Nemotron-H's.
MAMBA2 = {
    **dict.fromkeys(("x", "dt", "B", "C", "D", "dt_bias", "out"), "*bf16"),
    **dict.fromkeys(("A", "kept_key", "kept_value", "kept_decay"), "*fp32"),
    **dict.fromkeys(("sources", "starts"), "*i32"),
}
MAMBA2_STRIDES = [f"{name}_stride" for name in ("x", "dt", "b", "c", "slot", "out")]
MAMBA2_SIZES = {"GROUPS": 8, "HEADS": 128, "STATE_SIZE": 128, "HEAD_SIZE": 64, "KEYS": 128}


def every() -> dict[str, dict[str, int]]:
    """Count the instructions of all variants."""
    found = {}
    for state, run in (("fp32", 4), ("bf16", 8)):
        rows = {"VALUES": 16, "LONGEST": 5, "RUN": run}
        verify = {**rows, "COLUMNS": 8, "ALIGNED": True}
        delta, mamba2 = DELTA | {"state": f"*{state}"}, MAMBA2 | {"state": f"*{state}"}
        for name, tiles, stages in (("verify", 1, 1), ("verify many", 8, 3)):
            tile = {"TILES": tiles, "STAGES": stages, "NORMALISE": True}
            given = {**DELTA_SIZES, **verify, **tile}
            found[f"{name} {state}"] = facts(verify_rows, delta, DELTA_STRIDES, 1, **given)
        tile, warps = ADVANCE[state]
        given = {**DELTA_SIZES, **rows, **tile, "SNAPSHOTS": False}
        found[f"advance {state}"] = facts(advance_rows, delta, DELTA_STRIDES, warps, **given)
        given = {**MAMBA2_SIZES, **verify}
        found[f"mamba2 {state}"] = facts(verify_mamba2, mamba2, MAMBA2_STRIDES, 1, **given)
    for number, weight in (("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")):
        kinds = {"x": f"*{number}", "gate": f"*{number}", "weight": f"*{weight}", "eps": "fp32"}
        for sigmoid in (False, True):
            given = {"SIZE": 128, "WIDTH": 128, "HEADS": 4, "SIGMOID": sigmoid}
            norm = facts(norm_rows, kinds, ("x_stride", "gate_stride"), 1, **given)
            found[f"norm {number} {weight} {sigmoid}"] = norm
    return found


if __name__ == "__main__":
    json.dump(every(), sys.stdout)
