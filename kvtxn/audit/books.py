"""The ledger's memory: fixed tensors on the device, and their size by formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ..errors import ConfigError
from .digest import MAX_POSITION, Key
from .groups import WORD_BYTES, Group, Layout, positive
from .violation import BROUGHT as BROUGHT
from .violation import FIELDS, KINDS

#: Indices into ``Books.counters``, int64 on the device; counts by kind start at ``BY_KIND``.
STEP: Final = 0
ROWS_CHECKED: Final = 1
STATES_CHECKED: Final = 2
#: The number of violations found.
FOUND: Final = 3
#: The device keeps a violation only while fewer than this many were found; the host raises the
#: limit after it has read the violations.
LIMIT: Final = 4
#: The number of rows written to the journal so far.
JOURNALLED: Final = 5
#: The number of a launch's programs that have ended; 0 again when the launch has ended.
ENDED: Final = 6
#: The number of malformed requests that ``write`` left out.
REFUSED: Final = 7
#: The number of requests with drafts in the last step; 0 once it is resolved.
OPEN: Final = 8
#: The same number while the step is being written; else 0.
OPENING: Final = 9
#: The number of requests with drafts of steps that another step followed before ``resolve``.
UNRESOLVED: Final = 10
#: The number of rows and states that were taken for right because nobody knows what they are.
UNVERIFIED: Final = 11
#: The age of the oldest row that there can be; see ``epochs``.
EPOCH: Final = 12
#: 1 if a stale row that is read is a violation; else it is counted by age alone.
ALARM: Final = 13
BY_KIND: Final = 14
NUM_COUNTERS: Final = BY_KIND + len(KINDS)

#: Indices into one journal entry, int64: the step, the writer's serial number, the row's position,
#: the terms of its last three tokens (newest first), then, for each group, the index in
#: ``Books.words`` of the word written; -1 if the group has none. The position is -1 if it is not
#: known. Of a row that a connector brought it is ``BROUGHT``, or, where it is known who stored the
#: row, ``BROUGHT - 1`` less the position that it was stored for: the entry is of that writer then.
JOURNAL_STEP: Final = 0
JOURNAL_SERIAL: Final = 1
JOURNAL_POSITION: Final = 2
JOURNAL_TERMS: Final = 3
JOURNAL_PLACES: Final = 6

#: Indices into the first dimension of ``Books.facts``. The request's serial number.
SERIAL: Final = 0
#: The number of leading positions whose tokens are known to be the request's own.
KNOWN: Final = 1
#: The number of leading positions whose rows will not be taken back: those before the drafts of the
#: request's last step; before its first step, all its tokens, since nothing is its draft yet. It
#: stays when the request's tokens are given again, but never exceeds them.
DURABLE: Final = 2
#: Accepted drafts of the present step; -1 if not known.
KEPT: Final = 3
#: One bit per group (its number modulo 63): a step of the request read outside the group, and that
#: was reported, whichever position it was at.
OUTSIDE: Final = 4
#: Steps do not compare positions before this one: wrong rows among them were reported to this
#: request, not by exports alone. A wrong row's word stays, so that each request that reads it is
#: told, once, and whoever publishes or exports it. -1: nothing was reported. From an import of
#: rows, or from a window that aborts, until the request's next step it is ``IMPORTED``: what
#: ``TELLING`` says then is of the imported rows, or of the same ones, and holds for a step that
#: goes back to them as well.
TOLD: Final = 5
IMPORTED: Final = MAX_POSITION
#: What ``TOLD`` becomes with the request's next step: the passes of one step compare alike.
TELLING: Final = 6
#: Of rows before this position a step neither reports nor counts that they are of earlier weights,
#: as that was reported to this request; other faults of theirs are. -1: nothing was reported.
TOLD_STALE: Final = 7
#: What ``TOLD_STALE`` becomes with the request's next step.
TELLING_STALE: Final = 8
NUM_FACTS: Final = 9

#: Indices into the second dimension of ``Books.ages``: what is counted by age.
ROWS: Final = 0
DRAFT_ROWS: Final = 1
STATES: Final = 2
NUM_AGED: Final = 3
#: Ages that are told apart; the last stands for older rows, too.
AGES: Final = 16

#: The number of latest steps whose fingerprints are kept, to be compared between ranks.
FINGERPRINTS: Final = 256


@attrs.frozen
class Sizes:
    """The capacities of a ledger.

    Attributes:
        max_requests: requests that are admitted at one time.
        max_length: positions of a request.
        journal: the number of latest rows whose writers are remembered. A violation whose row was
            written earlier is reported without its writer.
        capacity: violations that can wait for the host; further violations are counted, not kept.

    Raises:
        ConfigError: a size is not a positive int, or ``max_length`` is too large.
    """

    max_requests: int = attrs.field(validator=positive)
    max_length: int = attrs.field(validator=positive)
    journal: int = attrs.field(default=1 << 16, validator=positive)
    capacity: int = attrs.field(default=1024, validator=positive)

    def __attrs_post_init__(self) -> None:
        if self.max_length >= MAX_POSITION:
            raise ConfigError(
                "Ledger", "max_length is too large", expected=f"below {MAX_POSITION}",
                got=self.max_length, hint="no digest has room for such a position",
            )  # fmt: skip

    def num_bytes(self, groups: Sequence[Group]) -> int:
        """Return the bytes that a ledger of these sizes takes on its device, without making it.

        8 per slot and group (once for groups of one pool), 8 per request and position, some 500
        per request, and a constant: the journal, the violations that wait, the counters.
        """
        layout = Layout.of(groups)
        numbers = (
            layout.num_words
            + layout.num_states
            + self.max_requests * (self.max_length + 2)
            + NUM_FACTS * self.max_requests
            + self.journal * (JOURNAL_PLACES + len(groups))
            + self.capacity * len(FIELDS)
            + NUM_COUNTERS
            + FINGERPRINTS * len(groups)
            + (self.max_requests + 1) * NUM_AGED * AGES
            + self.capacity * (1 + NUM_AGED * AGES)
        )
        return numbers * WORD_BYTES


@attrs.frozen(eq=False)
class Books:
    """The tensors that the passes read and write.

    Attributes:
        key: the engine's secret.
        salts: the salt of each group, an int64, by group name.
        layout: the positions of the groups' words in ``words``.
        sizes: the capacities.
        words: int64 ``[num_words]``, one word per slot of each pool.
        owners: int64 ``[num_states]``, serial number of the request that wrote each state; -1
            if any request may read the state.
        own: int64 ``[max_requests, max_length + 1]``: digests of each request's own tokens;
            ``[r, n]`` is the digest of the first n tokens of line r.
        facts: int64 ``[NUM_FACTS, max_requests]``; ``SERIAL`` to ``TELLING_STALE`` are the indices.
        first: int64 ``[max_requests]``, the position of each request's first row, for steps without
            ``Step.first``. It is filled when a step begins, since an engine may write the next
            step's positions over the step's own before the step is resolved.
        journal: int64 ``[journal, JOURNAL_PLACES + num_groups]``, a ring.
        found: int64 ``[capacity, len(FIELDS)]``, violations that wait for the host.
        counters: int64 ``[NUM_COUNTERS]``.
        fingerprints: int64 ``[FINGERPRINTS, num_groups]``, a ring: by step, a word over
            everything that each group wrote until then.
        ages: int64 ``[max_requests + 1, NUM_AGED, AGES]``, by line the rows and states of each age
            from 1 on that its request has read; the last line has those of requests that ended.
        ended: int64 ``[capacity, 1 + NUM_AGED * AGES]``, a ring: serial numbers of requests that
            ended, -1 for none, and what they had read.
    """

    key: Key
    salts: dict[str, int]
    layout: Layout
    sizes: Sizes
    words: Tensor
    owners: Tensor
    own: Tensor
    facts: Tensor
    first: Tensor
    journal: Tensor
    found: Tensor
    counters: Tensor
    fingerprints: Tensor
    ages: Tensor
    ended: Tensor

    @classmethod
    def new(cls, key: Key, groups: Sequence[Group], sizes: Sizes, device: torch.device) -> Books:
        """Allocate books: every word is unwritten, no request is admitted, nothing is counted."""
        layout = Layout.of(groups)

        def full(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        with torch.inference_mode(False):  # later writes may be in inference mode or not
            books = cls(
                key=key,
                salts={group.name: key.salt(group.name) for group in groups},
                layout=layout,
                sizes=sizes,
                words=full(layout.num_words),
                owners=full(layout.num_states, value=-1),
                own=full(sizes.max_requests, sizes.max_length + 1),
                facts=full(NUM_FACTS, sizes.max_requests, value=-1),
                first=full(sizes.max_requests),
                journal=full(sizes.journal, JOURNAL_PLACES + len(groups), value=-1),
                found=full(sizes.capacity, len(FIELDS)),
                counters=full(NUM_COUNTERS),
                fingerprints=full(FINGERPRINTS, len(groups)),
                ages=full(sizes.max_requests + 1, NUM_AGED, AGES),
                ended=full(sizes.capacity, 1 + NUM_AGED * AGES, value=-1),
            )
            books.counters[LIMIT] = sizes.capacity
        return books

    @property
    def num_bytes(self) -> int:
        """Bytes that the books take on the device."""
        tensors = (
            *(self.words, self.owners, self.own, self.facts, self.first),
            *(self.journal, self.found, self.counters, self.fingerprints),
            *(self.ages, self.ended),
        )
        return sum(t.numel() * t.element_size() for t in tensors)
