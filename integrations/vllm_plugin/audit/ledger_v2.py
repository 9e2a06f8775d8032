"""The ledger of vLLM's V2 model runner: tells a watch what happens in a step.

The ledger's passes are launched beside the forward, as ``ledger_v1`` says of a GPU. A step is told
once slots and tables are in place; if states are watched, once their metadata are made, too; if a
connector brings rows, once it has begun to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ...serving.ledger.transfers import TransferWatch
from ...serving.ledger.watch import Watch
from ...serving.parts import Part
from ...serving.step import Arrival, Changes, Outputs, PlannedStep, Rows, States
from ..internals import Foreign, audited, audited_states, audited_steps, connectors, held_states
from ..internals.batches import PlannedV2
from ..internals.engine_protocols import SchedulerOutput
from ..internals.hooks import follow, mix_in
from ..seam.hooked_runner import HookedRunnerV2
from .watch_opening import (
    end_step,
    fail_step,
    join_stages,
    leave,
    new_state_reader,
    open_device_watch,
)
from .watched_connectors import WatchedConnectorV2


class LedgerV2(Part):
    """Tells the watch which rows and states a forward writes and reads, and what became of drafts.

    The watch is the runner's ``kvtxn_audit``; a self-test takes it away for a while.

    Args:
        runner: the hooked runner.

    Attributes:
        reader: reads the runner's steps.
    """

    reader: audited_steps.StepReaderV2

    def __init__(self, runner: HookedRunnerV2) -> None:
        self._runner = runner
        self._states: audited_states.DeviceStateReader | None = None
        #: The step, if the watch was not told of it yet.
        self._planned: PlannedStep | None = None
        #: The step's attention metadata, once they are made, if states are watched.
        self._metadata: Foreign = None
        #: The watch is told later in a step than when tables and slots are in place.
        self._waits = False
        #: A forward was planned that has not ended.
        self._in_forward = False

    # -- caches ------------------------------------------------------------------------------

    def caches_dropped(self) -> None:
        """Close the ledger over the caches that go."""
        self._runner.kvtxn_audit = None

    def caches_made(self) -> None:
        """Open a ledger over new caches, or log why there is none."""
        self._runner.kvtxn_audit = join_stages(self._runner, self._open())

    def _open(self) -> Watch | None:
        """Open a ledger over new caches; if that is impossible, log why and return None."""
        runner = self._runner
        runner.kvtxn_requests, self._planned, self._metadata = {}, None, None
        # With a connector, the ledger remembers requests that ended until it needs their lines.
        lines = audited.lines(runner) if connectors.connector() is None else None
        watch = open_device_watch(runner, audited.lacking(runner), lines, WatchedConnectorV2)
        if watch is not None:
            self.reader = audited_steps.StepReaderV2(runner, watch.groups, watch.ledger.input)
            self._states = new_state_reader(runner, watch)
            self._waits = watch.transfers is not None or self._states is not None
            if self._states is not None:
                runner.kvtxn_undo.callback(self._follow_metadata())
            if watch.transfers is not None:
                own = connectors.of_runner(runner)
                undo = mix_in(own, TellingConnector, kvtxn_then=self._step_is_ready)
                runner.kvtxn_undo.callback(undo)
        return watch

    def _follow_metadata(self) -> Callable[[], None]:
        """Let vLLM's ``model_state`` hand over the attention metadata of each step.

        The step is ready then, unless a connector brings rows. Windows that hold states may have
        put themselves around the same method; they see the metadata first.

        Returns:
            A function that undoes it.
        """

        def prepared(metadata: Foreign) -> None:
            self._metadata = metadata
            watch = self._runner.kvtxn_audit
            if watch is not None and watch.transfers is None:
                self._step_is_ready()

        return follow(held_states.model_state(self._runner), "prepare_attn", prepared)

    # -- a step ------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Forget a step that was dropped half-way; note which blocks a connector takes."""
        self._in_forward = False
        watch = self._runner.kvtxn_audit
        if watch is not None and watch.transfers is not None:
            scheduled = self._runner.kvtxn_scheduled
            watch.transfers.tell(partial(self._note_leaving, scheduled, watch.transfers))

    def requests_changed(self, changes: Callable[[], Changes]) -> None:
        """Tell which requests begin and end, and which blocks each request gets."""
        self._runner.kvtxn_tell(lambda watch: watch.change(changes()))

    def planned(self, step: PlannedStep) -> None:
        """Tell which rows the forward writes and reads, if nothing else is awaited."""
        self._planned, self._in_forward = step, True
        if not self._waits:
            self._step_is_ready()

    def forward_ended(self) -> None:
        """Note that the rows of the forward are there."""
        self._in_forward = False

    def failed(self, error: BaseException) -> None:
        """Take a forward that raised back: nobody knows which of its rows are there.

        If the watch was not told of it yet, it never is: what comes next may be a dummy run.
        """
        self._planned = None
        if self._in_forward:
            self._in_forward = False
            self._runner.kvtxn_tell(Watch.take_back)

    def sampling_begins(self, outputs: Outputs) -> None:
        """Look for a NaN in what came out, if bytes are compared."""
        watch = self._runner.kvtxn_audit
        if watch is not None and watch.scrub is not None:
            self._runner.kvtxn_tell(lambda watch: watch.came_out(*outputs()))

    def outcome_kept(self, ids: Tensor, counts: Tensor) -> None:
        """Tell which drafts were accepted.

        Pipeline stages before the last are told of an earlier step, and have no drafts here.
        """
        if self._runner.kvtxn_audit is not None and audited.is_last_stage(self._runner):
            self._runner.kvtxn_tell(partial(self._tell_sampled, ids, counts))

    def step_ended(self, output: object) -> None:
        """End the step, and mark the requests that read wrong rows in its output.

        Raises:
            AuditError: a wrong row was read, and the user set ``on_violation`` to "raise".
        """
        end_step(self._runner, output)

    def step_failed(self) -> None:
        """End the step without an output."""
        fail_step(self._runner)

    def released(self) -> None:
        """Stop watching."""
        self._runner.kvtxn_audit = None

    # -- what the watch is told --------------------------------------------------------------

    def _note_leaving(self, scheduled: SchedulerOutput, transfers: TransferWatch) -> None:
        """Note the blocks that a connector takes before a step hands them to others."""
        transfers.flush(connectors.metadata_of(scheduled))
        audited.note_requests(self._runner.kvtxn_requests, scheduled)

    def _step_is_ready(self) -> None:
        """Tell the watch which rows and states the step's forward has."""
        step, self._planned = self._planned, None
        if step is not None:
            self._runner.kvtxn_tell(partial(self._tell_forward, step))
        self._metadata = None

    def _tell_forward(self, step: PlannedStep, watch: Watch) -> None:
        """Tell a watch which rows and states the next forward writes and reads."""
        watch.step(partial(self._read, step), _unknown)

    def _read(self, step: PlannedStep) -> tuple[Rows, States | None]:
        """Read the rows of the step that is about to run, and its states if any are watched."""
        assert isinstance(step, PlannedV2)
        rows = self.reader.rows(step.batch, step.prepared)
        if self._states is None:
            return rows, None
        return rows, self._states.read(self._metadata, rows, audited_steps.num_rows_v2(step.batch))

    def _tell_sampled(self, ids: Tensor, counts: Tensor, watch: Watch) -> None:
        """Tell a watch what was sampled, and which states windows write after that."""
        watch.sampled(counts, ids)
        leave(watch, self._states)


class TellingConnector:
    """A mixin of the object by which the V2 runner calls its connector.

    The rows that a connector brings within a step are in their blocks once this has begun, so the
    audit compares what the step reads only then.

    Attributes:
        kvtxn_then: called once the step's transfers have begun.
    """

    kvtxn_then: Callable[[], None]

    def pre_forward(self, *args: Any, **kwargs: Any) -> None:
        """Begin the step's transfers; then the step is ready."""
        super().pre_forward(*args, **kwargs)  # type: ignore[misc]
        self.kvtxn_then()


def _unknown(name: str) -> Arrival:
    """Refuse to describe a request that the ledger has forgotten; it forgets none that runs.

    Raises:
        LookupError: always.
    """
    raise LookupError(f"the ledger was not told of request {name!r}")
