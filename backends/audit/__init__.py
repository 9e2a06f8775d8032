"""The ledger's passes as Triton kernels."""

from .triton_passes import TritonPasses

__all__ = ["TritonPasses"]
