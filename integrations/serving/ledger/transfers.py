"""Rows that leave the cache or come into it through a KV connector.

A block that leaves is compared with the tokens that it is stored under, and remembered by its
bytes: wherever these bytes turn up again, they are the rows that they were. A block that comes
with other bytes than were stored in its place is wrong, if only this engine can store there. Any
other block is from elsewhere; its rows are taken for those of the request that loads it, and so is
each state that comes. Where a connector says that it could not load a block, nobody has written it,
and vLLM drops what the step computed of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Final

import attrs
import torch
from torch import Tensor

from ....audit import Ledger, RowGroup
from ..step import Arrival

#: Blocks that left the cache and are remembered; the ones that left first are forgotten.
_REMEMBERED: Final = 1 << 16

#: The name of the ledger's request for rows that are stored under tokens that no runner's request
#: has: a fault, or tokens that the scheduler's half knows first.
_NOBODYS: Final = "the tokens of a store"

#: Numbers of each block that ``Ledger.origins`` returns.
_ORIGIN: Final = 6

#: A block of a group: the group's name and the block's number.
Place = tuple[str, int]


@attrs.frozen(eq=False)
class Handed:
    """Neighbouring blocks of one request that a connector stores or loads.

    Attributes:
        group: the name of the KV-cache group.
        blocks: the blocks.
        begin: the number of blocks of the request before them.
        request: the engine's name of the request.
        other: the request as the store has it, if the rows are stored under or found by tokens that
            are not those that the runner has; None if they are.
        keys: the place of each block in the connector's store; None if the metadata do not say, or
            if other engines may store there, whose rows of the same tokens have other bytes.
    """

    group: str
    blocks: list[int]
    begin: int
    request: str
    other: Arrival | None = None
    keys: Sequence[Hashable] | None = None


@attrs.frozen(eq=False)
class Transfers:
    """The transfers of one step, as a connector's metadata name them.

    Attributes:
        stores: blocks that are read when the step's forward is over.
        at_once: blocks that are read before the step begins.
        loads: blocks that are filled, now or later.
        opaque: the metadata are of an unknown kind: any block may be filled.
    """

    stores: list[Handed]
    at_once: list[Handed]
    loads: list[Handed]
    opaque: bool


class TransferWatch:
    """Follows the rows that a worker's connector stores and loads.

    Args:
        ledger: the worker's ledger.
        groups: the groups of rows, by name.
        state_sizes: the tokens of a block in groups whose states the prefix cache keeps, by name.
        read: returns the transfers that a connector's metadata of a step name.
        hashes: returns a hash of the bytes of each block, given a group's name and the blocks; it
            waits for the device.
        stop: called with an error of the audit's own; ends the audit.
    """

    def __init__(
        self,
        ledger: Ledger,
        groups: Mapping[str, RowGroup],
        state_sizes: Mapping[str, int],
        read: Callable[[object], Transfers],
        hashes: Callable[[str, Sequence[int]], Sequence[bytes]],
        stop: Callable[[Exception], None],
    ) -> None:
        self._read: Final = read
        self._bytes: Final = hashes
        self._ledger: Final = ledger
        self._groups: Final = groups
        states = [group.name for group in ledger.groups if group.is_state]
        self._states: Final = {name: state_sizes.get(name) for name in states}
        self._stop: Final = stop
        # By group and bytes of a block: the origin of its rows, and their digests, in one tensor.
        self._left: OrderedDict[tuple[str, bytes], Tensor] = OrderedDict()
        self._stores: list[Handed] = []
        self._stored: OrderedDict[Hashable, None] = OrderedDict()
        self._loads: dict[Place, tuple[str, Hashable | None]] = {}
        self._arrivals: Sequence[Arrival] = ()
        self._before: dict[Place, bytes] = {}
        self._received: set[str] = set()
        self._came: list[tuple[str, int]] = []  # requests and blocks of the step under way
        self._failed: set[int] = set()
        self._loading = False  # the step under way reads rows that were loaded for it

    def restart(self) -> None:
        """Forget every transfer; the ledger has forgotten the rows."""
        self._left.clear()
        self._stored.clear()
        self._loads.clear()
        self._before.clear()
        self._received.clear()
        self._came.clear()
        self._failed.clear()
        self._stores, self._arrivals, self._loading = [], (), False

    # -- told by the connector ---------------------------------------------------------------

    def tell(self, what: Callable[[], None]) -> None:
        """Call one of the next methods; an error of the audit's own ends the audit."""
        try:
            what()
        except Exception as error:
            self._stop(error)

    def flush(self, metadata: object) -> None:
        """Note the blocks that the connector stores before a step changes anything."""
        self._export(self._read(metadata).at_once)

    def begin(self, metadata: object) -> None:
        """Note the blocks that the connector stores after the step, and those that it loads."""
        found = self._read(metadata)
        self._stores = found.stores
        for each in found.loads:
            for block, key in zip(each.blocks, each.keys or repeat(None), strict=False):
                self._loads[each.group, block] = each.request, key
        if found.opaque:
            rows = [at for arrival in self._arrivals for at, *_ in self._computed(arrival)]
            states = [at for arrival in self._arrivals for at in self._state_places(arrival)]
            self._before = self._hashes([*rows, *states])

    def end(self) -> None:
        """Note the blocks that the connector stores now that the step's forward is over."""
        stores, self._stores = self._stores, []
        self._export(stores)

    def received(self, names: Iterable[str] | None) -> None:
        """Note the requests whose rows were loaded while they waited."""
        self._received.update(names or ())

    def failed(self, blocks: Iterable[int]) -> None:
        """Note the blocks that could not be loaded."""
        self._failed.update(blocks)

    def _export(self, stores: Iterable[Handed]) -> None:
        """Compare the rows of blocks with what they are stored under, and remember their bytes."""
        taken: dict[str, list[tuple[int, Tensor]]] = {}
        for each in stores:
            group = self._groups.get(each.group)
            if group is None or each.request not in self._ledger:
                continue
            name, size, other = each.request, group.block_size, each.other
            if other is not None:
                name, tokens = _NOBODYS, other.tokens
                embedded = {at: what for at, what in other.embedded.items() if at < len(tokens)}
                self._ledger.admit(name, tokens, extras=other.extras, embedded=embedded)
            table = [0] * each.begin + each.blocks
            begins = range(each.begin * size, len(table) * size, size)
            words = self._ledger.export(name, each.group, table, begins.start, begins.stop)
            origins = self._ledger.origins(name, each.group, begins, stored_by=each.request)
            if other is not None:
                self._ledger.release(name)
            taken.setdefault(each.group, []).extend(
                zip(each.blocks, torch.cat([origins, words.view(-1, size)], 1), strict=True)
            )
            self._stored.update(dict.fromkeys((each.group, key) for key in each.keys or ()))
        for name, found in taken.items():
            blocks, rows = zip(*found, strict=True)
            for content, words in zip(
                self._bytes(name, blocks), torch.stack(rows).cpu(), strict=True
            ):
                self._left[name, content] = words
        while len(self._left) > _REMEMBERED:
            self._left.popitem(last=False)
            self._stored.clear()  # or else bytes that were forgotten would count as wrong

    # -- told by the watch -------------------------------------------------------------------

    def change(self, arrivals: Sequence[Arrival], handed_out: Iterable[Place]) -> None:
        """Note the requests that come, and the blocks that get new owners."""
        self._arrivals = arrivals
        for each in arrivals:
            if each.name in self._received:  # now, before vLLM copies states to the step's blocks
                for place in self._state_places(each):
                    self._believe(each, place)
        for place in handed_out:
            self._loads.pop(place, None)

    def forward(self) -> None:
        """Record the rows that a connector loaded for requests that begin in the coming step."""
        coming = [(each.name, *at) for each in self._arrivals for at in self._computed(each)]
        states = [(each, at) for each in self._arrivals for at in self._state_places(each)]
        wanted = [
            place
            for name, place, *_ in coming
            if name in self._received or place in self._loads or place in self._before
        ]
        now = self._hashes([*wanted, *(place for _, place in states if place in self._before)])
        for each, place in states:
            filled = place in self._before and self._before[place] != now[place]
            if each.name not in self._received and (place in self._loads or filled):
                self._believe(each, place)
        for name, place, blocks, first, end in coming:
            filled = place in self._before and self._before[place] != now[place]
            if name in self._received or place in self._loads or filled:
                known = self._rows_of(place, now[place])
                origin, words = (None, None) if known is None else known
                words = None if words is None else words[: end - first]
                self._ledger.import_rows(name, place[0], blocks, first, end, words, origin)
                self._loading = True
        self._came = [(name, place[1]) for name, place, *_ in coming]
        self._came += [(each.name, block) for each, (_, block) in states]
        came = {arrival.name for arrival in self._arrivals}
        self._received -= came
        self._loads = {place: load for place, load in self._loads.items() if load[0] not in came}
        self._arrivals, self._before = (), {}

    @property
    def unsettled(self) -> bool:
        """Tell whether loads may have failed of which ``take_failed`` has not told."""
        return self._loading or bool(self._failed)

    def take_failed(self) -> tuple[list[str], list[int]]:
        """Return what could not be loaded; call it once the connector has said so of a step.

        Returns:
            The requests that began with such a block in the last step, and the blocks.
        """
        failed, self._failed, self._loading = self._failed, set(), False
        names = {name: None for name, block in self._came if block in failed}
        return [*names], sorted(failed)

    def _hashes(self, places: Iterable[Place]) -> dict[Place, bytes]:
        """Return a hash of the bytes of each block."""
        blocks: dict[str, dict[int, None]] = {}
        for group, block in places:
            blocks.setdefault(group, {})[block] = None
        return {
            (group, block): content
            for group, own in blocks.items()
            for block, content in zip(own, self._bytes(group, [*own]), strict=True)
        }

    def _rows_of(self, place: Place, content: bytes) -> tuple[Tensor | None, Tensor] | None:
        """Return the origin and digests of rows that a block holds by its bytes, as far as known.

        Returns:
            None for the origin if nobody stored these bytes, which are wrong then; None for both
            if nothing is known.
        """
        group, _ = place
        known = self._left.get((group, content))
        _, key = self._loads.get(place, ("", None))
        if known is None and key is not None and (group, key) in self._stored:
            unwritten = torch.zeros(self._groups[group].block_size, dtype=torch.int64)
            return None, unwritten
        return None if known is None else (known[:_ORIGIN], known[_ORIGIN:])

    def _believe(self, arrival: Arrival, place: Place) -> None:
        """Take a state that a connector brought for that of the request that gets it."""
        self._ledger.import_state(arrival.name, *place, arrival.computed)
        self._loading = True

    def _state_places(self, arrival: Arrival) -> list[Place]:
        """Return the blocks that have the states after what is computed of a request."""
        found = []
        for name, size in self._states.items() if arrival.computed else ():
            blocks = arrival.tables[int(name.partition(".")[2])]
            column = 0 if size is None else (arrival.computed - 1) // size
            if column < len(blocks) and blocks[column]:  # block 0 belongs to nobody
                found.append((name, blocks[column]))
        return found

    def _computed(self, arrival: Arrival) -> Iterator[tuple[Place, Sequence[int], int, int]]:
        """Yield the blocks that a request comes with, their table, and their positions."""
        for number, blocks in enumerate(arrival.tables):
            name = f"group.{number}"
            group = self._groups.get(name)
            size = 0 if group is None else group.block_size
            for index in range(-(-arrival.computed // size) if size else 0):
                if index < len(blocks) and blocks[index]:  # block 0 belongs to nobody
                    first = index * size
                    yield (name, blocks[index]), blocks, first, min(first + size, arrival.computed)
