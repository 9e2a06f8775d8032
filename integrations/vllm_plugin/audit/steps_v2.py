"""The steps of vLLM's V2 model runner as the ledger reads them.

A step can be read once slots and tables are in place; if states are watched, once their metadata
are made, too; if a connector brings rows, once it has begun to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ...serving.ledger.transfers import TransferWatch
from ...serving.ledger.watch import Watch
from ...serving.step import Arrival, PlannedStep, Rows, States
from ..internals import Foreign, audited, audited_states, audited_steps, connectors, held_states
from ..internals.batches import PlannedV2
from ..internals.engine_protocols import SchedulerOutput
from ..internals.hooks import follow, mix_in
from ..seam.hooked_runner import HookedRunnerV2
from .runner_steps import RunnerSteps
from .watch_opening import join_stages, new_state_reader, open_device_watch
from .watched_connectors import WatchedConnectorV2


class StepsV2(RunnerSteps[HookedRunnerV2]):
    """The steps of a V2 runner, read out of its buffers.

    Attributes:
        rows: reads the rows of the runner's steps.
    """

    rows: audited_steps.StepReaderV2
    _states: audited_states.DeviceStateReader | None = None
    #: The step's attention metadata, once they are made, if states are watched.
    _metadata: Foreign = None

    def open(self, is_ready: Callable[[], None]) -> Watch | None:
        """Open a ledger over new caches; if that is impossible, log why and return None."""
        runner = self._runner
        runner.kvtxn_requests, self._metadata, self.ready = {}, None, "planned"
        # With a connector, the ledger remembers requests that ended until it needs their lines.
        lines = audited.lines(runner) if connectors.connector() is None else None
        watch = open_device_watch(runner, audited.lacking(runner), lines, WatchedConnectorV2)
        if watch is not None:
            self.rows = audited_steps.StepReaderV2(runner, watch.groups, watch.ledger.input)
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
        """Let the step be read, and forget its metadata."""
        is_ready()
        self._metadata = None

    def _follow_metadata(self, is_ready: Callable[[], None]) -> Callable[[], None]:
        """Let vLLM's ``model_state`` hand over the attention metadata of each step.

        The step is ready then, unless a connector brings rows. Windows that hold states may have
        put themselves around the same method; they see the metadata first.

        Returns:
            A function that undoes it.
        """

        def prepared(metadata: Foreign) -> None:
            self._metadata = metadata
            watch = self.watch
            if watch is not None and watch.transfers is None:
                is_ready()

        return follow(held_states.model_state(self._runner), "prepare_attn", prepared)

    def begin(self) -> None:
        """Note which blocks a connector takes before the step hands them to others."""
        watch = self.watch
        if watch is not None and watch.transfers is not None:
            scheduled = self._runner.kvtxn_scheduled
            watch.transfers.tell(partial(self._note_leaving, scheduled, watch.transfers))

    def _note_leaving(self, scheduled: SchedulerOutput, transfers: TransferWatch) -> None:
        transfers.flush(connectors.metadata_of(scheduled))
        audited.note_requests(self._runner.kvtxn_requests, scheduled)

    def read(self, step: PlannedStep, inputs: Mapping[str, object]) -> tuple[Rows, States | None]:
        """Read the rows of the step that is about to run, and its states if any are watched."""
        assert isinstance(step, PlannedV2)
        rows = self.rows.rows(step.batch, step.prepared)
        if self._states is None:
            return rows, None
        return rows, self._states.read(self._metadata, rows, audited_steps.num_rows_v2(step.batch))

    def returning(self, name: str) -> Arrival:
        """Refuse to describe a request that the ledger has forgotten; it forgets none that runs.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"the ledger was not told of request {name!r}")

    def sampled(self, ids: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return how many tokens each request has sampled, and which.

        Pipeline stages before the last are told of an earlier step, and have no drafts here.
        """
        assert counts is not None  # this runner has them
        return (counts, ids) if audited.is_last_stage(self._runner) else None


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
