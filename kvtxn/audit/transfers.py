"""Blocks of a ledger that are handed out, copied, published, and that leave or come from outside.

A connector's integration stores, beside the rows of a block, the digests that ``export`` returns,
under the same key; when the connector brings the rows, it gives these digests to ``import_rows``.
Rows that are stored under another request's tokens are then found when they are loaded, and rows
that are loaded into another block than was said are found when they are read. States go the same
way through ``export_state`` and ``import_state``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from ..errors import ConfigError
from ..host_values import described
from . import books as book
from . import checks
from .digest import UNWRITTEN, as_word, older
from .groups import Place
from .ledger_state import Ints, LedgerState
from .rows import through
from .step import Stretch, padded_columns
from .violation import NOBODY


class RowTransfers:
    """Rows and states of a ledger that are copied, published, exported and imported.

    Block numbers are the scheduler's, so they are given on the host; a wrong one is refused
    before anything is written. A block table may also be on the device where it is only read.

    Args:
        state: the ledger's state.
        inspect: compares rows; ``Ledger.inspect``.
    """

    def __init__(self, state: LedgerState, inspect: Callable[[Stretch], None]) -> None:
        self._state: Final = state
        self._compare: Final = inspect
        self._books: Final = state.books

    def copy(self, group: str, source: Ints, target: Ints) -> None:
        """Copy the words of blocks, and their checksums; a copied state has no owner.

        Nothing is known of the writers of the copies. See ``Ledger.copy``.

        Raises:
            ConfigError: the group is unknown, or the blocks are not such blocks.
        """
        place = checks.place_of("copy", self._books, group)
        end = place.group.num_blocks
        given = checks.bounded("copy", "source", source, end)
        wanted = checks.bounded("copy", "target", target, end, distinct=True)
        if len(given) != len(wanted):
            raise ConfigError(
                "copy", "source and target differ in length", expected=f"{len(given)} targets",
                got=len(wanted), hint="name a target for each source; nothing was changed",
            )  # fmt: skip
        pool = place.pool_of(self._books.words)
        there, here = self._state.upload(wanted), self._state.upload(given)
        pool.index_copy_(0, there, pool.index_select(0, here))
        if self._state.bytes is not None:
            self._state.bytes.copy(place, here, there)
        if place.group.is_state:
            self._books.owners[place.owners + there] = NOBODY
        rows = torch.arange(place.stride, device=self._state.device)
        where = place.base + there[:, None] * place.stride + rows
        self._journal(place, where.flatten(), None)

    def publish(self, request: str, group: str, table: Ints, first: int, end: int) -> None:
        """Report wrong rows among those that others can find from now on.

        See ``Ledger.publish``.
        """
        place = checks.place_of("publish", self._books, group, states=False)
        self._inspect("publish", "published", request, place, table, first, end)

    def publish_state(self, request: str, group: str, block: int, length: int) -> None:
        """Report a published state that is wrong, and let any request continue it from now on.

        See ``Ledger.publish_state``.
        """
        place = self._place_of_state("publish_state", group, block)
        end = checks.whole("publish_state", "length", length, 1, self._books.sizes.max_length)
        self._inspect("publish_state", "published", request, place, [block], end - 1, end)
        self._books.owners[place.owners + block] = NOBODY

    def export(self, request: str, group: str, table: Ints, first: int, end: int) -> Tensor:
        """Report wrong rows and open drafts that leave; return the words that the rows have.

        Words are at the first epoch's age, ``UNWRITTEN`` where the table leads nowhere. See
        ``Ledger.export``.
        """
        place = checks.place_of("export", self._books, group, states=False)
        return self._export("export", request, place, table, first, end)

    def export_state(self, request: str, group: str, block: int, length: int) -> Tensor:
        """Report a state that leaves and is wrong; return its word, at the first epoch's age.

        See ``Ledger.export_state``.
        """
        place = self._place_of_state("export_state", group, block)
        checks.whole("export_state", "length", length, 1, self._books.sizes.max_length)
        return self._export("export_state", request, place, [block], length - 1, length)

    def import_rows(
        self,
        request: str,
        group: str,
        table: Ints,
        first: int,
        end: int,
        digests: Tensor | None = None,
        origin: Tensor | None = None,
    ) -> None:
        """Put the words of rows from outside into their slots, and report those that are wrong.

        See ``Ledger.import_rows``.
        """
        place = checks.place_of("import_rows", self._books, group, states=False)
        blocks = self._blocks_of(place, table, first, end)
        self._import("import_rows", request, place, blocks, first, end, digests, origin)

    def identities(self, group: str, requests: Sequence[str], firsts: Ints, blocks: Ints) -> Tensor:
        """Return whose rows full blocks have, int64 ``[n, 7]``; see ``Ledger.identities``."""
        # Few and small launches: a connector that stores a block in each step asks in each step.
        place, books = checks.place_of("identities", self._books, group), self._books
        lines, firsts = self._lines_at("identities", requests, "firsts", firsts)
        known = checks.ints("identities", "blocks", blocks).long()
        self._one_each("identities", "blocks", known, lines)
        inside = (known >= 0) & (known < place.group.num_blocks)
        words_at = torch.where(inside, place.base + known * place.stride, 0)
        given = torch.stack([lines, firsts, words_at, inside.long()])
        line, first, where, is_inside = self._state.upload(given)
        size = place.group.block_size
        # From two digests before that of the tokens before the block, to that of all its tokens.
        span = torch.arange(-2, size + 1, device=self._state.device)
        at = (first[:, None] + span).clamp(0, books.sizes.max_length)
        own = books.own[line[:, None], at]
        words = books.words[where[:, None] + span[2:-1]]
        # Rows of one prefix differ from the request's own by one number: an age, or other extras.
        apart = words - own[:, 3:]
        is_one = (apart == apart[:, :1]).all(1) & (is_inside > 0)
        ends = torch.stack([words[:, 0], words[:, -1]])  # an index of ints would wait for a GPU
        first_word, last_word = older(ends, -self._state.epoch) * is_one
        terms = own[:, 1:4] - own[:, :3]
        step = books.counters[book.STEP].expand_as(first)
        serial = books.facts[book.SERIAL, line]
        columns = [step, serial, first_word, *reversed(terms.unbind(1)), last_word]
        return torch.stack(columns, 1)

    def own_words(self, group: str, requests: Sequence[str], positions: Ints) -> Tensor:
        """Return the words of requests' own rows at some positions; see ``Ledger.own_words``."""
        place = checks.place_of("own_words", self._books, group)
        numbers = self._lines_at("own_words", requests, "positions", positions)
        line, at = self._state.upload(torch.stack(numbers))
        after = self._books.own[line, (at + 1).clamp(max=self._books.sizes.max_length)]
        return older(as_word(after + self._books.salts[place.written]), -self._state.epoch)

    def _lines_at(
        self, operation: str, requests: Sequence[str], name: str, positions: Ints
    ) -> tuple[Tensor, Tensor]:
        """Return requests' lines, and positions of theirs, int64 ``[n]`` each on the host.

        Raises:
            ConfigError: a request is not admitted, a position is none, or one is missing.
        """
        lines = self._state.requests.lines_of(requests)
        if lines is None:
            lines = [self._state.requests.line(each, operation=operation) for each in requests]
        given = checks.bounded(operation, name, positions, self._books.sizes.max_length + 1)
        self._one_each(operation, name, given, lines)
        return torch.tensor(lines, dtype=torch.int64, device="cpu"), given

    @staticmethod
    def _one_each(operation: str, name: str, given: Tensor, lines: Sequence[int] | Tensor) -> None:
        """Raise a ConfigError unless there is one number for each request."""
        if len(given) != len(lines):
            raise ConfigError(
                operation, f"{name} are not those of the requests",
                expected=f"{len(lines)} numbers", got=len(given),
                hint="name a request for each; nothing was changed",
            )  # fmt: skip

    def expected(self, request: str, group: str, first: int, end: int) -> Tensor:
        """Return the words of a request's own rows in a stretch; see ``Ledger.expected``."""
        place = checks.place_of("expected", self._books, group)
        line = self._state.requests.line(request, operation="expected")
        self._span("expected", first, end)
        salt = self._books.salts[place.written]
        words = as_word(self._books.own[line, first + 1 : end + 1] + salt)
        return older(words, -self._state.epoch)

    def import_state(
        self,
        request: str,
        group: str,
        block: int,
        length: int,
        digest: Tensor | None = None,
        origin: Tensor | None = None,
    ) -> None:
        """Put the word of a state from outside into its block, without owner; report it if wrong.

        See ``Ledger.import_state``.
        """
        place = self._place_of_state("import_state", group, block)
        checks.whole("import_state", "length", length, 1, self._books.sizes.max_length)
        self._import(*("import_state", request, place, [block], length - 1, length, digest, origin))
        self._books.owners[place.owners + block] = NOBODY

    def words_of(self, operation: str, place: Place, table: Ints, first: int, end: int) -> Tensor:
        """Return the indices in ``Books.words`` of rows that a table must have, or of a state.

        Raises:
            ConfigError: the positions are no positions, a block is not one of the group's, or the
                table is on the device.
        """
        if place.group.is_state:
            checks.bounded(operation, "table", table, place.group.num_blocks)
        else:
            table = self._blocks_of(place, table, first, end, operation)
        self._span(operation, first, end)
        return self._words(place, table, first, end)

    def _place_of_state(self, operation: str, group: str, block: int) -> Place:
        """Return the place of a group of states; a ConfigError if it does not have this block."""
        place = checks.place_of(operation, self._books, group, states=True)
        checks.whole(operation, "block", block, 0, place.group.num_blocks - 1)
        return place

    def _span(self, operation: str, first: int, end: int) -> None:
        """Refuse, with a ConfigError, a stretch of positions that a request cannot have."""
        checks.whole(operation, "first", first, 0, self._books.sizes.max_length)
        checks.whole(operation, "end", end, first, self._books.sizes.max_length)

    def _blocks_of(
        self, place: Place, table: Ints, first: int, end: int, operation: str = "import_rows"
    ) -> Tensor:
        """Return a table as a tensor, if its blocks of these positions are blocks of the group.

        Raises:
            ConfigError: they are not, or the table or the positions are none.
        """
        self._span(operation, first, end)
        group = place.group
        given = checks.ints(operation, "table", table, "[blocks]")
        columns = range(first // group.block_size, -(-end // group.block_size))
        if group.ring is not None:
            columns = range(-(-min(end, group.ring) // group.block_size))
        if len(given) < columns.stop:
            raise ConfigError(
                operation, "the table is too short", expected=f"{columns.stop} blocks",
                got=len(given), hint="name the blocks of all rows; nothing was changed",
            )  # fmt: skip
        checks.bounded(operation, "table", given[columns.start : columns.stop], group.num_blocks)
        return given

    def _export(
        self,
        operation: str,
        request: str,
        place: Place,
        table: Ints,
        first: int,
        end: int,
    ) -> Tensor:
        """Inspect rows as exported; return their words as ``export`` does."""
        self._inspect(operation, "exported", request, place, table, first, end)
        where = self._words(place, table, first, end)
        words = self._books.words
        found = torch.where(where >= 0, words[where.clamp(min=0)], UNWRITTEN)
        return older(found, -self._state.epoch)

    def _import(
        self,
        operation: str,
        request: str,
        place: Place,
        table: Ints,
        first: int,
        end: int,
        digests: Tensor | None,
        origin: Tensor | None = None,
    ) -> None:
        """Put words into the slots of rows without a seal, name their writers, and inspect them.

        Without digests the words are the request's own, and the rows count as unverified. What the
        request was told of other rows is forgotten.

        Raises:
            ConfigError: see ``Ledger.import_rows``; nothing was changed.
        """
        books, line = self._books, self._state.requests.line(request, operation=operation)
        self._span(operation, first, end)
        if digests is None:
            books.counters[book.UNVERIFIED] += end - first
            salt = books.salts[place.written]
            words = as_word(books.own[line, first + 1 : end + 1] + salt)
        else:
            given = checks.ints(operation, "digests", digests)
            if given.dtype is not torch.int64 or len(given) != end - first or given.is_meta:
                raise ConfigError(
                    operation, "digests are not those of the rows",
                    expected=f"int64 [{end - first}], not on the device meta",
                    got=described(given, where=True),
                    hint="give what export returned for these rows; nothing was changed",
                )  # fmt: skip
            words = given.to(self._state.device, non_blocking=True)
            if self._state.epoch:  # they are of the first epoch's age
                words = older(words, self._state.epoch)
        writers = self._bringer(line, end - first)
        if origin is not None:
            writers = self._storer(operation, place, origin, digests, first, end - first)
        where = self._words(place, table, first, end)
        books.words[where] = words
        if self._state.bytes is not None:
            self._state.bytes.seals[where] = UNWRITTEN
        self._journal(place, where, writers)
        facts = books.facts[:, line]
        # The request gets other rows: only what was told of these holds for its next step.
        telling = torch.where(facts[book.TOLD] == book.IMPORTED, facts[book.TELLING], -1)
        facts[book.TOLD], facts[book.TELLING] = book.IMPORTED, telling
        self._inspect(operation, "imported", request, place, table, first, end)
        if place.group.is_state:
            facts[book.TELLING] = telling  # of rows before the state nothing was said

    def _bringer(self, line: int, count: int) -> Tensor:
        """Return what journal entries say of rows that a connector brings for a request.

        Returns:
            int64 ``[count, JOURNAL_PLACES]``.
        """
        shape = count, book.JOURNAL_PLACES
        writers = torch.full(shape, NOBODY, dtype=torch.int64, device=self._state.device)
        writers[:, book.JOURNAL_STEP] = self._books.counters[book.STEP]
        writers[:, book.JOURNAL_SERIAL] = self._books.facts[book.SERIAL, line]
        writers[:, book.JOURNAL_POSITION] = book.BROUGHT
        return writers

    def _storer(
        self, operation: str, place: Place, origin: Tensor, digests: Tensor | None,
        first: int, count: int,
    ) -> Tensor:  # fmt: skip
        """Return what journal entries say of rows whose origin is known; as ``_bringer``.

        A digest less the one before is the term of a token; what was stored of no token has none
        that decodes to its position, and ``violation.decode`` leaves it out.

        Raises:
            ConfigError: the origin has another dtype or shape, or there are no digests.
        """
        shape = "[blocks, 6]" if getattr(origin, "ndim", 1) == 2 else "[6]"
        known = checks.ints(operation, "origin", origin, shape)
        runs = known.view(1, -1) if known.ndim == 1 else known
        size = count if known.ndim == 1 else place.group.block_size
        number = 1 if known.ndim == 1 else -(-count // size)
        fits = known.dtype is torch.int64 and runs.shape == (number, 6)
        if digests is None or not fits or (known.ndim == 2 and first % size):
            raise ConfigError(
                operation, "origin is not that of the rows",
                expected="int64 [6], or [blocks, 6] from the beginning of a block on, with digests",
                got=described(known) if digests is not None else "no digests",
                hint="give what Identity.origin returned; nothing was changed",
            )  # fmt: skip
        step, serial, begin, before, last, older_still = (
            runs.to(self._state.device)[:, column, None] for column in range(6)
        )
        words = torch.zeros(len(runs) * size, dtype=torch.int64, device=self._state.device)
        words[:count] = digests.to(self._state.device)
        terms = torch.cat([before, words.view(len(runs), size)], 1).diff()
        terms = torch.cat([older_still, last, terms], 1)
        position = begin + torch.arange(size, device=self._state.device)
        every = [
            step.expand_as(position),
            serial.expand_as(position),
            book.BROUGHT - 1 - position,
            *(terms[:, 2 - back : 2 - back + size] for back in range(3)),
        ]
        return torch.stack(every, 2).view(-1, len(every))[:count]

    def _words(self, place: Place, table: Ints, first: int, end: int) -> Tensor:
        """Return the indices in ``Books.words`` of rows, int64 ``[end - first]``; -1 outside."""
        position = torch.arange(first, end, device=self._state.device)
        blocks = self._state.upload(table)[None]
        if not blocks.shape[1]:
            return torch.full_like(position, -1)
        return through(place, blocks, torch.zeros_like(position), position)

    def _inspect(
        self,
        operation: str,
        kind: str,
        request: str,
        place: Place,
        table: Ints,
        first: int,
        end: int,
    ) -> None:
        """Compare the rows of one request with the digests of its tokens, and report wrong ones.

        Imported rows are compared block by block. After a violation the ledger does not compare a
        request again before the stretch's end, so in a longer one a wrong block would hide others.

        Raises:
            ConfigError: the request is not admitted, or the table or the positions are none.
        """
        self._span(operation, first, end)
        blocks = self._state.upload(checks.ints(operation, "table", table, "[blocks]"))[None]
        number = self._state.requests.line(request, operation=operation)
        size = place.group.block_size
        ends = [*range((first // size + 1) * size, end, size), end] if kind == "imported" else [end]
        rows = [(number, *each, 0) for each in zip([first, *ends[:-1]], ends, strict=True)]
        line, low, high, one = self._state.upload(padded_columns(rows))
        if not blocks.shape[1]:
            blocks = torch.full_like(line[:1, None], -1)
        tables = {place.group.name: blocks}
        self._compare(Stretch(line, low, high, tables, kind, one))

    def _journal(self, place: Place, where: Tensor, writers: Tensor | None) -> None:
        """Write journal entries for rows that no step wrote.

        Args:
            place: the rows' group.
            where: int64 ``[n]``, the indices of their words.
            writers: int64 ``[n, JOURNAL_PLACES]``, see ``books``; None if the writer is not known.
        """
        width = self._books.journal.shape[1]
        entries = torch.full(
            (len(where), width), NOBODY, dtype=torch.int64, device=self._state.device
        )
        if writers is not None:
            entries[:, : book.JOURNAL_PLACES] = writers
        entries[:, book.JOURNAL_PLACES + place.index] = where
        self._state.append(entries)
