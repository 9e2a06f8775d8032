"""The states of tensor-parallel ranks that share a GPU: see ``one_gpu`` and ``state_watch``.

vLLM imports this module in each rank before it makes the device.
"""

from __future__ import annotations

import one_gpu  # noqa: F401 - the import lets ranks share a device
import state_watch
from first_configs import take_first_configs

take_first_configs()


class Watch(state_watch.Watch):
    """The worker extension of such ranks."""
