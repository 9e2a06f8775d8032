"""Slots, tables and lengths that the attention layers of a V1 forward are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from .protocols.layers import BatchMetadata, ForwardContext
from .protocols.runners import Runner

#: The lengths of requests of which none are known.
NO_LENGTHS: Final = torch.zeros(0, dtype=torch.int32)


def layers_of(runner: Runner, group: str) -> tuple[str, ...]:
    """Return the names of the layers of a KV-cache group."""
    number = int(group.partition(".")[2])
    return tuple(runner.kv_cache_config.kv_cache_groups[number].layer_names)


def context() -> ForwardContext:
    """Return the context of the forward that is about to run."""
    from vllm.forward_context import get_forward_context

    found: ForwardContext = get_forward_context()
    return found


def argument(given: object, own: Tensor, total: int) -> Tensor:
    """Return the tokens or positions that the model is called with, int ``[num_rows]`` at least.

    Args:
        given: the model's argument; None, or of more dimensions, where it takes something else.
        own: the runner's buffer, of which the argument is a part as a rule.
        total: the rows of the forward.
    """
    if not isinstance(given, Tensor) or given.data_ptr() == own.data_ptr():
        return own
    plain = given.dim() == 1 and len(given) >= total and given.dtype == own.dtype
    return given if plain and not torch.equal(given[:total], own[:total]) else own


def slots(context: ForwardContext, layers: Sequence[str], own: Tensor, total: int) -> Tensor:
    """Return the slots that layers write a forward's rows to, int ``[num_rows]`` at least.

    Those of the first layer that has other ones than the runner. Rows that a layer is given no slot
    for are written nowhere, -1.

    Args:
        context: of the forward.
        layers: those of one group.
        own: the runner's slots of the group, which layers are given as a rule.
        total: the rows of the forward.
    """
    by_layer = context.slot_mapping
    last: Tensor | None = own
    if isinstance(by_layer, dict):
        for layer in layers:
            given: Tensor | None = by_layer.get(layer)
            if given is None or given is last:
                continue
            last = given
            if given.data_ptr() == own.data_ptr() and len(given) >= total:
                continue
            whole = torch.nn.functional.pad(given, (0, max(0, total - len(given))), value=-1)
            if not torch.equal(whole[:total], own[:total]):
                return whole
    return own


def metadata(context: ForwardContext, layers: Sequence[str], starts: Tensor) -> list[BatchMetadata]:
    """Return the metadata of layers that say plainly what the requests of the batch read.

    Some backends' metadata have no tables and lengths of requests, and some are of other requests:
    of parts of them, or of those that sample. These are not among them.

    Args:
        context: of the forward.
        layers: those of one group.
        starts: the runner's first rows of all requests, to which plain metadata refer.
    """
    found: list[BatchMetadata] = []
    by_layer, last = context.attn_metadata, None
    if isinstance(by_layer, dict):
        for layer in layers:
            given = by_layer.get(layer)
            if given is None or given is last:
                continue
            last = given
            ours = getattr(given, "query_start_loc", None)
            if ours is None or not (_is_own(ours, starts) or _is_whole(ours, starts)):
                continue
            if hasattr(given, "block_table") and hasattr(given, "seq_lens"):
                found.append(given)
    return found


def _is_own(given: Tensor, own: Tensor) -> bool:
    return given.data_ptr() == own.data_ptr()


def _is_whole(given: Tensor, starts: Tensor) -> bool:
    """Tell whether first rows of requests are those of a whole batch: with as many rows in all."""
    number = len(given)
    return 0 < number <= len(starts) and int(given[-1]) == int(starts[number - 1])


def blocks(metadata: Sequence[BatchMetadata], own: Tensor, number: int) -> Tensor:
    """Return the table that a forward reads through, int32 ``[num_requests, blocks]`` at least.

    That of the first layer which has another one than the runner.

    Args:
        metadata: those of one group's layers.
        own: the runner's table of the group, which layers are given as a rule.
        number: of requests.
    """
    for each in metadata:
        given: Tensor = each.block_table
        # A table of another width is of blocks of another size.
        if _is_own(given, own) or given.shape[1:] != own.shape[1:]:
            continue
        if len(given) < number or not torch.equal(given, own[: len(given)]):
            return given
    return own


def lengths(metadata: Sequence[BatchMetadata], own: Tensor, starts: Tensor) -> Tensor | None:
    """Return the runner's lengths, if all metadata have them; None if some may have others.

    Args:
        metadata: those of one group's layers; without any, no lengths are known.
        own: the runner's lengths of all requests.
        starts: the runner's first rows of all requests.
    """
    for each in metadata:
        if not (_is_own(each.seq_lens, own) and _is_own(each.query_start_loc, starts)):
            return None
    return own if metadata else NO_LENGTHS


def wrong_lengths(
    metadata: Sequence[BatchMetadata], ends: NDArray[numpy.int64], starts: Tensor
) -> Tensor | None:
    """Return the rows that each request's attention reads, if not all of them are right.

    A request that is given a row of its neighbour reads one row more than it has, and the neighbour
    one fewer.

    Args:
        metadata: those of one group's layers.
        ends: int64 ``[num_requests]``, the position after each request's last row.
        starts: the runner's first rows of all requests.
    """
    number = len(ends)
    for each in metadata:
        given: Tensor = each.seq_lens[:number]
        if not _is_own(each.query_start_loc, starts) and len(each.query_start_loc) > number:
            rows, own = (one[: number + 1].diff() for one in (each.query_start_loc, starts))
            given = given + rows - own
        if (given.numpy() != ends).any():
            return given.clone()
    return None
