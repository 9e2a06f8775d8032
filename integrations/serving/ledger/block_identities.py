"""``BlockIdentities``: whose rows the bytes of blocks are, noted while the device works on.

Checksums of blocks that a step fills or stores, and the words of their rows, are computed together
with those of the next steps, which costs less than by themselves; at the latest before anything
else may come into the blocks, or somebody asks what some bytes are. They are taken over when they
have arrived on the host; a step waits for them only if it has to know what some bytes are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ....audit import Ledger
from ....audit.digest import UNWRITTEN
from ....audit.identity_table import Identity, IdentityTable
from ....host_values import HostCopy
from .shared_identities import SharedIdentities

#: A block of a group: the group's name and the block's number.
Place = tuple[str, int]

#: The checksum of a block's bytes.
Content = tuple[int, int]

#: Steps whose blocks are described together, and blocks that are described at once.
_TOGETHER: Final = 8
_AT_ONCE: Final = 256

#: Descriptions that may be on their way to the host; one more waits for the first of them.
_UNDER_WAY: Final = 4


@attrs.frozen
class Span:
    """Neighbouring blocks of a request.

    Attributes:
        request: the engine's name of the request.
        group: the name of the KV-cache group.
        blocks: the blocks.
        begin: the number of blocks of the request before them.
        keys: the place of each block in a connector's store; None if that is not known.
    """

    request: str
    group: str
    blocks: Sequence[int]
    begin: int
    keys: Sequence[Hashable] | None = None


#: Called with a span, and for each of its blocks whether it is remembered.
Then = Callable[[Span, Sequence[bool]], None]


@attrs.frozen(eq=False)
class _Waiting:
    """A span whose blocks are to be remembered.

    Attributes:
        span: the blocks.
        doubtful: the numbers in the span of blocks with rows that nobody vouches for.
        then: called once it is known which blocks are remembered; None: no one waits for that.
    """

    span: Span
    doubtful: Sequence[int]
    then: Then | None


@attrs.frozen(eq=False)
class _Noted:
    """Blocks that are remembered once their description has arrived on the host.

    Attributes:
        spans: the blocks.
        found: for each block its checksum, its identity, and the word that its last row should
            have: int64 ``[n, 10]``.
    """

    spans: Sequence[_Waiting]
    found: HostCopy

    def reads(self, blocks: Collection[int]) -> bool:
        """Tell whether one of some blocks of any group is among these."""
        return any(block in blocks for each in self.spans for block in each.span.blocks)


class BlockIdentities:
    """Remembers blocks by their bytes, and tells what bytes are.

    Args:
        ledger: the worker's ledger.
        sizes: the tokens of a block by group; of groups of states, if their blocks keep states at
            the ends of so many tokens.
        checksums: returns checksums of the bytes of blocks, int64 ``[n, 2]`` on the ledger's
            device, given a group's name and the blocks; does not wait for the device.
        shared: knows the blocks of other processes; None if there is no store. With a store, a
            step waits for its blocks and hands them on: the other process may read them next.
        copied: copies a tensor to the host.
    """

    def __init__(
        self,
        ledger: Ledger,
        sizes: Mapping[str, int],
        checksums: Callable[[str, Sequence[int]], Tensor],
        shared: SharedIdentities | None = None,
        copied: Callable[[Tensor], HostCopy] = HostCopy.of,
    ) -> None:
        self._ledger: Final = ledger
        self._sizes: Final = sizes
        self._states: Final = {group.name for group in ledger.groups if group.is_state}
        self._checksums: Final = checksums
        self._shared: Final = shared
        self._copied: Final = copied
        self._table: Final = IdentityTable()
        self._waiting: Final[list[_Waiting]] = []
        self._blocks: Final[set[int]] = set()  # of ``_waiting``, in any group
        self._steps = 0  # since the first of ``_waiting``
        self._noted: Final[deque[_Noted]] = deque()

    def clear(self) -> None:
        """Forget every block, also those on their way, whose ``then`` is never called."""
        self._drop_waiting()
        self._noted.clear()
        self._table.clear()

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        self._blocks.clear()
        self._steps = 0

    @property
    def forgotten(self) -> int:
        """Number of blocks that were pushed out by others."""
        return self._table.forgotten

    @property
    def may_have_forgotten(self) -> bool:
        """Tell whether known bytes may have had another identity, too, that was pushed out.

        True once any identity was pushed out and some bytes have several.
        """
        return self._table.repeats and self._table.forgotten > 0

    def remember(
        self, spans: Iterable[Span], doubtful: Collection[Place] = (), then: Then | None = None
    ) -> None:
        """Remember blocks by their bytes.

        Bytes and words are read at the same time, within some steps. Call ``describe`` before bytes
        change of which the ledger does not hear, as a connector fills blocks; and before the ledger
        forgets rows or requests that are to be remembered. Left out are blocks whose rows are not
        all there, or not all of one prefix.

        Args:
            spans: blocks of admitted requests.
            doubtful: blocks with rows that nobody vouches for, which are left out, too: a row that
                was believed once is no evidence.
            then: called for each span once it is known which of its blocks are remembered.
        """
        for span in spans:
            if span.blocks:
                places = ((span.group, block) for block in span.blocks)
                out = [number for number, place in enumerate(places) if place in doubtful]
                self._waiting.append(_Waiting(span, out, then))
                self._blocks.update(span.blocks)
        if len(self._blocks) >= _AT_ONCE or self._shared is not None:
            self.describe()

    def will_describe(self, blocks: Iterable[int]) -> bool:
        """Tell whether one of some blocks of any group waits to be described."""
        return not self._blocks.isdisjoint(blocks)

    def finish(self, blocks: Collection[int]) -> None:
        """Have some blocks read to the end, if that is still to be done; only then this waits.

        Call it before something fills the blocks that does not wait for the device's work: a
        connector may copy into them beside the step under way.
        """
        if self.will_describe(blocks):
            self.describe()
        self.look()
        while any(each.reads(blocks) for each in self._noted):
            self._take_first()

    def end_step(self) -> None:
        """Describe the blocks that wait for it, if they have waited for long enough."""
        if self._waiting:
            self._steps += 1
            if self._steps >= _TOGETHER:
                self.describe()
        self.look()

    def describe(self) -> None:
        """Have the bytes and the words read of all blocks that wait for it.

        The call waits for the device only with a store, or when too many descriptions are under
        way, for the first of them.
        """
        if not self._waiting:
            return
        spans = sorted(self._waiting, key=lambda each: each.span.group)
        self._drop_waiting()
        by_group: dict[str, list[Span]] = {}
        for each in spans:
            by_group.setdefault(each.span.group, []).append(each.span)
        found = torch.cat([*map(self._described, by_group, by_group.values())])
        self._noted.append(_Noted(spans, self._copied(found)))
        if self._shared is not None:
            self.settle()
        elif len(self._noted) > _UNDER_WAY:
            self._take_first()

    def look(self) -> None:
        """Take over what has arrived on the host, in the order it was noted; does not wait."""
        while self._noted and self._noted[0].found.ready:
            self._take(self._noted.popleft())

    def settle(self) -> None:
        """Describe what waits for it, wait for the device, and take all of it over."""
        self.describe()
        while self._noted:
            self._take_first()

    def _take_first(self) -> None:
        """Wait for the first of the descriptions that are under way, and take it over."""
        noted = self._noted.popleft()
        noted.found.wait()
        self._take(noted)

    def lookup(self, contents: Sequence[Content]) -> list[list[Identity]]:
        """Return what is known of each of these bytes, an empty list of unknown ones.

        Settles what is to be remembered, unless nothing is asked.
        """
        if not contents:
            return []
        self.settle()
        return self._table.lookup(torch.tensor(contents))

    def contents(self, places: Iterable[Place]) -> dict[Place, Content]:
        """Return two 64-bit checksums of each block's bytes, by place; waits for the device."""
        blocks: dict[str, dict[int, None]] = {}
        for group, block in places:
            blocks.setdefault(group, {})[block] = None
        return {
            (group, block): (content[0], content[1])
            for group, own in blocks.items()
            for block, content in zip(own, self._sums(group, [*own]).tolist(), strict=True)
        }

    def _sums(self, group: str, blocks: Sequence[int]) -> Tensor:
        """Return checksums of blocks' bytes, int64 ``[n, 2]``, others for each group."""
        return self._checksums(group, blocks) + self._ledger.books.key.salt(group)

    def _described(self, group: str, spans: Sequence[Span]) -> Tensor:
        """Return what ``_Noted.found`` has of blocks of one group, int64 ``[n, 10]`` on the device.

        A state that is not the one at the end of its block has an identity of zeros.
        """
        size, is_state = self._sizes[group], group in self._states
        requests = [name for span in spans for name in [span.request] * len(span.blocks)]
        blocks = [block for span in spans for block in span.blocks]
        lasts = [
            at * size + size - 1
            for span in spans
            for at in range(span.begin, span.begin + len(span.blocks))
        ]
        firsts = lasts if is_state else [last - size + 1 for last in lasts]
        identities = self._ledger.identities(group, requests, firsts, blocks)
        ends = identities[:, -1:]
        if is_state or self._shared is not None:
            ends = self._ledger.own_words(group, requests, lasts)[:, None]
        if is_state:  # one that is not at the end of its block is none
            identities = identities * (identities[:, -1:] == ends)
        return torch.cat([self._sums(group, blocks), identities, ends], 1)

    def _take(self, noted: _Noted) -> None:
        """Remember blocks whose description has arrived, call ``then``, and tell a store.

        Doubtful blocks and states are not told to the store.
        """
        found = noted.found.values
        parts = found.split([len(each.span.blocks) for each in noted.spans])
        for each, part in zip(noted.spans, parts, strict=True):
            if each.doubtful:
                part[each.doubtful, 4:9] = UNWRITTEN
        is_known, at = self._table.remember(found[:, :2], found[:, 2:9]), 0
        for each, part in zip(noted.spans, parts, strict=True):
            span, begin, at = each.span, at, at + len(each.span.blocks)
            if each.then is not None:
                each.then(span, is_known[begin:at])
            if self._shared is not None and span.group not in self._states:
                first = span.begin * self._sizes[span.group]
                ends = part[:, 8], part[:, 9]
                self._shared.remember(span.request, span.group, part[:, :2], *ends, first)
