"""The ledger of vLLM's V1 model runner on a CPU: tells a watch what happens in a step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from torch import Tensor

from ...serving.parts import Part
from ..internals import audited, audited_cpu, audited_states
from ..internals.protocols.engine import SchedulerOutput
from ..internals.protocols.runners import Prepared, SamplerOutput
from ..seam.runner_cpu_v1 import CpuRunnerV1
from .runner import end_step, fail_step, join_stages, open_watch, take_back
from .watch import Watch


class CpuLedger(Part):
    """Tells the watch which rows and states a forward writes and reads, and what became of drafts.

    The watch is the runner's ``kvtxn_audit``; a self-test takes it away for a while.

    Args:
        runner: the hooked runner.
    """

    def __init__(self, runner: CpuRunnerV1) -> None:
        self._runner = runner
        self._reader: audited_cpu.StepReader
        self._samples: audited_cpu.SampledReader
        #: The watch was told of a forward that has not ended.
        self._in_forward = False
        #: The rows with logits of the forward that is sampled next; None if it is not watched.
        self._outputs: Tensor | None = None
        #: By group, the blocks whose states windows write once it is known which drafts stay.
        self._leaves: Mapping[str, Tensor] = MappingProxyType({})

    def caches_dropped(self) -> None:
        """Close the ledger over the caches that go."""
        self._runner.kvtxn_audit = None

    def caches_made(self) -> None:
        """Open a ledger over new caches, or log why there is none."""
        runner = self._runner
        watch = open_watch(runner)
        if watch is not None:
            given = watch.ledger.input
            self._reader = audited_cpu.StepReader(runner, watch.groups, given)
            self._samples = audited_cpu.SampledReader(runner, given)
        runner.kvtxn_audit = join_stages(runner, watch)

    def step_begins(self) -> None:
        """Forget a step that was dropped half-way."""
        self._in_forward = False

    def requests_changed(self, scheduled: SchedulerOutput) -> None:
        """Tell which requests begin and end, and which blocks each request gets."""
        runner = self._runner
        runner.kvtxn_tell(lambda watch: watch.change(audited.changes(runner, scheduled)))

    def forward_begins(self, prepared: Prepared | None, inputs: Mapping[str, object]) -> None:
        """Tell which rows and states the forward writes and reads; nothing of a warm-up."""
        self._outputs = None
        if prepared is not None:
            self._outputs = audited_cpu.rows_with_logits(prepared)
            self._in_forward = True
            self._runner.kvtxn_tell(partial(self._tell_forward, prepared, inputs))

    def forward_ended(self) -> None:
        """Note that the rows of the forward are there."""
        self._in_forward = False

    def failed(self, error: BaseException) -> None:
        """Take a forward that raised back: nobody knows which of its rows are there."""
        if self._in_forward:
            self._in_forward = False
            self._runner.kvtxn_tell(take_back)

    def sampling_begins(self, logits: Tensor | None) -> None:
        """Look for a NaN in what came out, if bytes are compared."""
        rows, watch = self._outputs, self._runner.kvtxn_audit
        looks = watch is not None and watch.scrub is not None
        if rows is not None and logits is not None and looks:
            self._runner.kvtxn_tell(lambda watch: watch.came_out(logits, rows))

    def sampled(self, output: SamplerOutput) -> None:
        """Tell which drafts were accepted."""
        rows, self._outputs = self._outputs, None
        if rows is not None:
            self._runner.kvtxn_tell(partial(self._tell_sampled, output))

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

    def _tell_forward(self, prepared: Prepared, inputs: Mapping[str, object], watch: Watch) -> None:
        """Tell a watch which rows and states the next forward writes and reads."""
        runner = self._runner
        rows = self._reader.rows(prepared, *audited_cpu.ids_and_positions(inputs))
        states, self._leaves = None, {}
        if watch.states and audited_states.has_single_states(runner):
            states = audited_states.single_states(runner, list(watch.states), rows)
            self._leaves = {} if rows.drafts is None else states.leaves
        elif watch.states:
            assert rows.first is not None  # on a CPU the host knows it
            states = audited_states.states(runner, watch.states, rows.starts, rows.first)
        watch.forward(rows, partial(audited.returning, runner), states)

    def _tell_sampled(self, output: SamplerOutput, watch: Watch) -> None:
        """Tell a watch what was sampled, and which states windows write after that."""
        watch.sampled(*self._samples.of_step(output, watch.rows))
        if self._leaves and watch.under_way is not None:
            watch.ledger.leave(watch.under_way.lines, self._leaves)
