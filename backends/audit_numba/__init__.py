"""The ledger's passes for CPUs, compiled by numba."""

from .numba_passes import NumbaPasses

__all__ = ["NumbaPasses"]
