"""vLLM's V1 model runner on a GPU, watched by a ledger; and attaching the audit to either runner.

The ledger's passes are launched beside the forward: once slots and tables are in place, before the
forward; and once the sampler has decided, before the drafter. Nothing waits for the device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..attach import hook_runner
from ..internals import (
    Foreign,
    audited,
    audited_states,
    audited_v1,
    audited_v2,
    carried_states,
    workers,
)
from ..internals.audited import Rows
from ..internals.audited_states import States
from ..internals.protocols.runners import BeforeV1
from ..policy.engine import EngineFacts
from ..settings import PluginSettings
from .device_watch import DeviceWatch
from .gpu_runner_v2 import AuditedGpuRunnerV2
from .left_states import leave, new_state_reader
from .memory import rest
from .next_forward import NextForward
from .opening import open_device_watch
from .runner import AuditedRunner, take_back
from .watch import Watch


class AuditedGpuRunnerV1(AuditedRunner, BeforeV1):
    """A mixin of the V1 runner on a GPU: each method runs vLLM's own code and tells the ledger.

    Attributes:
        kvtxn_prepared: the inputs of the forward that comes next; None for one of vLLM's own,
            such as a warm-up.
        kvtxn_outputs: the rows of the forward that is sampled next which have logits; None for a
            forward that the ledger does not know.
        kvtxn_step_reader: reads the runner's steps.
        kvtxn_sampled_reader: reads what the runner samples.
        kvtxn_state_reader: reads the states of the runner's steps.
        kvtxn_copies: knows the states that the runner copies between blocks on the host's word;
            None where the device decides, or nothing is copied.
    """

    kvtxn_audit: DeviceWatch | None
    kvtxn_prepared: Any = None
    kvtxn_outputs: Tensor | None = None
    kvtxn_step_reader: audited_v1.StepReader
    kvtxn_sampled_reader: audited_v1.SampledReader
    kvtxn_state_reader: audited_states.DeviceStateReader
    kvtxn_copies: carried_states.HostCopies | None = None

    def kvtxn_open_watch(self) -> Watch | None:
        """Open a ledger over new caches; if that is impossible, log why and return None."""
        self.kvtxn_copies = None
        watch = open_device_watch(self, None, None)
        if watch is not None:
            given = watch.ledger.input
            self.kvtxn_step_reader = audited_v1.StepReader(self, watch.groups, given)
            self.kvtxn_sampled_reader = audited_v1.SampledReader(self, given)
            if watch.states:
                self.kvtxn_state_reader = new_state_reader(self, watch)
            if watch.kept_states and carried_states.lacks_context(self):
                self.kvtxn_copies = carried_states.HostCopies(self, watch.kept_states)
        return watch

    def _update_states(self, scheduler_output: Any) -> Any:
        """Tell the ledger what changes, and note the columns of states before vLLM moves them."""
        if self.kvtxn_copies is not None:
            self.kvtxn_copies.begin(scheduler_output)
        self.kvtxn_prepared = None
        result = super()._update_states(scheduler_output)  # type: ignore[misc]
        self.kvtxn_tell(lambda watch: watch.change(audited.changes(self, scheduler_output)))
        return result

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """Keep the prepared inputs until the forward begins."""
        self.kvtxn_prepared = super()._prepare_inputs(  # type: ignore[misc]
            scheduler_output, num_scheduled_tokens
        )
        return self.kvtxn_prepared

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Tell the ledger which rows the forward writes and reads, then run the forward."""
        prepared = self.kvtxn_prepared
        try:
            if prepared is not None:
                self.kvtxn_tell(partial(_step_v1, self, prepared))
            self.kvtxn_prepared = None
            output = super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            if prepared is not None:
                self.kvtxn_tell(take_back)
            raise
        self.kvtxn_outputs = None if prepared is None else prepared[0]
        return output

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """Look for a NaN that came out, and tell the ledger which drafts were accepted."""
        rows, self.kvtxn_outputs = self.kvtxn_outputs, None
        looks = self.kvtxn_audit is not None and self.kvtxn_audit.scrub is not None
        if rows is not None and logits is not None and looks:
            outputs = rows
            self.kvtxn_tell(lambda watch: watch.came_out(logits, outputs))
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        if rows is not None:
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
    leave(runner, watch)


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
