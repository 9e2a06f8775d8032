"""Engines with one fault each, like faults that real engines were released with.

Each fault occurs only now and then: ``self.errs()`` decides when.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar, Final

from kvtxn.audit.groups import Group, RowGroup, StateGroup

from .blocks import NULL_BLOCK, OutOfBlocks, Part, Request
from .engine import SmallEngine


class Mutant(SmallEngine):
    """An engine with a fault.

    Attributes:
        kinds: the kinds of violations that the fault may cause; the ledger finds at least one.
        needs: a property that the groups must have for the fault to show, such as ``"states"``.
        contested: True if two rows may be written to one slot in one step; the order of the writes
            is then unknown, and so is the writer that a violation should name.
        faults: the number of times that the fault occurred.
    """

    kinds: ClassVar[frozenset[str]]
    needs: ClassVar[str] = ""
    contested: ClassVar[bool] = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.faults = 0

    def errs(self, chance: float = 0.2) -> bool:
        """Return True, at random, where this mutant shall now make its fault; count the faults."""
        if self.random.random() >= chance:
            return False
        self.faults += 1
        return True


class KeepsOneRowTooMany(Mutant):
    """A rollback takes back one row too few."""

    kinds = frozenset({"rejected", "state"})

    def keep(self, part: Part, accepted: int, sampled: list[int]) -> None:
        """Count one rejected draft as accepted if the fault occurs."""
        super().keep(part, accepted, sampled)
        if accepted < part.drafts and part.request in self.running and self.errs():
            part.request.computed += 1
            part.request.tokens.append(self.token())


class LosesAWrite(Mutant):
    """An engine that does not write one row of a step."""

    kinds = frozenset({"unwritten", "foreign"})

    def slots(self, group: Group, part: Part) -> list[int]:
        """Leave out a settled row's slot."""
        slots = super().slots(group, part)
        if isinstance(group, RowGroup) and self.errs():
            slots[self.random.randrange(len(slots) - part.drafts)] = -1
        return slots


