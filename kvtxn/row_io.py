"""Read and write rows by slot, in plain torch: the definition of both operations.

Short and slow on purpose. The torch executor is built on this file, every fallback
ends in it, and every other executor must leave the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import attrs
import torch
from torch import Tensor

from .formats import words
from .layers import LayerRef, Plane


@attrs.frozen(eq=False)
class Selection:
    """Pairs of a row of a window and the slot that the row is written to.

    Attributes:
        source: int64, the rows.
        target: int64, the slot of each row; distinct if the rows' slots are, except that on a
            device one pair may repeat.
        live: bool scalar on the device, False if no row was selected at all and the pairs are
            placeholders; None if every pair is real (host tensors).
    """

    source: Tensor
    target: Tensor
    live: Tensor | None


def select(slots: Tensor, mask: Tensor, sources: Tensor | None = None) -> Selection:
    """Select the row positions where ``mask`` holds and the slot is not padding.

    Args:
        slots: int64 ``[num_rows]``, -1 is padding.
        mask: bool ``[num_rows]``.
        sources: int64 ``[num_rows]``, the row that goes to each row position, read where ``mask``
            holds; None if every row stays at its own row position.

    On a device the shape must not depend on the data (the host would have to wait for it), so an
    unselected row repeats the first selected row, which writes the same bytes to the same slot.
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


def last_writers(slots: Tensor, mask: Tensor) -> Tensor:
    """Return ``mask`` without the rows whose slot a later masked row writes as well.

    Args:
        slots: int64 ``[num_rows]``, -1 is padding.
        mask: bool ``[num_rows]``.

    Like ``select``, this is computed on the device, without waiting for it.
    """
    later = (slots.unsqueeze(1) == slots).triu(1) & mask
    return mask & ~later.any(1)


#: ``Plane.places`` of the same slots, by ``Plane.layout``: to compute them costs more than to move
#: the rows.
Places = dict[tuple[object, ...], tuple[Tensor, ...]]


def read(plane: Plane, slots: Tensor, known: Places | None = None) -> Tensor:
    """Return the stored rows of ``slots``, ``[num_rows, *row_shape]`` words.

    Padding reads slot 0, and a slot beyond the cache reads the last one: neither is written back.

    Args:
        plane: the plane.
        slots: int64 ``[num_rows]``.
        known: the places of the same slots; those of this plane are added.
    """
    places = None if known is None else known.get(plane.layout)
    if places is None:
        places = plane.places(slots.clamp(0, plane.num_slots - 1))
        if known is not None:
            known[plane.layout] = places
    return _read(plane, places)


def from_cache(
    ref: LayerRef, rows: Sequence[Tensor], slots: Mapping[str, Tensor], mask: Tensor
) -> tuple[Tensor, ...]:
    """Return a layer's rows, but those under a mask as the cache has them, unless they are padding.

    Args:
        ref: the layer.
        rows: ``[num_rows, *row_shape]`` for each plane.
        slots: int64 ``[num_rows]`` by group.
        mask: bool ``[num_rows]``.
    """
    own = slots[ref.group]
    cached, found = mask & (own >= 0), []
    for plane, row in zip(ref.planes, rows, strict=True):
        chosen = cached.view(-1, *[1] * (row.ndim - 1))
        found.append(torch.where(chosen, words(read(plane, own)), words(row)).view(row.dtype))
    return tuple(found)


def _read(plane: Plane, places: tuple[Tensor, ...]) -> Tensor:
    """Return the stored rows at ``Plane.places``."""
    return plane.cells[places] if plane.offsets is None else plane.cells.take(places[0])


def write(plane: Plane, rows: Tensor, selection: Selection, known: Places | None = None) -> None:
    """Write the selected rows and no other.

    Args:
        plane: the plane.
        rows: ``[num_rows, *row_shape]`` words.
        selection: which rows go to which slots.
        known: the places of the same selection's slots; those of this plane are added.
    """
    if selection.source.numel() == 0:
        return
    payload = words(rows).index_select(0, selection.source)
    places = None if known is None else known.get(plane.layout)
    if places is None:
        places = plane.places(selection.target)
        if known is not None:
            known[plane.layout] = places
    if selection.live is not None:
        payload = torch.where(selection.live, payload, _read(plane, places))
    # torch allows writes to a tensor that was made in inference mode only in that mode.
    with torch.inference_mode() if plane.cells.is_inference() else nullcontext():
        if plane.offsets is None:
            plane.cells.index_put_(places, payload)
        else:
            plane.cells.put_(places[0], payload)


#: Rows of some layers, by layer name: one ``[num_rows, *row_shape]`` tensor per plane, in the
#: cache's dtype or as words.
LayerRows = Mapping[str, tuple[Tensor, ...]]


def read_layers(layers: Iterable[LayerRef], slots: Mapping[str, Tensor]) -> LayerRows:
    """Return copies of every layer's rows in ``slots``, which are by group; as words.

    Slots outside a cache are read as in ``read``.
    """
    known: dict[str, Places] = {group: {} for group in slots}
    return {
        ref.name: tuple(read(plane, slots[ref.group], known[ref.group]) for plane in ref.planes)
        for ref in layers
    }


def write_layers(
    layers: Iterable[LayerRef],
    rows: LayerRows,
    slots: Mapping[str, Tensor],
    mask: Tensor,
    sources: Tensor | None = None,
) -> None:
    """Write ``rows`` of every layer at the row positions of ``mask``; slots are not checked.

    If masked rows share a slot of a ring or state, only the last one is written.

    Args:
        layers: the layers.
        rows: by layer, one tensor per plane.
        slots: by group, int64 ``[num_rows]``; -1 is not written.
        mask: bool ``[num_rows]``.
        sources: int64 ``[num_rows]``, the row that is written at each row position; None: its own.
    """
    layers = tuple(layers)
    chosen = {}
    for group, overwrites in {ref.group: ref.kind.overwrites for ref in layers}.items():
        tensor = slots[group]
        chosen[group] = select(tensor, last_writers(tensor, mask) if overwrites else mask, sources)
    known: dict[str, Places] = {group: {} for group in chosen}
    for ref in layers:
        for plane, part in zip(ref.planes, rows[ref.name], strict=True):
            write(plane, part, chosen[ref.group], known[ref.group])
