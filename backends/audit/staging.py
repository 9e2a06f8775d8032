"""Numbers on their way from the host to kernels, without a copy and without waiting.

Memory of the host that is pinned can be read by kernels where it lies. It is allocated once, in
parts that are filled one after the other. A part is filled anew when an event behind the launches
that read it has passed; where that is not so, or numbers do not fit into a part, they are copied to
the device by torch, which pins memory for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ...host_values import to_device
from ..launching.repeated_launch import ALIGNED, memoryview_of

#: Parts, and the numbers of each: 4 MiB in all.
_PARTS: Final = 4
_NUMBERS: Final = 1 << 17
#: Each piece begins at a multiple of so many numbers: launches are compiled for such addresses.
_EVEN: Final = ALIGNED // 8
_INT64: Final = torch.int64


class Staging:
    """Pinned memory of the host, of which each launch gets a piece.

    The launch that reads a piece must come before the next call, on the same stream.

    Args:
        device: of the launches.
        parts: parts.
        numbers: numbers of each part.
    """

    def __init__(self, device: torch.device, parts: int = _PARTS, numbers: int = _NUMBERS) -> None:
        self._device: Final = device
        self._on_gpu: Final = device.type == "cuda"
        with torch.inference_mode(False):
            memory = torch.zeros(parts, numbers, dtype=torch.int64)
            memory = memory.pin_memory() if self._on_gpu else memory
        self._parts: Final = memory.unbind()
        self._views: Final = [memoryview_of(part) for part in self._parts]
        self._passed: list[torch.cuda.Event | None] = [None] * parts
        self._numbers: Final = numbers
        self._part = self._filled = 0

    def put(self, pieces: Sequence[memoryview | Tensor]) -> Tensor:
        """Return numbers, one piece after the other, where a kernel can read them.

        They lie in the pinned memory, or are copied to the device where that has no room.

        Args:
            pieces: memory of int64, or tensors of ints on the host.

        Returns:
            int64 ``[n]``; its memory is another call's as soon as the launch that comes next has
            read it.
        """
        count = sum(map(len, pieces))
        if not self._make_room(count):
            whole = [
                each.long() if isinstance(each, Tensor) else torch.frombuffer(each, dtype=_INT64)
                for each in pieces
                if len(each)
            ]
            return to_device(torch.cat(whole), self._device, torch.int64)
        begin = end = self._filled
        part, view = self._parts[self._part], self._views[self._part]
        for each in pieces:
            begin, end = end, end + len(each)
            if isinstance(each, Tensor):
                part[begin:end].copy_(each)
            else:
                view[begin:end] = each
        begin, self._filled = self._filled, end + count % _EVEN
        return part[begin:end]

    def _make_room(self, count: int) -> bool:
        """Go on to the next part where this one is full; tell whether ``count`` numbers fit in now.

        False if no part is so large, or if launches may still read the next part.
        """
        if count > self._numbers:
            return False
        if self._filled + count <= self._numbers:
            return True
        later = (self._part + 1) % len(self._parts)
        passed = self._passed[later]
        if passed is not None and not passed.query():
            return False
        if self._on_gpu:
            event = self._passed[self._part] or torch.cuda.Event()
            event.record()
            self._passed[self._part] = event
        self._part, self._filled = later, 0
        return True
