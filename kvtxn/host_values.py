"""Values from the host on their way to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return host values as a tensor on ``device``, without waiting for the device.

    Pinned memory makes the copy asynchronous; torch's caching host allocator
    keeps the pinned memory alive until the copy is done.
    """
    host = torch.as_tensor(values, dtype=dtype, device="cpu")  # whatever torch's default device
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
