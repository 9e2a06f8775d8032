"""``LedgerPart``: hears the steps of any engine, and tells a watch of them.

On a GPU the ledger's passes are launched beside the forward: once slots and tables are in place,
and once it is decided which drafts stay, before the drafter. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, Literal, Protocol

from torch import Tensor

from ....manager import TransactionManager
from ..parts import Part
from ..step import Arrival, Changes, Outputs, PlannedStep, Rows, States
from .encoded_items import EncodedItems, Read
from .followed_windows import no_manager
from .rank_agreement import Wrong
from .violation_log import AuditError
from .watch import Watch


class LedgerReader(Protocol):
    """The side of an engine's adapter that the ledger needs: it opens watches and reads steps.

    Attributes:
        watch: the watch over the present caches; None while nothing is watched. Whoever runs steps
            of no request may take it away for a while.
        ready: when a step can be read: once it is planned, when its forward begins, or later, when
            the reader says so.
    """

    watch: Watch | None
    ready: Literal["planned", "forward", "later"]

    def open(self, is_ready: Callable[[], None]) -> Watch | None:
        """Open a watch over new caches; if that is impossible, log why and return None.

        Args:
            is_ready: call it in each step once it can be read, if ``ready`` is "later".
        """

    def begin(self) -> None:
        """Read what has to be known before a step changes requests and blocks."""

    def read(self, step: PlannedStep, inputs: Mapping[str, object]) -> tuple[Rows, States | None]:
        """Return the rows that a step's forward writes and reads; its states, if any are watched.

        Args:
            step: the step, whose forward comes next.
            inputs: the arguments of the forward, if ``ready`` is "forward"; else none.
        """

    def returning(self, name: str) -> Arrival:
        """Describe a request that goes on and that the ledger has forgotten."""

    def sampled(self, ids: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return how many tokens each request of the step has sampled, and which.

        Args:
            ids: as for ``Part.sampled``.
            counts: as for ``Part.sampled``; None if the engine does not have them.

        Returns:
            As ``Watch.sampled`` takes them; None if they are of another step than the last one.
        """

    def mark(self, output: object, wrong: Wrong) -> None:
        """Add wrong reads to the output of their step, for the engine's scheduler to contain."""


