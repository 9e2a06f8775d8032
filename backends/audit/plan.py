"""Tables on the device that tell the audit's kernels the tensors of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import attrs
import torch
import triton.language as tl
from torch import Tensor

from ...audit.books import Books
from ...audit.step import Step, Stretch

#: A step or a stretch.
_Reads = TypeVar("_Reads", Step, Stretch)

#: Sets of addresses that are remembered; beyond, all are forgotten.
_MAX_REMEMBERED: Final = 256


#: Columns of a table of ``Addresses``, one line per group. The stride is in elements. Behind the
#: number of lines comes the address of int64 ``[num_requests]``, each request's line of the tensor,
#: or 0; then that of int64 ``[n]``, what each number in the tensor stands for, or 0, and n.
TENSOR: Final = (
    "address", "stride", "columns", "lines", "table_lines", "block_map", "map_length",
)  # fmt: skip

#: Columns per line, and where each stands, for kernels.
NUM_TENSOR_FIELDS = tl.constexpr(len(TENSOR))
(
    AT_ADDRESS,
    AT_STRIDE,
    AT_COLUMNS,
    AT_LINES,
    AT_TABLE_LINES,
    AT_BLOCK_MAP,
    AT_MAP_LENGTH,
) = (tl.constexpr(column) for column in range(len(TENSOR)))

#: The tensors of a step whose elements kernels count from the tensor's address.
_COUNTED: Final = ("lines", "starts", "first", "tokens", "drafts", "told", "positions", "parents")


def contiguous(step: Step) -> Step:
    """Return a step whose tensors of requests and rows are contiguous; itself if it is that.

    ``table_lines`` and ``block_maps`` are int64, too. A table from ``Addresses`` says how the other
    tensors by group lie.
    """
    copied = {}
    for name in _COUNTED:
        tensor = getattr(step, name)
        if tensor is not None and not tensor.is_contiguous():
            copied[name] = tensor.contiguous()
    step = attrs.evolve(step, **copied) if copied else step
    return with_numbers(step)


def with_numbers(read: _Reads) -> _Reads:
    """Return a step or stretch whose lines and maps of tables are int64, contiguous; or itself."""
    lines, maps = read.table_lines, read.block_maps
    if lines is not None:
        lines = lines.long().contiguous()
    if maps:
        maps = {name: each.long().contiguous() for name, each in maps.items()}
    same = all(maps[name] is each for name, each in read.block_maps.items())
    if same and lines is read.table_lines:
        return read
    return attrs.evolve(read, table_lines=lines, block_maps=maps)


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

    def of(self, tensors: Mapping[str, Tensor], read: Step | Stretch | None = None) -> Tensor:
        """Return the table of a step's tensors, int64 ``[num_groups, len(TENSOR)]``, on the device.

        A group that has no tensor here has address 0. Equal addresses and sizes give the same
        table.

        Args:
            tensors: by group.
            read: reads through these tables, as ``with_numbers`` returns it; None: they are none.
        """
        flat: list[int] = []
        lines = None if read is None else read.table_lines
        named = 0 if lines is None else lines.data_ptr()
        maps = {} if read is None else read.block_maps
        for name in self._names:
            tensor = tensors.get(name)
            if tensor is None:
                flat += (0,) * len(TENSOR)
            else:
                stride = tensor.stride(0) if tensor.ndim == 2 else 0
                flat += (tensor.data_ptr(), stride, tensor.shape[-1], tensor.shape[0], named)
                block_map = maps.get(name)
                flat += (0, 0) if block_map is None else (block_map.data_ptr(), len(block_map))
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
