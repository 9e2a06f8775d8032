"""vLLM's V2 and V1 model runners on a GPU, watched by a ledger.

The ledger's passes are launched beside the forward: once slots and tables are in place, before the
forward; and once the sampler has decided, before the drafter. Where the V2 runner replays the
forward as one graph, the graph begins with the first of them. Nothing waits for the device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..attach import hook_runner, keep_for_graphs, mix_in
from ..begun_graphs import NotesMode
from ..internals import (
    Foreign,
    audited,
    audited_states,
    audited_v1,
    audited_v2,
    carried_states,
    connectors,
    held_states,
    whole_graphs,
    workers,
)
from ..internals.audited import Rows
from ..internals.audited_states import States
from ..policy.engine import EngineFacts
from ..settings import PluginSettings
from .device_watch import DeviceWatch
from .gpu_telling import TellingConnector, tell_metadata
from .memory import rest
from .next_forward import NextForward
from .opening import open_device_watch
from .runner import AuditedRunner, AuditedRunnerV1, take_back
from .transfers import (
    TransferWatch,
    WatchedConnectorV2,
)
from .watch import Watch
from .watching_graphs import let_graphs_watch


class AuditedGpuRunnerV2(NotesMode, AuditedRunner):
    """A mixin of the V2 runner: each method runs vLLM's own code and tells the ledger of it.

    Attributes:
        kvtxn_reader: reads the runner's steps.
        kvtxn_requests: the runner's requests, which a connector's metadata do not name; kept with
            a connector alone.
        kvtxn_prepared: the step that the ledger was not told of yet; None between steps.
        kvtxn_metadata: the step's attention metadata, once they are made, if states are watched.
        kvtxn_waits: the ledger is told later in a step than when tables and slots are in place.
        kvtxn_state_reader: reads the states of the runner's steps.
    """

    kvtxn_audit: DeviceWatch | None
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
            self.kvtxn_reader = audited_v2.StepReader(self, watch.groups, watch.ledger.passes)
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

    def kvtxn_let_graphs_watch(self, watch: DeviceWatch) -> None:
        """Let the graphs of whole forwards write and check the steps, if they can."""
        undo = let_graphs_watch(self, watch, self.kvtxn_reader)
        if undo is not None:
            self.kvtxn_reader.in_graphs = True
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
        self.kvtxn_tell(lambda watch: watch.change(audited_v2.changes(self, scheduler_output)))

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; if it fails, tell the ledger, which was told of its rows before."""
        if self.kvtxn_audit is not None:
            self.kvtxn_audit.under_way = None  # the step before is over
        try:
            return super().execute_model(*args, **kwargs)  # type: ignore[misc]
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
        """Tell the ledger which rows and states the forward writes and reads."""
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
        if self.kvtxn_audit is not None and audited_v2.samples(self):
            self.kvtxn_tell(partial(_sampled_v2, self, sampled_tokens, num_sampled))


def _leave_v2(
    runner: AuditedGpuRunnerV2, scheduler_output: Foreign, transfers: TransferWatch
) -> None:
    """Note the blocks that a connector takes before a step hands them to others."""
    transfers.flush(connectors.metadata_of(scheduler_output))
    audited_v2.note_requests(runner.kvtxn_requests, scheduler_output)


def _step_v2(runner: AuditedGpuRunnerV2, batch: Foreign, prepared: Foreign, watch: Watch) -> None:
    """Tell a watch of the step that is about to run."""
    assert isinstance(watch, DeviceWatch)
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
        self, runner: AuditedGpuRunnerV2, watch: DeviceWatch, batch: Foreign, prepared: Foreign
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


def new_state_reader(runner: Any, watch: DeviceWatch) -> audited_states.DeviceStateReader:
    """Make a reader of the states that a watch compares."""
    return audited_states.DeviceStateReader(runner, watch.states, watch.ledger.device)


def _sampled_v2(runner: AuditedGpuRunnerV2, ids: Tensor, num_sampled: Tensor, watch: Watch) -> None:
    """Tell a watch what was sampled."""
    assert isinstance(watch, DeviceWatch)
    watch.sampled_on_device(num_sampled, ids)
    _leave(runner, watch)


def _leave(runner: AuditedGpuRunnerV1 | AuditedGpuRunnerV2, watch: DeviceWatch) -> None:
    """Tell a watch which states windows have committed."""
    last = runner.kvtxn_state_reader.take_last() if watch.states else None
    if last is None or not last.leaves or watch.under_way is None:
        return
    lines = watch.under_way.lines
    watch.ledger.leave(lines, last.leaves)
    if last.ends:
        watch.ledger.leave(lines, last.ends, last.end_at)


def _unknown(name: str) -> Any:
    """Refuse to describe a request that the ledger has forgotten; it forgets none that runs.

    Raises:
        LookupError: always.
    """
    raise LookupError(f"the ledger was not told of request {name!r}")


