"""The steps of vLLM's V1 model runner as the ledger reads them, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ...serving.ledger.watch import Watch
from ...serving.step import Arrival, PlannedStep, Rows, States
from ..internals import aligned_states, audited, audited_cpu, audited_states, audited_steps
from ..internals.batches import PlannedV1
from ..seam.hooked_runner import HookedRunnerV1
from .runner_steps import RunnerSteps
from .watch_opening import join_stages, new_state_reader, open_device_watch, open_watch


class CpuSteps(RunnerSteps[HookedRunnerV1]):
    """The steps of a V1 runner on a CPU, where the host knows all that the ledger asks for."""

    _reader: audited_cpu.StepReader
    _samples: audited_steps.SampledReader
    #: The drafts of each request in the last step.
    _drafts: Tensor | None = None

    def open(self, is_ready: Callable[[], None]) -> Watch | None:
        """Open a ledger over new caches; if that is impossible, log why and return None."""
        watch = open_watch(self._runner)
        if watch is not None:
            given = watch.ledger.input
            self._reader = audited_cpu.StepReader(self._runner, watch.groups, given)
            self._samples = audited_steps.SampledReader(self._runner, given)
        return join_stages(self._runner, watch)

    def read(self, step: PlannedStep, inputs: Mapping[str, object]) -> tuple[Rows, States | None]:
        """Read the rows of the step that is about to run, and its states if any are watched."""
        runner, watch = self._runner, self.watch
        assert isinstance(step, PlannedV1)
        assert watch is not None  # it asks
        rows = self._reader.rows(step.prepared, *audited_cpu.ids_and_positions(inputs))
        self._drafts = rows.drafts
        if not watch.states:
            return rows, None
        if audited_states.has_single_states(runner):
            return rows, audited_states.single_states(runner, list(watch.states), rows)
        assert rows.first is not None  # on a CPU the host knows it
        return rows, audited_states.states(runner, watch.states, rows.starts, rows.first)

    def returning(self, name: str) -> Arrival:
        """Describe a request that goes on and that the ledger has forgotten."""
        return audited.returning(self._runner, name)

    def sampled(self, ids: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return how many tokens each request has sampled, and which."""
        return self._samples.sampled(ids, self._drafts)


class DeviceSteps(RunnerSteps[HookedRunnerV1]):
    """The steps of a V1 runner on a GPU, read out of its buffers."""

    _reader: audited_steps.StepReaderV1
    _samples: audited_steps.SampledReader
    _states: audited_states.DeviceStateReader | None = None
    #: Knows the states that the runner copies between blocks on the host's word; None where the
    #: device decides, or nothing is copied.
    _copies: aligned_states.HostCopies | None = None

    def open(self, is_ready: Callable[[], None]) -> Watch | None:
        """Open a ledger over new caches; if that is impossible, log why and return None."""
        runner, self._copies = self._runner, None
        watch = open_device_watch(runner, None, None)
        if watch is not None:
            given = watch.ledger.input
            self._reader = audited_steps.StepReaderV1(runner, watch.groups, given)
            self._samples = audited_steps.SampledReader(runner, given)
            self._states = new_state_reader(runner, watch)
            if watch.kept_states and aligned_states.lacks_context(runner):
                self._copies = aligned_states.HostCopies(runner, watch.kept_states)
        return join_stages(runner, watch)

    def begin(self) -> None:
        """Note the columns of states before vLLM moves them."""
        copies, watch, scheduled = self._copies, self.watch, self._runner.kvtxn_scheduled
        if copies is not None and watch is not None:
            watch.hear(lambda _: copies.begin(scheduled))

    def read(self, step: PlannedStep, inputs: Mapping[str, object]) -> tuple[Rows, States | None]:
        """Read the rows of the step that is about to run, and its states if any are watched."""
        watch = self.watch
        assert isinstance(step, PlannedV1)
        assert watch is not None  # it asks
        if self._copies is not None:
            for group, (source, target) in self._copies.take().items():
                if source:
                    watch.ledger.copy(group, source, target)
        rows = self._reader.rows(step.prepared)
        if self._states is None:
            return rows, None
        metadata, total = audited_states.forward_metadata(), audited_steps.num_rows_v1(self._runner)
        return rows, self._states.read(metadata, rows, total)

    def returning(self, name: str) -> Arrival:
        """Describe a request that goes on and that the ledger has forgotten."""
        return audited.returning(self._runner, name)

    def sampled(self, ids: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return how many tokens each request has sampled, and which."""
        return self._samples.sampled(ids)
