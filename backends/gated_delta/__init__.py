"""Verify steps of gated delta nets that write no state, and their commit by replay.

- ``verify_gated_delta`` computes the outputs of one layer's rows. It reads each state once, writes
  none, and stages what a commit needs: normalised keys, corrected values, decays.
- ``advance_gated_delta`` commits: it reads one state per request and layer, takes the kept rows in,
  and writes the state back, for all layers in one launch.

``DeltaRows`` holds the staged rows of a layer, ``DeltaLayers`` the addresses of all layers.
``reference`` has the same two functions in torch: the specification, and what runs on a CPU.
"""

from .layers import DeltaLayers, DeltaRows
from .step import advance_gated_delta, verify_gated_delta

__all__ = ["DeltaLayers", "DeltaRows", "advance_gated_delta", "verify_gated_delta"]
