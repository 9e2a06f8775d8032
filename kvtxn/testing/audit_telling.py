"""The small engine's reports of a forward pass to a ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..audit.groups import Group, RowGroup, StateGroup
from ..audit.step import Step
from .audit_blocks import Part, Request

#: The fields of a step that say where its rows stand.
_WAYS: Final = (("positions",), ("first",), ("first", "positions"))


class Telling:
    """Reports a forward pass as a ``Step``; each fact of the report is a method.

    Attributes:
        groups: the groups, by name.
        ledgers: the ledgers and models that get the report.
        device: the device of the step's tensors.
        says: where the rows of the last step stand was said by these fields of it; the ways follow
            each other.
    """

    groups: Mapping[str, Group]
    ledgers: Sequence[Any]
    device: str
    says: tuple[str, ...] = _WAYS[-1]

    def tell(self, call: str, *arguments: Any, **named: Any) -> list[Any]:
        """Call a method of every ledger, and return the results."""
        return [getattr(ledger, call)(*arguments, **named) for ledger in self.ledgers]

    @property
    def row_groups(self) -> list[RowGroup]:
        """Groups of rows, except groups that only read another group's rows."""
        return [g for g in self.groups.values() if isinstance(g, RowGroup) and g.reads is None]

    @property
    def state_groups(self) -> list[StateGroup]:
        """Groups of states."""
        return [g for g in self.groups.values() if isinstance(g, StateGroup)]

    def build(self, parts: list[Part]) -> Step:
        """Describe the rows that a forward pass writes and the tables that it reads."""
        counts = [len(part.tokens) for part in parts]
        ledger = self.ledgers[0]
        written: list[Group] = [*self.row_groups, *self.state_groups]
        self.says = _WAYS[(_WAYS.index(self.says) + 1) % len(_WAYS)]
        return Step(
            lines=self.numbers([self.line(ledger, part.request) for part in parts]),
            starts=self.numbers([sum(counts[:i]) for i in range(len(counts) + 1)]),
            first=self.numbers([part.first for part in parts]) if "first" in self.says else None,
            tokens=self.numbers([t for part in parts for t in self.fed(part)]),
            drafts=self.numbers([part.drafts for part in parts]),
            slots={
                group.name: self.numbers([s for part in parts for s in self.slots(group, part)])
                for group in written
            },
            tables={
                group.name: self.padded([self.table(group, part.request) for part in parts])
                for group in self.groups.values()
                if isinstance(group, RowGroup)
            },
            sources={
                group.name: self.numbers([self.source(group, part) for part in parts])
                for group in self.state_groups
            },
            told=self.numbers([part.request.told for part in parts]),
            positions=self.numbers([p for part in parts for p in self.positions(part)])
            if "positions" in self.says
            else None,
        )

    @staticmethod
    def line(ledger: Any, request: Request) -> int:
        """Return a request's line in a ledger or its model."""
        known = getattr(ledger, "requests", None)
        return int(ledger.line(request.name) if known is None else known[request.name].line)

    def numbers(self, values: Sequence[int]) -> Tensor:
        """Return numbers as an int64 tensor on the device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def padded(self, tables: list[list[int]]) -> Tensor:
        """Return tables of different lengths as one tensor, padded."""
        width = max(1, *(len(table) for table in tables))
        lines = [[*table, *[-1] * (width - len(table))] for table in tables]
        return torch.tensor(lines, dtype=torch.int32, device=self.device)

    def fed(self, part: Part) -> list[int]:
        """Return the tokens that the forward gets."""
        return part.tokens

    def positions(self, part: Part) -> list[int]:
        """Return the positions that the forward gets."""
        return [*range(part.first, part.first + len(part.tokens))]

    def table(self, group: RowGroup, request: Request) -> list[int]:
        """Return the table that the forward reads through."""
        return request.tables[group.reads or group.name]

    def slots(self, group: Group, part: Part) -> list[int]:
        """Return the slots that the forward writes."""
        if isinstance(group, StateGroup):
            settled = len(part.tokens) - part.drafts
            columns = part.request.states[group.name]
            return [*[-1] * (settled - 1), *columns[: 1 + part.drafts]]
        table, size = part.request.tables[group.name], group.block_size
        positions = range(part.first, part.first + len(part.tokens))
        at = [p if group.ring is None else p % group.ring for p in positions]
        return [table[p // size] * size + p % size for p in at]

    def source(self, group: StateGroup, part: Part) -> int:
        """Return the block of the state that the forward continues."""
        if part.first == 0:
            return -1
        return part.request.states[group.name][part.request.column]
