"""Values that callers give: on their way to a device, checked for their kind, named in messages."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor


def to_device(values: Sequence[int] | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return host values as a tensor on ``device``, without waiting for the device.

    Pinned memory makes the copy to a GPU asynchronous; torch's caching host allocator keeps it
    alive until the copy is done. It is new memory even if ``values`` is pinned already, because the
    caller may refill ``values`` while the copy still waits. On a CPU a tensor of the dtype is
    returned as it is.
    """
    host = torch.as_tensor(values, dtype=dtype, device="cpu")  # whatever torch's default device
    if device.type != "cuda":
        return host.to(device)
    pinned = torch.empty_like(host, pin_memory=True).copy_(host)
    return pinned.to(device, non_blocking=True)


def host_memory(tensor: Tensor) -> Tensor:
    """Return new memory of the host for a copy of a tensor; pinned, if it comes from a GPU."""
    with torch.inference_mode(False):  # it is changed in inference mode or not
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


@attrs.frozen(eq=False)
class HostCopy:
    """A copy of a tensor on the host, made while its device works on.

    Attributes:
        values: the copy, on the host; valid once ``ready``.
        copied: on a GPU, the event after the copy; None elsewhere.
    """

    values: Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def of(cls, tensor: Tensor) -> HostCopy:
        """Begin to copy a tensor; on a GPU this does not wait for it."""
        values = host_memory(tensor)
        values.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event() if tensor.is_cuda else None
        if copied is not None:
            copied.record()
        return cls(values, copied)

    @property
    def ready(self) -> bool:
        """True once the copy has arrived."""
        return self.copied is None or bool(self.copied.query())

    def wait(self) -> Tensor:
        """Wait until the copy has arrived, and return it."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.values


def ints(values: object) -> Tensor:
    """Return int32 or int64 in one dimension: a tensor as it is, other values on the host.

    Raises:
        ValueError: ``values`` are others; the message says what came.
    """
    try:
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(type(values).__name__) from None
    if not isinstance(values, Tensor) and tensor.shape == (0,):
        return tensor.to(torch.int64)  # torch's guess for an empty list is a float
    if not is_plain(tensor) or tensor.ndim != 1 or tensor.dtype not in (torch.int64, torch.int32):
        raise ValueError(described(tensor))
    return tensor


def in_python(value: object) -> object:
    """Return host arrays and tensors as Python lists, scalars of numpy and torch as Python numbers.

    So are the elements of a list or tuple, which comes back as a list. Other values are returned as
    they are, among them tensors on a device, which are not read.
    """
    if isinstance(value, Tensor):
        return value.tolist() if value.is_cpu and is_plain(value) else value
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [each if type(each) is int else in_python(each) for each in value]
    return value


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's numbers lie in memory; not if sparse, nested or quantised."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def is_dense(tensor: Tensor) -> bool:
    """Return whether what lies in memory are a tensor's numbers; a lazy view negates them."""
    return is_plain(tensor) and not (tensor.is_neg() or tensor.is_conj())


def described(value: object, *, where: bool = False) -> str:
    """Return dtype and shape of a tensor, or the type of anything else; ``where``: its device."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    layout = "nested" if value.is_nested else value.layout
    lazy = ", a view that negates" if is_plain(value) and not is_dense(value) else ""
    text = f"{value.dtype} {list(value.shape) if is_plain(value) else layout}{lazy}"
    return f"{text} on {value.device}" if where else text
