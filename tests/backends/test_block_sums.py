"""Checksums of whole blocks: the kernel is the reference to the bit, in every layout of a cache."""

from __future__ import annotations

import pytest
import torch
from kernels_here import importing_kernels

from kvtxn.audit import Key
from kvtxn.audit.checksum import block_checksums, block_pages

with importing_kernels():
    from kvtxn.backends.audit.block_sums import BlockSums

KEY = Key((3 << 40, 5, -7 & (1 << 64) - 1, 11))
BLOCKS = 5


def filled(*shape, dtype=torch.bfloat16):
    """A tensor whose bytes differ."""
    bytes_of = torch.randint(0, 256, (torch.empty(shape, dtype=dtype).nbytes,), dtype=torch.uint8)
    return bytes_of.view(dtype).view(shape)


#: By name: a cache, the dimension of its blocks, and the runs of memory of a block.
CACHES = {
    "K beside V": lambda: (filled(BLOCKS, 2, 4, 2, 8), 0, 1),
    "K apart from V": lambda: (filled(2, BLOCKS, 4, 2, 8), 1, 2),
    "heads first": lambda: (filled(BLOCKS, 2, 2, 4, 8).transpose(2, 3), 0, 1),
    "packed rows": lambda: (filled(BLOCKS, 4, 656, dtype=torch.uint8), 0, 1),
    "half of larger blocks": lambda: (filled(BLOCKS, 8, 16)[:, 4:], 0, 1),
    "one row": lambda: (filled(BLOCKS, 1, 1, 64), 0, 1),
    "more than a tile": lambda: (filled(BLOCKS, 16, 8, 40), 0, 1),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_block_is_a_few_runs_of_memory(name):
    """Together they are all its bytes, and they are views."""
    cache, dim, runs = CACHES[name]()
    pages = block_pages(cache, dim)
    assert len(pages) == runs
    assert all(page.dtype is torch.uint8 and page.stride(1) == 1 for page in pages)
    whole = cache.movedim(dim, 0).contiguous().view(torch.uint8).flatten(1)
    found = torch.cat(pages, 1)
    assert found.sort(1).values.equal(whole.sort(1).values)
    cache.zero_()
    assert not torch.cat(pages, 1).any()


def test_a_cache_of_many_runs_is_one_view():
    """Its checksum is still that of all bytes."""
    cache = filled(BLOCKS, 4, 8, 8)[..., :6]
    (page,) = block_pages(cache, 0)
    assert page.shape == cache.shape
    sums = block_checksums(KEY, [page], torch.arange(BLOCKS))
    cache[3, 2, 1, 5] += 1
    again = block_checksums(KEY, [page], torch.arange(BLOCKS))
    assert (sums != again).any(1).tolist() == [number == 3 for number in range(BLOCKS)]


def test_the_kernel_is_the_reference(kernel_device):
    """Over several layers of several layouts, for many blocks, and none."""
    caches = [make() for make in CACHES.values()]
    pages = [page.to(kernel_device) for cache, dim, _ in caches for page in block_pages(cache, dim)]
    assert BlockSums.fits(pages)
    sums = BlockSums(KEY, pages)
    for blocks in ([3, 0, 3, 4, 1], [2], []):
        some = torch.tensor(blocks, dtype=torch.int64, device=kernel_device)
        expected = block_checksums(KEY, pages, some)
        assert torch.equal(sums.of(some), expected)
        assert len({*map(tuple, expected.tolist())}) == len({*blocks})


def test_a_block_that_is_none_is_not_read(kernel_device):
    (page,) = block_pages(filled(BLOCKS, 4, 8).to(kernel_device), 0)
    some = torch.tensor([-1, BLOCKS, 2], device=kernel_device)
    found = BlockSums(KEY, [page]).of(some)
    assert found[:2].tolist() == [[0, 0], [0, 0]]
    assert found[2:].equal(block_checksums(KEY, [page], some[2:]))


@pytest.mark.parametrize(
    "page",
    [
        torch.zeros(3, 12, dtype=torch.uint8),
        torch.zeros(3, 20, dtype=torch.uint8)[:, :16],
        torch.zeros(3 * 16 + 4, dtype=torch.uint8)[4:].view(3, 16),
        torch.zeros(3, 4, 8, dtype=torch.uint8),
        torch.zeros(3, 2, dtype=torch.int64),
    ],
    ids=["bytes over", "blocks apart", "address", "dimensions", "dtype"],
)
def test_other_pages_do_not_fit(page):
    assert not BlockSums.fits([page])
    assert not BlockSums.fits([])
