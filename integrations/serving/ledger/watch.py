"""``Watch``: tells a ledger, step by step, what an engine's runner does.

A GPU runs behind the host: it knows how many drafts were accepted, and so where each request
stands, before the host does. There positions and counts stay on the device, no call in a step waits
for it, and what it has found is read some steps later. A KV connector is the exception: a step for
which it loads blocks waits for their hashes, and with a store of other processes one that stores
some does, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ....audit import (
    Key,
    Ledger,
    RecordingLedger,
    RowGroup,
    Scrub,
    StateGroup,
    Step,
    WeightWatch,
)
from ....audit.lengths import report_lengths
from ....audit.repeated_work import RepeatedWork
from ....errors import KVTxnError
from ....log import get_logger
from ..step import NO_CHANGES, Arrival, Changes, Room, Rows, States
from .followed_windows import FollowedWindows
from .late_counters import COPY_SOON, LateCounters
from .rank_agreement import RankAgreement, RankReport, Ranks, Wrong
from .step_forms import (
    LineBuffer,
    PublishedBlocks,
    StepForms,
    admissions,
    count_repeated,
    fresh_blocks,
    launch_all,
    leave_out,
    leave_states,
    number_of_group,
    one_of_each_pool,
    prepare_states,
)
from .transfers import TransferWatch
from .violation_log import AuditError, FoundViolations

log = get_logger()

#: Steps between two meetings of the ranks where what one of them finds concerns all of them; and
#: where the device runs behind the host.
_MEET: Final = {"contain": 1, "raise": 1}
_MEET_LATE: Final = {"contain": 1, "raise": COPY_SOON}


class Watch:
    """A worker's ledger, told by the runner's hooks.

    Args:
        groups: the watched KV-cache groups with a row per token, by name, in the engine's order.
            Each is named ``group.N``, N being its number among all groups of the caches.
        room: the runner's sizes, by which the ledger is sized.
        rank: the worker's rank, for the log.
        on_violation: ``"log"``, ``"raise"`` or ``"contain"``.
        states: the watched KV-cache groups of recurrent layers, by name.
        record: keep the life of every slot, for ``recording``; it makes steps slow, and each of
            them wait for the device.
        key: the secret that this rank shares with the ranks that it is compared with; None if it
            is compared with none.
        ranks: how the ranks reach each other; None where a rank is alone.
        shared_key: the secret that processes with one store of identities share; None without a
            store.
        device: of the runner's tensors.
        drafts: the most drafts of a request in one step, where the device runs behind the host;
            None where the host knows all numbers of a step, as on a CPU.
        lines: the most requests known at one time; None: the running ones and as many that wait.
        stale: ``"count"``, ``"alarm"`` or ``"contain"``, what becomes of rows of earlier weights
            that are read.

    Raises:
        ConfigError: a group has another name.

    Attributes:
        ledger: the ledger.
        groups: the watched groups with a row per token.
        states: the watched groups of recurrent layers.
        left_out: names of the KV-cache groups that are not watched.
        kept_states: the tokens of a block in groups whose states the prefix cache keeps.
        shared_key: the argument.
        transfers: follows the rows of a KV connector; None without a connector.
        weights: begins an epoch when weights have changed; None if nobody can tell.
        scrub: compares the bytes of rows and states; None if digests alone are compared.
        drafts_late: the drafter writes rows of its own after the sampling; bytes are known then.
        under_way: the step that was told last, until it has come to its end.
        windows: those that may end a step in place of ``sampled``.
        found: logs the violations that the ledger finds, and remembers them.
        finds_more: waits for a step and tells if more was found; None: waits for all, to contain.
        repeated: counts requests that were put back, and the rows that they compute again.
        on_violation: the argument; it may be changed between steps.
        begun: False until ``begin``, as while the engine warms up: no step is watched.
        steps: how many steps with a forward the ledger was told of since then.
        stopped: the audit has ended by an error of its own.
        peers: the other ranks, which act with this one; None without any, or once audits ended.
        asks_peers: a call for counters or a report reaches all ranks.
    """

    def __init__(
        self,
        groups: Mapping[str, RowGroup],
        room: Room,
        rank: int,
        on_violation: str,
        *,
        states: Mapping[str, StateGroup] | None = None,
        record: bool = False,
        key: Key | None = None,
        shared_key: Key | None = None,
        ranks: Ranks | None = None,
        device: torch.device | str = "cpu",
        drafts: int | None = None,
        lines: int | None = None,
        stale: str = "count",
    ) -> None:
        # Beside the running requests those that wait: preempted, or for a session's next turn.
        most = 2 * room.requests + 8 if lines is None else lines
        kind = RecordingLedger if record else Ledger
        self.groups: Final = groups
        self.states: Final = states or {}
        self._numbers: Final = [(name, number_of_group(name)) for name in (*groups, *self.states)]
        self._copied: Final = one_of_each_pool(groups)
        every: list[RowGroup | StateGroup] = [*groups.values(), *self.states.values()]
        # One more line: for rows that a connector stores under tokens of nobody's.
        self.ledger: Final = kind(
            every, max_requests=most + 1, max_length=room.length, key=shared_key or key,
            stale="count" if stale == "count" else "alarm", device=device,
        )  # fmt: skip
        self.windows: Final = FollowedWindows(self.ledger)
        self.left_out: Sequence[str] = ()
        self.kept_states: Mapping[str, int] = {}
        self.shared_key: Final = shared_key
        self.transfers: TransferWatch | None = None
        self.weights: WeightWatch | None = None
        self.scrub: Scrub | None = None
        self.drafts_late, self.asks_peers = False, True
        self._unsealed: tuple[Step, Tensor | None, int] | None = None
        self.under_way: Step | None = None
        self.begun = drafts is None
        self._counters: Final = None if drafts is None else LateCounters(self.ledger)
        self._meets: Final[Mapping[str, int]] = _MEET if drafts is None else _MEET_LATE
        self._ranks: Final = ranks
        self.peers: RankAgreement | None = None
        if key is not None:
            self._agree(compares=True)
        self._own = RankReport()  # met since the ranks acted last
        self._ended = 0  # steps that have come to their end, failed ones and unwatched ones too
        self.stopped, self.steps = False, 0
        self._caches_prefixes = room.caches_prefixes
        self._rank, self._most = rank, most
        self.on_violation = on_violation
        self._known: OrderedDict[str, None] = OrderedDict()  # by the last batch of each
        self._batch: tuple[list[str], Tensor] | None = None
        self._awaits = False  # a step was told whose samples are not known yet
        self._leaving: States | None = None  # written once it is known which drafts stay
        self._forms: Final = StepForms()
        self._buffer: Final = LineBuffer(self.ledger, self.ledger.books.sizes.max_requests, device)
        self._published: Final = PublishedBlocks(self.ledger, groups.values(), drafts)
        self.found: Final = FoundViolations(self.ledger, rank)
        self.finds_more: Callable[[], bool] | None = None
        self.repeated: Final = RepeatedWork()
        self.found.evicts_stale = stale == "contain"

    def join_stages(self) -> None:
        """Replace ``peers``: exchange reports with the ranks of all pipeline stages from now on.

        Fingerprints are still compared with the tensor-parallel ranks alone, if they were before.
        """
        self._agree(compares=self.peers is not None, stages=True)

    def _agree(self, *, compares: bool, stages: bool = False) -> None:
        """Replace ``peers`` with a new ``RankAgreement``, which gets the arguments."""
        assert self._ranks is not None  # whoever is compared, or joins stages, can reach them
        self.peers = RankAgreement(
            self.ledger, self._ranks, self._meets, compares=compares, stages=stages
        )

    # -- the beginning -----------------------------------------------------------------------

    def begin(self) -> None:
        """Watch from now on. On a CPU every step is watched anyway, and nothing else changes.

        On a GPU everything of the warm-up is dropped: rows, requests, counters, findings and the
        number of steps. Every pass is launched once; if that fails, the audit ends.
        """
        self.begun = True
        if self._counters is None:
            return
        self._counters.restart()
        self.steps = self._ended = 0
        if self.peers is not None:
            self.peers.restart()
        self.found.take_report()  # of the warm-up
        self._try(self._begin)

    def _begin(self) -> None:
        """Forget what was watched and counted so far, and launch every pass once."""
        self.forget()
        self.warm_up()

    def forget(self) -> None:
        """Forget every row, request and transfer, as caches lost their content; keep the counts."""
        self._known.clear()
        self._batch = self._unsealed = self.under_way = None
        self._awaits = False
        self.ledger.reset()
        if self.transfers is not None:
            self.transfers.restart()

    def warm_up(self) -> None:
        """Compile a GPU's kernels: launch every pass once, over a step of padding.

        The ledger forgets everything then, its counters and findings included. Call it before the
        engine says that it has warmed up; a first request must not wait.
        """
        with torch.inference_mode():
            launch_all(self.ledger, self.groups, self.states, self.scrub, self._published)
        self.ledger.restart()

    # -- requests and blocks -----------------------------------------------------------------

    def hear(self, tell: Callable[[Watch], None]) -> None:
        """Let the runner tell of a step; an error of the audit's own ends the audit alone.

        Args:
            tell: gets this watch; not called before the engine has warmed up, nor once the audit
                has ended.
        """
        if self.stopped or not self.begun:
            return
        try:
            tell(self)
        except Exception as error:
            self.stop(error)

    def stop(self, error: Exception) -> None:
        """End the audit after an error of its own, and log the error; the engine runs on.

        Windows are not followed any more. The failure stands in this rank's next report, by which
        other ranks end their audits as well. Once the audit has ended, no further error is logged.
        """
        if not self.stopped:
            why = f"the audit failed: {error!r}"
            log.error("kvtxn.audit_inactive", rank=self._rank, why=why, exc_info=error)
            self._own |= RankReport(failure=repr(error))
        self.windows.remove()
        self.stopped = True
        if self.transfers is not None:
            self.transfers.ended = True

    def change(self, changes: Changes) -> None:
        """Seal the step before; tell the ledger what a step changes before its forward.

        First an epoch begins if weights have changed, and blocks that could not be loaded are
        forgotten. With a connector, requests that ended stay in the ledger until it is full.
        Nothing is done once the audit has ended.
        """
        if self.stopped:
            return
        if self.weights is not None:  # before rows come from outside: they may be of the new ones
            hits = any(each.computed for each in changes.arrivals)
            self.weights.begin_step(hits=hits, before=self._before_epoch)
        self.under_way = None
        if self._unsealed is not None:
            self._seal()
        if self.transfers is not None:  # the step before may have been dropped after its forward
            self.transfers.take_back()
        self._settle_loads()
        if changes is NO_CHANGES:
            return
        if not (changes.gone or changes.arrivals or changes.copies or self.transfers):
            self._give(changes.grown)
            return
        # A connector may still store rows of a request that ended.
        gone = changes.gone if self.transfers is None else ()
        count_repeated(self.repeated, changes)
        fresh = fresh_blocks(changes, self.groups, self.kept_states)
        self._come_and_go(gone, changes.arrivals, fresh)
        if self.transfers is not None:
            given = [(name, block) for name, blocks in fresh.items() for block in blocks]
            self.transfers.change(changes.arrivals, given, changes.copies)
        if changes.copies:
            source, target = zip(*changes.copies, strict=True)
            for name in self._copied:
                self.ledger.copy(name, source, target)

    def _before_epoch(self) -> None:
        """Have the blocks read that a connector has stored: states there are of these weights."""
        if self.transfers is not None:
            self.transfers.before_change(True, ())

    def _settle_loads(self) -> None:
        """Forget rows that could not be loaded, and the requests whose step is dropped for it.

        Violations that the last step found in these blocks are withdrawn. Nothing is done unless a
        load may have failed since the last call.
        """
        if self.transfers is None or not self.transfers.unsettled:
            return
        names, blocks = self.transfers.take_failed()
        if blocks:
            self.found.drop(self.steps, blocks)
            known = [name for name in names if name in self._known]
            self._come_and_go(known, (), dict.fromkeys(self.groups, blocks))

    def _give(self, grown: Sequence[Sequence[int]]) -> None:
        """Tell the ledger which blocks of watched groups running requests get, if there are any.

        Args:
            grown: the blocks, by number of their group among all groups of the caches.
        """
        given = {name: grown[at] for name, at in self._numbers if grown and grown[at]}
        if given:
            self.ledger.change(given=given)

    def admit(self, arrivals: Iterable[Arrival]) -> None:
        """Begin requests, or renew the tokens of known ones.

        If there are more than the ledger has lines for, it forgets requests that were in no batch
        for the longest time.
        """
        self._come_and_go((), list(arrivals), {})

    def _come_and_go(
        self, gone: Iterable[str], arrivals: Sequence[Arrival], fresh: Mapping[str, Sequence[int]]
    ) -> None:
        """Tell the ledger of requests that end and begin, and of blocks that are handed out.

        Ended requests that are not known and blocks of groups that are not watched are left out. If
        there are more requests than lines, those in no batch for the longest time are forgotten.
        """
        given = {
            name: blocks
            for name, blocks in fresh.items()
            if blocks and (name in self.groups or name in self.states)
        }
        if self.transfers is not None:
            # Groups that are not watched get blocks of the same pool.
            places = ((name, block) for name, blocks in fresh.items() for block in blocks)
            self.transfers.before_change(bool(gone or arrivals), places)
        if not (gone or arrivals):
            if given:
                self.ledger.change(given=given)
            return
        named = {each.name: each for each in arrivals}
        leaving = [name for name in gone if name in self._known]
        for name in leaving:
            del self._known[name]
        for name in named:
            if name not in self._known and len(self._known) >= self._most:
                leaving.append(self._known.popitem(last=False)[0])
            self._known[name] = None
            self._known.move_to_end(name)
        if leaving or named:
            self._batch = None
        lines = self.ledger.change(leaving, admissions(named.values()), given)
        self._published.begin(lines, [*named.values()])

    # -- a forward ---------------------------------------------------------------------------

    def step(
        self, read: Callable[[], tuple[Rows, States | None]], returning: Callable[[str], Arrival]
    ) -> None:
        """Note what a forward writes, compare what it reads, and log what was found until now.

        An error ends the audit alone. Once the audit has ended, the step is only counted.

        Args:
            read: returns the batch's rows, and its states if any are watched. It is called here, so
                that all ranks count this step even if it raises on one of them.
            returning: describes a request, given its name, that the ledger has forgotten.
        """
        self.steps += 1
        if not self.stopped:
            try:
                rows, states = read()
                self.windows.begin()
                self._forward(rows, returning, states)
            except Exception as error:
                self.stop(error)
            self._try(self._look)

    def _forward(
        self, rows: Rows, returning: Callable[[str], Arrival], states: States | None
    ) -> None:
        """Record in the ledger what a forward writes, and compare what it reads.

        Bytes are compared before, if there is a scrub. Lengths that attention reads are compared
        after, and so are blocks that the step fills, if prefixes are cached. On a CPU with a
        connector, a request that begins before position 0 is left out, and then no block is
        compared.
        """
        lines, whole = self._lines(rows.names, returning), True
        late = self.drafts_late and self._counters is not None
        step = self._forms.step(rows, lines, states, copies=late)
        if states is not None:
            prepare_states(self.ledger, lines, states)
        if self.transfers is not None:
            # Where the host does not know the positions, the device leaves such requests out.
            if rows.first is not None and leave_out(self.ledger, lines, rows.first):
                self._batch, whole = None, False  # the next step finds its lines anew
            self.transfers.forward(rows)
        if self.scrub is not None:
            self.scrub.compare(step)
            self._unsealed = step, None, 0
        self.under_way, self._awaits, self._leaving = step, True, states
        self.ledger.write_and_check(step)
        report_lengths(self.ledger.books, step, rows.lengths)
        if self._caches_prefixes and whole:  # a later step checks all that was filled until then
            self._published.publish(step)

    def _lines(self, names: Sequence[str], returning: Callable[[str], Arrival]) -> Tensor:
        """Return the lines of requests in the ledger, int64 ``[num_requests]``, -1 without a name.

        Requests that the ledger has forgotten are admitted. For the same names as in the last call
        the same tensor is returned.
        """
        if self._batch is None or self._batch[0] != names:
            found = self.ledger.lines_of(names)
            for name in filter(None, names):
                if found is None and name not in self.ledger:
                    self.admit([returning(name)])
                self._known.move_to_end(name)
            if found is None:
                found = [self.ledger.line(name) if name else -1 for name in names]
            self._batch = list(names), self._buffer.put(found)
        return self._batch[1]

    def sampled(self, number: Tensor, ids: Tensor) -> None:
        """End the ledger's last step by what was sampled, unless a window has ended it already.

        The bytes of rows and states are sealed, or noted to be sealed in ``ended`` if the drafter
        still writes, and states that the step leaves are recorded. On a CPU failed loads are taken
        up, too, and findings logged. Nothing is done once the audit has ended, or for a GPU's
        unwatched step.

        Args:
            number: int ``[num_requests]``, sampled tokens: the accepted drafts and the next token;
                0 for a request that has none.
            ids: int ``[num_requests, n]``, the accepted drafts, then the next token; -1 where there
                is none.
        """
        behind = self._counters is not None
        if self.stopped or (behind and not self._awaits):  # its step is not watched
            return
        self._awaits = False
        left = self.windows.end()
        if left is None:
            self.ledger.resolve(number, ids, besides=1)
        if self._unsealed is not None:
            step = self._unsealed[0]
            self._unsealed = (step, number, 1) if behind else (step, self.ledger.kept(step), 0)
        if not self.drafts_late:
            self._seal()
        if not behind and self.transfers is not None and self.transfers.unsettled:
            self._settle_loads()
            self._say()
        states, self._leaving = self._leaving, None
        if states is not None and self.under_way is not None:
            leave_states(self.ledger, self.under_way.lines, states, left or {})

    def came_out(self, logits: Tensor, rows: Tensor) -> None:
        """Look for a NaN in a step's outputs before they are sampled, and for where it came from.

        Nothing is done without a scrub, or without a watched step. On a GPU a report names a
        poisoned row, or no slot, and nothing waits. On a CPU what is found is logged at once, and
        where wrong rows are contained, rows with a NaN are filled with zeros: the attention of a
        CPU would hand the NaN to whoever gets the block next.

        Args:
            logits: float ``[n, vocabulary]``.
            rows: int ``[n]``, the row of the step that each output belongs to.
        """
        if self.stopped or self.scrub is None or self._unsealed is None:
            return
        step = self._unsealed[0]
        if self._counters is not None:
            self.scrub.trace(step, logits.float(), rows)
            return
        most = float(logits.amax()) if logits.numel() else 0.0
        if most != most:  # a NaN is the largest, and not equal to itself
            clear = self.on_violation == "contain"
            self.scrub.locate(step, logits.amax(1, keepdim=True), rows, clear=clear)
            self._say()

    def take_back(self) -> None:
        """Mark the rows of a failed step as unwritten: the prefix cache has their blocks already.

        Windows are not followed any more. If no step is under way, or the audit has ended, that is
        all.
        """
        step, self.under_way, self._awaits = self.under_way, None, False
        self.windows.remove()
        if step is not None and not self.stopped:
            self._unsealed = None
            if self.transfers is not None:
                self.transfers.take_back()
            self.ledger.take_back(step)

    def sampling_failed(self) -> None:
        """Take the step back after a failure behind the forward, if something may be missing.

        The forward's own rows are there. But a drafter that has rows of its own may not have
        written them, and states may not have been moved to where the next step looks for them.
        """
        if self.drafts_late or self.states:
            self.take_back()

    def ended(self) -> None:
        """End the step under way, and take the checksums that wait for its drafter, if any do."""
        self.under_way = None
        if self._unsealed is not None and not self.stopped:
            self._seal()

    def _seal(self) -> None:
        """Take the checksums of the rows and states that the last step leaves, unless taken.

        Nothing is done without a scrub.
        """
        unsealed, self._unsealed = self._unsealed, None
        if self.scrub is not None and unsealed is not None:
            self.scrub.seal(*unsealed[:2], besides=unsealed[2])

    # -- what came of it ---------------------------------------------------------------------

    def _look(self) -> None:
        """Log what was found until now or, where the device runs behind, until some steps ago.

        Nothing is logged while a load may have failed. Where the device runs behind, the next copy
        of the counters begins when it is due.
        """
        waits = self.transfers is not None and self.transfers.unsettled
        if not waits and (self._counters is None or self._counters.found_more()):
            self._say()
        if self._counters is not None:
            self._counters.copy(self.steps, soon=self.on_violation != "log")

    def _say(self) -> None:
        """Log the violations that were found since the last call, and keep them for the reports."""
        self.found.take(self.on_violation)

    def end_step(self) -> Wrong | None:
        """End a step on all ranks alike; every rank must call this after each step, failed or not.

        Returns:
            What has to be contained: the wrong reads that the ranks have exchanged, and this rank's
            blocks of earlier weights that are to leave the prefix cache. None without any, or if
            the ranks do not meet after this step and no such block was found.

        Raises:
            AuditError: on all ranks, if one found a violation and ``on_violation`` is "raise".
        """
        if self.transfers is not None and not self.stopped:
            self._try(self.transfers.end_step)
        wrong = self._end_step()
        if not (stale := self.found.take_stale()):
            return wrong
        # All ranks have the same rows of the same age, and an engine hears one of them.
        return (wrong or Wrong()) | Wrong(stale=stale)

    def _end_step(self) -> Wrong | None:
        """Exchange findings with the other ranks, if they meet after this step.

        Returns:
            What to contain, without stale rows; None if there is nothing, or the ranks do not meet,
            or the watch has not begun, or a rank is alone and its audit has ended or only logs.

        Raises:
            AuditError: as in ``end_step``.
        """
        alone = self.peers is None
        if not self.begun or (alone and (self.stopped or self.on_violation == "log")):
            return None
        self._try(self._find)
        self._try(self._take_report)
        if self.peers is not None:
            self._ended += 1
            if not self._meet(
                lambda peers: peers.after_step(self._ended, self._own, self.on_violation)
            ):
                return None
        # A failure after the ranks have met is reported when they meet next.
        own, self._own = self._own, RankReport(failure=self._own.failure)
        if own.violation is not None and self.on_violation == "raise":
            raise AuditError("audit", own.violation)
        return own.wrong or None

    def _take_report(self) -> None:
        """Add the violations that were logged since the last call to this rank's report."""
        self._own |= self.found.take_report()

    def _find(self) -> None:
        """Wait for a GPU's violations and log them, if they are contained; else do nothing.

        Before that, rows that a connector could not load are forgotten, and violations in them
        withdrawn. ``finds_more`` may say that there are none to log. Those of a CPU are found at
        once. Nothing is done once the audit has stopped.
        """
        if self._counters is not None and self.on_violation == "contain" and not self.stopped:
            self._settle_loads()
            if self.finds_more is None or self.finds_more():
                self._say()

    def _meet(self, hear: Callable[[RankAgreement], RankReport | None]) -> bool:
        """Exchange reports with the other ranks, and act on them.

        If a rank reports that its audit ended, or the exchange fails, this rank's audit ends, too,
        and ``peers`` is None from then on. Else fingerprints that came are compared, and findings
        logged.

        Args:
            hear: makes the exchange; returns the reports of all ranks in one, or None if they do
                not meet.

        Returns:
            True if the ranks met, or the exchange failed; False if they do not meet now.
        """
        peers = self.peers
        if peers is None:
            return False
        try:
            heard = hear(peers)
        except Exception as error:  # a rank is gone, and with it the engine
            self.peers = None
            self.stop(error)
            return True
        if not self.stopped and peers.copies_prints(self._ended):
            self._try(peers.copy_prints)
        if heard is None:
            return False
        self._own = heard
        if heard.failure is not None:
            self.peers = None
            self.stop(KVTxnError("audit", f"a rank's audit ended: {heard.failure}"))
        elif not self.stopped:
            self._try(peers.compare)
            self._try(self._say)
        return True

    def _try(self, call: Callable[[], object]) -> None:
        """Call a function; an error of it ends the audit, and is not raised."""
        try:
            call()
        except Exception as error:
            self.stop(error)

    def compare_ranks(self) -> None:
        """Compare what the ranks wrote; all ranks must call this after the same step.

        Differences are logged, and what other ranks report is acted on. Nothing is done without
        other ranks to compare with, or if ``asks_peers`` is False.
        """
        if self.asks_peers:
            self._meet(lambda peers: peers.now(self._own))

    def report(self) -> list[dict[str, Any]]:
        """Return the remembered violations as dicts, oldest first; all ranks must call this.

        Before, what the ranks wrote is compared, other processes' answers are awaited for a moment,
        and new violations are logged.
        """
        self.compare_ranks()
        if self.transfers is not None:
            self._try(self.transfers.settle)
        self._try(self._say)
        return self.found.report()

    def ages(self) -> list[dict[str, Any]]:
        """Return the rows of earlier weights that each request has read, oldest request first.

        If the ledger fails, the audit ends, and the list is empty.
        """
        found: list[dict[str, Any]] = []
        self._try(lambda: found.extend(each.as_dict() for each in self.ledger.read_ages()))
        return found

    def recording(self) -> dict[str, Any] | None:
        """Return the life of every slot; None without a recording."""
        return self.ledger.recording() if isinstance(self.ledger, RecordingLedger) else None

    def counters(self) -> dict[str, float]:
        """Return the audit's counters by Prometheus name; waits. All ranks must call this.

        If the ledger fails, the audit ends, and the ledger's own counters are left out.
        """
        self.compare_ranks()
        if self.transfers is not None:
            self._try(self.transfers.settle)
            self._try(self._say)  # of a failed load nothing counts
        found: dict[str, float] = {}
        self._try(lambda: found.update(self.ledger.counters()))
        found |= self.repeated.counters()
        dropped = 0 if self.transfers is None else self.transfers.dropped
        return {
            **found,
            "kvtxn_audit_store_dropped_total": float(dropped),
            "kvtxn_audit_active": float(self.begun and not self.stopped),
            "kvtxn_audit_unwatched_groups": float(len(self.left_out)),
        }
