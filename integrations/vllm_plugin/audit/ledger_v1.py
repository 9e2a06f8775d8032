"""The ledger of vLLM's V1 model runner: tells a watch what happens in a step.

On a GPU the ledger's passes are launched beside the forward: once slots and tables are in place,
before the forward; and once the sampler has decided, before the drafter. Nothing waits for the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from ...serving.ledger.watch import Watch
from ...serving.parts import Part
from ...serving.step import Changes, Outputs, PlannedStep, Rows, States
from ..internals import aligned_states, audited, audited_cpu, audited_states, audited_steps
from ..internals.batches import PlannedV1
from ..seam.hooked_runner import HookedRunnerV1
from .watch_opening import (
    end_step,
    fail_step,
    join_stages,
    leave,
    new_state_reader,
    open_device_watch,
    open_watch,
)


class StepsV1(Protocol):
    """Reads the steps of a V1 runner, on a CPU or a GPU, and tells a watch of them."""

    def open(self) -> Watch | None:
        """Open a ledger over new caches; if that is impossible, log why and return None."""

    def begin(self) -> None:
        """Read what has to be known before a step changes requests and blocks."""

    def tell_forward(self, step: PlannedStep, inputs: Mapping[str, object], watch: Watch) -> None:
        """Tell a watch which rows and states the next forward writes and reads."""

    def tell_sampled(self, ids: Tensor, watch: Watch) -> None:
        """Tell a watch what was sampled, and which states windows write after that."""


class LedgerV1(Part):
    """Tells the watch which rows and states a forward writes and reads, and what became of drafts.

    The watch is the runner's ``kvtxn_audit``; a self-test takes it away for a while.

    Args:
        runner: the hooked runner.
        steps: its steps, on a CPU or a GPU.
    """

    def __init__(self, runner: HookedRunnerV1, steps: StepsV1) -> None:
        self._runner = runner
        self._steps = steps
        #: The watch was told of a forward that has not ended.
        self._in_forward = False
        #: The rows with logits of the forward that is sampled next; None if it is not watched.
        self._outputs: Tensor | None = None

    def caches_dropped(self) -> None:
        """Close the ledger over the caches that go."""
        self._runner.kvtxn_audit = None

    def caches_made(self) -> None:
        """Open a ledger over new caches, or log why there is none."""
        self._runner.kvtxn_audit = join_stages(self._runner, self._steps.open())

    def step_begins(self) -> None:
        """Forget a step that was dropped half-way."""
        self._in_forward = False
        self._steps.begin()

    def requests_changed(self, changes: Callable[[], Changes]) -> None:
        """Tell which requests begin and end, and which blocks each request gets."""
        self._runner.kvtxn_tell(lambda watch: watch.change(changes()))

    def forward_begins(self, step: PlannedStep | None, inputs: Mapping[str, object]) -> None:
        """Tell which rows and states the forward writes and reads; nothing of a warm-up."""
        self._outputs = None
        if step is not None:
            self._outputs = step.outputs()
            self._in_forward = True
            self._runner.kvtxn_tell(partial(self._steps.tell_forward, step, inputs))

    def forward_ended(self) -> None:
        """Note that the rows of the forward are there."""
        self._in_forward = False

    def failed(self, error: BaseException) -> None:
        """Take a forward that raised back: nobody knows which of its rows are there."""
        if self._in_forward:
            self._in_forward = False
            self._runner.kvtxn_tell(Watch.take_back)

    def sampling_begins(self, outputs: Outputs) -> None:
        """Look for a NaN in what came out, if bytes are compared."""
        rows, watch = self._outputs, self._runner.kvtxn_audit
        if rows is not None and watch is not None and watch.scrub is not None:
            logits, _ = outputs()
            if logits is not None:
                self._runner.kvtxn_tell(lambda watch: watch.came_out(logits, rows))

    def sampled(self, ids: Tensor | None, counts: Tensor | None) -> None:
        """Tell which drafts were accepted."""
        rows, self._outputs = self._outputs, None
        if rows is not None and ids is not None:
            self._runner.kvtxn_tell(partial(self._steps.tell_sampled, ids))

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


class CpuSteps:
    """The steps of a V1 runner on a CPU, where the host knows all that the ledger asks for.

    Args:
        runner: the hooked runner.
    """

    def __init__(self, runner: HookedRunnerV1) -> None:
        self._runner = runner
        self._reader: audited_cpu.StepReader
        self._samples: audited_cpu.SampledReader
        #: By group, the blocks whose states windows write once it is known which drafts stay.
        self._leaves: Mapping[str, Tensor] = MappingProxyType({})

    def open(self) -> Watch | None:
        """Open a ledger over new caches; if that is impossible, log why and return None."""
        watch = open_watch(self._runner)
        if watch is not None:
            given = watch.ledger.input
            self._reader = audited_cpu.StepReader(self._runner, watch.groups, given)
            self._samples = audited_cpu.SampledReader(self._runner, given)
        return watch

    def begin(self) -> None:
        """Do nothing: on a CPU the host announces no move of a state."""

    def tell_forward(self, step: PlannedStep, inputs: Mapping[str, object], watch: Watch) -> None:
        """Tell a watch which rows and states the next forward writes and reads."""
        runner = self._runner
        assert isinstance(step, PlannedV1)
        rows = self._reader.rows(step.prepared, *audited_cpu.ids_and_positions(inputs))
        states, self._leaves = None, {}
        if watch.states and audited_states.has_single_states(runner):
            states = audited_states.single_states(runner, list(watch.states), rows)
            self._leaves = {} if rows.drafts is None else states.leaves
        elif watch.states:
            assert rows.first is not None  # on a CPU the host knows it
            states = audited_states.states(runner, watch.states, rows.starts, rows.first)
        watch.forward(rows, partial(audited.returning, runner), states)

    def tell_sampled(self, ids: Tensor, watch: Watch) -> None:
        """Tell a watch what was sampled, and which states windows write after that."""
        watch.sampled(*self._samples.of_step(ids, watch.rows))
        if self._leaves and watch.under_way is not None:
            watch.ledger.leave(watch.under_way.lines, self._leaves)


class DeviceSteps:
    """The steps of a V1 runner on a GPU, read out of its buffers.

    Args:
        runner: the hooked runner.
    """

    def __init__(self, runner: HookedRunnerV1) -> None:
        self._runner = runner
        self._reader: audited_steps.StepReaderV1
        self._samples: audited_steps.SampledReader
        self._states: audited_states.DeviceStateReader | None = None
        #: Knows the states that the runner copies between blocks on the host's word; None where the
        #: device decides, or nothing is copied.
        self._copies: aligned_states.HostCopies | None = None

    def open(self) -> Watch | None:
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
        return watch

    def begin(self) -> None:
        """Note the columns of states before vLLM moves them."""
        copies, scheduled = self._copies, self._runner.kvtxn_scheduled
        if copies is not None:
            self._runner.kvtxn_tell(lambda watch: copies.begin(scheduled))

    def tell_forward(self, step: PlannedStep, inputs: Mapping[str, object], watch: Watch) -> None:
        """Tell a watch which rows and states the next forward writes and reads."""
        if self._copies is not None:
            for group, (source, target) in self._copies.take().items():
                if source:
                    watch.ledger.copy(group, source, target)
        watch.step(partial(self._read, step), partial(audited.returning, self._runner))

    def _read(self, step: PlannedStep) -> tuple[Rows, States | None]:
        """Read the rows of the step that is about to run, and its states if any are watched."""
        assert isinstance(step, PlannedV1)
        rows = self._reader.rows(step.prepared)
        if self._states is None:
            return rows, None
        metadata, total = audited_states.forward_metadata(), audited_steps.num_rows_v1(self._runner)
        return rows, self._states.read(metadata, rows, total)

    def tell_sampled(self, ids: Tensor, watch: Watch) -> None:
        """Tell a watch what was sampled, and which states windows write after that."""
        watch.sampled(*self._samples.sampled(ids))
        leave(watch, self._states)
