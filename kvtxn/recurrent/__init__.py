"""Recurrent layers whose commit replays rows: one state per request, and no copies of it.

``LayerRef.recurrent(name, *states, replay=...)`` takes one description per state:

- ``GatedDelta``: gated delta net, and Kimi delta attention with ``decay="channel"``;
- ``Mamba2``;
- ``ShortConv``: the convolution window that those layers keep beside their state.

``StateSlots`` holds the slots for requests whose states are kept at a block boundary.

``kvtxn.recurrence`` defines the interface of a description, ``kvtxn.state_replay`` is the
reference for the commit; ``rank_one`` has the arithmetic that gated delta net and Mamba-2 share.
"""

from ..recurrence import Recurrence, RowPart
from ..state_slots import StateSlots
from .gated_delta import GatedDelta
from .mamba2 import Mamba2
from .short_conv import ShortConv

__all__ = ["GatedDelta", "Mamba2", "Recurrence", "RowPart", "ShortConv", "StateSlots"]
