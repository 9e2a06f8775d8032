"""kvtxn beside an SGLang server: the entry point of the group ``sglang.srt.plugins``."""

from .plugin import register

__all__ = ["register"]