class AuditedGpuRunnerV1(AuditedRunnerV1):
    """A mixin of the V1 runner on a GPU.

    Attributes:
        kvtxn_step_reader: reads the runner's steps.
        kvtxn_sampled_reader: reads what the runner samples.
        kvtxn_state_reader: reads the states of the runner's steps.
        kvtxn_copies: knows the states that the runner copies between blocks on the host's word;
            None where the device decides, or nothing is copied.
    """

    kvtxn_audit: DeviceWatch | None
    kvtxn_step_reader: audited_v1.StepReader
    kvtxn_sampled_reader: audited_v1.SampledReader
    kvtxn_state_reader: audited_states.DeviceStateReader
    kvtxn_copies: carried_states.HostCopies | None = None

    def kvtxn_open_watch(self) -> Watch | None:
        """Open a ledger over new caches; if that is impossible, log why and return None."""
        self.kvtxn_copies = None
        watch = open_device_watch(self, None, None)
        if watch is not None:
            passes = watch.ledger.passes
            self.kvtxn_step_reader = audited_v1.StepReader(self, watch.groups, passes)
            self.kvtxn_sampled_reader = audited_v1.SampledReader(self, passes)
            if watch.states:
                self.kvtxn_state_reader = new_state_reader(self, watch)
            if watch.kept_states and carried_states.lacks_context(self):
                self.kvtxn_copies = carried_states.HostCopies(self, watch.kept_states)
        return watch

    def _update_states(self, scheduler_output: Any) -> Any:
        """Tell the ledger what changes, and note the columns of states before vLLM moves them."""
        if self.kvtxn_copies is not None:
            self.kvtxn_copies.begin(scheduler_output)
        return super()._update_states(scheduler_output)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Tell the ledger which rows the forward writes and reads, then run the forward."""
        prepared = self.kvtxn_prepared
        try:
            if prepared is not None:
                self.kvtxn_tell(partial(_step_v1, self, prepared))
            self.kvtxn_prepared = None
            output = super()._model_forward(*args, **kwargs)
        except BaseException:
            if prepared is not None:
                self.kvtxn_tell(take_back)
            raise
        self.kvtxn_outputs = None if prepared is None else prepared[0]
        return output

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """Look for a NaN that came out, and tell the ledger which drafts were accepted."""
        known = self.kvtxn_take_outputs(logits) is not None
        output = super()._sample(logits, spec_decode_metadata)
        if known:
            self.kvtxn_tell(partial(_sampled_v1, self, output))
        return output


def _step_v1(runner: AuditedGpuRunnerV1, prepared: Foreign, watch: Watch) -> None:
    """Tell a watch of the step that ``_prepare_inputs`` has prepared."""
    assert isinstance(watch, DeviceWatch)
    if runner.kvtxn_copies is not None:
        for group, (source, target) in runner.kvtxn_copies.take().items():
            if source:
                watch.ledger.copy(group, source, target)
    watch.step(_ForwardV1(runner, watch, prepared), partial(audited.returning, runner))


class _ForwardV1(NextForward):
    """A step of the V1 runner that is about to run.

    Args:
        runner: the runner.
        watch: its watch.
        prepared: the result of ``_prepare_inputs``.
    """

    def __init__(self, runner: AuditedGpuRunnerV1, watch: DeviceWatch, prepared: Foreign) -> None:
        self._runner, self._watch, self._prepared = runner, watch, prepared

    def read(self) -> tuple[Rows, States | None]:
        """Read the batch's rows, and its states if any are watched."""
        runner = self._runner
        rows = runner.kvtxn_step_reader.rows(self._prepared)
        if not self._watch.states:
            return rows, None
        metadata, total = audited_states.forward_metadata(), audited_v1.num_rows(runner)
        return rows, runner.kvtxn_state_reader.read(metadata, rows, total)


def _sampled_v1(runner: AuditedGpuRunnerV1, output: Foreign, watch: Watch) -> None:
    """Tell a watch what was sampled."""
    assert isinstance(watch, DeviceWatch)
    watch.sampled_on_device(*runner.kvtxn_sampled_reader.sampled(output))
    _leave(runner, watch)


# -- attaching ----------------------------------------------------------------------------------


def mixins_and_methods(
    settings: PluginSettings, runner: str
) -> tuple[tuple[type, ...], dict[str, tuple[str, ...]]]:
    """Return the mixins of the audit that the user asks for, and the methods that they override.

    Args:
        settings: the user's.
        runner: ``"v1"`` or ``"v2"``.
    """
    if settings.audit == "off":
        return (), {}
    if runner == "v2":
        return (AuditedGpuRunnerV2,), dict(audited_v2.AUDITED_METHODS)
    return (AuditedGpuRunnerV1,), dict(audited.AUDITED_METHODS)


def attach(wrapper: Foreign, settings: PluginSettings, rank: int, facts: EngineFacts) -> None:
    """Attach the audit to a worker's runner without windows, before its KV cache exists."""
    runner = workers.runner_of(wrapper)
    mixins, methods = mixins_and_methods(settings, facts.runner)
    hook_runner(runner, settings, rank, methods, *mixins)
    reserve_memory(wrapper, settings)


def reserve_memory(wrapper: Foreign, settings: PluginSettings) -> None:
    """Let vLLM size the KV cache without the memory of the ledger, if there is to be one."""
    runner = workers.runner_of(wrapper)
    if settings.audit != "off" and hasattr(runner, "kvtxn_unhook"):
        undo = workers.less_cache_memory(wrapper, partial(rest, runner, settings))
        runner.kvtxn_unhook.callback(undo)
