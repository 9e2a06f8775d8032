"""Requests of a step, described for the ledger: their blocks, their lines, their tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from ....audit import Admission, Ledger, RowGroup
from ....audit.books import REFUSED
from ...serving.step import Arrival, Changes


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


class LineBuffer:
    """Lines of requests that stay in one place, so that launches over them can be made again.

    Args:
        ledger: copies them to its device.
        number: the most lines.
        device: of the steps.
    """

    def __init__(self, ledger: Ledger, number: int, device: torch.device | str) -> None:
        self._ledger: Final = ledger
        with torch.inference_mode(False):  # steps write into it in inference mode or not
            self._all: Final = torch.full((number,), -1, device=device)
        self._views: Final[dict[int, Tensor]] = {}

    def put(self, lines: Sequence[int]) -> Tensor:
        """Put the lines of a batch in place.

        Args:
            lines: one for each request.

        Returns:
            int64 ``[len(lines)]``, their place; the same object for as many lines.
        """
        view = self._views.get(len(lines))
        if view is None:
            view = self._views[len(lines)] = self._all[: len(lines)]
        self._ledger.input.put(view, lines)
        return view


def leave_out(ledger: Ledger, lines: Tensor, first: Tensor) -> bool:
    """Turn requests that begin before position 0 into padding, and count them as malformed.

    vLLM computes such rows if a connector says that it brings fewer than no tokens, as
    ``ExampleConnector`` does for a prompt of one token that it has stored.

    Args:
        ledger: the ledger.
        lines: int64 ``[num_requests]``, the lines of the step's requests; changed in place.
        first: int64 ``[num_requests]``, the positions of their first rows.

    Returns:
        True if there are such requests; ``lines`` is of no use for the next step then.
    """
    outside = first < 0
    if not bool(outside.any()):
        return False
    lines.masked_fill_(outside, -1)
    ledger.books.counters[REFUSED] += outside.sum()
    return True