class WritesToTheNextSlot(Mutant):
    """The slot mapping is off by one."""

    kinds = frozenset({"unwritten", "foreign"})

    def slots(self, group: Group, part: Part) -> list[int]:
        """Move all rows one slot on, around in their blocks."""
        slots = super().slots(group, part)
        if isinstance(group, RowGroup) and self.errs():
            size = group.block_size
            slots = [slot // size * size + (slot + 1) % size for slot in slots]
        return slots


class ReadsAnothersTable(Mutant):
    """The block tables of two requests are exchanged."""

    kinds = frozenset({"foreign", "unwritten", "rejected"})

    def table(self, group: RowGroup, request: Request) -> list[int]:
        """Return the table of any request."""
        if len(self.running) > 1 and self.errs(0.1):
            request = self.random.choice([r for r in self.running if r is not request])
        return super().table(group, request)


class ShiftsATable(Mutant):
    """A block table is off by one column."""

    kinds = frozenset({"foreign", "unwritten", "rejected"})

    def table(self, group: RowGroup, request: Request) -> list[int]:
        """Leave out the first block."""
        table = super().table(group, request)
        return table[1:] if len(table) > 1 and self.errs(0.1) else table


class HandsOutBlocksInUse(Mutant):
    """A block is given back while its request still runs."""

    kinds = frozenset({"foreign", "unwritten", "rejected"})
    contested = True

    def keep(self, part: Part, accepted: int, sampled: list[int]) -> None:
        """Free the first block of a request that goes on."""
        super().keep(part, accepted, sampled)
        for group in self.row_groups:
            table = part.request.tables.get(group.name)
            if table and table[0] != NULL_BLOCK and self.errs(0.1):
                pool = self.pool(group)
                if pool.users[table[0]] == 1 and table[0] not in pool.free:
                    pool.free.insert(0, table[0])


class HashesTooFewTokens(Mutant):
    """A hash leaves out the first token, so that other prompts find a block."""

    kinds = frozenset({"foreign"})

    def key(self, group: Group, request: Request, end: int) -> object:
        """Return a hash of all tokens but the first."""
        self.faults += 1
        return (group.name, tuple(request.tokens[1:end]))


class PublishesDrafts(Mutant):
    """A block gets its hash while one of its rows is a draft that will be taken back."""

    kinds = frozenset({"published", "rejected", "foreign", "unwritten"})

    def keep(self, part: Part, accepted: int, sampled: list[int]) -> None:
        """Publish as if all drafts had been accepted."""
        super().keep(part, accepted, sampled)
        request, size = part.request, max(g.block_size for g in self.row_groups)
        end = (part.first + len(part.tokens)) // size * size
        if request not in self.running or end <= request.computed or self.state_groups:
            return
        self.faults += 1
        request.tokens += [self.token() for _ in range(max(0, end - len(request.tokens)))]
        self.tell("admit", request.name, request.tokens)
        self.publish(request, end)
        for tell in self.publications:
            tell()
        self.publications.clear()
        self.finish(request)


class KeepsATurnsDrafts(Mutant):
    """A session counts accepted drafts past a stop as rows of its next turn."""

    kinds = frozenset({"foreign"})

    def go_on(self, request: Request, more: Any, *, drop: bool) -> None:
        """Cut the turn short without cutting its rows."""
        computed = request.computed
        if computed > 4:
            self.faults += 1
            request.tokens[computed - 2 :] = [t + self.vocabulary for t in more]
            while len(request.tokens) <= computed:
                request.tokens.append(self.token())
            self.tell("admit", request.name, request.tokens)


class FeedsAStaleToken(Mutant):
    """The forward is given another token than was sampled."""

    kinds = frozenset({"foreign"})

    def fed(self, part: Part) -> list[int]:
        """Change the first token of a part."""
        if not self.errs():
            return part.tokens
        return [part.tokens[0] + 1, *part.tokens[1:]]


class MovesPositions(Mutant):
    """The rows of a request are computed for other positions.

    The first one is so only where the step says besides where it stands.
    """

    kinds = frozenset({"foreign", "state"})

    def positions(self, part: Part) -> list[int]:
        """Move the positions by one."""
        positions = super().positions(part)
        fixed = 0 if "first" in self.says else 1
        if len(positions) == fixed or not self.errs():
            return positions
        return positions[:fixed] + [position + 1 for position in positions[fixed:]]


class CountsABlockAsLoaded(Mutant):
    """A connector says that it brought a block, and did not."""

    kinds = frozenset({"unwritten", "foreign", "rejected"})

    def load(self, request: Request) -> None:
        """Count a block as loaded that was not."""
        size = max(g.block_size for g in self.row_groups)
        if request.computed + size < len(request.tokens) and not self.state_groups:
            self.faults += 1
            super().load(request)
            with suppress(OutOfBlocks):
                self.grow(request, request.computed + size)
                request.computed += size


class ReadsTheWrongColumn(Mutant):
    """The next step goes on from a column that is not the accepted drafts'."""

    kinds = frozenset({"state"})
    needs = "states"

    def next_column(self, accepted: int) -> int:
        """Return column 0, whatever was accepted."""
        self.faults += accepted > 0
        return 0


class NeverTellsCounts(Mutant):
    """The next step always gets an accepted count of 0."""

    kinds = frozenset({"state"})
    needs = "states"

    def next_told(self, accepted: int) -> int:
        """Return 0."""
        self.faults += accepted > 0
        return 0


class DropsAState(Mutant):
    """A step begins with an empty state in the middle of a request."""

    kinds = frozenset({"state"})
    needs = "states"

    def source(self, group: StateGroup, part: Part) -> int:
        """Return no state."""
        return -1 if part.first > 0 and self.errs() else super().source(group, part)


class KeepsAnOldState(Mutant):
    """A new request goes on from the old state in its block, which was not zeroed."""

    kinds = frozenset({"state"})
    needs = "states"

    def source(self, group: StateGroup, part: Part) -> int:
        """Return the request's first column where it begins."""
        if part.first == 0 and self.errs(0.5):
            return part.request.states[group.name][0]
        return super().source(group, part)


class ReadsAnothersState(Mutant):
    """Two requests have each other's states."""

    kinds = frozenset({"state"})
    needs = "states"

    def source(self, group: StateGroup, part: Part) -> int:
        """Return the state of any request."""
        others = [r for r in self.running if r is not part.request and r.computed]
        if part.first > 0 and others and self.errs():
            other = self.random.choice(others)
            return other.states[group.name][other.column]
        return super().source(group, part)


class ExportsTooMuch(Mutant):
    """Rows leave the engine that were never accepted, under the tokens that came after them."""

    kinds = frozenset({"exported", "rejected", "foreign", "unwritten"})
    needs = "whole"

    def durable(self, request: Request) -> int:
        """Return one block more than may leave, if there are tokens for it."""
        size = max(g.block_size for g in self.row_groups)
        full = -(-request.computed // size) * size
        if full > request.computed and all(
            len(request.tables[g.name]) * g.block_size >= full for g in self.row_groups
        ):
            self.faults += 1
            request.tokens += [self.token() for _ in range(full - len(request.tokens))]
            self.tell("admit", request.name, request.tokens)
            return full
        return request.computed


class LoadsAnotherBlock(Mutant):
    """A connector brings the rows of another key."""

    kinds = frozenset({"imported"})
    needs = "whole"

    def payload(self, group: RowGroup, request: Request, end: int) -> list[Any]:
        """Return a random stored block of the group."""
        right = self.key(group, request, end)
        keys = [k for k in self.stored if k != right and k[0] == group.name]  # type: ignore[index]
        if keys and self.errs(1.0):
            return self.stored[self.random.choice(keys)]
        return self.stored[right]


class ExportsAnotherColumn(Mutant):
    """A state leaves the engine that is not after the tokens that it is stored under."""

    kinds = frozenset({"exported"})
    needs = "states"

    def exported_state(self, group: StateGroup, request: Request) -> int:
        """Return the block of another column."""
        columns = request.states[group.name]
        if len(columns) < 2 or not self.errs(0.5):
            return super().exported_state(group, request)
        return columns[(request.column + 1) % len(columns)]


class LoadsAnotherState(Mutant):
    """A connector brings rows and states that were stored under other tokens."""

    kinds = frozenset({"imported"})
    needs = "states"

    def loaded_key(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return other tokens of the same number, if some are stored."""
        others = [key for key in self.whole if len(key) == len(tokens) and key != tokens]
        return self.random.choice(others) if others and self.errs(1.0) else tokens


class CountsAStateAsLoaded(Mutant):
    """A connector says that rows and states are there, but brought only the rows."""

    kinds = frozenset({"state"})
    needs = "states"

    def load_states(self, request: Request) -> None:
        """Load the rows alone, and count the request's tokens as computed all the same."""
        groups, self.groups = self.groups, {g.name: g for g in self.row_groups}
        super().load_states(request)
        self.groups = groups
        self.faults += request.computed > 0


MUTANTS: Final = (
    KeepsOneRowTooMany, LosesAWrite, WritesToTheNextSlot, ReadsAnothersTable, ShiftsATable,
    HandsOutBlocksInUse, HashesTooFewTokens, PublishesDrafts, KeepsATurnsDrafts, FeedsAStaleToken,
    MovesPositions, CountsABlockAsLoaded, ReadsTheWrongColumn, NeverTellsCounts, DropsAState,
    KeepsAnOldState, ReadsAnothersState, ExportsTooMuch, LoadsAnotherBlock, ExportsAnotherColumn,
    LoadsAnotherState, CountsAStateAsLoaded,
)  # fmt: skip
