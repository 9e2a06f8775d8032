"""Rows that leave the cache or come into it through a KV connector.

Full blocks are remembered by their bytes, when they become full and when they leave: wherever these
bytes turn up again, they are the rows that they were. A block that leaves is compared with the
tokens that it is stored under. A block that comes with other bytes than were stored in its place is
wrong, if only this engine can store there. Any other block is from elsewhere: other processes may
know it, see ``shared_identities``; if none does, its rows are taken for those of the request that
loads it. Where a connector says that it could not load a block, nobody has written it, and the
engine drops what the step computed of it.

States at the ends of blocks are remembered by their bytes, too, when they leave. Other processes
are not asked about states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, repeat
from typing import Final

import torch
from torch import Tensor

from ....audit import Ledger, RowGroup
from ....audit.identity_table import Identity
from ..step import Arrival, Rows
from .block_identities import BlockIdentities, Content, Place, Span
from .brought_rows import BroughtRows, import_runs
from .handed_blocks import Handed, Transfers
from .leaving_rows import compare, compare_with
from .shared_identities import SharedIdentities

#: Requests of which it is known which blocks are remembered, for each one of a step.
_FULL: Final = 8

#: Returns the words that a request's rows in a group should have, on the host; waits but once.
Words = Callable[[str, str], Tensor]


#: The checksum of a block's bytes, and what is known of them.
_Known = tuple[Content, Sequence[Identity]]


class TransferWatch:
    """Follows the rows that a worker's connector stores and loads.

    Args:
        ledger: the worker's ledger.
        groups: the groups of rows, by name.
        state_sizes: the tokens of a block in groups whose states the prefix cache keeps, by name.
        read: returns the transfers that a connector's metadata of a step name.
        flushed: returns the blocks that are read before the step begins, by the same metadata.
        hashes: as for ``BlockIdentities``.
        tables: returns the blocks of a request by group, as the host knows them when a step ends;
            nothing of a request that it does not know.
        stop: called with an error of the audit's own; ends the audit.
        shared: knows the blocks of other processes; None if there is no store.

    Attributes:
        ended: the audit has ended: nothing is heard any more, and no cache is read.
    """

    def __init__(
        self,
        ledger: Ledger,
        groups: Mapping[str, RowGroup],
        state_sizes: Mapping[str, int],
        read: Callable[[object], Transfers],
        flushed: Callable[[object], list[Handed]],
        hashes: Callable[[str, Sequence[int]], Tensor],
        tables: Callable[[str], Sequence[Sequence[int]]],
        stop: Callable[[Exception], None],
        shared: SharedIdentities | None = None,
    ) -> None:
        self.ended = False
        self._read: Final = read
        self._flushed: Final = flushed
        self._tables: Final = tables
        self._shared: Final = shared
        self._forgotten = 0  # blocks of the table, when places were noted
        self._rows: Rows | None = None  # of the step under way, where the host knows them
        self._full: dict[tuple[str, str], int] = {}  # by request and group: blocks remembered
        self._known: dict[str, tuple[int, int]] = {}  # by request: rows computed, tokens it has
        self._given: dict[Place, bool] = {}  # handed out now; with rows before that were believed
        self._ledger: Final = ledger
        self._groups: Final = groups
        states = (group.name for group in ledger.groups if group.is_state)
        self._states: Final = {name: state_sizes.get(name) for name in states}
        sizes = {name: group.block_size for name, group in groups.items()}
        sizes |= {name: size for name, size in self._states.items() if size is not None}
        self._blocks: Final = BlockIdentities(ledger, sizes, hashes, shared)
        self._stop: Final = stop
        self._stores: list[Handed] = []
        self._stored: OrderedDict[Hashable, None] = OrderedDict()
        self._loads: dict[Place, tuple[str, Hashable | None]] = {}
        self._arrivals: Sequence[Arrival] = ()
        self._before: dict[Place, Content] = {}
        self._doubtful: set[Place] = set()  # with rows that nobody vouches for, or not yet
        self._received: set[str] = set()
        self._came: list[tuple[str, int]] = []  # requests and blocks of the step under way
        self._failed: set[int] = set()
        self._loading = False  # the step under way reads rows that were loaded for it
        self._opaque = False  # the metadata do not say which blocks leave; some steps have none

    def restart(self) -> None:
        """Forget every transfer, every remembered block and every question to other processes."""
        self._blocks.clear()
        self._full.clear()
        self._known.clear()
        self._given.clear()
        if self._shared is not None:
            self._shared.restart()
        self._stored.clear()
        self._loads.clear()
        self._before.clear()
        self._doubtful.clear()
        self._received.clear()
        self._came.clear()
        self._failed.clear()
        self._stores, self._arrivals, self._loading, self._rows = [], (), False, None
        self._forgotten, self._opaque = 0, False

    # -- told by the connector ---------------------------------------------------------------

    def tell(self, what: Callable[[], None]) -> None:
        """Call ``what``, one of the next methods, unless the audit has ended.

        An error ends the audit and is not raised.
        """
        if self.ended:
            return
        try:
            what()
        except Exception as error:
            self._stop(error)

    def flush(self, metadata: object) -> None:
        """Compare and remember the blocks that are stored before a step changes anything."""
        self._export(self._flushed(metadata))

    def begin(self, metadata: object) -> None:
        """Note the blocks that the connector loads, and those to be stored after the step.

        A connector may load beside the device's other work, so the call waits for blocks that are
        filled and whose bytes are still to be read. If the metadata are opaque, ``forward`` has to
        find what was loaded: so the checksums of all blocks that arrivals come with are taken now,
        which waits, too.

        Args:
            metadata: the connector's, of the step.
        """
        found = self._read(metadata)
        self._stores, self._opaque = found.stores, self._opaque or found.opaque
        if found.opaque:  # any block may be filled from now on
            self._blocks.describe()
        if filled := {*found.nameless, *chain.from_iterable(each.blocks for each in found.loads)}:
            self._blocks.finish(filled)
        for each in found.loads:
            for block, key in zip(each.blocks, each.keys or repeat(None), strict=False):
                self._loads[each.group, block] = each.request, key
        if found.opaque:
            rows = [at for arrival in self._arrivals for at, *_ in self._computed(arrival)]
            states = [at for arrival in self._arrivals for at in self._state_places(arrival)]
            self._before = self._blocks.contents([*rows, *states])

    def end(self) -> None:
        """Compare and remember the blocks that are stored now that the step's forward is over."""
        stores, self._stores = self._stores, []
        self._export(stores)

    def received(self, names: Iterable[str] | None) -> None:
        """Note requests whose rows were loaded while they waited; None stands for no request."""
        self._received.update(names or ())

    def failed(self, blocks: Iterable[int]) -> None:
        """Note the blocks that could not be loaded."""
        self._failed.update(blocks)

    def _export(self, stores: Iterable[Handed]) -> None:
        """Compare the rows of blocks with what they are stored under, and remember their bytes.

        States are remembered alone. Unknown requests and unwatched groups are left out.
        """
        spans, own, others = list[Span](), list[Span](), list[tuple[Span, Arrival]]()
        for each in stores:
            is_row = each.group in self._groups
            if each.request in self._ledger and (is_row or self._states.get(each.group)):
                span = Span(each.request, each.group, each.blocks, each.begin, each.keys)
                spans.append(span)
                if is_row and each.other is not None:
                    others.append((span, each.other))
                elif is_row:
                    own.append(span)
        compare(self._ledger, self._groups, own)
        for span, other in others:
            compare_with(self._ledger, self._groups, span, other)
        self._blocks.remember(spans, self._doubtful, self._note_stored)

    def _note_stored(self, span: Span, known: Sequence[bool]) -> None:
        """Note the store's places that got known blocks; forget places that got other blocks."""
        for is_known, key in zip(known, span.keys or (), strict=False):
            if is_known:
                self._stored[span.group, key] = None
            else:  # its bytes may come back from there
                self._stored.pop((span.group, key), None)
        self._doubt_places()

    def _doubt_places(self) -> None:
        """Forget what was stored where, if remembered bytes were pushed out since the last call."""
        if self._blocks.forgotten > self._forgotten:
            self._forgotten = self._blocks.forgotten
            self._stored.clear()

    def _settled(self, rows: Rows) -> list[tuple[str, int, int]]:
        """Return by request where its rows in a step begin, and where those without drafts end.

        Where the device alone knows positions, these are 0, and the rows that the host knows to be
        computed from tokens that were given.
        """
        if rows.first is None:
            return [(name, 0, self._known.get(name, (0, 0))[0]) for name in rows.names]
        settled = rows.first + rows.starts.diff()
        settled = settled if rows.drafts is None else settled - rows.drafts
        return [*zip(rows.names, rows.first.tolist(), settled.tolist(), strict=True)]

    def _remember_full(self, rows: Rows) -> None:
        """Remember the blocks that a step has newly filled with rows that stay.

        Groups with a ring are left out, requests that the ledger or the host does not know, and
        blocks that have left a sliding window.
        """
        spans = self._settled(rows)
        groups = {name: each for name, each in self._groups.items() if each.ring is None}
        full: list[Span] = []
        for request, first, last in spans:
            tables = self._tables(request) if request in self._ledger else ()
            for name, group in groups.items() if tables else ():
                begin = self._full.get((request, name), max(first, 0) // group.block_size)
                end = last // group.block_size
                if begin < end:
                    table = tables[int(name.partition(".")[2])]
                    while begin < end and not table[begin]:  # it has left a sliding window
                        begin += 1
                    full.append(Span(request, name, table[begin:end], begin))
                    self._full[request, name] = end
        self._blocks.remember(full, self._doubtful)
        if len(self._full) > _FULL * (1 + len(rows.names)) * len(self._groups):
            now = {*rows.names}
            self._full = {key: each for key, each in self._full.items() if key[0] in now}
            self._known = {name: each for name, each in self._known.items() if name in now}

    # -- told by the watch -------------------------------------------------------------------

    def before_change(self, others: bool, handed_out: Iterable[Place]) -> None:
        """Have blocks read that wait for it, before the ledger or their bytes change.

        Args:
            others: requests come or go, so that the ledger forgets the tokens of some; or weights
                have changed.
            handed_out: the blocks that get new owners.
        """
        if others or self._blocks.will_describe(block for _, block in handed_out):
            self._blocks.describe()

    def before_overwritten(self, blocks: Iterable[int]) -> None:
        """Have blocks read that wait for it, before a step fills some with zeros or copies.

        The engine does that before ``Watch.change`` hears who gets these blocks.

        Args:
            blocks: the blocks that are filled, of any group.
        """
        if self._blocks.will_describe(blocks):
            self._blocks.describe()

    def change(
        self,
        arrivals: Sequence[Arrival],
        handed_out: Iterable[Place],
        copies: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Note what a step changes before its forward.

        Blocks that are handed out are loaded and doubtful no more; doubt is copied with rows.
        States of arrivals that were loaded while they waited are recorded in the ledger.

        Args:
            arrivals: the requests that come.
            handed_out: the blocks that get new owners.
            copies: as for ``Changes``.
        """
        self._arrivals = arrivals
        if self._shared is not None:
            self._shared.look()
        for each in arrivals:
            self._known[each.name] = each.computed, len(each.tokens)
            for group, rows in self._groups.items():
                self._full[each.name, group] = each.computed // rows.block_size
            if each.name in self._received:  # now, before states are copied to the step's blocks
                for place, now in self._known_of(self._state_places(each)).items():
                    self._take_state(each, place, now)
        self._given = {place: place in self._doubtful for place in handed_out}
        for place in self._given:
            self._loads.pop(place, None)
            self._doubtful.discard(place)
        for source, target in copies:
            for group in self._groups:  # doubt goes with the rows
                mark = set.add if (group, source) in self._doubtful else set.discard
                mark(self._doubtful, (group, target))

    def scheduled(self, numbers: Mapping[str, int]) -> None:
        """Count the rows of the coming step as computed, up to the tokens known of each request.

        Args:
            numbers: by request, its rows, drafts included; unknown requests are left out. No
                request has drafts before its last token that is known.
        """
        for name, number in numbers.items():
            done, known = self._known.get(name, (0, 0))
            if done < known:
                self._known[name] = min(done + number, known), known

    def forward(self, rows: Rows) -> None:
        """Record the rows and states that were loaded for requests that begin in the coming step.

        Bytes that nobody knows count as right, and make their block doubtful. What was noted of
        these requests' arrival and loads is used up.

        Args:
            rows: the step's; where the device alone knows their positions, and the metadata say
                which blocks leave, the blocks that the step fills are remembered then, not before.
        """
        self._rows = rows if rows.first is not None or self._opaque else None
        self._came = []
        if self._arrivals:
            self._record_brought()
        self._arrivals, self._before, self._given = (), {}, {}

    def _record_brought(self) -> None:
        """Record the rows and states that were loaded for arrivals, see ``forward``."""
        coming = [(each.name, *at) for each in self._arrivals for at in self._computed(each)]
        states = [(each, at) for each in self._arrivals for at in self._state_places(each)]
        self._came = [(name, at[1]) for name, at, *_ in coming]
        self._came += [(each.name, at[1]) for each, at in states]
        wanted = [
            place
            for name, place, *_ in coming
            if name in self._received or place in self._loads or place in self._before
        ]
        lengths = {each.name: len(each.tokens) for each in self._arrivals}
        last = max([0, *lengths.values(), *(end for *_, end in coming)])
        own = cache(lambda name, group: self._ledger.expected(name, group, 0, last).cpu())
        states = [at for at in states if at[0].name not in self._received]
        loaded = (at for _, at in states if at in self._loads or at in self._before)
        now = self._known_of([*wanted, *loaded])
        for each, place in states:
            if place in self._loads or self._is_filled(place, now):
                self._take_state(each, place, now[place])
        brought: list[BroughtRows] = []
        for name, place, blocks, first, end in coming:
            if name in self._received or place in self._loads or self._is_filled(place, now):
                what = self._rows_of(own, lengths[name], name, place, now[place], first, end)
                (self._doubtful.add if what[1] is None else self._doubtful.discard)(place)
                brought.append(BroughtRows(name, place[0], blocks, first, end, *what))
        import_runs(self._ledger, brought)
        self._loading = self._loading or bool(brought)
        self._received -= lengths.keys()
        self._loads = {at: load for at, load in self._loads.items() if load[0] not in lengths}

    def _known_of(self, places: Sequence[Place]) -> dict[Place, _Known]:
        """Return the checksum of each block's bytes, and what is known of such bytes; waits."""
        contents = self._blocks.contents(places)
        known = self._blocks.lookup([*contents.values()])
        return dict(zip(contents, zip(contents.values(), known, strict=True), strict=True))

    def _is_filled(self, place: Place, now: Mapping[Place, _Known]) -> bool:
        """Tell whether a block was filled since the step began, though the metadata do not say so.

        Its bytes have changed; or it was handed out, with the bytes that it had before, and these
        are remembered or were doubtful. False if the metadata were not opaque.
        """
        if place not in self._before:
            return False
        content, known = now[place]
        if self._before[place] != content:
            return True
        given = self._given.get(place)
        return given is not None and (given or bool(known))

    @property
    def unsettled(self) -> bool:
        """Tell whether loads may have failed of which ``take_failed`` has not told."""
        return self._loading or bool(self._failed)

    def take_failed(self) -> tuple[list[str], list[int]]:
        """Take what could not be loaded; call it once the connector has said so of a step.

        Doubts and questions about these blocks are dropped.

        Returns:
            The requests that began with such a block in the last step, and the blocks, sorted.
        """
        failed, self._failed, self._loading = self._failed, set(), False
        names = {name: None for name, block in self._came if block in failed}
        self._doubtful = {place for place in self._doubtful if place[1] not in failed}
        if self._shared is not None:
            self._shared.drop(failed)
        return [*names], sorted(failed)

    def take_back(self) -> None:
        """Drop the rows of a failed step, so that ``end_step`` remembers none of their blocks."""
        self._rows = None

    def end_step(self) -> None:
        """Remember the blocks that the step has filled, a drafter's too, unless taken back."""
        rows, self._rows = self._rows, None
        if rows is not None:
            self._remember_full(rows)
        if self._opaque:  # whoever fills blocks does not say so before
            self._blocks.describe()
        self._blocks.end_step()

    def settle(self) -> None:
        """Wait for what is noted, then judge what the store of other processes answers soon.

        Nothing is done once the audit has ended: the caches may be gone.
        """
        if self.ended:
            return
        self._blocks.settle()
        if self._shared is not None:
            self._shared.settle()

    @property
    def dropped(self) -> int:
        """Number of blocks that the store of other processes was too slow for, or not there."""
        return 0 if self._shared is None else self._shared.dropped

    def _rows_of(
        self,
        words_of: Words,
        length: int,
        name: str,
        place: Place,
        now: _Known,
        first: int,
        end: int,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the words of rows that came for a request, and the origin of the first of them.

        Of unknown bytes in a full block other processes are asked, if there is a store.

        Args:
            words_of: as for ``_written``.
            length: the number of the request's tokens.
            name: the request.
            place: the block that has the rows.
            now: the checksum of its bytes, and what is known of them.
            first: the position of the first row.
            end: the position after the last; in a block that is not full the rows after it count
                for what the block is, too, if it is known what the request has there.

        Returns:
            The words, int64 on the host: zeros for other bytes than this engine stored there, the
            request's own while other processes are asked, None if nothing is known. The origin;
            None unless the bytes are known.
        """
        (group, _), (content, known) = place, now
        size = self._groups[group].block_size
        whole = first + size <= length
        own = words_of(name, group)[first : first + size if whole else end]
        if known:
            first_word, last_word = int(own[0]), int(own[-1])
            right = [e for e in known if (e.last == last_word if whole else e.first == first_word)]
            found = self._best(known, right)
            if found is None or (not right and self._groups[group].context_free):
                return None, None
            words = self._written(words_of, found, group, first, first + len(own))
            if words is None:
                words = own + (found.first - own[0])
            if whole:
                words[-1] = found.last
            elif found.first == first_word:  # and nobody knows the others
                return None, None
            return words[: end - first], found.origin(self._ledger.books.key)
        if self._is_stored(place):
            return torch.zeros(end - first, dtype=torch.int64), None
        # A request computes its last token anew, also where all of its rows have come.
        came = whole and end >= min(first + size, length - 1)
        if self._shared is not None and came:
            rows, last = end - first, int(own[-1])
            if self._shared.ask(name, place, torch.tensor(content), first, rows, last):
                return own[:rows], None
        return None, None

    def _written(
        self, words_of: Words, known: Identity, group: str, first: int, end: int
    ) -> Tensor | None:
        """Return the words of a block's rows from its writer's tokens, while the ledger has them.

        They tell at which row a block begins to be another one; its ends alone do not. None without
        them, or if the block does not begin and end with these words.
        """
        writer = self._ledger.name_of(known.serial)
        if writer is None or writer not in self._ledger:
            return None
        words = words_of(writer, group)[first:end].clone()
        is_its = int(words[0]) == known.first and known.last == int(words[-1])
        return words if is_its else None

    def _take_state(self, arrival: Arrival, place: Place, now: _Known) -> None:
        """Record a state that a connector brought for a request; unknown bytes are believed.

        Other bytes than this engine alone has stored there count as wrong. Bytes that are not known
        make the block doubtful. ``unsettled`` is True afterwards.
        """
        group, length = place[0], arrival.computed
        own = int(self._ledger.expected(arrival.name, group, length - 1, length)[0])
        _, known = now
        found = self._best(known, [each for each in known if each.last == own])
        digest = origin = None
        if found is not None:
            digest = torch.tensor([found.last])
            origin = found.origin(self._ledger.books.key)
        elif not known and self._is_stored(place):
            digest = torch.zeros(1, dtype=torch.int64)
        mark = set.add if origin is None else set.discard
        mark(self._doubtful, place)
        self._ledger.import_state(arrival.name, *place, length, digest, origin)
        self._loading = True

    def _best(self, known: Sequence[Identity], right: Sequence[Identity]) -> Identity | None:
        """Return what some bytes count for: the latest of ``right``, or else of all that is known.

        None: nothing is known; or all are wrong, and one that was right may have been forgotten.
        """
        if not right and self._blocks.may_have_forgotten:
            return None
        return max(right or known, key=lambda each: each.step, default=None)

    def _is_stored(self, place: Place) -> bool:
        """Tell whether a block came from where this engine alone has stored one of known bytes."""
        self._doubt_places()
        _, key = self._loads.get(place, ("", None))
        return key is not None and (place[0], key) in self._stored

    def _state_places(self, arrival: Arrival) -> list[Place]:
        """Return the blocks with the states after what is computed of a request, if anything is."""
        found: list[Place] = []
        for name, size in self._states.items() if arrival.computed else ():
            blocks = arrival.tables[int(name.partition(".")[2])]
            column = 0 if size is None else (arrival.computed - 1) // size
            if column < len(blocks) and blocks[column]:  # block 0 belongs to nobody
                found.append((name, blocks[column]))
        return found

    def _computed(self, arrival: Arrival) -> Iterator[tuple[Place, Sequence[int], int, int]]:
        """Yield each watched block with computed rows: place, table, first position and end."""
        for number, blocks in enumerate(arrival.tables):
            name = f"group.{number}"
            group = self._groups.get(name)
            size = 0 if group is None else group.block_size
            for index in range(-(-arrival.computed // size) if size else 0):
                if index < len(blocks) and blocks[index]:  # block 0 belongs to nobody
                    first = index * size
                    yield (name, blocks[index]), blocks, first, min(first + size, arrival.computed)
