"""Pools of the toy of SGLang: rows, the slots of rows, and slots of rows with a sliding window.

Classes have the names and the attributes of SGLang's. Rows are made of a token and a position.
"""

from __future__ import annotations

from collections import deque

import torch

LINES, POSITIONS, SLOTS = 9, 96, 1200
#: Slots of rows with a window, and rows behind its own that a query sees.
WINDOW_SLOTS, WINDOW = 260, 6


class MHATokenToKVPool:
    """Two layers of rows."""

    start_layer = 0

    def __init__(self, slots: int = SLOTS) -> None:
        self.k_buffer, self.v_buffer = (
            [torch.zeros(slots + 1, 2, 4) for _ in range(2)] for _ in "kv"
        )

    def move_kv_cache(self, target, source) -> None:
        for plane in (*self.k_buffer, *self.v_buffer):
            plane[target] = plane[source]

    def write(self, forward_batch, slots=None) -> None:
        b = forward_batch
        slots = b.out_cache_loc if slots is None else slots
        for number, rows in enumerate(zip(self.k_buffer, self.v_buffer, strict=True), 1):
            for plane, values in zip(rows, (b.input_ids, b.positions), strict=True):
                plane[slots] = (values * number).to(plane.dtype)[:, None, None]


class TokenToKVPoolAllocator:
    """Hands out slots, those that were given back first at last."""

    page_size = 1

    def __init__(self, pool=None, size: int = SLOTS) -> None:
        self.pool, self.size = MHATokenToKVPool() if pool is None else pool, size
        self.clear()

    def clear(self) -> None:
        self.free_slots = deque(range(1, self.size + 1))

    def alloc(self, number):
        return [self.free_slots.popleft() for _ in range(number)]

    def free(self, slots) -> None:
        self.free_slots += slots

    def get_kvcache(self):
        return self.pool


class ReqToTokenPool:
    def __init__(self) -> None:
        self.req_to_token = torch.zeros(LINES, POSITIONS, dtype=torch.int32)
        self.free_slots = list(range(1, LINES))


# -- sliding windows -------------------------------------------------------------------------


class SWAKVPool:
    """Two layers with a window, and two without; a map from the slots of these to those."""

    start_layer = 0

    def __init__(self, mapping, *, full: int = SLOTS) -> None:
        self.full_kv_pool, self.swa_kv_pool = MHATokenToKVPool(full), MHATokenToKVPool(WINDOW_SLOTS)
        self.layers_mapping = {1: (0, False), 3: (1, False), 0: (0, True), 2: (1, True)}
        if not full:
            self.layers_mapping = {0: (0, True), 1: (1, True)}
        self.full_to_swa_index_mapping = mapping

    def move_kv_cache(self, target, source) -> None:
        there = self.full_to_swa_index_mapping
        if len(self.full_kv_pool.k_buffer[0]) > 1:
            self.full_kv_pool.move_kv_cache(target, source)
        self.swa_kv_pool.move_kv_cache(there[target], there[source])

    def write(self, forward_batch) -> None:
        slots = forward_batch.out_cache_loc
        if len(self.full_kv_pool.k_buffer[0]) > 1:
            self.full_kv_pool.write(forward_batch)
        self.swa_kv_pool.write(forward_batch, self.full_to_swa_index_mapping[slots])


class SWATokenToKVPoolAllocator:
    """Hands out pairs of slots; that of the window can be given back alone."""

    page_size, size_full, size_swa = 1, SLOTS, WINDOW_SLOTS
    size = WINDOW_SLOTS

    def __init__(self) -> None:
        self.mapping = torch.zeros(SLOTS + 2, dtype=torch.int64)
        self.pool = SWAKVPool(self.mapping)
        self.full = TokenToKVPoolAllocator(self.pool.full_kv_pool)
        self.near = TokenToKVPoolAllocator(self.pool.swa_kv_pool, WINDOW_SLOTS)
        self.clear()

    def clear(self) -> None:
        self.full.clear()
        self.near.clear()
        self.mapping[:-1], self.mapping[-1] = 0, -1

    @property
    def free_slots(self):
        return self.full.free_slots

    def alloc(self, number):
        slots = self.full.alloc(number)
        self.mapping[slots] = torch.tensor(self.near.alloc(number), dtype=torch.int64)
        return slots

    def free_swa(self, slots) -> None:
        own = self.mapping[list(slots)]
        self.near.free(own[own > 0].tolist())
        self.mapping[list(slots)] = 0

    def free(self, slots) -> None:
        self.free_swa(slots)
        self.full.free(slots)

    def get_kvcache(self):
        return self.pool


class PureSWATokenToKVPoolAllocator(TokenToKVPoolAllocator):
    """Hands out the slots of a model whose layers all have a window."""

    size_full = size_swa = WINDOW_SLOTS

    def __init__(self) -> None:
        own = torch.arange(WINDOW_SLOTS + 2)
        super().__init__(SWAKVPool(own, full=0), WINDOW_SLOTS)

    def free_swa(self, slots) -> None:
        self.free(slots)


# -- hybrids ---------------------------------------------------------------------------------


class HybridLinearKVPool(MHATokenToKVPool):
    """Rows of the layers with attention of a model that has recurrent layers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.full_attention_layer_id_mapping = {3: 0, 7: 1}
        self.full_kv_pool = MHATokenToKVPool()
        self.k_buffer = self.v_buffer = None

    def move_kv_cache(self, target, source) -> None:
        self.full_kv_pool.move_kv_cache(target, source)

    def write(self, forward_batch) -> None:
        self.full_kv_pool.write(forward_batch)


class HybridReqToTokenPool(ReqToTokenPool):
    pass
