"""Faults of a transfer: what a connector has brought is not what the request should get.

Bytes are changed once they are in the blocks and before the step reads them, so each fault is the
same whatever the connector.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # which the rules' own tests do not need
    from planting import Rig

#: A fault's change, given the caches and the table of a request that rows came for; returns the
#: position of the first wrong row, None if it has not changed anything.
Change = Callable[[Sequence[Tensor], Sequence[int]], int | None]


def caches(rig: Rig) -> list[Tensor]:
    """Return the caches of the first group's layers, blocks first."""
    config = rig.runner.kv_cache_config
    layers = rig.runner.compilation_config.static_forward_context
    found = [layers[name].kv_cache for name in config.kv_cache_groups[0].layer_names]
    return [each if each.shape[0] == config.num_blocks else each.movedim(1, 0) for each in found]


@contextmanager
def brought(rig: Rig, change: Change) -> Iterator[None]:
    """Apply a change to the first request for which it does something."""
    from planting import around

    coming: list[Any] = []

    def arrive(arrivals: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        coming[:] = [each for each in arrivals if each.computed]

    def read(*args: Any, **kwargs: Any) -> None:
        for each in coming:
            if rig.struck is None:
                torch.cuda.synchronize()
                table = each.tables[0]
                with torch.inference_mode():
                    position = change(caches(rig), table)
                torch.cuda.synchronize()
                if position is not None:
                    rig.strike(each.name, position, int(table[position // 32]) * 32)
        coming.clear()

    with ExitStack() as stack:
        stack.enter_context(around(rig.watch.transfers, "change", arrive))
        stack.enter_context(around(rig.watch.transfers, "forward", read))
        yield


def swapped_blocks() -> Change:
    """Two blocks of a request come in each other's place."""

    def change(layers: Sequence[Tensor], table: Sequence[int]) -> int:
        for cache in layers:
            first = cache[table[1]].clone()
            cache[table[1]] = cache[table[2]]
            cache[table[2]] = first
        return 32

    return change


def foreign_block() -> Change:
    """A block of another request comes."""
    theirs: list[Tensor] = []

    def change(layers: Sequence[Tensor], table: Sequence[int]) -> int | None:
        if not theirs:
            theirs.extend(cache[table[0]].clone() for cache in layers)
            return None
        for cache, block in zip(layers, theirs, strict=True):
            cache[table[1]] = block
        return 32

    return change


def swapped_layers() -> Change:
    """A block's rows of two layers come in each other's place."""

    def change(layers: Sequence[Tensor], table: Sequence[int]) -> int:
        first = layers[0][table[1]].clone()
        layers[0][table[1]] = layers[1][table[1]]
        layers[1][table[1]] = first
        return 32

    return change


def shifted_block() -> Change:
    """Each row of a block comes one place later."""

    def change(layers: Sequence[Tensor], table: Sequence[int]) -> int:
        for cache in layers:
            block = cache[table[1]]
            flat = block.reshape(-1)
            cache[table[1]] = flat.roll(flat.numel() // 32).view(block.shape)
        return 32

    return change


def nothing_came() -> Change:
    """A block keeps what it had: here zeros."""

    def change(layers: Sequence[Tensor], table: Sequence[int]) -> int:
        for cache in layers:
            cache[table[1]] = 0
        return 32

    return change


BROUGHT: dict[str, Callable[[], Change]] = {
    each.__name__: each
    for each in (swapped_blocks, foreign_block, swapped_layers, shifted_block, nothing_came)
}
#: They leave bytes that no block ever had, of which nobody can say whose rows they are.
UNKNOWN = ("swapped_layers", "shifted_block", "nothing_came")


def swap_files(folder: Path) -> list[str]:
    """Let files of one size change places, as far as they lie there in pairs; returns their names.

    Files of ExampleConnector are one layer of one prompt each, those of the fs tier one block.
    """
    by_size: dict[tuple[int, str], list[Path]] = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        if path.suffix in (".bin", ".safetensors", ".pt"):
            name = path.name if path.suffix == ".safetensors" else path.suffix
            by_size.setdefault((path.stat().st_size, name), []).append(path)
    swapped = []
    for paths in by_size.values():
        for one, other in zip(paths[::2], paths[1::2], strict=False):
            spare = one.with_suffix(".spare")
            os.replace(one, spare)
            os.replace(other, one)
            os.replace(spare, other)
            swapped += [one.name, other.name]
    return swapped
