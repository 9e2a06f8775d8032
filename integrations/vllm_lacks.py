"""What vLLM's own attention backends do not take, so that no engine has it, kvtxn or not.

By their declarations and refusals in 0.32.0; on GPUs, where several can be chosen by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

_EIGHT_BITS: Final = ("fp8", "fp8_e4m3")

#: By backend: types of the model, formats of the cache, and what else a model can have.
LACKS: Final[Mapping[str, tuple[str, ...]]] = {
    "FLASH_ATTN": ("float32",),
    "FLASHINFER": ("float32",),
    "FLEX_ATTENTION": (*_EIGHT_BITS, "ALiBi", "attention sinks", "shared rows"),
    "TRITON_MLA": ("float32",),
    "FLASHMLA": ("float32",),
    "FLASH_ATTN_MLA": ("float32", *_EIGHT_BITS),
}


def lacking(attention: str | None, wanted: Sequence[str]) -> str:
    """The first of these that a backend does not take; "" where it takes all, or is not known."""
    return next((each for each in wanted if each in LACKS.get(attention or "", ())), "")
