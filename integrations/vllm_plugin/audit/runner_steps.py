"""The steps of vLLM's model runners as the ledger reads them, see ``LedgerReader``.

A V1 runner's step is read when its forward begins. A V2 runner's step can be read once slots and
tables are in place; if states are watched, once their metadata are made, too; if a connector brings
rows, once it has begun to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

from ...serving.ledger.rank_agreement import Wrong
from ...serving.ledger.watch import Watch
from ...serving.step import Arrival, PlannedStep, Rows, States
from ..runners.hooked_runner import HookedRunner, HookedRunnerV1, HookedRunnerV2
from ..seam import (
    Foreign,
    aligned_states,
    audited_requests,
    audited_states,
    audited_steps_cpu,
    audited_steps_gpu,
    connectors,
    containment,
    held_states,
)
from ..seam.batches import PlannedV1, PlannedV2
from ..seam.hooks import follow, mix_in
from .watch_opening import join_stages, new_state_reader, open_watch
from .watched_connectors import WatchedConnectorV2

HookedRunnerT = TypeVar("HookedRunnerT", bound=HookedRunner)


class RunnerSteps(Generic[HookedRunnerT]):
    """The steps of a hooked runner; its watch is the runner's ``kvtxn_audit``."""

    ready: Literal["planned", "forward", "later"] = "forward"

    def __init__(self, runner: HookedRunnerT) -> None:
        self._runner = runner

    @property
    def watch(self) -> Watch | None:
        """The watch over the present caches; None without an audit, and during a self-test."""
        return self._runner.kvtxn_audit

    @watch.setter
    def watch(self, watch: Watch | None) -> None:
        self._runner.kvtxn_audit = watch

    def begin(self) -> None:
        """Before the step changes anything, note its requests' blocks, if there is a connector."""
        self._note_blocks()

    def _note_blocks(self) -> None:
        """Bring the runner's record of its requests' blocks up to date, if there is a connector.

        Blocks that were stored are read before the runner overwrites them. An error ends the audit
        and is not raised.
        """
        watch = self.watch
        if watch is not None and watch.transfers is not None:
            runner, transfers = self._runner, watch.transfers
            told = runner.kvtxn_scheduled
            transfers.tell(partial(connectors.hear, runner.kvtxn_requests, told))
            transfers.tell(lambda: transfers.before_overwritten(connectors.overwritten(told)))

    def mark(self, output: object, wrong: Wrong) -> None:
        """Add wrong reads to the output of their step, for vLLM's scheduler to contain.

        Nothing is added to an output without sampled ids.
        """
        containment.mark(output, wrong)

    def _note_scheduled(self, watch: Watch) -> None:
        """Tell a connector's transfers, if any, how many rows of each request the step has."""
        if watch.transfers is not None:
            scheduled = containment.scheduled(self._runner.kvtxn_scheduled)
            watch.transfers.scheduled(scheduled)


class StepsV1(RunnerSteps[HookedRunnerV1]):
    """The steps of a V1 runner, which hands the logprobs of a prompt out once."""

    def begin(self) -> None:
        """Note the requests' blocks; let logprobs of prompts that were contained come again."""
        super().begin()
        runner, watch = self._runner, self.watch
        if watch is not None and watch.on_violation == "contain":
            told = runner.kvtxn_scheduled
            watch.hear(lambda _: containment.repeat_prompt_logprobs(runner, told))


