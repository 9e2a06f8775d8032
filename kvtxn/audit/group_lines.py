"""The groups of a ledger as a table of numbers, for compiled passes."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .books import Books
from .digest import TARGET_AGE

#: int64 columns of a group's line; -1 stands for None.
BASE: Final = 0
STRIDE: Final = 1
BLOCK_SIZE: Final = 2
NUM_BLOCKS: Final = 3
WINDOW: Final = 4
CHUNK: Final = 5
RING: Final = 6
SALT: Final = 7
IS_STATE: Final = 8
OWNERS: Final = 9
#: The bits of an age that concern the group.
AGED_BY: Final = 10
#: Columns.
FIELDS: Final = 11


def group_lines(books: Books) -> Tensor:
    """Return the lines of all groups, int64 ``[num_groups, FIELDS]``, on the device."""
    lines = []
    for place in books.layout.places.values():
        group = place.group
        given = (group.window, group.chunk, group.ring)
        lines.append(
            [
                *(place.base, place.stride, group.block_size, group.num_blocks),
                *(-1 if number is None else number for number in given),
                *(books.salts[place.written], int(group.is_state), place.owners),
                -1 if group.drafter else TARGET_AGE,
            ]
        )
    return torch.tensor(lines, dtype=torch.int64, device="cpu").to(books.words.device)
