"""The states of tensor-parallel ranks that share a GPU: see ``one_gpu`` and ``rank_states``.

vLLM imports this module in each rank before it makes the device.
"""

from __future__ import annotations

import one_gpu  # noqa: F401 - the import lets ranks share a device
import rank_states


class Watch(rank_states.Watch):
    """The worker extension of such ranks."""