class CpuSteps(StepsV1):
    """The steps of a V1 runner on a CPU, where the host knows all that the ledger asks for."""

    _reader: audited_steps_cpu.StepReader
    _samples: audited_steps_gpu.SampledReader
    #: The drafts of each request in the last step.
    _drafts: Tensor | None = None

    def open(self, is_ready: Callable[[], None]) -> Watch | None:
        """Open a ledger over new caches; if that is impossible, log why and return None.

        ``is_ready`` is not called: a step is read when its forward begins.

        Raises:
            RequiredError: it is impossible, and the user requires the audit.
        """
        watch = open_watch(self._runner)
        if watch is not None:
            given = watch.ledger.input
            self._reader = audited_steps_cpu.StepReader(self._runner, watch.groups, given)
            self._samples = audited_steps_gpu.SampledReader(self._runner, given)
        return join_stages(self._runner, watch)

    def read(self, step: PlannedStep, inputs: Mapping[str, object]) -> tuple[Rows, States | None]:
        """Return the rows and states of the step that is about to run; None for no states.

        Args:
            step: the step.
            inputs: the arguments of the model's call, whose ids and positions are read.
        """
        runner, watch = self._runner, self.watch
        assert isinstance(step, PlannedV1)
        assert watch is not None  # it asks
        rows = self._reader.rows(step.prepared, *audited_steps_cpu.ids_and_positions(inputs))
        self._drafts = rows.drafts
        if not watch.states:
            return rows, None
        if audited_states.has_single_states(runner):
            return rows, audited_states.single_states(runner, list(watch.states), rows)
        assert rows.first is not None  # on a CPU the host knows it
        return rows, audited_states.states(runner, watch.states, rows.starts, rows.first)

    def returning(self, name: str) -> Arrival:
        """Describe, by the runner, a request that goes on and that the ledger has forgotten."""
        return audited_requests.returning(self._runner, name)

    def sampled(self, ids: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the number of tokens that each request has sampled, and their ids; -1 for none.

        ``counts`` is not used: no request gets more than its drafts in the step and one.
        """
        return self._samples.sampled(ids, self._drafts)


class DeviceSteps(StepsV1):
    """The steps of a V1 runner on a GPU, read out of its buffers."""

    _reader: audited_steps_gpu.StepReaderV1
    _samples: audited_steps_gpu.SampledReader
    _states: audited_states.DeviceStateReader | None = None
    #: Knows the states that the runner copies between blocks on the host's word; None where the
    #: device decides, or nothing is copied.
    _copies: aligned_states.HostCopies | None = None

    def open(self, is_ready: Callable[[], None]) -> Watch | None:
        """Open a ledger over new caches; if a rank cannot have one, log why and return None.

        ``is_ready`` is not called: a step is read when its forward begins.

        Raises:
            RequiredError: it is impossible, and the user requires the audit.
        """
        runner, self._copies = self._runner, None
        watch = open_watch(runner, on_device=True)
        if watch is not None:
            given = watch.ledger.input
            self._reader = audited_steps_gpu.StepReaderV1(runner, watch.groups, given)
            self._samples = audited_steps_gpu.SampledReader(runner, given)
            self._states = new_state_reader(runner, watch)
            if watch.kept_states and aligned_states.lacks_context(runner):
                self._copies = aligned_states.HostCopies(runner, watch.kept_states)
        return join_stages(runner, watch)

    def begin(self) -> None:
        """Do the same, and note the columns of states before vLLM moves them.

        The latter only where the host copies states, and once the audit has begun.
        """
        super().begin()
        copies, watch, scheduled = self._copies, self.watch, self._runner.kvtxn_scheduled
        if copies is not None and watch is not None:
            watch.hear(lambda _: copies.begin(scheduled))

    def read(self, step: PlannedStep, inputs: Mapping[str, object]) -> tuple[Rows, States | None]:
        """Return the rows and states of the step that is about to run; None for no states.

        The copies of states that the host knows go into the ledger first. ``inputs`` is not used.
        """
        watch = self.watch
        assert isinstance(step, PlannedV1)
        assert watch is not None  # it asks
        if self._copies is not None:
            for group, (source, target) in self._copies.take().items():
                if source:
                    watch.ledger.copy(group, source, target)
        self._note_scheduled(watch)
        rows = self._reader.rows(step.prepared)
        if self._states is None:
            return rows, None
        metadata, total = (
            audited_states.forward_metadata(),
            audited_steps_gpu.num_rows_v1(self._runner),
        )
        return rows, self._states.read(metadata, rows, total)

    def returning(self, name: str) -> Arrival:
        """Describe, by the runner, a request that goes on and that the ledger has forgotten."""
        return audited_requests.returning(self._runner, name)

    def sampled(self, ids: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the number of tokens that each request has sampled, and their ids; -1 for none.

        ``counts`` is not used.
        """
        return self._samples.sampled(ids)


class StepsV2(RunnerSteps[HookedRunnerV2]):
    """The steps of a V2 runner, read out of its buffers."""

    rows: audited_steps_gpu.StepReaderV2
    _states: audited_states.DeviceStateReader | None = None
    #: The step's attention metadata, once they are made, if states are watched.
    _metadata: Foreign = None

    def open(self, is_ready: Callable[[], None]) -> Watch | None:
        """Open a ledger over new caches; if a rank cannot have one, log why and return None.

        Args:
            is_ready: called in each step once its states and transfers can be read, too.

        Raises:
            RequiredError: it is impossible, and the user requires the audit.
        """
        runner = self._runner
        self._metadata, self.ready = None, "planned"
        # With a connector, the ledger remembers requests that ended until it needs their lines.
        lines = audited_requests.lines(runner) if connectors.connector() is None else None
        lacking = audited_requests.lacking(runner)
        watch = open_watch(
            runner, on_device=True, lacking=lacking, lines=lines, mixin=WatchedConnectorV2
        )
        if watch is not None:
            self.rows = audited_steps_gpu.StepReaderV2(runner, watch.groups, watch.ledger.input)
            self._states = new_state_reader(runner, watch)
            is_ready = partial(self._is_ready, is_ready)
            if self._states is not None:
                self.ready = "later"
                runner.kvtxn_undo.callback(self._follow_metadata(is_ready))
            if watch.transfers is not None:
                self.ready = "later"
                own = connectors.of_runner(runner)
                runner.kvtxn_undo.callback(mix_in(own, TellingConnector, kvtxn_then=is_ready))
        return join_stages(runner, watch)

    def _is_ready(self, is_ready: Callable[[], None]) -> None:
        """Call ``is_ready``, which reads the step, and forget the step's metadata."""
        is_ready()
        self._metadata = None

    def _follow_metadata(self, is_ready: Callable[[], None]) -> Callable[[], None]:
        """Keep the attention metadata that vLLM makes in each step; return the undo.

        The step is ready then, unless a connector brings rows. Windows that hold states may have
        put themselves around the same method; they see the metadata first.
        """

        def prepared(metadata: Foreign) -> None:
            self._metadata = metadata
            watch = self.watch
            if watch is not None and watch.transfers is None:
                is_ready()

        return follow(held_states.model_state(self._runner), "prepare_attn", prepared)

    def begin(self) -> None:
        """Note which blocks a connector takes before the step hands them to others.

        Then note the requests' blocks; nothing without a connector.
        """
        watch = self.watch
        if watch is not None and watch.transfers is not None:
            leaving = connectors.metadata_of(self._runner.kvtxn_scheduled)
            watch.transfers.tell(partial(watch.transfers.flush, leaving))
        self._note_blocks()

    def read(self, step: PlannedStep, inputs: Mapping[str, object]) -> tuple[Rows, States | None]:
        """Return the rows and states of the step that is about to run; None for no states.

        A connector's transfers hear of the step's rows first. ``inputs`` is not used.
        """
        assert isinstance(step, PlannedV2)
        assert self.watch is not None  # it asks
        self._note_scheduled(self.watch)
        rows = self.rows.rows(step.batch, step.prepared)
        if self._states is None:
            return rows, None
        return rows, self._states.read(
            self._metadata, rows, audited_steps_gpu.num_rows_v2(step.batch)
        )

    def returning(self, name: str) -> Arrival:
        """Refuse to describe a request that the ledger has forgotten; it forgets none that runs.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"the ledger was not told of request {name!r}")

    def sampled(self, ids: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return each request's number of sampled tokens, ``counts``, and the tokens, ``ids``.

        None on pipeline stages before the last: they are told of an earlier step, and have no
        drafts here.
        """
        assert counts is not None  # this runner has them
        return (counts, ids) if audited_requests.is_last_stage(self._runner) else None


class TellingConnector:
    """A mixin of the object by which the V2 runner calls its connector.

    The rows that a connector brings within a step are in their blocks once this has begun, so the
    audit compares what the step reads only then.
    """

    kvtxn_then: Callable[[], None]

    def pre_forward(self, *args: Any, **kwargs: Any) -> None:
        """Let the connector begin the step's transfers, then say that the step is ready."""
        super().pre_forward(*args, **kwargs)  # type: ignore[misc]
        self.kvtxn_then()
