"""Compile ``advance_states`` for an H100 or H200, without one; prints facts of its code as JSON."""

from __future__ import annotations

import json
import re
import sys

import triton
import triton.language as tl
from kvtxn.backends.recurrent.kernel import advance_states
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

#: Dtypes of a launch's arguments, in their order.
ARGUMENTS = ["*i64", "*i32", *["*i64"] * 8, *["i32"] * 5, "i64", "i32", "i64", "i64", *["i32"] * 3]

#: Qwen3.5's layer: heads of 128 x 128 and convolutions of four taps.
CONSTANTS = {
    "ACCEPT": 1, "UNIFORM": True, "GROUPS": 2, "CROSSES": False, "RANK_ONE": True,
    "STATE": tl.float32, "KEY": tl.float32, "VALUES": 16, "KEYS": 128, "VECTOR": 4,
    "SHIFTS": True, "WORD": tl.int16, "TAPS": 4, "CHANNELS": 256, "LONGEST": 8, "CHUNK": 128,
}  # fmt: skip

#: What else is to compile.
OTHERS = {
    "float32": {},
    "bfloat16": {"STATE": tl.bfloat16, "VALUES": 32, "VECTOR": 8},
    "odd": {"STATE": tl.float16, "KEY": tl.bfloat16, "VECTOR": 1, "UNIFORM": False},
    "paths": {"ACCEPT": 5, "UNIFORM": False},
    "boundaries": {"CROSSES": True},
    "past": {"RANK_ONE": False, "WORD": tl.int32, "ACCEPT": 0},
}


def facts(**constants: object) -> dict[str, int]:
    """Counts of instructions in the compiled kernel's assembly."""
    names = advance_states.arg_names
    known = CONSTANTS | constants
    kinds = dict(zip((n for n in names if n not in known), ARGUMENTS, strict=True))
    source = ASTSource(
        fn=advance_states,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in known.items()},
    )
    options = {"num_warps": 2, "enable_fp_fusion": False, "maxnreg": 128}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    patterns = {
        "fused": r"\bfma\.\S*f32",
        "flushed": r"\.ftz\.",
        "wide_loads": r"ld\.global\.v4\.",
        "wide_stores": r"st\.global\.v4\.",
    }
    found = {name: len(re.findall(pattern, code)) for name, pattern in patterns.items()}
    store = code.index("st.global")
    between = code[code.rindex("ld.global", 0, store) : store]
    return found | {"barriers_before_store": between.count("bar.sync")}


if __name__ == "__main__":
    json.dump({name: facts(**constants) for name, constants in OTHERS.items()}, sys.stdout)
