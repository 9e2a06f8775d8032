"""Faults that only bytes show: a row or a layer that changes after it was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from planting import Rig, around


def compare_all(rig: Rig) -> None:
    """Let the audit compare each row at each read, not a sample."""
    scrub = rig.watch.scrub
    scrub.passes = type(scrub.passes)(attrs.evolve(scrub.books, every=1))


def _later(rig: Rig, change: Callable[[Any, int, int], None]) -> Any:
    """Change the cache of the second layer between two steps, in the second block of a request.

    ``change`` gets the cache of the layer, the block and the row within it.
    """
    row = 5

    def schedule(*args: Any) -> None:
        for request in rig.scheduler.running:
            left = request.max_tokens - request.num_output_tokens
            if rig.struck is None and request.num_computed_tokens > 64 and left > 8:
                slot = rig.slot(request.request_id, 32 + row)
                layers = rig.runner.compilation_config.static_forward_context
                name = sorted(name for name in layers if hasattr(layers[name], "kv_cache"))[1]
                change(layers[name].kv_cache, slot // 32, row)
                rig.strike(request.request_id, 32 + row, slot)

    return around(rig.scheduler, "schedule", schedule)


def flipped_bit(rig: Rig) -> Any:
    """One bit of one number flips."""

    def change(cache: Any, block: int, row: int) -> None:
        # V lies behind K in a block's half of a head, and is a plain row there.
        page = cache[block, 0].flatten()
        size = page.numel() // 2 // 32
        page.view(torch.int32)[page.numel() // 2 + row * size + 3] ^= 1

    return _later(rig, change)


def stray_writer(rig: Rig) -> Any:
    """Somebody writes a row of zeros."""

    def change(cache: Any, block: int, row: int) -> None:
        page = cache[block, 0].flatten()
        size = page.numel() // 2 // 32
        page[page.numel() // 2 + row * size :][:size] = 0

    return _later(rig, change)


FAULTS = (flipped_bit, stray_writer)
