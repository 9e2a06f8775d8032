"""A cache for Hugging Face transformers that is written by transactions."""

from .cache import TxnCache

__all__ = ["TxnCache"]
