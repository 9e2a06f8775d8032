"""``BlockSums``: checksums over all bytes of blocks, in one launch for all blocks and layers.

Memory contract of ``sum_blocks``: a program reads the bytes of one block in one page, and adds to
the block's two sums, which are zero before the launch. Sums of 64 bits wrap, so the order in which
programs add does not matter. A block that a page does not have is not read, and sums to nothing of
that page. Addresses are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...audit.digest import Key
from .words import RESERVED, permute

#: int64 columns of a page's line.
_BASE: Final = tl.constexpr(0)  # address of block 0
_STRIDE: Final = tl.constexpr(1)  # bytes from one block to the next
_WORDS: Final = tl.constexpr(2)  # words of a block
_FIRST: Final = tl.constexpr(3)  # words of a block in the pages before
_BLOCKS: Final = tl.constexpr(4)  # blocks
_FIELDS: Final = tl.constexpr(5)
#: Bytes of a word.
_WORD: Final = 8
#: Words that a program reads at a time.
_TILE: Final = 1024


@triton.jit(do_not_specialize=["blocks", "pages"])
def sum_blocks(
    blocks: tl.tensor, pages: tl.tensor, key: tl.tensor, sums: tl.tensor, TILE: tl.constexpr
) -> None:
    """Add the two checksums of one page of one block to ``sums``. Grid: (n, num_pages).

    A block outside the page's cache adds nothing.

    Args:
        blocks: int64 ``[n]``.
        pages: int64 ``[num_pages, _FIELDS]``.
        key: int64 ``[3]``.
        sums: int64 ``[n, 2]``, added to atomically.
        TILE: words that are read at a time.
    """
    number = tl.program_id(0)
    page = pages + tl.program_id(1) * _FIELDS
    block = tl.load(blocks + number)
    if (block >= 0) & (block < tl.load(page + _BLOCKS)):
        words, before = tl.load(page + _WORDS), tl.load(page + _FIRST)
        address = tl.load(page + _BASE) + block * tl.load(page + _STRIDE)
        start = address.to(tl.pointer_type(tl.int64))
        first, second = before * 0, before * 0
        for at in range(0, words, TILE):
            word = at + tl.arange(0, TILE).to(tl.int64)
            inside = word < words
            value = tl.load(start + word, mask=inside, other=0)
            place = (before + word) * RESERVED
            mixed = permute(value + permute(place, key), key)
            first += tl.sum(tl.where(inside, mixed, 0), axis=0)
            mixed = permute(value + permute(place + 1, key), key)
            second += tl.sum(tl.where(inside, mixed, 0), axis=0)
        tl.atomic_add(sums + number * 2, first)
        tl.atomic_add(sums + number * 2 + 1, second)


class BlockSums:
    """Computes ``kvtxn.audit.checksum.block_checksums`` of blocks, to the bit.

    Args:
        key: the engine's key.
        pages: uint8 ``[num_blocks, n]`` each, for which ``fits`` is True; they have to live as long
            as this.
    """

    def __init__(self, key: Key, pages: Sequence[Tensor]) -> None:
        device, lines, first = pages[0].device, [], 0
        for page in pages:
            words = page.shape[1] // _WORD
            lines.append([page.data_ptr(), page.stride(0), words, first, len(page)])
            first += words
        self._pages: Final = torch.tensor(lines, dtype=torch.int64, device="cpu").to(device)
        self._key: Final = key.constants(device)

    @staticmethod
    def fits(pages: Sequence[Tensor]) -> bool:
        """Tell whether each page is uint8 ``[num_blocks, n]`` of whole words at words' addresses.

        False without pages. A block's bytes have to be neighbours.
        """
        return bool(pages) and all(
            page.dtype is torch.uint8
            and page.ndim == 2
            and page.stride(1) == 1
            and not (page.shape[1] % _WORD or page.stride(0) % _WORD or page.data_ptr() % _WORD)
            for page in pages
        )

    def of(self, blocks: Tensor) -> Tensor:
        """Return the checksums of blocks, int64 ``[n, 2]``, on the pages' device; never waits.

        A page whose cache lacks a block adds nothing to the block's sums.

        Args:
            blocks: int64 ``[n]`` on the pages' device, contiguous.
        """
        sums = torch.zeros((len(blocks), 2), dtype=torch.int64, device=blocks.device)
        if len(blocks):
            sum_blocks[len(blocks), len(self._pages)](blocks, self._pages, self._key, sums, _TILE)
        return sums
