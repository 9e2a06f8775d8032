"""Verify steps of Mamba-2 layers that write no state.

``verify_mamba2`` computes the outputs of one layer's rows. It reads each state once, writes none,
and stages what a commit needs: B, ``x * dt``, and decays.

A row updates the state as in a gated delta net: ``state * decay + value (x) key``. So the staged
rows are ``gated_delta.DeltaRows``, with B for the keys and ``x * dt`` for the corrected values, and
``gated_delta.advance_gated_delta`` commits them, for all layers in one launch.

``reference`` has the same function in torch: the specification, and what runs on a CPU.
"""

from .step import verify_mamba2

__all__ = ["verify_mamba2"]
