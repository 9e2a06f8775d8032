"""Faults that only bytes show: a row or a layer that changes after it was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from planting import Rig, around

from kvtxn.audit.byte_books import Watched
from kvtxn.row_io import read

#: Each row and state is compared at each read, not a sample.
EACH = {"audit": "bytes", "audit_every": 1}


def _layers(rig: Rig) -> list[Watched]:
    return [layer for layers in rig.watch.scrub.books.layers.values() for layer in layers]


def _later(rig: Rig, change: Callable[[Any], None]) -> Any:
    """Change a cache between two steps; ``change`` gets a request with more than two blocks."""

    def schedule(*args: Any) -> None:
        for request in rig.scheduler.running:
            left = request.max_tokens - request.num_output_tokens
            if rig.struck is None and request.num_computed_tokens > 64 and left > 8:
                change(request)

    return around(rig.scheduler, "schedule", schedule)


def _second_layer(rig: Rig, change: Callable[[Any, int, int], None]) -> Any:
    """Change the second layer in the second block of a request.

    ``change`` gets the cache of the layer, the block and the row within it.
    """
    row = 5

    def strike(request: Any) -> None:
        slot = rig.slot(request.request_id, 32 + row)
        layers = rig.runner.compilation_config.static_forward_context
        name = sorted(name for name in layers if hasattr(layers[name], "kv_cache"))[1]
        change(layers[name].kv_cache, slot // 32, row)
        rig.strike(request.request_id, 32 + row, slot)

    return _later(rig, strike)


def _flip(layer: Watched, slot: int) -> None:
    """Flip a bit of a slot in the last plane of a layer."""
    plane, slots = layer.planes[-1][1], torch.tensor([slot])
    row = read(plane, slots).clone()
    row.view(-1)[3] ^= 1
    plane.cells[plane.index(slots)] = row


def flipped_state(rig: Rig) -> Any:
    """One bit of the state of a request flips, in the last recurrent layer."""
    layer = [layer for layer in _layers(rig) if layer.ref.states][-1]
    number = int(layer.ref.group.partition(".")[2])

    def strike(request: Any) -> None:
        blocks = rig.manager.get_block_ids(request.request_id)[number]
        for block in blocks:  # whichever the next step continues
            _flip(layer, block)
        rig.strike(request.request_id, request.num_computed_tokens - 1, blocks[0])

    return _later(rig, strike)


def _drafters(rig: Rig) -> Watched:
    names = rig.runner.drafter._draft_attn_layer_names
    return [layer for layer in _layers(rig) if layer.ref.name in names][-1]


def flipped_drafters_row(rig: Rig) -> Any:
    """One bit of a drafter's row flips."""

    def strike(request: Any) -> None:
        slot = rig.slot(request.request_id, 37)
        _flip(_drafters(rig), slot)
        rig.strike(request.request_id, 37, slot)

    return _later(rig, strike)


def drafter_writes_elsewhere(rig: Rig) -> Any:
    """A row of the drafter's goes to the slot of an older one."""

    def after(found: Any, *args: Any, **kwargs: Any) -> None:
        for request in rig.scheduler.running:
            if rig.struck is None and request.num_output_tokens:
                slot = rig.slot(request.request_id, 37)
                next(iter(found.values()))[0] = slot
                rig.strike(request.request_id, 37, slot)

    return around(rig.runner.drafter, "_get_slot_mapping", after=after)


def flipped_bit(rig: Rig) -> Any:
    """One bit of one number flips."""

    def change(cache: Any, block: int, row: int) -> None:
        # V lies behind K in a block's half of a head, and is a plain row there.
        page = cache[block, 0].flatten()
        size = page.numel() // 2 // 32
        page.view(torch.int32)[page.numel() // 2 + row * size + 3] ^= 1

    return _second_layer(rig, change)


def stray_writer(rig: Rig) -> Any:
    """Somebody writes a row of zeros."""

    def change(cache: Any, block: int, row: int) -> None:
        page = cache[block, 0].flatten()
        size = page.numel() // 2 // 32
        page[page.numel() // 2 + row * size :][:size] = 0

    return _second_layer(rig, change)


def not_a_number(rig: Rig) -> Any:
    """A number of a row that is read becomes NaN; no checksum is compared until it comes out."""

    def change(cache: Any, block: int, row: int) -> None:
        page = cache[block, 0].flatten()
        size = page.numel() // 2 // 32
        page[page.numel() // 2 + row * size + 2] = torch.nan
        rig.watch.scrub.books.seals.zero_()

    return _second_layer(rig, change)


FAULTS = (flipped_bit, stray_writer, not_a_number)
#: By the name of an engine in which nothing else is wrong.
AFTERWARDS: dict[str, tuple[Callable[[Rig], Any], ...]] = {
    "gated-delta-net": (flipped_state,),
    "mamba": (flipped_state,),
    "draft-model": (flipped_drafters_row, drafter_writes_elsewhere),
}
