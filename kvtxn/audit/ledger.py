"""``Ledger``: checks that every row an engine read was the right one, and reports the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import WindowStateError
from . import arguments, checks
from . import books as book
from .backends import choose
from .books import Sizes
from .digest import UNWRITTEN, Key
from .findings import Findings
from .glance import Glance
from .groups import Group
from .passes import Passes
from .ranks import Fingerprints, compare_ranks
from .replays import Replays
from .roster import Roster
from .step import Step
from .violation import NOBODY, Violation

#: Requests are as they are.
_AS_THEY_ARE: Final = nullcontext()


class Ledger(Replays):
    """A record of the token prefix that each slot's row was computed from, compared at each read.

    An engine calls the ledger at each forward pass, in this order, all on one stream::

        ledger.admit("chat-7", prompt)              # new, resumed, or a session's next turn
        ledger.hand_out("attention", blocks)        # blocks given to a request: unwritten
        ledger.write(step)                          # the rows that this forward writes
        ledger.check(step)                          # the rows that this forward reads
        ...                                         # the forward, sampling
        ledger.resolve(accepted)                    # the number of accepted drafts
        ledger.publish("chat-7", "attention", table, 0, 16)
        ledger.release("chat-7")

    ``write``, ``check`` and ``resolve`` never wait for the device. ``violations`` and ``counters``
    do; call them now and then.

    The ledger proves that each row that was read had been computed for exactly the tokens it stands
    for, if the engine reports its writes and reads truthfully. While it finds nothing, each was
    also computed from nothing but such rows. After a wrong read, what its step computed from it
    counts as any other row of its tokens: the report names the read, not what follows from it. The
    ledger does not see a kernel that computes or copies something else than it was told to.
    ``Scrub`` sees what becomes of a row once it is there: another writer, a wrong copy, a flipped
    bit. Two digests are equal by chance with a probability of about 2^-64 per wrong row: see
    ``kvtxn.audit.digest``.

    An adapter is a part of a row's identity (``extras`` of ``admit``), the model's weights are not
    yet: rows that weights before an update computed count as right, unless ``reset`` forgets them.

    Args:
        groups: all groups of layers.
        max_requests: the most requests admitted at one time.
        max_length: the most positions of a request.
        device: the device of the engine's tensors.
        key: the engine's secret; all ranks of an engine need the same key. None draws a new one.
        journal: number of latest rows whose writers are remembered.
        capacity: violations that can wait to be read.
        backend: ``"torch"``, ``"numba"`` (CPUs), ``"triton"`` (GPUs), ``"auto"``, or a subclass of
            ``Passes``.

    Raises:
        ConfigError: groups or sizes do not fit together, or an argument is something else.
        CapacityError: the device has no memory for the books.
        BackendUnavailableError: the backend cannot run here.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        max_requests: int,
        max_length: int,
        device: torch.device | str = "cpu",
        key: Key | None = None,
        journal: int = 1 << 16,
        capacity: int = 1024,
        backend: str | type[Passes] = "auto",
    ) -> None:
        sizes = Sizes(max_requests, max_length, journal, capacity)
        books = arguments.new_books(key, groups, sizes, device)
        self.groups: Final = tuple(place.group for place in books.layout.places.values())
        passes = choose(backend, books.words.device)(books)
        super().__init__(books, passes, Roster(max_requests))
        self.findings: Final = Findings(self.books, self.groups, self._roster)
        self._parted = False

    def reset(self) -> None:
        """Forget every row and every request; call it when the engine clears its caches."""
        self.graphs.settle()
        self._roster.clear()
        self.books.words.fill_(UNWRITTEN)
        self.books.owners.fill_(NOBODY)
        self.books.facts[book.SERIAL].fill_(NOBODY)
        self.books.counters[book.OPEN] = 0
        self._open, self._unread = None, False
        self._later.clear()

    def restart(self) -> None:
        """Forget everything, what was counted and found included; the books stay where they are."""
        self.reset()
        books = self.books
        books.counters.zero_()
        books.counters[book.LIMIT] = books.sizes.capacity
        books.journal.fill_(NOBODY)
        books.fingerprints.zero_()
        if self._bytes is not None:
            self._bytes.seals.zero_()
            self._bytes.compared.zero_()
        self.findings.restart()
        self.graphs.restart()
        self._parted = False

    # -- steps -------------------------------------------------------------------------------

    def write(self, step: Step) -> None:
        """Begin a step: compare the states that it continues, and record the rows it writes.

        The step before it is over: ``resolve`` is for the last step alone. If that had drafts and
        was not resolved, nobody knows which of their rows may be read; the requests that had them
        are counted in ``unresolved``.

        Raises:
            ConfigError: the step does not fit the ledger; see ``Step``. Nothing is recorded.
        """
        self.require("write", step)
        self.passes.write(step)
        self._open, self._unread = step, True
        self._later.clear()

    def check(self, step: Step) -> None:
        """Compare all rows that the step reads, its own included; call it after ``write``.

        Raises:
            ConfigError: as in ``write``.
            WindowStateError: the step was not written (of which a GPU's ledger knows if none was),
                or was checked or resolved already.
        """
        other = False
        if step is not self._open:
            self.require("check", step)
            other = self._open is not None and not (self._on_gpu or step.is_like(self._open))
        if other or not self._unread:
            none = "none written yet" if self._open is None else "one that was checked"
            raise WindowStateError(
                "check",
                "no step waits to be checked",
                expected="one check of each step, after its write and before its resolve",
                got="another one than was written" if other and self._unread else none,
                hint="call write(step) first; nothing was compared",
            )
        self._unread = False
        with self._as_written():
            self.passes.check(step)

    def write_and_check(self, step: Step) -> None:
        """Call ``write`` and then ``check``.

        Raises:
            ConfigError: as in ``write``.
        """
        self.write(step)
        self.check(step)

    def _as_written(self) -> AbstractContextManager[None]:
        """Hide the requests that came since the open step was written.

        They may have lines of requests of the step that were released since.
        """
        return self._hide_later() if self._later else _AS_THEY_ARE

    @contextmanager
    def _hide_later(self) -> Iterator[None]:
        serials, lines = self.books.facts[book.SERIAL], self._upload(self._later)
        theirs = serials.index_select(0, lines)
        serials.index_fill_(0, lines, NOBODY)
        try:
            yield
        finally:
            serials.index_copy_(0, lines, theirs)

    def resolve(
        self,
        accepted: Tensor | Sequence[int],
        sampled: Tensor | Sequence[Sequence[int]] | None = None,
        *,
        besides: int = 0,
        later: bool = False,
    ) -> None:
        """End the last step given to ``write``: mark the rows of rejected drafts.

        A step without drafts need not be resolved. Requests that were released since ``write`` may
        be part of it, and others may have their lines by now; their blocks are handed out after it.

        Args:
            accepted: int ``[num_requests]``, the number of accepted drafts of each request, -1 if
                nothing was sampled for it (its prompt goes on after the step); numbers of padding
                are not read. Counts out of range are refused on a CPU, and clamped on a GPU.
            sampled: int ``[num_requests, n]``: the accepted drafts, then the next token, then -1.
                If given, the row at the next token's position must be computed from that token,
                and a draft whose row was computed from another token than the one sampled counts
                as rejected, with all drafts after it. What follows the next token is not read.
            besides: tokens that ``accepted`` counts beside drafts: 1 for counts of sampled tokens.
            later: the tensors stay as they are until the next step, whose graph may resolve this.

        Raises:
            WindowStateError: no step was written, or the last one is resolved already.
            AcceptanceError: the arguments do not fit the step, which can be resolved still.
        """
        step = self._open
        if step is None:
            raise WindowStateError(
                "resolve", "no step waits to be resolved", expected="one that was written",
                got="none", hint="call write first, and resolve each step once",
            )  # fmt: skip
        besides = arguments.tokens_besides("resolve", besides)
        later = later and self._bytes is None and not self._later
        if not (later and self.graphs.resolve(step, accepted, sampled, besides)):
            counts, ids = self.outcome("resolve", step, accepted, sampled, besides)
            with self._as_written():
                self.passes.resolve(step, counts, ids, besides)
        self._open, self._unread = None, False
        self._later.clear()

    def take_back(self, step: Step) -> None:
        """End a step whose forward failed: its rows and states are unwritten for all readers.

        Waits for the device. It takes the place of ``resolve``, and of ``Scrub.seal``.

        Raises:
            ConfigError: as in ``write``.
        """
        self.require("take_back", step, after=True)
        self.graphs.settle()
        self._unwrite(step)
        if step is self._open:
            self.books.counters[book.OPEN] = 0
            self._open, self._unread = None, False
            self._later.clear()

    def outcome(
        self, operation: str, step: Step, accepted: Any, sampled: Any = None, besides: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Return the arguments of ``resolve`` as tensors on the ledger's device.

        Raises:
            AcceptanceError: they do not fit the step; ``operation`` can be called again.
        """
        usual = checks.are_there(accepted, sampled, step.lines.shape[0], self.device)
        if usual and (self._on_gpu or self.input.takes(step, accepted, besides, released=True)):
            return accepted, sampled
        return checks.check_outcome(operation, self.books, step, accepted, sampled, besides)

    def kept(self, step: Step) -> Tensor:
        """Return the drafts that ``resolve`` has kept, int64 ``[num_requests]``, without waiting.

        A draft whose row is of another token than the one sampled is not kept, even if the engine
        counts it as accepted. Numbers of padding mean nothing.

        Args:
            step: the last step, after its ``resolve``.
        """
        self.require("kept", step, after=True)
        self.graphs.settle()
        return self.books.facts[book.KEPT].index_select(0, step.lines.long().clamp(min=0))

    # -- what came of it -----------------------------------------------------------------------

    @property
    def lost(self) -> int:
        """Number of violations that were counted and not kept, because too many waited."""
        return self.findings.lost

    @property
    def refused(self) -> int:
        """Number of malformed requests that steps on a GPU left out; see ``Step``.

        Waits for the device. It is 0 unless the engine's integration is wrong.
        """
        return int(self.books.counters[book.REFUSED])

    @property
    def unresolved(self) -> int:
        """Number of requests whose drafts nobody resolved before the next step was written.

        Waits for the device. While it is 0, every draft was accepted or rejected by ``resolve``. A
        request counts once per such step; a step that is resolved before the next one never counts.
        """
        return int(self.books.counters[book.UNRESOLVED])

    def violations(self) -> list[Violation]:
        """Return the violations found since the last call, oldest first. Waits for the device."""
        return self.findings.take()

    def counters(self) -> dict[str, int]:
        """Return the counts by Prometheus name, kinds folded in. Waits for the device.

        Those of a scrub are among them if there is one.
        """
        found = self.findings.counters()
        if self._bytes is not None:
            found["kvtxn_audit_bytes_compared_total"] = int(self._bytes.compared)
        return found

    def glance(self, spare: Glance | None = None, *, prints: bool = True) -> Glance:
        """Begin to copy the counters to the host, without waiting; see ``Glance``.

        Args:
            spare: an earlier copy that nobody looks at any more, whose memory is used again.
            prints: copy the fingerprints, too; as it was for ``spare``.
        """
        return self.findings.glance(spare, prints=prints, steps=self.graphs.num_steps)

    def fingerprints(self, glance: Glance | None = None) -> dict[int, dict[str, int]]:
        """Return what ``compare_ranks`` compares: by step and group, a word. Waits for the device.

        Args:
            glance: a copy whose fingerprints are returned, none if the ledger was restarted since;
                None: those of now.

        The last ``FINGERPRINTS - 1`` steps are there, as plain numbers that can be sent.
        """
        return self.findings.fingerprints(glance)

    def compare_ranks(self, theirs: Fingerprints, glance: Glance | None = None) -> None:
        """Compare the fingerprints of this rank with those of another rank with the same key.

        The first step that differs becomes a violation of kind ``ranks`` of this rank, once.

        Args:
            theirs: the other rank's ``fingerprints()``, as they are or through JSON.
            glance: as for ``fingerprints``.

        Raises:
            ConfigError: these are no fingerprints.
        """
        given = arguments.prints_of("compare_ranks", theirs)
        if not self._parted:
            for violation in compare_ranks([given, self.fingerprints(glance)])[1]:
                self.findings.add(violation)
                self._parted = True
