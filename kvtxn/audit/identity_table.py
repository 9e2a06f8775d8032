"""``IdentityTable``: what the rows of a block are, by the bytes of the block.

A connector may copy any full block away and bring it back at any time, and need not say so. So the
table remembers the bytes of full blocks, by a checksum of 128 bits, and whose rows they are. Bytes
that turn up again are then the rows that they were, however they came.

An entry takes 64 bytes, and the table is as large as it may become from the beginning. It works as
the cache of a processor does: an entry may lie in one of eight places, and pushes out the one that
has been there longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..errors import ConfigError
from ..host_values import described
from .digest import RESERVED, Key, signed

#: Blocks that a table remembers by default.
CAPACITY: Final = 1 << 20
#: Places in which an entry may lie.
WAYS: Final = 8
#: The int64 numbers of an entry: two of the bytes, the step with the serial number, and the rest of
#: what ``Ledger.identities`` returns.
_ENTRY: Final = 8
#: The column of the last row's word; 0 in an entry that is empty.
_WORD: Final = 7
#: Steps and serial numbers have 32 bits each.
_SERIALS: Final = 1 << 32


@attrs.frozen
class Identity:
    """Whose rows the bytes of a block are: the first and the last row tell it of all.

    Words are at the age that they had in the first epoch.

    Attributes:
        step: the ledger's step in which the block was remembered.
        serial: the serial number of the request that wrote or stored it.
        first: the word of the block's first row.
        terms: the terms of the token of the first row and of the two before.
        last: the word of the block's last row.
    """

    step: int
    serial: int
    first: int
    terms: tuple[int, int, int]
    last: int

    def origin(self, key: Key) -> Tensor:
        """Return the ``origin`` of the first row for ``Ledger.import_rows``, int64 ``[6]``."""
        own, *before = self.terms
        _, position = key.token_of(own)
        digest = signed(self.first - own)
        return torch.tensor([self.step, self.serial, position, digest, *before])


class IdentityTable:
    """The identities of blocks by their bytes, bounded in size.

    The same bytes may be the rows of several prefixes, such as of tokens with equal embeddings, or
    of earlier weights: then each of them is remembered, as long as there is room.

    Args:
        capacity: the most blocks to remember, 64 bytes of host memory each; rounded up to a
            multiple of eight.

    Attributes:
        forgotten: number of blocks that were pushed out by others.
        repeats: the same bytes were once the rows of several prefixes or weights. If blocks were
            forgotten as well, bytes that are known may be somebody else's, too.

    Raises:
        ConfigError: ``capacity`` is not a positive int.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        if type(capacity) is not int or capacity < 1:
            raise ConfigError(
                "IdentityTable", "capacity is not valid", expected="a positive int",
                got=repr(capacity), hint=f"leave it out for {CAPACITY}",
            )  # fmt: skip
        sets = -(-capacity // WAYS)
        with torch.inference_mode(False):  # remembered in inference mode or not
            self._entries: Final = torch.zeros((sets, WAYS, _ENTRY), dtype=torch.int64)
            self._next: Final = torch.zeros(sets, dtype=torch.uint8)
        self.forgotten, self.repeats = 0, False

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory, whatever is remembered."""
        return self._entries.nbytes + self._next.nbytes

    def __len__(self) -> int:
        """Return the number of blocks that are remembered."""
        return int((self._entries[..., _WORD] != 0).sum())

    def clear(self) -> None:
        """Forget every block; ``forgotten`` is 0 and ``repeats`` False again."""
        self._entries.zero_()
        self.forgotten, self.repeats = 0, False

    def remember(self, contents: Tensor, identities: Tensor) -> list[bool]:
        """Remember blocks; where there is no room, older ones are pushed out.

        Args:
            contents: int64 ``[n, 2]`` on the host, keyed checksums of the blocks' bytes.
            identities: int64 ``[n, 7]`` on the host, as ``Ledger.identities`` returns them. Blocks
                whose first or last row nobody has written, or is of a rejected draft, are left out.

        Returns:
            For each block whether it was written down.

        Raises:
            ConfigError: a tensor does not fit.
        """
        _require(contents, 2)
        _require(identities, 7, len(contents))
        step, serial, *rest = identities.unbind(1)
        ends = identities[:, (2, -1)]
        is_written = ((ends < 0) | (ends >= RESERVED)).all(1)
        packed = [*contents.unbind(1), step * _SERIALS + serial, *rest]
        entries = torch.stack(packed, 1)[is_written]
        homes = entries[:, 0].remainder(len(self._entries))
        while len(entries):
            now = _first_of_each(homes)
            self._put(homes[now], entries[now])
            homes, entries = homes[~now], entries[~now]
        return is_written.tolist()

    def _put(self, homes: Tensor, entries: Tensor) -> None:
        """Write entries, each into its set: over the one of the same rows, else over the oldest.

        Entries that are pushed out are counted in ``forgotten``; ``repeats`` is set if the bytes of
        an entry were there as other rows.

        Args:
            homes: int64 ``[n]``, the sets, all different.
            entries: int64 ``[n, 8]``.
        """
        there = self._entries[homes]
        same = (there[..., :2] == entries[:, None, :2]).all(2) & (there[..., _WORD] != 0)
        had = same.any(1)
        same &= there[..., _WORD] == entries[:, None, _WORD]
        is_new = ~same.any(1)
        self.repeats |= bool((had & is_new).any())
        way = torch.where(is_new, self._next[homes].long(), same.int().argmax(1))
        self.forgotten += int((is_new & (self._entries[homes, way, _WORD] != 0)).sum())
        self._entries[homes, way] = entries
        self._next[homes[is_new]] = ((way[is_new] + 1) % WAYS).to(torch.uint8)

    def lookup(self, contents: Tensor) -> list[list[Identity]]:
        """Return what is known of blocks.

        Args:
            contents: as for ``remember``.

        Returns:
            For each block the identities of its bytes; none if these bytes are unknown.

        Raises:
            ConfigError: the tensor does not fit.
        """
        _require(contents, 2)
        there = self._entries[contents[:, 0].remainder(len(self._entries))]
        same = (there[..., :2] == contents[:, None]).all(2) & (there[..., _WORD] != 0)
        return [[*_unpacked(row[at])] for row, at in zip(there, same, strict=True)]


def _unpacked(entries: Tensor) -> Iterator[Identity]:
    """Yield the identities of entries, int64 ``[n, 8]``."""
    for _, _, packed, first, own, before, older, last in entries.tolist():
        step, serial = divmod(packed, _SERIALS)
        yield Identity(step, serial, first, (own, before, older), last)


def _first_of_each(values: Tensor) -> Tensor:
    """Return True for the first of equal values, bool ``[n]``."""
    order = values.argsort(stable=True)
    sorted_values = values[order]
    first = torch.ones(len(values), dtype=torch.bool)
    first[order[1:]] = sorted_values[1:] != sorted_values[:-1]
    return first


def _require(tensor: Any, width: int, length: int | None = None) -> None:
    """Refuse, with a ConfigError, what is not int64 ``[length, width]`` on the host."""
    is_tensor = isinstance(tensor, Tensor) and tensor.dtype is torch.int64 and tensor.is_cpu
    right = is_tensor and tensor.ndim == 2 and tensor.shape[1] == width
    if not right or (length is not None and len(tensor) != length):
        raise ConfigError(
            "IdentityTable", "the tensor does not fit",
            expected=f"int64 [{'n' if length is None else length}, {width}] on the host",
            got=described(tensor),
            hint="give one row per block; nothing was changed",
        )  # fmt: skip
