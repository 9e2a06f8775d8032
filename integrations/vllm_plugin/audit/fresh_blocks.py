"""The blocks that a step hands out anew: whatever they held counts as unwritten."""

from __future__ import annotations

from collections.abc import Mapping

from ....audit import RowGroup
from ..internals.audited import Changes


def fresh_blocks(changes: Changes, groups: Mapping[str, RowGroup]) -> dict[str, list[int]]:
    """Return the blocks that a step hands out, by name of their KV-cache group.

    Args:
        changes: what the step changes.
        groups: the watched groups with a row per token, by name.
    """
    fresh = {f"group.{number}": [*blocks] for number, blocks in enumerate(changes.grown)}
    for arrival in changes.arrivals:
        for number, blocks in enumerate(arrival.tables):
            name = f"group.{number}"
            known, group = fresh.setdefault(name, []), groups.get(name)
            if group is not None:  # those before are of a hit, or of the turn before
                known += blocks[-(-arrival.computed // group.block_size) :]
            elif not arrival.computed:
                known += blocks
    return fresh
