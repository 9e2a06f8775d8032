"""Blocks of a ledger that are handed out, copied, published, and that leave or come from outside.

A connector's integration stores, beside the rows of a block, the digests that ``export`` returns,
under the same key; when the connector brings the rows, it gives these digests to ``import_rows``.
Rows that are stored under another request's tokens are then found when they are loaded, and rows
that are loaded into another block than was said are found when they are read. States go the same
way through ``export_state`` and ``import_state``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigError
from . import books as book
from . import checks
from .arguments import described
from .changing import Ints
from .digest import UNWRITTEN, as_word
from .groups import Place
from .moving import Moving
from .passes import Stretch
from .rows import through
from .violation import NOBODY


class Exchange(Moving):
    """The calls of a ledger that concern blocks, and not a step.

    Block numbers are the scheduler's, so they are given on the host; a wrong one is refused
    before anything is written. A block table may also be on the device where it is only read.
    """

    def copy(self, group: str, source: Ints, target: Ints) -> None:
        """Record that the engine copied whole blocks or states.

        Args:
            group: the group of the blocks.
            source: int ``[n]`` on the host, the blocks copied from.
            target: int ``[n]`` on the host, the blocks copied to, all different.

        Raises:
            ConfigError: the group is unknown, or the blocks are not such blocks.
        """
        place = checks.place_of("copy", self.books, group)
        end = place.group.num_blocks
        given = checks.bounded("copy", "source", source, end)
        wanted = checks.bounded("copy", "target", target, end, distinct=True)
        if len(given) != len(wanted):
            raise ConfigError(
                "copy", "source and target differ in length", expected=f"{len(given)} targets",
                got=len(wanted), hint="name a target for each source; nothing was changed",
            )  # fmt: skip
        self.graphs.settle()
        pool, there, here = self._pool(place), self._upload(wanted), self._upload(given)
        pool.index_copy_(0, there, pool.index_select(0, here))
        if self._bytes is not None:
            self._bytes.copy(place, here, there)
        if place.group.is_state:
            self.books.owners[place.owners + there] = NOBODY
        rows = torch.arange(place.stride, device=self.device)
        where = place.base + there[:, None] * place.stride + rows
        self._journal(place, where.flatten(), None)

    # -- blocks that others will read ----------------------------------------------------------

    def publish(self, request: str, group: str, table: Ints, first: int, end: int) -> None:
        """Check rows that other requests can find by their tokens from now on (prefix caching).

        Args:
            request: the request by whose tokens the rows are found.
            group: the group of the rows.
            table: int ``[blocks]``, the request's block table.
            first: the first position.
            end: the position after the last.

        Raises:
            ConfigError: the request or the group is unknown, or the positions are no positions.
        """
        place = checks.place_of("publish", self.books, group, states=False)
        self._inspect("publish", "published", request, place, table, first, end)

    def publish_state(self, request: str, group: str, block: int, length: int) -> None:
        """Check a state that other requests can find by its tokens and continue from now on.

        Args:
            request: the request by whose tokens the state is found.
            group: the group of the state.
            block: the block that holds the state.
            length: the number of tokens that the state has taken in.

        Raises:
            ConfigError: the request, the group or the block is unknown, or the length is none.
        """
        place = self._state("publish_state", group, block)
        end = checks.whole("publish_state", "length", length, 1, self.books.sizes.max_length)
        self._inspect("publish_state", "published", request, place, [block], end - 1, end)
        self.books.owners[place.owners + block] = NOBODY

    # -- rows and states that leave, and that come ---------------------------------------------

    def export(self, request: str, group: str, table: Ints, first: int, end: int) -> Tensor:
        """Check rows that leave the engine: of the request's tokens, and not of an open draft.

        Call this when a connector takes the rows, with the request whose tokens they are stored
        under. A wrong row is reported as ``exported``: once, until it is written again. The row of
        an open draft is not wrong, but must not leave yet; each export of it is reported. Open are
        the drafts of the request's last step until ``resolve``. Before its first step it has none,
        so rows that it found in the cache may leave.

        The arguments and errors are those of ``publish``.

        Returns:
            int64 ``[end - first]`` on the ledger's device, the ``digests`` for ``import_rows``.
        """
        place = checks.place_of("export", self.books, group, states=False)
        return self._export("export", request, place, table, first, end)

    def export_state(self, request: str, group: str, block: int, length: int) -> Tensor:
        """Check a state that leaves the engine: after exactly the request's first tokens.

        The arguments and errors are those of ``publish_state``.

        Returns:
            int64 ``[1]`` on the ledger's device, the ``digest`` for ``import_state``.
        """
        place = self._state("export_state", group, block)
        checks.whole("export_state", "length", length, 1, self.books.sizes.max_length)
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
        """Record rows that were loaded from outside for a request; reads compare them later.

        Call this when the rows are in their blocks, after ``hand_out`` and before the step that
        reads them. A row that is not of the request's tokens is reported at once, as ``imported``,
        and not again when the request's next step reads it.

        Args:
            request: the request that gets the rows.
            group: the group of the rows.
            table: int ``[blocks]`` on the host, the request's block table.
            first: the first position.
            end: the position after the last.
            digests: int64 ``[end - first]``, the result of ``export`` for the rows that were
                brought, in this engine or one with its key. None: the rows are assumed to be of
                the request's tokens, as those of a connector that keeps no digests have to be, and
                counted in ``kvtxn_audit_rows_unverified_total``.
            origin: int64 ``[6]``, the result of ``origins`` for the first of the rows when this
                ledger exported them; reports then name who stored them, and for which tokens.
                None: reports name the request that gets the rows.

        Raises:
            ConfigError: as in ``publish``; or a block of the rows is not one of the group's, there
                is not one digest per row, or an origin is there without digests.
        """
        place = checks.place_of("import_rows", self.books, group, states=False)
        blocks = self._blocks_of(place, table, first, end)
        self._import("import_rows", request, place, blocks, first, end, digests, origin)

    def origins(
        self, request: str, group: str, firsts: Ints, *, stored_by: str | None = None
    ) -> Tensor:
        """Return who stores runs of rows, for ``import_rows`` when they come back.

        Args:
            request: the request whose tokens the rows are stored under.
            group: the group of the rows.
            firsts: int ``[n]`` on the host, the position of the first row of each run.
            stored_by: the request that stores them; None: the same one.

        Returns:
            int64 ``[n, 6]`` on the ledger's device: the step, the storing request's serial number,
            the position, the digest up to the row before, and the terms of the two tokens before.

        Raises:
            ConfigError: as in ``publish``.
        """
        place = checks.place_of("origins", self.books, group, states=False)
        books, line = self.books, self.line(request, operation="origins")
        writer = self.line(request if stored_by is None else stored_by, operation="origins")
        end = books.sizes.max_length + 1
        first = self._upload(checks.bounded("origins", "firsts", firsts, end))
        self.graphs.settle()
        before = [books.own[line, (first - back).clamp(min=0)] for back in range(3)]
        step = books.counters[book.STEP].expand_as(first)
        serial = books.facts[book.SERIAL, writer].expand_as(first)
        terms = [before[0] - before[1], before[1] - before[2]]
        last = before[0] + books.salts[place.written]
        return torch.stack([step, serial, first, last, *terms], 1)

    def import_state(
        self, request: str, group: str, block: int, length: int, digest: Tensor | None = None
    ) -> None:
        """Record a state that was loaded from outside for a request; a step compares it later.

        As after ``publish_state``, any request with the same tokens may continue it.

        Args:
            request: the request that gets the state.
            group: the group of the state.
            block: the block that the state was loaded into.
            length: the number of tokens that the state has taken in.
            digest: int64 ``[1]``, the result of ``export_state``; None as in ``import_rows``.

        Raises:
            ConfigError: as in ``publish_state``; or there is not one digest.
        """
        place = self._state("import_state", group, block)
        checks.whole("import_state", "length", length, 1, self.books.sizes.max_length)
        self._import("import_state", request, place, [block], length - 1, length, digest)
        self.books.owners[place.owners + block] = NOBODY

    # -- how -----------------------------------------------------------------------------------

    def _state(self, operation: str, group: str, block: int) -> Place:
        """Return the place of a group of states that has this block."""
        place = checks.place_of(operation, self.books, group, states=True)
        checks.whole(operation, "block", block, 0, place.group.num_blocks - 1)
        return place

    def _span(self, operation: str, first: int, end: int) -> None:
        """Refuse a stretch of positions that a request cannot have."""
        checks.whole(operation, "first", first, 0, self.books.sizes.max_length)
        checks.whole(operation, "end", end, first, self.books.sizes.max_length)

    def words_of(self, operation: str, place: Place, table: Ints, first: int, end: int) -> Tensor:
        """Return the indices in ``Books.words`` of rows that a table must have, or of a state.

        Raises:
            ConfigError: the positions are no positions, or a block is not one of the group's.
        """
        if place.group.is_state:
            checks.bounded(operation, "table", table, place.group.num_blocks)
        else:
            table = self._blocks_of(place, table, first, end, operation)
        self._span(operation, first, end)
        return self._words(place, table, first, end)

    def _blocks_of(
        self, place: Place, table: Ints, first: int, end: int, operation: str = "import_rows"
    ) -> Tensor:
        """Return a table whose blocks of these positions are blocks of the group."""
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
        self, operation: str, request: str, place: Place, table: Ints, first: int, end: int
    ) -> Tensor:
        self._inspect(operation, "exported", request, place, table, first, end)
        where = self._words(place, table, first, end)
        words = self.books.words
        return torch.where(where >= 0, words[where.clamp(min=0)], UNWRITTEN)

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
        books, line = self.books, self.line(request, operation=operation)
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
                    got=f"{described(given)} on {given.device}",
                    hint="give what export returned for these rows; nothing was changed",
                )  # fmt: skip
            words = given.to(self.device, non_blocking=True)
        writers = self._bringer(line, end - first)
        if origin is not None:
            writers = self._storer(operation, origin, digests, end - first)
        self.graphs.settle()
        where = self._words(place, table, first, end)
        books.words[where] = words
        if self._bytes is not None:
            self._bytes.seals[where] = UNWRITTEN
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
        writers = torch.full(shape, NOBODY, dtype=torch.int64, device=self.device)
        writers[:, book.JOURNAL_STEP] = self.books.counters[book.STEP]
        writers[:, book.JOURNAL_SERIAL] = self.books.facts[book.SERIAL, line]
        writers[:, book.JOURNAL_POSITION] = book.BROUGHT
        return writers

    def _storer(self, operation: str, origin: Tensor, digests: Tensor | None, count: int) -> Tensor:
        """Return what journal entries say of rows whose origin is known; as ``_bringer``.

        A digest less the one before is the term of a token; what was stored of no token has none
        that decodes to its position, and ``violation.decode`` leaves it out.
        """
        known = checks.ints(operation, "origin", origin, "[6]")
        if digests is None or known.dtype is not torch.int64 or len(known) != 6:
            raise ConfigError(
                operation, "origin is not that of the rows", expected="int64 [6], with digests",
                got=described(known) if digests is not None else "no digests",
                hint="give what origins returned when the rows left; nothing was changed",
            )  # fmt: skip
        step, serial, first, before, last, older = known.to(self.device).unbind()
        words = digests.to(self.device)
        terms = torch.cat([torch.stack([older, last]), torch.cat([before[None], words]).diff()])
        position = first + torch.arange(count, device=self.device)
        return torch.stack(
            [
                step.expand(count),
                serial.expand(count),
                book.BROUGHT - 1 - position,
                *(terms[2 - back : 2 - back + count] for back in range(3)),
            ],
            1,
        )

    def _words(self, place: Place, table: Ints, first: int, end: int) -> Tensor:
        """Return the indices in ``Books.words`` of rows, int64 ``[end - first]``; -1 outside."""
        position = torch.arange(first, end, device=self.device)
        blocks = self._upload(table)[None]
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
        """Compare the rows of one request with the digests of its tokens."""
        self._span(operation, first, end)
        blocks = self._upload(checks.ints(operation, "table", table, "[blocks]"))[None]
        number = self.line(request, operation=operation)
        line, low, high = self._upload([number, first, end]).unbind()
        if not blocks.shape[1]:
            blocks = torch.full_like(line[None, None], -1)
        tables = {place.group.name: blocks}
        self.inspect(Stretch(line[None], low[None], high[None], tables, kind))

    def inspect(self, stretch: Stretch) -> None:
        """Check rows of many requests at once, as ``publish`` or ``export`` do for one request.

        Numbers that lie outside the ledger are left out, as in a step on a GPU.

        Raises:
            ConfigError: a group is unknown, or a tensor does not fit.
        """
        checks.check_stretch(self.books, stretch)
        self.passes.inspect(stretch)

    def _pool(self, place: Place, words: Tensor | None = None) -> Tensor:
        """Return the words of a group's pool, ``[num_blocks, stride]``."""
        return place.pool_of(self.books.words if words is None else words)

    def _journal(self, place: Place, where: Tensor, writers: Tensor | None) -> None:
        """Write journal entries for rows that no step wrote.

        Args:
            place: the rows' group.
            where: int64 ``[n]``, the indices of their words.
            writers: int64 ``[n, JOURNAL_PLACES]``, see ``books``; None if the writer is not known.
        """
        width = self.books.journal.shape[1]
        entries = torch.full((len(where), width), NOBODY, dtype=torch.int64, device=self.device)
        if writers is not None:
            entries[:, : book.JOURNAL_PLACES] = writers
        entries[:, book.JOURNAL_PLACES + place.index] = where
        self._append(entries)
