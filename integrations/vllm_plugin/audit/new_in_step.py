"""News of a step: requests, and blocks whose rows nobody has written."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

from ....audit import Admission, RowGroup
from ..internals.audited import Arrival, Changes


def fresh_blocks(
    changes: Changes, groups: Mapping[str, RowGroup], kept: Mapping[str, int] | None = None
) -> dict[str, list[int]]:
    """Return the blocks that a step hands out, by name of their KV-cache group.

    Args:
        changes: what the step changes.
        groups: the watched groups with a row per token, by name.
        kept: the tokens of a block in groups whose states the prefix cache keeps at their ends.
    """
    sizes = {**(kept or {}), **{name: group.block_size for name, group in groups.items()}}
    fresh = {f"group.{number}": [*blocks] for number, blocks in enumerate(changes.grown)}
    for arrival in changes.arrivals:
        for number, blocks in enumerate(arrival.tables):
            name = f"group.{number}"
            known, size = fresh.setdefault(name, []), sizes.get(name)
            if size is not None:  # those before are of a hit, or of the turn before
                known += blocks[-(-arrival.computed // size) :]
            elif not arrival.computed:
                known += blocks
    return fresh


def admissions(arrivals: Iterable[Arrival]) -> list[Admission]:
    """Describe requests that come for the ledger, which looks at an array quicker than at a list.

    Args:
        arrivals: the requests.
    """
    return [
        Admission(each.name, _in_array(each.tokens), each.extras, each.embedded)
        for each in arrivals
    ]


def _in_array(tokens: list[int]) -> array[int]:
    """Return token ids in an array: of 32 bits, so that nobody need look for too large ones."""
    try:
        return array("I", tokens)
    except OverflowError:
        return array("q", tokens)
