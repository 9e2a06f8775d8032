"""Faults in what a forward's attention is given, where the runner's own numbers are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planting import Batch, Rig, around

#: Gets the batch, the metadata of all layers, and the slots of all layers by their names.
Tamper = Callable[[Batch, Any, dict[str, Any]], None]


def _given(rig: Rig, tamper: Tamper) -> Any:
    """Tamper with what the layers of a forward are given, until the fault strikes."""
    from vllm.forward_context import get_forward_context

    def before(*args: Any, **kwargs: Any) -> None:
        context = get_forward_context()
        if rig.struck is None and rig.runner.kvtxn_prepared is not None:
            batch = Batch(rig, rig.runner.kvtxn_prepared, [])
            metadata = next(iter(context.attn_metadata.values()))
            tamper(batch, metadata, context.slot_mapping)

    return around(rig.runner, "_model_forward", before)


def _running(batch: Batch) -> int | None:
    """Find a request that decodes, with more than 70 rows behind it."""
    return next((n for n, at in enumerate(batch.first) if at > 70 and batch.rows(n) < 8), None)


def reads_too_many(rig: Rig) -> Any:
    """Attention reads two rows more than a request has."""

    def tamper(batch: Batch, metadata: Any, slots: dict[str, Any]) -> None:
        index = _running(batch)
        if index is not None and (end := batch.first[index] + batch.rows(index)) % 32:
            metadata.seq_lens = metadata.seq_lens.clone()
            metadata.seq_lens[index] += 2
            rig.strike(batch.names[index], end, _slot(batch, index, end))

    return _given(rig, tamper)


def reads_too_few(rig: Rig) -> Any:
    """Attention leaves out the last forty rows of a request."""

    def tamper(batch: Batch, metadata: Any, slots: dict[str, Any]) -> None:
        if (index := _running(batch)) is not None:
            end = batch.first[index] + batch.rows(index) - 40
            metadata.seq_lens = metadata.seq_lens.clone()
            metadata.seq_lens[index] -= 40
            rig.strike(batch.names[index], end, _slot(batch, index, end))

    return _given(rig, tamper)


def reads_anothers_block(rig: Rig) -> Any:
    """The metadata's table has another request's first block."""

    def tamper(batch: Batch, metadata: Any, slots: dict[str, Any]) -> None:
        index = _running(batch)
        others = [n for n in range(len(batch)) if n != index and batch.first[n] >= 32]
        if index is None or not others:
            return
        table = metadata.block_table = metadata.block_table.clone()
        if int(table[index, 0]) != int(table[others[0], 0]):
            table[index, 0] = table[others[0], 0]
            rig.strike(batch.names[index], 0, int(table[index, 0]) * 32)

    return _given(rig, tamper)


def writes_nothing(rig: Rig) -> Any:
    """The layers are told to leave out a row."""
    return _given(rig, lambda batch, metadata, slots: _write(rig, batch, slots, None))


def writes_elsewhere(rig: Rig) -> Any:
    """The layers are told to write a row into a block of nobody's."""
    return _given(rig, lambda batch, metadata, slots: _write(rig, batch, slots, 5))


def _write(rig: Rig, batch: Batch, slots: dict[str, Any], slot: int | None) -> None:
    """Give all layers another slot for the first row of a request that decodes."""
    if (index := _running(batch)) is not None:
        row = batch.starts[index]
        right = int(batch.slots[row])
        for layer, given in list(slots.items()):
            slots[layer] = given.clone()
            slots[layer][row] = -1 if slot is None else slot
        rig.strike(batch.names[index], batch.first[index], right)


def _slot(batch: Batch, index: int, position: int) -> int:
    """Return the slot of a request's position."""
    return int(batch.tables[index, position // 32]) * 32 + position % 32


FAULTS = (reads_too_many, reads_too_few, reads_anothers_block, writes_nothing, writes_elsewhere)
