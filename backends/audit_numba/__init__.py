"""The ledger's passes for CPUs, compiled by numba.

They stay beside those in torch for engines that serve. A tiny vLLM on two busy cores (1, 4 and 8
requests, four drafts, 21 rounds by turns, medians) spent 0.4 ms of the host's time per step on the
ledger with these passes, and 5.5 to 6.4 ms with those in torch; it made 0.77 to 0.90 of stock's
tokens per second, and 0.45 to 0.50. A short run that compiles them spends what they save: ``kvtxn
audit`` of 100 requests took 129 s with them and 113 s in torch (medians of three by turns). Later
processes load what one has compiled, see ``machine_code``.
"""

from .numba_passes import NumbaPasses

__all__ = ["NumbaPasses"]
