"""The spaces of slots that SGLang's table of requests names, and the layers that lie in each.

The table names a slot of each row. Most models have one pool of rows, whose slots these are. Layers
with a sliding window have a pool of their own, which gives slots back once they have left the
window: a map says which slot of that pool each number of the table stands for, 0 for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import attrs
import torch
from torch import Tensor

from ....audit import RowGroup
from ....errors import LayerError
from ....layers import LayerRef
from .protocols import HiCacheController, RowPool, Scheduler

#: The groups of rows whose slots the table names, of rows in the pool of sliding windows, and of
#: recurrent states.
ROWS: Final = "group.0"
WINDOWS: Final = "group.1"
STATES: Final = "group.2"


@attrs.frozen(eq=False)
class SlotSpace:
    """The slots of one pool of rows.

    Attributes:
        group: of the ledger: one slot per block.
        pool: has the rows.
        layers: the number in the model of each of the pool's layers.
        number: of slots on the device; those of the host's memory lie behind them.
        slot_map: int64 ``[n]``, the slot that each number in the table stands for, 0 for none;
            None: the number itself.
    """

    group: RowGroup
    pool: RowPool = attrs.field(repr=False)
    layers: Sequence[int]
    number: int
    slot_map: Tensor | None = attrs.field(default=None, repr=False)

    def slots(self, numbers: Tensor) -> Tensor:
        """Return the slots that numbers of the table stand for, int64 ``[n]``; -1 for none.

        Args:
            numbers: int ``[n]``; of a space without a map they are returned as they are.
        """
        if self.slot_map is None:
            return numbers
        own = self.slot_map[numbers.clamp(0, len(self.slot_map) - 1)]
        return own.masked_fill_(own == 0, -1)


def controller_of(scheduler: Scheduler) -> HiCacheController | None:
    """Return HiCache's controller, which copies rows to the host; None without HiCache."""
    tree = getattr(scheduler, "tree_cache", None)
    found: HiCacheController | None = getattr(tree, "cache_controller", None)
    return found


def is_of(device_pool: object, pool: object) -> bool:
    """Tell whether a pool on the device is the one with a group's slots, or is made of it."""
    return device_pool is pool or getattr(device_pool, "full_kv_pool", None) is pool


def host_slots(scheduler: Scheduler, pool: object) -> int:
    """Return the number of the host's slots for the rows or states of a pool; 0 without HiCache."""
    controller = controller_of(scheduler)
    entries = () if controller is None else controller.mem_pool_host.entries
    return sum(int(each.host_pool.size) for each in entries if is_of(each.device_pool, pool))


def slot_spaces(scheduler: Scheduler, *, windows: bool = True) -> list[SlotSpace]:
    """Return the spaces of slots of an engine, that of the table's own numbers first.

    Args:
        scheduler: its scheduler.
        windows: with the pool of sliding windows, if it has a second pool for them.
    """
    allocator = scheduler.token_to_kv_pool_allocator
    pool, page = allocator.get_kvcache(), max(int(allocator.page_size), 1)
    kind, space = type(pool).__name__, partial(_space, scheduler)
    if kind == "HybridLinearKVPool":
        layers = [*pool.full_attention_layer_id_mapping]
        return [space(ROWS, pool.full_kv_pool, layers, int(allocator.size) + page)]
    if kind != "SWAKVPool":
        return [space(ROWS, pool, None, int(allocator.size) + page)]
    near = [number for number, (_, slides) in pool.layers_mapping.items() if slides]
    full = [number for number, (_, slides) in pool.layers_mapping.items() if not slides]
    window = (scheduler.tp_worker.model_runner.sliding_window_size or 0) + 1
    number = int(allocator.size_swa) + page
    if type(allocator).__name__ == "PureSWATokenToKVPoolAllocator":
        return [space(ROWS, pool.swa_kv_pool, near, number, window)]
    spaces = [space(ROWS, pool.full_kv_pool, full, int(allocator.size_full) + page)]
    if windows:
        there = pool.full_to_swa_index_mapping
        spaces.append(space(WINDOWS, pool.swa_kv_pool, near, number, window, there))
    return spaces


def _space(
    scheduler: Scheduler,
    name: str,
    pool: RowPool,
    layers: Sequence[int] | None,
    number: int,
    window: int | None = None,
    slot_map: Tensor | None = None,
) -> SlotSpace:
    """Return a space of ``number`` slots on the device, and those of the host behind them.

    SGLang's size of a window leaves the query out. With some kernels a step that decodes reads one
    row less; SGLang keeps that row as well.

    Args:
        scheduler: SGLang's.
        name: the group's.
        pool: has the rows.
        layers: numbers in the model of the pool's layers; None: from the pool's first on.
        number: of slots on the device.
        window: tokens that a query sees, itself included; None: all.
        slot_map: as in ``SlotSpace``.
    """
    every = number + host_slots(scheduler, pool)
    group = RowGroup(name, 1, every, window=window, drafter=False)
    if layers is None:
        first = int(getattr(pool, "start_layer", 0))
        layers = range(first, first + len(_buffers(pool)))
    return SlotSpace(group, pool, layers, number, slot_map)


def _buffers(pool: RowPool) -> Sequence[Tensor]:
    """Return the first buffer of each layer of a pool; empty for a pool without such buffers."""
    found: Sequence[Tensor] = getattr(pool, "kv_buffer" if _is_latent(pool) else "k_buffer", ())
    return found


def _is_latent(pool: RowPool) -> bool:
    """Tell whether a pool has one latent row per token and layer, in place of a key and a value."""
    return type(pool).__name__ == "MLATokenToKVPool"


#: Formats of rows whose bytes can be compared: 8-bit ones have scales of their own.
_FORMATS: Final = (torch.float16, torch.bfloat16, torch.float32)


def layer_refs(spaces: Sequence[SlotSpace]) -> list[LayerRef]:
    """Return a reference to the rows of each of the target's layers, a block of one row per slot.

    Args:
        spaces: their spaces.

    Raises:
        LayerError: they lie in another way than by slot, or have another format.
    """
    refs = []
    for space in spaces:
        pool, name = space.pool, space.group.name
        latent = _is_latent(pool)
        planes = [(rows,) for rows in pool.kv_buffer] if latent else zip(
            pool.k_buffer, pool.v_buffer, strict=True
        )  # fmt: skip
        for number, parts in zip(space.layers, planes, strict=True):
            if any(rows.dim() != 3 or rows.dtype not in _FORMATS for rows in parts):
                got = ", ".join(f"{rows.dtype} {list(rows.shape)}" for rows in parts)
                raise LayerError("Scrub", "the rows of a layer do not lie by slot", got=got)
            layer = f"layers.{number}"
            if latent:
                refs.append(LayerRef.latent(layer, parts[0], group=name))
            else:
                key, value = (rows.unsqueeze(1) for rows in parts)
                refs.append(LayerRef(layer, key, value, group=name))
    return refs
