"""Compile the gated norm for an H100 or H200, without one; prints facts as JSON."""

from __future__ import annotations

import json
import re
import sys

import triton
from kvtxn.backends.gated_delta.gated_norm import norm_rows
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def facts(number: str, weight: str, *, sigmoid: bool) -> dict[str, int]:
    """Counts of instructions, for rows of a dtype and weights of another."""
    kinds = {"x": f"*{number}", "gate": f"*{number}", "weight": f"*{weight}", "eps": "fp32"}
    constants = {"SIZE": 128, "WIDTH": 128, "HEADS": 4, "SIGMOID": sigmoid}
    names = norm_rows.arg_names
    source = ASTSource(
        fn=norm_rows,
        signature={n: "constexpr" if n in constants else kinds.get(n, "i32") for n in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in ("x", "gate", "weight", "x_stride", "gate_stride")
        },
    )
    target = GPUTarget("cuda", 90, 32)
    code = triton.compile(source, target=target, options={"num_warps": 1}).asm["ptx"]
    patterns = {"loads": r"ld\.global", "stores": r"st\.global", "barriers": r"bar\.sync"}
    return {name: len(re.findall(pattern, code)) for name, pattern in patterns.items()}


if __name__ == "__main__":
    found = {
        f"{number}, {weight}, {sigmoid}": facts(number, weight, sigmoid=sigmoid)
        for number, weight in (("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32"))
        for sigmoid in (False, True)
    }
    json.dump(found, sys.stdout)
