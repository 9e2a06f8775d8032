"""vLLM's V2 model runner on a GPU, watched by a ledger.

The ledger's passes are launched beside the forward, as ``gpu_runners`` says. Where the runner
replays the forward as one graph, the graph begins with the first of them.

A step whose forward is a graph is told just before the replay, its changes and the last step's
outcome included. Between two calls vLLM's code runs for milliseconds, so each call of the audit's
finds its own code and data out of the processor's caches: one call costs the host much less than
several that do as much.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..attach import keep_for_graphs, mix_in
from ..begun_graphs import NotesMode, let_graphs_begin
from ..internals import (
    Foreign,
    audited_states,
    audited_v2,
    connectors,
    held_states,
    whole_graphs,
)
from ..internals.audited import Rows
from ..internals.audited_states import States
from ..internals.protocols.runners import BeforeV2
from .gpu_telling import TellingConnector, tell_metadata
from .graph_watch import GraphWatch
from .left_states import leave, new_state_reader
from .next_forward import NextForward
from .opening import open_device_watch
from .runner import AuditedRunner, take_back
from .transfers import TransferWatch, WatchedConnectorV2
from .watch import Watch
from .watching_graphs import WatchingGraphs


class AuditedGpuRunnerV2(NotesMode, AuditedRunner, BeforeV2):
    """A mixin of the V2 runner: each method runs vLLM's own code and tells the ledger of it.

    Attributes:
        kvtxn_reader: reads the runner's steps.
        kvtxn_requests: the runner's requests, which a connector's metadata do not name; kept with
            a connector alone.
        kvtxn_changes: what the scheduler said of the step, if the ledger was not told of it yet.
        kvtxn_prepared: the step's forward, if the ledger was not told of it yet.
        kvtxn_metadata: the step's attention metadata, once they are made, if states are watched.
        kvtxn_waits: the ledger is told later in a step than when tables and slots are in place.
        kvtxn_at_once: a step whose forward is a graph is told when the graph is replayed.
        kvtxn_state_reader: reads the states of the runner's steps.
        kvtxn_watching: tells the ledger of replays; None if no graph checks steps.
    """

    kvtxn_audit: GraphWatch | None
    kvtxn_reader: audited_v2.StepReader
    kvtxn_requests: dict[str, audited_v2.Told]
    kvtxn_changes: Any = None
    kvtxn_prepared: tuple[Any, Any] | None = None
    kvtxn_metadata: Any = None
    kvtxn_waits: bool = False
    kvtxn_at_once: bool = False
    kvtxn_state_reader: audited_states.DeviceStateReader
    kvtxn_watching: WatchingGraphs | None = None

    def kvtxn_open_watch(self) -> Watch | None:
        """Open a ledger over new caches; if that is impossible, log why and return None."""
        self.kvtxn_requests = {}
        self.kvtxn_changes = self.kvtxn_prepared = self.kvtxn_metadata = None
        self.kvtxn_at_once, self.kvtxn_watching = False, None
        # With a connector, the ledger remembers requests that ended until it needs their lines.
        lines = audited_v2.lines(self) if connectors.connector() is None else None
        watch = open_device_watch(self, audited_v2.lacking(self), lines, WatchedConnectorV2)
        if watch is not None:
            self.kvtxn_reader = audited_v2.StepReader(self, watch.groups, watch.ledger.input)
            self.kvtxn_waits = watch.transfers is not None or bool(watch.states)
            if watch.can_be_in_graphs() and audited_v2.graphs_find_rows(self):
                self.kvtxn_let_graphs_watch(watch)
            if watch.states:
                self.kvtxn_state_reader = new_state_reader(self, watch)
                state = held_states.model_state(self)
                self.kvtxn_undo.callback(tell_metadata(state, self))
            if watch.transfers is not None:
                own = connectors.of_runner(self)
                self.kvtxn_undo.callback(mix_in(own, TellingConnector, kvtxn_runner=self))
        return watch

    def kvtxn_let_graphs_watch(self, watch: GraphWatch) -> None:
        """Let the graphs of whole forwards write and check the steps, if they can."""
        watching = WatchingGraphs(self, watch, self.kvtxn_reader)
        undo = let_graphs_begin(self, watching)
        if undo is not None:
            self.kvtxn_watching = watching
            self.kvtxn_reader.in_graphs = True
            self.kvtxn_at_once = watch.scrub is None and watch.transfers is None
            self.kvtxn_undo.callback(undo)
            keep_for_graphs(self, watch)

    def kvtxn_is_whole(self) -> bool:
        """Tell whether the step's forward is a graph that may check it."""
        return self.kvtxn_reader.in_graphs and self.kvtxn_mode is whole_graphs.whole()

    def update_requests(self, scheduler_output: Any) -> None:
        """Tell the ledger which requests begin and end, and which blocks each request gets."""
        watch = self.kvtxn_audit
        if watch is not None and watch.transfers is not None:
            watch.transfers.tell(partial(_leave_v2, self, scheduler_output, watch.transfers))
        super().update_requests(scheduler_output)  # type: ignore[misc]
        if not self.kvtxn_at_once:
            self.kvtxn_tell(partial(_change_v2, self, scheduler_output))
            return
        if self.kvtxn_changes is not None or self.kvtxn_prepared is not None:
            self.kvtxn_step_is_ready()  # that step came to nothing
        self.kvtxn_changes = scheduler_output

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; if it fails, tell the ledger, which was told of its rows before."""
        if self.kvtxn_audit is not None:
            self.kvtxn_audit.under_way = None  # the step before is over
        try:
            output = super().execute_model(*args, **kwargs)
        except BaseException:
            if self.kvtxn_at_once:
                self.kvtxn_step_is_ready()
            self.kvtxn_tell(take_back)
            raise
        if self.kvtxn_changes is not None:  # there was no forward
            self.kvtxn_step_is_ready()
        return output

    def prepare_attn(self, input_batch: Any) -> Any:
        """Tell the ledger which rows the forward writes and reads, if nothing else is awaited."""
        prepared = super().prepare_attn(input_batch)  # type: ignore[misc]
        self.kvtxn_prepared = input_batch, prepared
        if not (self.kvtxn_waits or (self.kvtxn_at_once and self.kvtxn_is_whole())):
            self.kvtxn_step_is_ready()
        return prepared

    def kvtxn_step_is_ready(self) -> None:
        """Tell the ledger what the step changes, and which rows and states its forward has."""
        changes, self.kvtxn_changes = self.kvtxn_changes, None
        if changes is not None:
            self.kvtxn_tell(partial(_change_v2, self, changes))
        prepared, self.kvtxn_prepared = self.kvtxn_prepared, None
        if prepared is not None:
            self.kvtxn_tell(partial(_step_v2, self, *prepared))
        self.kvtxn_metadata = None

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        """Look for a NaN in what the forward gave, if bytes are compared."""
        watch = self.kvtxn_audit
        if watch is not None and watch.scrub is not None:
            given = audited_v2.sampled_outputs(hidden_states, input_batch)
            self.kvtxn_tell(lambda watch: watch.came_out(*given))
        return super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc]

    def postprocess_sampled(
        self,
        idx_mapping: Any,
        sampled_tokens: Any,
        num_sampled: Any,
        num_rejected: Any,
        *others: Any,
        **named: Any,
    ) -> None:
        """Tell the ledger which drafts were accepted, once a window has been committed.

        Pipeline stages before the last are told of an earlier step, and have no drafts here.
        """
        super().postprocess_sampled(  # type: ignore[misc]
            *(idx_mapping, sampled_tokens, num_sampled, num_rejected, *others), **named
        )
        watch = self.kvtxn_audit
        if watch is None or not audited_v2.samples(self):
            return
        if self.kvtxn_at_once and self.kvtxn_prepared is not None:
            self.kvtxn_step_is_ready()  # the forward was no graph after all
        if watch.waits:
            watch.outcome = num_sampled, sampled_tokens
        else:
            self.kvtxn_tell(partial(_sampled_v2, self, sampled_tokens, num_sampled))


def _leave_v2(
    runner: AuditedGpuRunnerV2, scheduler_output: Foreign, transfers: TransferWatch
) -> None:
    """Note the blocks that a connector takes before a step hands them to others."""
    transfers.flush(connectors.metadata_of(scheduler_output))
    audited_v2.note_requests(runner.kvtxn_requests, scheduler_output)


def _change_v2(runner: AuditedGpuRunnerV2, scheduler_output: Foreign, watch: Watch) -> None:
    """Tell a watch what a step changes."""
    watch.change(audited_v2.changes(runner, scheduler_output))


def _step_v2(runner: AuditedGpuRunnerV2, batch: Foreign, prepared: Foreign, watch: Watch) -> None:
    """Tell a watch of the step that is about to run."""
    assert isinstance(watch, GraphWatch)
    watch.step(_ForwardV2(runner, watch, batch, prepared), _unknown)


class _ForwardV2(NextForward):
    """A step of the V2 runner that is about to run.

    Args:
        runner: the runner.
        watch: its watch.
        batch: vLLM's ``InputBatch``.
        prepared: the result of ``prepare_attn``.
    """

    __slots__ = ("_batch", "_prepared", "_runner", "_watch")

    def __init__(
        self, runner: AuditedGpuRunnerV2, watch: GraphWatch, batch: Foreign, prepared: Foreign
    ) -> None:
        self._runner, self._watch, self._batch, self._prepared = runner, watch, batch, prepared

    def read(self) -> tuple[Rows, States | None]:
        """Read the batch's rows, and its states if any are watched."""
        runner, batch = self._runner, self._batch
        rows = runner.kvtxn_reader.rows(batch, self._prepared)
        if not self._watch.states:
            return rows, None
        total = audited_v2.num_rows(batch)
        return rows, runner.kvtxn_state_reader.read(runner.kvtxn_metadata, rows, total)

    def is_replay(self) -> bool:
        """Tell whether the step's forward is a graph, which finds its rows where they lie.

        Raises:
            LookupError: it is, and the rows lie elsewhere.
        """
        if not self._runner.kvtxn_is_whole():
            return False
        if not self._runner.kvtxn_reader.placed:
            raise LookupError("the step's rows are not where a captured forward finds them")
        return True

    def repeats(self) -> bool:
        """Tell whether the step's forward is a graph, and its requests those of the step before."""
        runner = self._runner
        return runner.kvtxn_is_whole() and runner.kvtxn_reader.repeats(self._batch)


def _sampled_v2(runner: AuditedGpuRunnerV2, ids: Tensor, num_sampled: Tensor, watch: Watch) -> None:
    """Tell a watch what was sampled."""
    assert isinstance(watch, GraphWatch)
    watch.sampled_on_device(num_sampled, ids)
    leave(runner, watch)


def _unknown(name: str) -> Any:
    """Refuse to describe a request that the ledger has forgotten; it forgets none that runs.

    Raises:
        LookupError: always.
    """
    raise LookupError(f"the ledger was not told of request {name!r}")
