"""Row addressing in plain torch: what reading and writing a slot *means*.

Short and slow on purpose. The torch executor is built on it, every fallback
ends in it, and every other executor must leave the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext

import attrs
import torch
from torch import Tensor

from .formats import words
from .layers import LayerRef, Plane


@attrs.frozen(eq=False)
class Selection:
    """Which rows of a window go to which slots.

    Attributes:
        source: int64, rows to take.
        target: int64, the slot of each; distinct where those of the rows are, except that on a
            device one pair may repeat.
        live: bool scalar on the device, False where nothing was selected at all and the
            pairs are placeholders; None where every pair is real (host tensors).
    """

    source: Tensor
    target: Tensor
    live: Tensor | None


def select(slots: Tensor, mask: Tensor, sources: Tensor | None = None) -> Selection:
    """Select the places where ``mask`` holds and the slot is not padding.

    Args:
        slots: int64 ``[num_rows]``, -1 is padding.
        mask: bool ``[num_rows]``.
        sources: int64 ``[num_rows]``, the row that goes to each place, read where ``mask``
            holds; None where every row stays in its own.

    On a device the shape must not depend on the data (that would wait for the device), so an
    unselected row repeats the first selected one: the same bytes to the same place.
    """
    wanted = mask & (slots >= 0)
    if slots.numel() == 0:
        return Selection(slots, slots, None)
    if slots.device.type == "cpu":
        place = wanted.nonzero().squeeze(1)
        return Selection(place if sources is None else sources[place], slots[place], None)
    rows = torch.arange(slots.numel(), device=slots.device)
    place = torch.where(wanted, rows, wanted.to(torch.uint8).argmax())
    live = wanted.any()
    source = place if sources is None else sources[place].clamp(min=0)
    return Selection(source, torch.where(live, slots[place], 0), live)


def latest(slots: Tensor, mask: Tensor) -> Tensor:
    """``mask`` without the rows whose slot a later masked row has: of those, the last stays.

    Args:
        slots: int64 ``[num_rows]``, -1 is padding.
        mask: bool ``[num_rows]``.

    Like ``select`` it is computed on the device, without waiting for it.
    """
    later = (slots.unsqueeze(1) == slots).triu(1) & mask
    return mask & ~later.any(1)


def read(plane: Plane, slots: Tensor) -> Tensor:
    """The stored rows of ``slots``, ``[num_rows, *row_shape]`` words.

    Padding reads slot 0 and a slot beyond the cache the last one: nobody writes those back.
    """
    return plane.cells[plane.index(slots.clamp(0, plane.num_slots - 1))]


def write(plane: Plane, rows: Tensor, selection: Selection) -> None:
    """Write the selected ``rows`` (``[num_rows, *row_shape]``, the cache's width); nothing else."""
    if selection.source.numel() == 0:
        return
    index = plane.index(selection.target)
    payload = words(rows)[selection.source]
    if selection.live is not None:
        payload = torch.where(selection.live, payload, plane.cells[index])
    # torch lets a tensor that was made in inference mode be written to in that mode alone.
    with torch.inference_mode() if plane.cells.is_inference() else nullcontext():
        plane.cells.index_put_(index, payload)


#: Rows of some layers, by layer name: one ``[num_rows, *row_shape]`` tensor per plane, in the
#: cache's dtype or as words.
LayerRows = Mapping[str, tuple[Tensor, ...]]


def read_layers(layers: Iterable[LayerRef], slots: Mapping[str, Tensor]) -> LayerRows:
    """Copies of the rows that ``slots`` (by group) name, for every layer."""
    return {
        ref.name: tuple(read(plane, slots[ref.group]) for plane in ref.planes) for ref in layers
    }


def write_layers(
    layers: Iterable[LayerRef],
    rows: LayerRows,
    slots: Mapping[str, Tensor],
    mask: Tensor,
    sources: Tensor | None = None,
) -> None:
    """Write ``rows`` of every layer where ``mask`` holds; ``slots`` are by group.

    Where rows may share a slot, the last one of those is written, and only that one.
    """
    layers = tuple(layers)
    chosen = {}
    for group, overwrites in {ref.group: ref.kind.overwrites for ref in layers}.items():
        tensor = slots[group]
        chosen[group] = select(tensor, latest(tensor, mask) if overwrites else mask, sources)
    for ref in layers:
        for plane, part in zip(ref.planes, rows[ref.name], strict=True):
            write(plane, part, chosen[ref.group])
