"""Values from the host on their way to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return host values as a tensor on ``device``, without waiting for the device.

    Pinned memory makes the copy to a GPU asynchronous; torch's caching host allocator keeps it
    alive until the copy is done. It is new memory even if ``values`` is pinned already, because the
    caller may refill ``values`` while the copy still waits.
    """
    host = torch.as_tensor(values, dtype=dtype, device="cpu")  # whatever torch's default device
    if device.type != "cuda":
        return host.to(device)
    pinned = torch.empty_like(host, pin_memory=True).copy_(host)
    return pinned.to(device, non_blocking=True)
