"""``Ledger``: checks that every row an engine read was the right one, and reports the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor

from ..errors import AcceptanceError, ConfigError, ManagerCopyError, WindowStateError
from ..manager import TransactionManager
from . import arguments, checks
from . import books as book
from .admission import Admission, admissions_of
from .backends import choose
from .books import Sizes
from .byte_books import ByteBooks
from .counter_copy import CounterCopy
from .decided_moves import Moves
from .digest import UNWRITTEN, Key
from .epochs import Epochs, ReadAges
from .findings import Findings
from .following import Following
from .groups import Group, Place
from .ledger_state import Ints, LedgerState
from .passes import Passes
from .rank_fingerprints import Fingerprints, compare_ranks
from .request_changes import NONE, RequestChanges
from .request_table import RequestTable
from .step import Step, Stretch
from .transfers import RowTransfers
from .violation import NOBODY, Violation


class Ledger:
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

    An adapter is a part of a row's tokens (``extras`` of ``admit``). The model's weights have an
    epoch, which ``new_epoch`` begins; rows that earlier weights computed are *stale*, not foreign:
    they are counted by age, or alarm as ``stale`` says, unless ``reset`` has forgotten them.

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
        stale: ``"count"`` counts the rows of earlier weights that are read; ``"alarm"`` makes them
            violations of kind ``stale`` as well.

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
        stale: str = "count",
    ) -> None:
        sizes = Sizes(max_requests, max_length, journal, capacity)
        self.books: Final = arguments.new_books(key, groups, sizes, device)
        self.device: Final = self.books.words.device
        self.groups: Final = tuple(place.group for place in self.books.layout.places.values())
        self.passes: Final = choose(backend, self.device)(self.books)
        self.input: Final = self.passes.input()
        requests = RequestTable(max_requests)
        self._state: Final = LedgerState(self.books, self.passes, self.input, requests)
        self._requests: Final = requests
        self._epochs: Final = Epochs(self._state, stale)
        self._changes: Final = RequestChanges(self._state, self._epochs)
        self._transfers: Final = RowTransfers(self._state, self.inspect)
        self._moves: Final = Moves(self._state)
        self.findings: Final = Findings(self.books, self.groups, requests)
        self._checked: Step | None = None
        self._buffers: Final[WeakSet[Step]] = WeakSet()  # steps whose tensors were checked
        self._on_gpu: Final = self.device.type != "cpu"
        self._parted = False
        self._following: Following | None = None

    def __reduce__(self) -> NoReturn:
        """Refuse ``copy``, ``deepcopy`` and ``pickle``.

        Raises:
            ManagerCopyError: always.
        """
        raise ManagerCopyError(
            type(self).__name__,
            "a ledger can be neither copied nor pickled: its passes read the books by their "
            "addresses, and the windows that it follows tell nobody else of their end",
            hint="make a new ledger with the same groups, and admit the requests again",
        )

    def reset(self) -> None:
        """Forget every row and every request; call it when the engine clears its caches.

        The epoch of the weights stays, and what was counted. A step under way is over.
        """
        self._epochs.keep(self._requests.lines)
        self._requests.clear()
        self.books.words.fill_(UNWRITTEN)
        self.books.owners.fill_(NOBODY)
        self.books.facts[book.SERIAL].fill_(NOBODY)
        self.books.counters[book.OPEN] = 0
        self._state.end()

    def restart(self) -> None:
        """Forget everything, what was counted and found included; the books stay where they are.

        Weights are in their first epoch again, and a scrub has sealed nothing.
        """
        self.reset()
        books = self.books
        books.counters.zero_()
        books.counters[book.LIMIT] = books.sizes.capacity
        books.journal.fill_(NOBODY)
        books.fingerprints.zero_()
        self._epochs.restart()
        if self._state.bytes is not None:
            self._state.bytes.seals.zero_()
            self._state.bytes.compared.zero_()
        self.findings.restart()
        self._parted = False

    def watch_bytes(self, books: ByteBooks) -> None:
        """Keep the books of a scrub up to date from now on, when blocks change hands."""
        self._state.bytes = books

    @property
    def has_bytes(self) -> bool:
        """True if a scrub keeps checksums beside this ledger."""
        return self._state.bytes is not None

    def __contains__(self, request: object) -> bool:
        return isinstance(request, str) and request in self._requests

    def line(self, request: str, *, operation: str = "line") -> int:
        """Return the line of a request.

        Args:
            request: the request's name.
            operation: the call that needs the line, for the message.

        Raises:
            ConfigError: the request was not admitted, or was released.
        """
        return self._requests.line(request, operation)

    def lines_of(self, requests: Sequence[str]) -> list[int] | None:
        """Return the lines of requests; None if one of them is not admitted.

        Raises:
            ConfigError: these are no names.
        """
        return self._requests.lines_of(requests)

    # -- weights -----------------------------------------------------------------------------

    def new_epoch(self, weights: str = "target") -> None:
        """Begin an epoch, because weights have changed: each row that is there is older by one.

        Call it between two steps, after an update of any part of the weights. It does not wait for
        the device. Rows that are computed again, or that come back from outside as they left, keep
        the epoch of the weights that computed them.

        A state that a step has continued counts as that step's, like a row, even if earlier
        weights took in its first tokens.

        Args:
            weights: ``"target"``, or ``"drafter"`` for the rows that a drafter's layers have in the
                same slots.

        Raises:
            ConfigError: there are no weights of this name.
        """
        self._epochs.begin(weights)

    def read_ages(self) -> list[ReadAges]:
        """Return the rows of earlier weights that each request has read. Waits for the device.

        Requests that read none are left out, and so are those that ended before the last
        ``capacity`` ones that did.
        """
        return self._epochs.read(self._requests)

    # -- requests and blocks -----------------------------------------------------------------

    def admit(
        self,
        request: str,
        tokens: Sequence[int] | Tensor,
        *,
        extras: Iterable[int] = (),
        embedded: Mapping[int, int] | None = None,
    ) -> int:
        """Begin a request, or give a resumed or continued request's tokens again.

        Args:
            request: the request's name.
            tokens: int ``[n]``, all tokens that are the request's own, from its first: the prompt,
                and the tokens generated before. They replace the tokens given earlier.
            extras: ints of 64 bits that stand for anything that changes all its K and V, such as a
                LoRA; their order counts.
            embedded: by position, a hash of the content embedded there in place of a token.

        Returns:
            The request's line, for ``Step.lines``; it keeps the line until it is released.

        Raises:
            CapacityError: no line is left, or the request is too long.
            ConfigError: the tokens are no token ids, ``extras`` no ints, or ``embedded`` is not of
                the tokens' positions.
        """
        return self.admit_all([Admission(request, tokens, extras, embedded)])[0]

    def admit_all(self, admissions: Iterable[Admission]) -> list[int]:
        """Begin several requests, or give their tokens again, in one copy to the device.

        Args:
            admissions: the requests, none of them twice; see ``admit``. An iterator is read once.

        Returns:
            The line of each.

        Raises:
            CapacityError: as in ``admit``; nothing was changed.
            ConfigError: as in ``admit``, a request is named twice, or one is no ``Admission``;
                nothing was changed.
        """
        return self.change(admissions=admissions_of("admit_all", admissions))

    def release(self, request: str) -> None:
        """End a request that finished, was aborted, or was preempted; an unknown name is harmless.

        The rows of the request stay, and are right for any request with the same tokens.

        Raises:
            ConfigError: the name is no text.
        """
        self.change([request])

    def hand_out(self, group: str, blocks: Ints) -> None:
        """Mark the rows of blocks as unwritten, because the engine gives the blocks to a request.

        Args:
            group: any group of the pool that the blocks come from.
            blocks: int ``[n]`` on the host, without blocks that a prefix cache hands over with
                their rows.

        Raises:
            ConfigError: the group is unknown, or a block is not one of its blocks.
        """
        checks.place_of("hand_out", self.books, group)
        self.change(given={group: blocks})

    def change(
        self,
        gone: Iterable[str] = NONE,
        admissions: Iterable[Admission] = NONE,
        given: Mapping[str, Ints] | None = None,
    ) -> list[int]:
        """Do all that a step changes before its forward: ``release``, ``admit_all``, ``hand_out``.

        It does not wait for the device.

        Args:
            gone: names of the requests that ended; a request may end and begin again in one call.
            admissions: the requests that come, as for ``admit_all``.
            given: the blocks that are handed out, by group, as for ``hand_out``.

        Returns:
            The line of each request that comes.

        Raises:
            CapacityError: as in ``admit``; nothing was changed.
            ConfigError: as in the three calls; nothing was changed.
        """
        return self._changes.change(gone, admissions, given)

    # -- steps -------------------------------------------------------------------------------

    def follow(self, manager: TransactionManager) -> Following:
        """Let the end of a manager's window be the outcome of the step that was written last.

        ``write`` and ``check`` are called as before, but not ``resolve``::

            following = ledger.follow(manager)
            ledger.write_and_check(step)
            with manager.window(drafts, slots) as window:
                ...                                 # the forward stages its rows, sampling
                following.sampled(ids)              # if the ledger shall know the next token
                window.commit(accepted)             # ends the step in the ledger, too

        A commit accepts the drafts that the window kept, and so does one that fell back to direct
        writes. An abort accepts none, and settled rows that some layer may lack are unwritten until
        the step is repeated. The ledger takes from the window what became of rings (a rejected row
        evicts none, unless the policy is "direct") and of recurrent states, which the commit
        writes: leave their groups out of ``Step.slots``, and ``leave`` to the ledger.

        What the engine goes on with is in its next step. Where that is not what the window kept,
        it reads a row or a state that is not its own; ``Step.told``, the count that the engine
        goes on with, is compared with the window's.

        A window has the step's requests, in their order; settled rows and requests without drafts
        may be left out. A step with drafts that gets no window, or whose window FAILED, needs
        ``resolve`` or ``take_back``; else the next ``write`` raises ``WindowStateError``. A window
        that fits no step raises in its hook: ``TxnConfig.on_error`` says what becomes of that.

        Args:
            manager: its groups have the names, kinds and sizes of groups of this ledger.

        Returns:
            The attachment; ``remove()`` detaches.

        Raises:
            ConfigError: the groups differ, or the ledger follows a manager already.
        """
        if self._following is not None and not self._following.is_removed:
            raise ConfigError(
                "follow", "the ledger follows a manager already", expected="one manager",
                got=repr(manager), hint="call remove() on what the first follow returned",
            )  # fmt: skip
        self._following = Following(self.resolve, self.leave, self._state, manager)
        return self._following

    def write(self, step: Step) -> None:
        """Begin a step: compare the states that it continues, and record the rows it writes.

        A wrong state, or a wrong count in ``Step.told``, becomes a violation of kind ``state``.

        The step before it is over: ``resolve`` is for the last step alone. If that had drafts and
        was not resolved, nobody knows which of their rows may be read; the requests that had them
        are counted in ``unresolved``.

        Raises:
            ConfigError: the step does not fit the ledger; see ``Step``. Nothing is recorded.
            WindowStateError: the ledger follows a manager, and the step before is still open.
        """
        self.require("write", step)
        following = self._following
        if following is not None and not following.is_removed:
            following.begin(step)
        self.passes.write(step)
        self._state.begin(step)

    def check(self, step: Step) -> None:
        """Compare all rows that the step reads, its own included; call it after ``write``.

        Wrong rows become violations; see ``Violation``.

        Raises:
            ConfigError: as in ``write``.
            WindowStateError: the step was not written (of which a GPU's ledger knows if none was),
                or was checked or resolved already.
        """
        state, other = self._state, False
        if step is not state.step:
            self.require("check", step)
            other = state.step is not None and not (self._on_gpu or step.is_like(state.step))
        if other or not state.unread:
            none = "none written yet" if state.step is None else "one that was checked"
            raise WindowStateError(
                "check",
                "no step waits to be checked",
                expected="one check of each step, after its write and before its resolve",
                got="another one than was written" if other and state.unread else none,
                hint="call write(step) first; nothing was compared",
            )
        state.unread = False
        with state.as_written():
            self.passes.check(step)

    def write_and_check(self, step: Step) -> None:
        """Call ``write`` and then ``check``.

        Raises:
            ConfigError: as in ``write``.
            WindowStateError: as in ``write``.
        """
        self.write(step)
        self.check(step)

    def resolve(
        self,
        accepted: Tensor | Sequence[int],
        sampled: Tensor | Sequence[Sequence[int]] | None = None,
        *,
        besides: int = 0,
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
                Drafts that are trees need it: see ``Step.parents``.
            besides: tokens that ``accepted`` counts beside drafts: 1 for counts of sampled tokens.

        Raises:
            WindowStateError: no step was written, or the last one is resolved already.
            AcceptanceError: the arguments do not fit the step, which can be resolved still.
        """
        step = self._state.step
        if step is None:
            raise WindowStateError(
                "resolve", "no step waits to be resolved", expected="one that was written",
                got="none", hint="call write first, and resolve each step once",
            )  # fmt: skip
        if step.parents is not None and sampled is None:
            raise AcceptanceError(
                "resolve", "a count says nothing of drafts that are trees",
                expected="the sampled tokens, too", got="none",
                hint="give the accepted drafts of each request and its next token; nothing changed",
            )  # fmt: skip
        besides = arguments.tokens_besides("resolve", besides)
        counts, ids = self.outcome("resolve", step, accepted, sampled, besides)
        with self._state.as_written():
            self.passes.resolve(step, counts, ids, besides)
        self._state.end()

    def take_back(self, step: Step) -> None:
        """End a step whose forward failed: its rows and states are unwritten for all readers.

        Waits for the device. It takes the place of ``resolve``, and of ``Scrub.seal``.

        Raises:
            ConfigError: as in ``write``.
        """
        self.require("take_back", step, after=True)
        self._state.unwrite(step)
        if step is self._state.step:
            self.books.counters[book.OPEN] = 0
            self._state.end()

    def outcome(
        self, operation: str, step: Step, accepted: Any, sampled: Any = None, besides: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Check the arguments of ``resolve``, and return them as tensors on the ledger's device.

        ``sampled`` stays None if it is None.

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
        return self.books.facts[book.KEPT].index_select(0, step.lines.long().clamp(min=0))

    def require(self, operation: str, step: Step, *, after: bool = False) -> None:
        """Check a step: its tensors when it is first given, and on a CPU their values each time.

        Args:
            operation: the call that was given the step, for the message.
            step: the step.
            after: its forward is done, so its requests may have been released.

        Raises:
            ConfigError: the step does not fit the ledger.
        """
        if step is self._checked is not None and (after or self._on_gpu):
            return
        known = isinstance(step, Step) and step in self._buffers
        if not known or not (self._on_gpu or self.input.takes(step, released=after)):
            checks.check_step(operation, self.books, step, released=after)
            self._buffers.add(step)
        self._checked = step

    # -- rows and states that are copied, that leave and that come ---------------------------

    def copy(self, group: str, source: Ints, target: Ints) -> None:
        """Record that the engine copied whole blocks or states.

        Args:
            group: the group of the blocks.
            source: int ``[n]`` on the host, the blocks copied from.
            target: int ``[n]`` on the host, the blocks copied to, all different.

        Raises:
            ConfigError: the group is unknown, or the blocks are not such blocks.
        """
        self._transfers.copy(group, source, target)

    def publish(self, request: str, group: str, table: Ints, first: int, end: int) -> None:
        """Check rows that other requests can find by their tokens from now on (prefix caching).

        Wrong rows become violations of kind ``published``.

        Args:
            request: the request by whose tokens the rows are found.
            group: the group of the rows.
            table: int ``[blocks]``, the request's block table.
            first: the first position.
            end: the position after the last.

        Raises:
            ConfigError: the request or the group is unknown, or the positions are no positions.
        """
        self._transfers.publish(request, group, table, first, end)

    def publish_state(self, request: str, group: str, block: int, length: int) -> None:
        """Check a state that other requests can find by its tokens and continue from now on.

        A wrong one becomes a violation of kind ``published``.

        Args:
            request: the request by whose tokens the state is found.
            group: the group of the state.
            block: the block that holds the state.
            length: the number of tokens that the state has taken in.

        Raises:
            ConfigError: the request, the group or the block is unknown, or the length is none.
        """
        self._transfers.publish_state(request, group, block, length)

    def export(self, request: str, group: str, table: Ints, first: int, end: int) -> Tensor:
        """Check rows that leave the engine: of the request's tokens, and not of an open draft.

        Call this when a connector takes the rows, with the request whose tokens they are stored
        under. A wrong row is reported as ``exported``: once, until it is written again. The row of
        an open draft is not wrong, but must not leave yet; each export of it is reported. Open are
        the drafts of the request's last step until ``resolve``. Before its first step it has none,
        so rows that it found in the cache may leave.

        The arguments and errors are those of ``publish``.

        Returns:
            int64 ``[end - first]`` on the ledger's device, the ``digests`` for ``import_rows``;
            they say the epoch of each row's weights, too.
        """
        return self._transfers.export(request, group, table, first, end)

    def export_state(self, request: str, group: str, block: int, length: int) -> Tensor:
        """Check a state that leaves the engine: after exactly the request's first tokens.

        A wrong one is reported as ``exported``. The arguments and errors are those of
        ``publish_state``.

        Returns:
            int64 ``[1]`` on the ledger's device, the ``digest`` for ``import_state``.
        """
        return self._transfers.export_state(request, group, block, length)

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
            origin: int64 ``[6]``, as ``Identity.origin`` returns it, for the first of the rows; or
                ``[blocks, 6]``, for the first row of each block, where ``first`` begins a block.
                Reports then name who stored the rows, and for which tokens. None: reports name the
                request that gets the rows.

        Raises:
            ConfigError: as in ``publish``; or a block of the rows is not one of the group's, there
                is not one digest per row, or an origin is there without digests.
        """
        self._transfers.import_rows(request, group, table, first, end, digests, origin)

    def identities(self, group: str, requests: Sequence[str], firsts: Ints, blocks: Ints) -> Tensor:
        """Return whose rows full blocks have, or states, for ``IdentityTable.remember``.

        On a GPU this never waits for it.

        Args:
            group: the group of the blocks.
            requests: for each block a request that has it in its block table.
            firsts: int ``[n]`` on the host, the position of the first row of each block; of a
                state, the position of the last token that it has taken in.
            blocks: int ``[n]`` on the host, the blocks; one that the group does not have has no
                rows.

        Returns:
            int64 ``[n, 7]`` on the ledger's device: the step, the request's serial number, the word
            of the first row, the terms of its token and of the two before, and the word of the last
            row. Words are at the age that they had in the first epoch. They are 0 of a block
            whose rows are not all there, or not all of one prefix that ends with these tokens.

        Raises:
            ConfigError: as in ``publish``; or a position is none, or there is not one per request.
        """
        return self._transfers.identities(group, requests, firsts, blocks)

    def own_words(self, group: str, requests: Sequence[str], positions: Ints) -> Tensor:
        """Return the words of requests' own rows, as ``expected`` does for one request.

        Args:
            group: the group of the rows, or of the states after each position.
            requests: the request of each row.
            positions: int ``[n]`` on the host, the rows' positions.

        Returns:
            int64 ``[n]`` on the ledger's device.

        Raises:
            ConfigError: as in ``identities``.
        """
        return self._transfers.own_words(group, requests, positions)

    def expected(self, request: str, group: str, first: int, end: int) -> Tensor:
        """Return the words of a request's own rows, as ``export`` returns those that are there.

        Args:
            request: the request, whose tokens are known up to ``end``.
            group: the group of the rows, or of the states after each position.
            first: the first position.
            end: the position after the last.

        Returns:
            int64 ``[end - first]`` on the ledger's device, the ``digests`` of right rows for
            ``import_rows``.

        Raises:
            ConfigError: as in ``publish``.
        """
        return self._transfers.expected(request, group, first, end)

    def name_of(self, serial: int) -> str | None:
        """Return the name of the request with a serial number; None if it is forgotten."""
        return self._state.requests.name(serial)

    def believe(self, rows: int) -> None:
        """Count rows as unverified: they were imported as right ones, and nothing confirms it."""
        self.books.counters[book.UNVERIFIED] += rows

    @property
    def epoch(self) -> int:
        """Changes of the weights until now: the target's in the low 32 bits, the drafter's above.

        The word of a row at the age of the first epoch, plus this number, is its word now.
        """
        return self._state.epoch

    def import_state(
        self,
        request: str,
        group: str,
        block: int,
        length: int,
        digest: Tensor | None = None,
        origin: Tensor | None = None,
    ) -> None:
        """Record a state that was loaded from outside for a request; a step compares it later.

        As after ``publish_state``, any request with the same tokens may continue it.

        Args:
            request: the request that gets the state.
            group: the group of the state.
            block: the block that the state was loaded into.
            length: the number of tokens that the state has taken in.
            digest: int64 ``[1]``, the result of ``export_state``; None as in ``import_rows``.
            origin: int64 ``[6]``, as in ``import_rows``, for the position ``length - 1``.

        Raises:
            ConfigError: as in ``publish_state``; or there is not one digest, or an origin is there
                without one.
        """
        self._transfers.import_state(request, group, block, length, digest, origin)

    def words_of(self, operation: str, place: Place, table: Ints, first: int, end: int) -> Tensor:
        """Return the indices in ``Books.words`` of rows that a table must have, or of a state.

        Raises:
            ConfigError: the positions are no positions, or a block is not one of the group's.
        """
        return self._transfers.words_of(operation, place, table, first, end)

    def inspect(self, stretch: Stretch) -> None:
        """Check rows of many requests at once, as ``publish`` or ``export`` do for one request.

        Wrong rows become violations of the stretch's kind. Numbers that lie outside the ledger are
        left out, as in a step on a GPU.

        Raises:
            ConfigError: a group is unknown, or a tensor does not fit.
        """
        checks.check_stretch(self.books, stretch)
        self.passes.inspect(stretch)

    def carry(self, copies: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Record that the engine copied rows or states, as the device alone knows; never waits.

        All are copied at once: what is copied to one slot may be copied from another to a third.
        A report names whoever wrote the row that was copied, if it is one of the latest thousands.
        Rows of a step are copied after its ``resolve``. A copy has no checksum: see ``Scrub``.

        Args:
            copies: by group, int ``[n]`` twice on the ledger's device, as many of each group: the
                slots copied from, and those copied to, all different; -1 for none. The slot of a
                state is its block. Of groups that share their blocks, one names the copied rows.

        Raises:
            ConfigError: a group is unknown, or the slots do not fit together.
        """
        self._moves.carry(copies)

    def age(self, slots: Mapping[str, Tensor], epochs: int) -> None:
        """Record that rows are older than the step that wrote them; never waits.

        Call it after ``write`` for rows that were computed of something that the target's earlier
        weights have made, such as the output of an encoder which the engine has kept.

        Args:
            slots: by group, int ``[n]`` on the ledger's device, as many of each group, all
                different; -1 for none.
            epochs: the age, in epochs of the target's weights.

        Raises:
            ConfigError: a group is unknown or has states, the slots do not fit together, or the age
                is none.
        """
        self._moves.age(slots, epochs)

    def leave(
        self, lines: Tensor, blocks: Mapping[str, Tensor], lengths: Tensor | None = None
    ) -> None:
        """Record states that the engine has written once it knew which drafts stay; never waits.

        Call it after ``resolve``, for an engine that writes one state per request then, and none
        per draft. The step's ``slots`` have -1 for the rows of such requests.

        Args:
            lines: int ``[num_requests]``, those of the step.
            blocks: by group of states, int ``[num_requests]`` on the ledger's device, the block
                that got the state; -1 for none.
            lengths: int ``[num_requests]``, the tokens that each state has taken in; where that is
                more than were kept, there is none. None: after each request's last kept row.

        Raises:
            ConfigError: a group is unknown or has no states, or blocks do not fit the lines.
        """
        self._moves.leave(lines, blocks, lengths)

    @property
    def steps(self) -> int:
        """Number of steps that were written. Waits for the device."""
        return int(self.books.counters[book.STEP])

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
        """Return the counts by Prometheus name: of violations their sum, and one for each kind.

        Waits for the device. Those of a scrub are among them if there is one, and rows that were
        read by age once weights have changed.
        """
        found = self.findings.counters()
        found |= self._epochs.counters(found["kvtxn_audit_rows_checked_total"])
        if self._state.bytes is not None:
            found["kvtxn_audit_bytes_compared_total"] = int(self._state.bytes.compared)
        return found

    def copy_counters(
        self, spare: CounterCopy | None = None, *, prints: bool = True
    ) -> CounterCopy:
        """Begin to copy the counters to the host, without waiting; see ``CounterCopy``.

        Args:
            spare: an earlier copy that nobody looks at any more, whose memory is used again.
            prints: copy the fingerprints, too; as it was for ``spare``.

        Raises:
            ConfigError: ``spare`` is no such copy.
        """
        return self.findings.copy_counters(spare, prints=prints)

    def fingerprints(self, copy: CounterCopy | None = None) -> dict[int, dict[str, int]]:
        """Return what ``compare_ranks`` compares: by step and group, a word. Waits for the device.

        Args:
            copy: a copy whose fingerprints are returned, none if the ledger was restarted since;
                None: those of now.

        The last ``FINGERPRINTS - 1`` steps are there, as plain numbers that can be sent.
        """
        return self.findings.fingerprints(copy)

    def compare_ranks(self, theirs: Fingerprints, copy: CounterCopy | None = None) -> None:
        """Compare the fingerprints of this rank with those of another rank with the same key.

        The first step that differs becomes a violation of kind ``ranks`` of this rank, once.

        Args:
            theirs: the other rank's ``fingerprints()``, as they are or through JSON.
            copy: as for ``fingerprints``.

        Raises:
            ConfigError: these are no fingerprints.
        """
        given = arguments.prints_of(theirs)
        if not self._parted:
            for violation in compare_ranks([given, self.fingerprints(copy)])[1]:
                self.findings.add(violation)
                self._parted = True
