"""Compile the kernel of Mamba-2 layers for an H100 or H200, without one; prints facts as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from compiled_delta import facts
from kvtxn.backends.mamba2.verify_kernel import verify_rows
from triton import compile as compile_for
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

#: Dtypes of the arguments: those of an engine.
POINTERS = {
    **dict.fromkeys(("x", "dt", "B", "C", "D", "dt_bias", "out"), "*bf16"),
    **dict.fromkeys(("A", "kept_key", "kept_value", "kept_decay"), "*fp32"),
    **dict.fromkeys(("sources", "starts"), "*i32"),
}
#: Strides that are multiples of 16.
STRIDES = ("x", "dt", "b", "c", "slot", "out")
#: Nemotron-H's layer.
SIZES = {"GROUPS": 8, "HEADS": 128, "STATE_SIZE": 128, "HEAD_SIZE": 64, "KEYS": 128}


def assembly(state: str, **constants: Any) -> str:
    """The kernel's assembly for states of a dtype."""
    names = verify_rows.arg_names
    kinds = {
        name: "constexpr"
        if name in constants
        else {**POINTERS, "state": f"*{state}"}.get(name, "i32")
        for name in names
    }
    wide = [*POINTERS, "state", *(f"{name}_stride" for name in STRIDES)]
    source = ASTSource(
        fn=verify_rows,
        signature=kinds,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in wide},
    )
    target = GPUTarget("cuda", 90, 32)
    return compile_for(source, target=target, options={"num_warps": 1}).asm["ptx"]


def every() -> dict[str, dict[str, int]]:
    """Facts of all variants."""
    found = {}
    for state, run in (("fp32", 4), ("bf16", 8)):
        same = {**SIZES, "VALUES": 16, "LONGEST": 5, "COLUMNS": 8, "RUN": run, "ALIGNED": True}
        found[state] = facts(assembly(state, **same))
    return found


if __name__ == "__main__":
    json.dump(every(), sys.stdout)
