"""What happens after an executor failed: the reference finishes its work, or takes it back.

Everything here is idempotent and built on ``kvtxn.rows`` alone, so it does not
matter how far the executor got, nor why it stopped.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .executor import StagedLayer, Txn
from .formats import words
from .rows import LayerRows, latest, read, read_layers, write_layers


def _staged_rows(layers: Iterable[StagedLayer]) -> LayerRows:
    return {layer.ref.name: layer.rows for layer in layers}


def check_range(txn: Txn) -> None:
    """Refuse slots outside their caches, on a device, where the executor was to check them."""
    if txn.in_range is None and txn.layout.is_draft.device.type != "cpu" and txn.slots:
        inside = []
        for group, slots in txn.slots.items():
            limit = min(ref.num_slots for ref in txn.layers if ref.group == group)
            inside.append(((slots >= -1) & (slots < limit)).all())
        txn.in_range = torch.stack(inside).all()


def write_through(txn: Txn, layers: Iterable[StagedLayer]) -> None:
    """Write all rows of these layers, as stock would: settled, accepted and rejected alike."""
    check_range(txn)
    layers = tuple(layers)
    everything = torch.ones_like(txn.layout.is_draft)
    refs = [layer.ref for layer in layers]
    write_layers(refs, _staged_rows(layers), txn.slots, txn.permit(everything))


def write_settled(txn: Txn, layers: Iterable[StagedLayer]) -> None:
    """Write the settled rows of these layers, as staging does under ``deferred``."""
    layers = tuple(layers)
    if layers:
        check_range(txn)
        refs = [layer.ref for layer in layers]
        write_layers(refs, _staged_rows(layers), txn.slots, txn.permit(~txn.layout.is_draft))


def finish_commit(txn: Txn, accepted: Tensor, before: LayerRows) -> None:
    """Bring the caches to where the commit should have brought them.

    Args:
        txn: the window.
        accepted: what was to be committed.
        before: rows read before the commit, or saved at begin, as far as there are any.
    """
    check_range(txn)
    waiting = txn.staged.values() if txn.holds_rows else ()
    finish(txn, accepted, before, waiting)


def finish(
    txn: Txn, accepted: Tensor | None, before: LayerRows, waiting: Iterable[StagedLayer]
) -> None:
    """Put back what was ``before`` the drafts that are not kept, then write those that are.

    In that order: a kept row and a rejected one may have the same slot. Nothing is kept where
    ``accepted`` is None.
    """
    check_range(txn)
    nothing = torch.zeros_like(txn.layout.is_draft)
    kept = nothing if accepted is None else txn.kept(accepted)
    sources = None if accepted is None else txn.sources(accepted)
    put_back(txn, before, txn.permit(txn.layout.is_draft) & ~kept)
    waiting = tuple(waiting)
    refs = [layer.ref for layer in waiting]
    write_layers(refs, _staged_rows(waiting), txn.slots, kept, sources)


def put_back(txn: Txn, before: LayerRows, mask: Tensor | None = None) -> None:
    """Write rows read earlier back to their slots: the masked ones, or every draft row."""
    if before:
        check_range(txn)
        draft = txn.permit(txn.layout.is_draft) if mask is None else mask
        refs = [ref for ref in txn.layers if ref.name in before]
        write_layers(refs, before, txn.slots, draft)


def read_back(txn: Txn) -> LayerRows:
    """Copies of the window's rows as the caches hold them now, for the staged layers."""
    return read_layers((layer.ref for layer in txn.staged.values()), txn.slots)


def verify(txn: Txn, accepted: Tensor, before: LayerRows) -> None:
    """Compare the caches with what a commit must leave. Waits for the device.

    Kept rows are compared where the window has them; under ``undo`` that is in trees only.

    Args:
        txn: the window, after its executor's commit.
        accepted: what was committed.
        before: the rows the caches held before the window wrote drafts.

    Raises:
        RuntimeError: they differ; names the layers.
    """
    kept, sources, wrong = txn.kept(accepted), txn.sources(accepted), []
    for ref in txn.layers:
        if ref.name not in before:
            continue
        layer = txn.staged.get(ref.name)
        real = (txn.slots[ref.group] >= 0) & txn.layout.is_draft
        rejected, written = real & ~kept, real & kept
        if ref.kind.overwrites:  # what a kept row took is not to be as it was
            slots = txn.slots[ref.group]
            rejected &= ~torch.isin(slots, slots[written])
            written = latest(slots, written)
        for i, (plane, old) in enumerate(zip(ref.planes, before[ref.name], strict=True)):
            now = words(read(plane, txn.slots[ref.group]))
            good = torch.equal(now[rejected], words(old)[rejected])
            if txn.holds_rows and layer is not None:
                rows = written if sources is None else sources[written]
                good &= torch.equal(now[written], words(layer.rows[i])[rows])
            if not good and ref.name not in wrong:
                wrong.append(ref.name)
    if wrong:
        raise RuntimeError(f"commit left wrong bytes in {', '.join(wrong)}")
