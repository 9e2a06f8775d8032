"""Tables on the device that tell the audit's kernels the tensors of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import torch
import triton.language as tl
from torch import Tensor

from ...audit.books import Books
from ...audit.step import Step

#: Sets of addresses that are remembered; beyond, all are forgotten.
_MAX_REMEMBERED: Final = 256


#: Columns of a table of ``Addresses``, one line per group. The stride is in elements; the last one
#: is the address of int64 ``[num_requests]``, each request's line of the tensor, or 0.
TENSOR: Final = ("address", "stride", "columns", "lines", "table_lines")

#: Columns per line, and where each stands, for kernels.
NUM_TENSOR_FIELDS = tl.constexpr(len(TENSOR))
AT_ADDRESS, AT_STRIDE, AT_COLUMNS, AT_LINES, AT_TABLE_LINES = (
    tl.constexpr(column) for column in range(len(TENSOR))
)

#: The tensors of a step whose elements kernels count from the tensor's address.
_COUNTED: Final = ("lines", "starts", "first", "tokens", "drafts", "told", "positions", "parents")


def contiguous(step: Step) -> Step:
    """Return a step whose tensors of requests and rows are contiguous; itself if it is that.

    ``table_lines`` are int64, too. A table from ``Addresses`` says how the tensors by group lie.
    """
    copied = {}
    for name in _COUNTED:
        tensor = getattr(step, name)
        if tensor is not None and not tensor.is_contiguous():
            copied[name] = tensor.contiguous()
    lines = line_numbers(step.table_lines)
    if lines is not step.table_lines:
        copied["table_lines"] = lines
    return attrs.evolve(step, **copied) if copied else step


def line_numbers(table_lines: Tensor | None) -> Tensor | None:
    """Return lines of tables as int64, contiguous; the tensor itself if it is that, or None."""
    return None if table_lines is None else table_lines.long().contiguous()


class Addresses:
    """Makes and remembers tables of the addresses of each group's tensors, on the device.

    An engine's buffers stay where they are, so a table is made once and found again by the
    addresses in it. The table keeps no tensor alive: the caller must, as long as a launch runs or
        can be replayed.

    Args:
        books: the ledger's books, which give the order of the groups and the device.
    """

    def __init__(self, books: Books) -> None:
        self._names: Final = tuple(books.layout.places)
        self._device: Final = books.words.device
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor], table_lines: Tensor | None = None) -> Tensor:
        """Return the table of a step's tensors, int64 ``[num_groups, len(TENSOR)]``.

        A group that has no tensor here has address 0.

        Args:
            tensors: by group.
            table_lines: int64 ``[num_requests]``, contiguous, each request's line of the tensors;
                None: its own number.
        """
        flat: list[int] = []
        named = 0 if table_lines is None else table_lines.data_ptr()
        for name in self._names:
            tensor = tensors.get(name)
            if tensor is None:
                flat += (0,) * len(TENSOR)
            else:
                stride = tensor.stride(0) if tensor.ndim == 2 else 0
                flat += (tensor.data_ptr(), stride, tensor.shape[-1], tensor.shape[0], named)
        key = tuple(flat)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= _MAX_REMEMBERED:
                self._tables.clear()
            host = torch.tensor(flat, dtype=torch.int64).view(-1, len(TENSOR))
            if self._device.type == "cuda":
                host = host.pin_memory()
            table = self._tables[key] = host.to(self._device, non_blocking=True)
        return table
