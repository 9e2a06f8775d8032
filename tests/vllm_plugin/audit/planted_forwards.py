"""Faults in what a forward's attention is given, where the runner's own numbers are right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from model_files import VOCAB
from planting import Batch, Rig, around

#: Gets the batch, the metadata of all layers, and the slots of all layers by their names.
Tamper = Callable[[Batch, Any, dict[str, Any]], None]


def _given(rig: Rig, tamper: Tamper) -> Any:
    """Tamper with what the layers of a forward are given, until the fault strikes."""
    from vllm.forward_context import get_forward_context

    def before(*args: Any, **kwargs: Any) -> None:
        context = get_forward_context()
        if rig.struck is None and rig.runner.kvtxn_planned is not None:
            batch = Batch(rig, rig.runner.kvtxn_planned.prepared, [])
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

    def with_own_table(metadata: Any) -> Any:
        metadata.block_table = metadata.block_table.clone()
        return metadata

    return _with_anothers_block(rig, with_own_table)


def _with_anothers_block(rig: Rig, own: Callable[[Any], Any]) -> Any:
    """Put another request's first block into a table that ``own`` makes ready for it."""

    def tamper(batch: Batch, metadata: Any, slots: dict[str, Any]) -> None:
        index = _running(batch)
        others = [n for n in range(len(batch)) if n != index and batch.first[n] >= 32]
        if index is None or not others:
            return
        table = own(metadata).block_table
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


def _write(
    rig: Rig, batch: Batch, slots: dict[str, Any], slot: int | None, layers: tuple[str, ...] = ()
) -> None:
    """Give layers, all or these, another slot for the first row of a request that decodes."""
    if (index := _running(batch)) is not None:
        row = batch.starts[index]
        right = int(batch.slots[row])
        for layer in layers or [*slots]:
            slots[layer] = slots[layer].clone()
            slots[layer][row] = -1 if slot is None else slot
        rig.strike(batch.names[index], batch.first[index], right)


def writes_nothing_in_one_layer(rig: Rig) -> Any:
    """The last layer leaves out a row; the slots of the first one are a copy of the right ones."""

    def tamper(batch: Batch, metadata: Any, slots: dict[str, Any]) -> None:
        first, *_, last = slots
        slots[first] = slots[first].clone()
        _write(rig, batch, slots, None, (last,))

    return _given(rig, tamper)


def one_layer_reads_anothers_block(rig: Rig) -> Any:
    """The last layer's table is another one, and its metadata are copies of the others'."""
    return _with_anothers_block(rig, lambda metadata: _of_last_layer())


def one_layer_gives_a_row_away(rig: Rig) -> Any:
    """In the last layer the last row of a request is the first one of its neighbour."""

    def tamper(batch: Batch, metadata: Any, slots: dict[str, Any]) -> None:
        index = _running(batch)
        if index is not None and index + 1 < len(batch) and batch.rows(index) > 1:
            _of_last_layer().query_start_loc[index + 1] -= 1
            last = batch.first[index] + batch.rows(index) - 1
            rig.strike(batch.names[index], last, _slot(batch, index, last))

    return _given(rig, tamper)


def _of_last_layer() -> Any:
    """Give the last layer metadata of its own, with a table and first rows of their own."""
    from vllm.forward_context import get_forward_context

    by_layer = get_forward_context().attn_metadata
    last = [*by_layer][-1]
    metadata = by_layer[last] = copy.copy(by_layer[last])
    metadata.block_table = metadata.block_table.clone()
    metadata.query_start_loc = metadata.query_start_loc.clone()
    return metadata


def called_with_another_token(rig: Rig) -> Any:
    """The model is called with another token than the runner's, for one row of a prompt."""
    return _called(rig, "input_ids", lambda token: (token + 1) % VOCAB)


def called_with_another_position(rig: Rig) -> Any:
    """The model is called with another position than the runner's, for one row of a prompt."""
    return _called(rig, "positions", lambda position: position + 7)


@contextmanager
def _called(rig: Rig, name: str, other: Callable[[Any], Any]) -> Iterator[None]:
    """Call the model with another number, in a tensor that is not the runner's own."""
    real = rig.runner._model_forward

    def call(*args: Any, **kwargs: Any) -> Any:
        if rig.struck is None and rig.runner.kvtxn_planned is not None:
            batch = Batch(rig, rig.runner.kvtxn_planned.prepared, [])
            index = next((n for n in range(len(batch)) if batch.rows(n) > 10), None)
            if index is not None:
                row, position = batch.starts[index] + 3, batch.first[index] + 3
                kwargs[name] = kwargs[name].clone()
                kwargs[name][row] = other(kwargs[name][row])
                rig.strike(batch.names[index], position, _slot(batch, index, position))
        return real(*args, **kwargs)

    with mock.patch.object(rig.runner, "_model_forward", call):
        yield


def _slot(batch: Batch, index: int, position: int) -> int:
    """Return the slot of a request's position."""
    return int(batch.tables[index, position // 32]) * 32 + position % 32


FAULTS = (
    *(reads_too_many, reads_too_few, reads_anothers_block, writes_nothing, writes_elsewhere),
    *(writes_nothing_in_one_layer, one_layer_reads_anothers_block, one_layer_gives_a_row_away),
    *(called_with_another_token, called_with_another_position),
)
