"""vLLM's V2 model runner on a GPU, watched by a ledger.

The ledger's passes are launched beside the forward, as ``gpu_runners`` says.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..attach import mix_in
from ..internals import (
    Foreign,
    audited_states,
    audited_v2,
    connectors,
    held_states,
)
from ..internals.audited import Rows
from ..internals.audited_states import States
from .gpu_telling import TellingConnector, tell_metadata
from .left_states import leave, new_state_reader
from .opening import open_device_watch
from .runner import AuditedRunner, take_back
from .transfers import TransferWatch, WatchedConnectorV2
from .watch import Watch


class AuditedGpuRunnerV2(AuditedRunner):
    """A mixin of the V2 runner: each method runs vLLM's own code and tells the ledger of it.

    Attributes:
        kvtxn_reader: reads the runner's steps.
        kvtxn_requests: the runner's requests, which a connector's metadata do not name; kept with
            a connector alone.
        kvtxn_prepared: the step's forward, if the ledger was not told of it yet.
        kvtxn_metadata: the step's attention metadata, once they are made, if states are watched.
        kvtxn_waits: the ledger is told later in a step than when tables and slots are in place.
        kvtxn_state_reader: reads the states of the runner's steps.
    """

    kvtxn_audit: Watch | None
    kvtxn_reader: audited_v2.StepReader
    kvtxn_requests: dict[str, audited_v2.Told]
    kvtxn_prepared: tuple[Any, Any] | None = None
    kvtxn_metadata: Any = None
    kvtxn_waits: bool = False
    kvtxn_state_reader: audited_states.DeviceStateReader

    def kvtxn_open_watch(self) -> Watch | None:
        """Open a ledger over new caches; if that is impossible, log why and return None."""
        self.kvtxn_requests = {}
        self.kvtxn_prepared = self.kvtxn_metadata = None
        # With a connector, the ledger remembers requests that ended until it needs their lines.
        lines = audited_v2.lines(self) if connectors.connector() is None else None
        watch = open_device_watch(self, audited_v2.lacking(self), lines, WatchedConnectorV2)
        if watch is not None:
            self.kvtxn_reader = audited_v2.StepReader(self, watch.groups, watch.ledger.input)
            self.kvtxn_waits = watch.transfers is not None or bool(watch.states)
            if watch.states:
                self.kvtxn_state_reader = new_state_reader(self, watch)
                state = held_states.model_state(self)
                self.kvtxn_undo.callback(tell_metadata(state, self))
            if watch.transfers is not None:
                own = connectors.of_runner(self)
                self.kvtxn_undo.callback(mix_in(own, TellingConnector, kvtxn_runner=self))
        return watch

    def update_requests(self, scheduler_output: Any) -> None:
        """Tell the ledger which requests begin and end, and which blocks each request gets."""
        watch = self.kvtxn_audit
        if watch is not None and watch.transfers is not None:
            watch.transfers.tell(partial(_leave_v2, self, scheduler_output, watch.transfers))
        super().update_requests(scheduler_output)  # type: ignore[misc]
        self.kvtxn_tell(partial(_change_v2, self, scheduler_output))

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; if it fails, tell the ledger, which was told of its rows before."""
        if self.kvtxn_audit is not None:
            self.kvtxn_audit.under_way = None  # the step before is over
        try:
            return super().execute_model(*args, **kwargs)
        except BaseException:
            self.kvtxn_tell(take_back)
            raise

    def prepare_attn(self, input_batch: Any) -> Any:
        """Tell the ledger which rows the forward writes and reads, if nothing else is awaited."""
        prepared = super().prepare_attn(input_batch)  # type: ignore[misc]
        self.kvtxn_prepared = input_batch, prepared
        if not self.kvtxn_waits:
            self.kvtxn_step_is_ready()
        return prepared

    def kvtxn_step_is_ready(self) -> None:
        """Tell the ledger which rows and states the step's forward has."""
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
        if watch is not None and audited_v2.samples(self):
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
    watch.step(partial(_read_v2, runner, watch, batch, prepared), _unknown)


def _read_v2(
    runner: AuditedGpuRunnerV2, watch: Watch, batch: Foreign, prepared: Foreign
) -> tuple[Rows, States | None]:
    """Read the rows of the step that is about to run, and its states if any are watched."""
    rows = runner.kvtxn_reader.rows(batch, prepared)
    if not watch.states:
        return rows, None
    total = audited_v2.num_rows(batch)
    return rows, runner.kvtxn_state_reader.read(runner.kvtxn_metadata, rows, total)


def _sampled_v2(runner: AuditedGpuRunnerV2, ids: Tensor, num_sampled: Tensor, watch: Watch) -> None:
    """Tell a watch what was sampled."""
    watch.sampled(num_sampled, ids)
    leave(runner, watch)


def _unknown(name: str) -> Any:
    """Refuse to describe a request that the ledger has forgotten; it forgets none that runs.

    Raises:
        LookupError: always.
    """
    raise LookupError(f"the ledger was not told of request {name!r}")
