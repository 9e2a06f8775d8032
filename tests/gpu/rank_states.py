"""The states of tensor-parallel ranks, each on a GPU of its own: see ``state_watch``.

vLLM imports this module in each rank before it makes the device.
"""

from __future__ import annotations

import state_watch
from first_configs import take_first_configs

take_first_configs()


class Watch(state_watch.Watch):
    """The worker extension of such ranks."""
