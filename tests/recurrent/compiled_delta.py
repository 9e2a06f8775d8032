"""Compile kernels of gated delta nets for an H100 or H200, without one; prints facts as JSON."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
import triton.language as tl
from kvtxn.backends.gated_delta.advance_kernel import advance_rows
from kvtxn.backends.gated_delta.verify_kernel import verify_rows
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

#: Dtypes of the arguments, and which of them are multiples of 16: those of an engine.
POINTERS = {
    **dict.fromkeys(("query", "key", "value", "a", "b", "dt_bias", "out"), "*bf16"),
    **dict.fromkeys(("A_log", "kept_key", "kept_value", "kept_decay"), "*fp32"),
    **dict.fromkeys(("sources", "starts", "count", "boundary", "snapshots"), "*i32"),
    "table": "*i64",
}
STRIDES = ("query", "key", "value", "a", "b", "slot", "out")
#: By dtype of the states: the tiles of a commit's programs, and their warps.
ADVANCE = {
    tl.float32: ({"VALUES": 8, "TILES": 2}, 1),
    tl.bfloat16: ({"VALUES": 16, "TILES": 1}, 2),
}
SIZES = {"KEY_HEADS": 16, "HEADS": 32, "KEY_SIZE": 128, "VALUE_SIZE": 128, "KEYS": 128}


def assembly(kernel: Any, state: str, warps: int, **constants: Any) -> str:
    """The kernel's assembly for states of a dtype."""
    names = kernel.arg_names
    kinds = {
        name: "constexpr"
        if name in constants
        else {**POINTERS, "state": f"*{state}", "scale": "fp32"}.get(name, "i32")
        for name in names
    }
    wide = [*POINTERS, "state", *(f"{name}_stride" for name in STRIDES)]
    source = ASTSource(
        fn=kernel,
        signature=kinds,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in wide if n in names},
    )
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]


def facts(code: str) -> dict[str, int]:
    """Counts of instructions."""
    patterns = {
        "from_shared": r"ld\.shared|ldmatrix",
        "wide_loads": r"ld\.global\.v4\.b32",
        "wide_stores": r"st\.global\.v4\.b32",
        "products": r"mma\.sync\.",
        "ahead": r"cp\.async\.(ca|cg)",
    }
    return {name: len(re.findall(pattern, code)) for name, pattern in patterns.items()}


def every() -> dict[str, dict[str, int]]:
    """Facts of all variants."""
    found = {}
    for state, dtype, run in (("fp32", tl.float32, 4), ("bf16", tl.bfloat16, 8)):
        sizes = {**SIZES, "VALUES": 16, "LONGEST": 5, "RUN": run}
        verify = {"COLUMNS": 8, "ALIGNED": True, "NORMALISE": True}
        for name, tiles, stages in (("verify", 1, 1), ("verify many", 8, 3)):
            several = {"TILES": tiles, "STAGES": stages}
            code = assembly(verify_rows, state, 1, **sizes, **verify, **several)
            found[f"{name} {state}"] = facts(code)
        tile, warps = ADVANCE[dtype]
        advance = {**tile, "STATE": dtype, "SNAPSHOTS": False}
        code = assembly(advance_rows, state, warps, **{**sizes, **advance})
        found[f"advance {state}"] = facts(code)
    return found


if __name__ == "__main__":
    json.dump(every(), sys.stdout)
