"""Forwards of one request in blocks of four rows, as a runner tells a watch of them."""

from __future__ import annotations

import torch
from kvtxn.integrations.serving.step import Rows

from kvtxn.audit import RowGroup

GROUP = RowGroup("group.0", 4, 12, pool="blocks")
TOKENS = list(range(20, 31))


def rows(name, first, tokens, slots, table):
    """Rows of these tokens in these slots, from the position ``first`` on."""
    return Rows(
        [name], torch.tensor([0, len(tokens)]), torch.tensor([first]), torch.tensor(tokens), None,
        {"group.0": torch.as_tensor(slots)}, {"group.0": torch.tensor([table], dtype=torch.int32)},
    )  # fmt: skip


def rows_in_blocks(name, first, end, table):
    """Rows of ``TOKENS`` from one position to another, where the table has them."""
    positions = torch.arange(first, end)
    slots = torch.tensor(table)[positions // 4] * 4 + positions % 4
    return rows(name, first, TOKENS[first:end], slots, table)


def unknown(name):
    """Refuse to describe a request that the watch should know."""
    raise AssertionError(name)


def forward(w, read, returning=unknown):
    """Tell a watch of a forward."""
    w.step(lambda: (read, None), returning)
    assert not w.stopped
