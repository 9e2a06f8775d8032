"""``BlockIdentities``: whose rows the bytes of blocks are, noted while the device works on.

A step that fills or stores blocks has their checksums and the words of their rows computed behind
it. They are taken over some steps later, when they have arrived on the host; a step waits for them
only if it has to know what some bytes are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
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

#: Steps whose blocks may be on their way to the host; one more waits for the first of them.
_UNDER_WAY: Final = 16


@attrs.frozen
class Span:
    """Neighbouring blocks of a request.

    Attributes:
        request: the engine's name of the request.
        group: the name of the KV-cache group.
        blocks: the blocks.
        begin: the number of blocks of the request before them.
    """

    request: str
    group: str
    blocks: Sequence[int]
    begin: int


@attrs.frozen(eq=False)
class _Noted:
    """Blocks that are to be remembered once the device has got there.

    Attributes:
        spans: the blocks.
        found: for each block its checksum, its identity, and the word that its last row should
            have: int64 ``[n, 10]``.
        doubtful: numbers of blocks with rows that nobody vouches for.
        then: called with the blocks that are remembered.
    """

    spans: Sequence[Span]
    found: HostCopy
    doubtful: Sequence[int]
    then: Callable[[set[Place]], None]


def _nothing(known: set[Place]) -> None:
    """Do nothing: no one waits for the blocks that are remembered."""


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
        self._noted: Final[deque[_Noted]] = deque()

    def clear(self) -> None:
        """Forget every block, also those on their way, whose ``then`` is never called."""
        self._noted.clear()
        self._table.clear()

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
        self,
        spans: Sequence[Span],
        doubtful: Collection[Place] = (),
        then: Callable[[set[Place]], None] = _nothing,
    ) -> None:
        """Remember blocks by the bytes that they have now.

        Left out are blocks whose rows are not all there, or not all of one prefix. The call waits
        only with a store, or when too many steps' blocks are under way, for the first of them.

        Args:
            spans: blocks of admitted requests.
            doubtful: blocks with rows that nobody vouches for, which are left out, too: a row that
                was believed once is no evidence.
            then: called with the blocks that are remembered, once that is known.
        """
        spans = sorted((span for span in spans if span.blocks), key=lambda span: span.group)
        places = [(span.group, block) for span in spans for block in span.blocks]
        if not places:
            self.look()
            return
        by_group: dict[str, list[Span]] = {}
        for span in spans:
            by_group.setdefault(span.group, []).append(span)
        found = self._copied(torch.cat([*map(self._described, by_group, by_group.values())]))
        out = [number for number, place in enumerate(places) if place in doubtful]
        self._noted.append(_Noted(spans, found, out, then))
        if self._shared is not None:
            self.settle()
        elif len(self._noted) > _UNDER_WAY:
            self._noted[0].found.wait()
        self.look()

    def look(self) -> None:
        """Take over what has arrived on the host, in the order it was noted; does not wait."""
        while self._noted and self._noted[0].found.ready:
            self._take(self._noted.popleft())

    def settle(self) -> None:
        """Wait for the device, and take over all that was noted until now."""
        while self._noted:
            noted = self._noted.popleft()
            noted.found.wait()
            self._take(noted)

    def lookup(self, contents: Sequence[Content]) -> list[list[Identity]]:
        """Return what is known of each of these bytes, an empty list of unknown ones.

        Waits for what was noted, unless nothing is asked.
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
        requests = [span.request for span in spans for _ in span.blocks]
        blocks = [block for span in spans for block in span.blocks]
        columns = [at for span in spans for at in range(span.begin, span.begin + len(span.blocks))]
        lasts = [(column + 1) * size - 1 for column in columns]
        firsts = lasts if is_state else [column * size for column in columns]
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
        contents, known = found[:, :2], found[:, 2:9]
        known[noted.doubtful, 2:] = UNWRITTEN
        places = chain.from_iterable(
            ((span.group, block) for block in span.blocks) for span in noted.spans
        )
        is_known = self._table.remember(contents, known)
        noted.then({place for place, here in zip(places, is_known, strict=True) if here})
        if self._shared is None:
            return
        for span, part in zip(
            noted.spans, found.split([len(span.blocks) for span in noted.spans]), strict=True
        ):
            if span.group not in self._states:
                first = span.begin * self._sizes[span.group]
                ends = part[:, 8], part[:, 9]
                self._shared.remember(span.request, span.group, part[:, :2], *ends, first)