class LedgerPart(Part):
    """Tells the watch which rows and states a forward writes and reads, and what became of drafts.

    Behind windows in a list of parts, it lets the watch follow them: the end of a step's window is
    the end of the ledger's step, and what was sampled is compared with it.

    Args:
        reader: reads the engine's steps, and keeps the watch.

    Attributes:
        reader: the same.
    """

    def __init__(self, reader: LedgerReader) -> None:
        self.reader: Final = reader
        #: The step, if it cannot be read yet.
        self._planned: PlannedStep | None = None
        #: The step that is sampled next; None if it is not watched.
        self._unsampled: PlannedStep | None = None
        #: The watch was told of a forward that has not ended.
        self._in_forward = False
        self._encoded = EncodedItems()
        #: Finds the manager of the windows that the watch follows.
        self._manager: Callable[[], TransactionManager | None] = no_manager
        #: The outcome of the step as ``commit_nears`` has read it; None before.
        self._outcome: tuple[Tensor, Tensor] | None = None

    def _tell(self, tell: Callable[[Watch], None]) -> None:
        """Call ``tell`` with the watch, if there is one; its error ends the audit alone."""
        watch = self.reader.watch
        if watch is not None:
            watch.hear(tell)

    # -- caches ------------------------------------------------------------------------------

    def caches_dropped(self) -> None:
        """Let go of the watch over the caches that go; its windows are not followed any more."""
        self._drop_watch()

    def caches_made(self) -> None:
        """Open a watch over new caches, which follows the windows; None if the reader cannot."""
        self._planned, self._encoded = None, EncodedItems()
        self.reader.watch = watch = self.reader.open(self.is_ready)
        if watch is not None:
            watch.windows.find = self._manager

    def released(self) -> None:
        """Let go of the watch, as ``caches_dropped`` does: nothing is watched any more."""
        self._drop_watch()

    def _drop_watch(self) -> None:
        """Follow no more windows, and set the reader's watch to None."""
        if self.reader.watch is not None:
            self.reader.watch.windows.remove()
        self.reader.watch = None

    def follow_windows(self, manager: Callable[[], TransactionManager | None]) -> None:
        """Keep the function that finds a manager, for the watch over the next caches to follow."""
        self._manager = manager

    # -- a forward ---------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Forget a step that was dropped half-way, and let the reader read ahead."""
        self._planned, self._in_forward = None, False
        self.reader.begin()

    def requests_changed(self, changes: Callable[[], Changes]) -> None:
        """Tell the watch, if there is one, who begins and ends, and which blocks requests get."""
        self._tell(partial(self._change, changes))

    def _change(self, changes: Callable[[], Changes], watch: Watch) -> None:
        """Read a step's changes, and tell them to the watch and to the record of encoded items."""
        told = changes()
        watch.change(told)
        self._encoded.change(watch, told.encoder)

    def planned(self, step: PlannedStep) -> None:
        """Tell the watch of the step's forward if the reader is ready then; keep it if ready later.

        A reader that is ready when the forward begins is told in ``forward_begins``.
        """
        if self.reader.ready == "planned":
            self._tell_forward(step, {})
        elif self.reader.ready == "later":
            self._planned = step

    def forward_begins(self, step: PlannedStep | None, inputs: Mapping[str, object]) -> None:
        """Tell the watch of the step's forward, if the reader is ready only then.

        A forward without a step, such as a warm-up, is not watched, nor is what is sampled next.
        """
        if step is None:
            self._unsampled = None
        elif self.reader.ready == "forward":
            self._tell_forward(step, inputs)

    def is_ready(self) -> None:
        """Tell the watch of the planned step's forward, once; nothing if no step waits for it."""
        step, self._planned = self._planned, None
        if step is not None:
            self._tell_forward(step, {})

    def _tell_forward(self, step: PlannedStep, inputs: Mapping[str, object]) -> None:
        """Tell the watch what a forward writes and reads, and how old its encoder outputs are."""
        self._unsampled, self._in_forward, self._outcome = step, True, None
        read: Read = partial(self.reader.read, step, inputs)
        if self._encoded.late:
            read = self._encoded.keeping(read)
        self._tell(lambda watch: watch.step(read, self.reader.returning))
        if self._encoded.late:
            self._tell(self._encoded.note)

    def forward_ended(self) -> None:
        """Note that the rows of the forward are there: ``failed`` takes none of them back now."""
        self._in_forward = False

    def failed(self, error: BaseException) -> None:
        """Take back a forward that raised: nobody knows which of its rows are there.

        If the forward has ended, nothing is taken back. If the watch was not told of the step yet,
        it never is: what comes next may be a dummy run.
        """
        self._planned = None
        if self._in_forward:
            self._in_forward = False
            self._tell(Watch.take_back)

    # -- its outcome -------------------------------------------------------------------------

    def sampling_begins(self, outputs: Outputs) -> None:
        """Let the watch look for a NaN in what came out, if bytes are compared in this step."""
        step, watch = self._unsampled, self.reader.watch
        if step is not None and watch is not None and watch.scrub is not None:
            watch.hear(partial(_tell_outputs, step, outputs))

    def commit_nears(self, ids: Tensor | None, counts: Tensor | None) -> None:
        """Tell the watch the tokens of a step whose windows it follows, before a window ends it.

        Nothing is told without ids, or if no window may end the step.
        """
        watch = self.reader.watch
        if ids is not None and self._unsampled is not None and watch and watch.windows:
            self._tell(partial(self._read_tokens, ids, counts))

    def _read_tokens(self, ids: Tensor, counts: Tensor | None, watch: Watch) -> None:
        """Read what was sampled, keep it for ``sampled``, and tell the followed windows."""
        self._outcome = self.reader.sampled(ids, counts)
        if self._outcome is not None:
            watch.windows.commit_nears(*self._outcome)

    def sampled(self, ids: Tensor | None, counts: Tensor | None) -> None:
        """Tell the watch what was sampled, which ends its step; without ids do nothing."""
        if ids is not None:
            self._tell_sampled(ids, counts)

    def outcome_kept(self, ids: Tensor, counts: Tensor) -> None:
        """Tell the watch what was sampled, which ends its step, unless ``sampled`` has done so."""
        self._tell_sampled(ids, counts)

    def _tell_sampled(self, ids: Tensor, counts: Tensor | None) -> None:
        """Tell the watch what the step has sampled, once; nothing if the step is not watched."""
        step, self._unsampled = self._unsampled, None
        if step is not None:
            self._tell(partial(self._read_sampled, ids, counts))

    def _read_sampled(self, ids: Tensor, counts: Tensor | None, watch: Watch) -> None:
        """Tell the watch what was sampled, as ``commit_nears`` has read it, or as it is read now.

        Nothing is told if the reader says that it is of another step.
        """
        found, self._outcome = self._outcome, None
        if found is None:
            found = self.reader.sampled(ids, counts)
        if found is not None:
            watch.sampled(*found)

    def step_ended(self, output: object) -> None:
        """End the step on all ranks, and add what has to be contained to its output.

        Raises:
            AuditError: a wrong row was read, and the user set ``on_violation`` to "raise".
        """
        self.launched()
        watch = self.reader.watch
        wrong = None if watch is None else watch.end_step()
        if wrong is not None:
            self.reader.mark(output, wrong)

    def launched(self) -> None:
        """Take the checksums that wait for the drafter, since all of the step was launched.

        Nothing is taken if no bytes are compared. An engine may call ``Watch.end_step`` later.
        """
        self._unsampled, watch = None, self.reader.watch
        if watch is not None and watch.scrub is not None:
            watch.hear(Watch.ended)

    def step_failed(self) -> None:
        """End the step without an output, and take it back if rows or states of it may be missing.

        An AuditError is dropped, as the step's own error goes on.
        """
        self._unsampled, watch = None, self.reader.watch
        if watch is not None:
            watch.hear(Watch.sampling_failed)
            with suppress(AuditError):
                watch.end_step()


def _tell_outputs(step: PlannedStep, outputs: Outputs, watch: Watch) -> None:
    """Let a watch look for a NaN in the outputs of a step's forward; nothing if there are none.

    Without numbers of their rows, these are the step's own.
    """
    logits, rows = outputs()
    if logits is not None:
        watch.came_out(logits, step.outputs() if rows is None else rows)
