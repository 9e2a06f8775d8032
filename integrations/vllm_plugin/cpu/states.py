"""Recurrent states in the windows of vLLM's V1 model runner on a CPU.

Each request has one block for its state, where stock has one more per draft. So vLLM alone can no
longer speculate over these caches: if kvtxn cannot make its steps, the engine does not start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from ....config import TxnConfig
from ....errors import KVTxnError, LayerError
from ....layers import LayerRef
from ....manager import TransactionManager
from ....recurrent import Recurrence, RowPart, ShortConv
from ...serving.eager_steps import EagerSteps, StateSteps
from ...serving.parts import Part
from ...serving.step import PlannedStep, drafts_and_ends
from ..policy.engine_facts import GATED_DELTA, MAMBA2, SHORT_CONV, EngineFacts
from ..policy.rules import decide
from ..runners.hooked_runner import HookedRunnerV1
from ..runners.window_steps import refuse_without_windows
from ..seam import batches, cpu_states, state_layers
from ..seam.cpu_states import StateBatch, step_batch
from ..seam.engine_config import runner_facts
from ..seam.hooks import check_methods, not_called
from ..seam.layers import TargetLayer
from ..seam.runner_protocols import GatedDeltaLayer, Mamba2Layer
from ..seam.state_layers import StateLayer
from . import attention, cache_layout
from .windows import RowCaches, row_slots


@attrs.frozen(eq=False)
class OwnGatedDelta(Recurrence):
    """A gated delta net that takes rows in by vLLM's own operator, to the bit.

    A row is staged as three tensors in the model's dtype: the output of the convolution,
    ``[num_rows, channels]``, then a and b, ``[num_rows, num_heads]``.
    """

    module: GatedDeltaLayer = attrs.field(repr=False)
    channels: int
    dtype: torch.dtype

    def check(self, layer: str, state: Tensor) -> None:
        """Refuse a state that is not float32 ``[num_states, num_heads, key_size, value_size]``.

        Raises:
            LayerError: it is another one.
        """
        expected = "float32 [num_states, num_heads, key_size, value_size]"
        _check(layer, state, expected, (torch.float32,))

    def given(self, state: Tensor) -> tuple[RowPart, ...]:
        """List the parts of a staged row: the output of the convolution, a and b."""
        heads = state.shape[1]
        return (
            RowPart.of("convolved", self.dtype, self.channels),
            RowPart.of("a", self.dtype, heads),
            RowPart.of("b", self.dtype, heads),
        )

    def step(self, state: Tensor, row: Sequence[Tensor]) -> Tensor:
        """Return the states after one more row of each request; ``state`` is not changed."""
        convolved, a, b = (part.to(self.dtype) for part in row)
        return cpu_states.take_in_gated_delta(self.module, state, convolved, a, b)


@attrs.frozen(eq=False)
class OwnMamba2(Recurrence):
    """A Mamba-2 layer that takes rows in by vLLM's own operator, to the bit.

    A row is staged as two tensors in the model's dtype: the output of the convolution,
    ``[num_rows, channels]``, then dt, ``[num_rows, num_heads]``. A state is rounded to its dtype
    after each row, as vLLM rounds it after each token.
    """

    module: Mamba2Layer = attrs.field(repr=False)
    channels: int
    dtype: torch.dtype
    stored: torch.dtype

    def check(self, layer: str, state: Tensor) -> None:
        """Refuse a state that is not ``[num_states, num_heads, head_size, state_size]``.

        Raises:
            LayerError: it is another one, or neither float32 nor bfloat16.
        """
        expected = "float32 or bfloat16 [num_states, num_heads, head_size, state_size]"
        _check(layer, state, expected, (torch.float32, torch.bfloat16))

    def given(self, state: Tensor) -> tuple[RowPart, ...]:
        """List the parts of a staged row: the output of the convolution, and dt."""
        return (
            RowPart.of("convolved", self.dtype, self.channels),
            RowPart.of("dt", self.dtype, state.shape[1]),
        )

    def step(self, state: Tensor, row: Sequence[Tensor]) -> Tensor:
        """Return the states after one more row of each request, rounded to their dtype, as float32.

        ``state`` is not changed.
        """
        convolved, dt = (part.to(self.dtype) for part in row)
        return cpu_states.take_in_mamba2(self.module, state.to(self.stored), convolved, dt).float()


def _check(layer: str, state: Tensor, expected: str, dtypes: Sequence[torch.dtype]) -> None:
    """Raise LayerError if a state has not four dimensions, or none of these dtypes."""
    if state.ndim != 4 or state.dtype not in dtypes:
        raise LayerError(
            "LayerRef",
            f"the state of {layer!r} does not fit vLLM's operator",
            expected=expected,
            got=f"{state.dtype} {list(state.shape)}",
        )


def state_ref(layer: StateLayer) -> LayerRef:
    """Describe a recurrent layer for the library: its caches, and how they take rows in."""
    width, channels = layer.past.shape[1] + 1, layer.past.shape[2]
    given, dtype = (layer.module, channels, layer.past.dtype), {"group": layer.group}
    if layer.state is None:
        return LayerRef.recurrent(layer.name, layer.past, replay=[ShortConv(width)], **dtype)
    own: Recurrence = OwnGatedDelta(*given)
    if layer.kind == MAMBA2:
        own = OwnMamba2(*given, layer.state.dtype)
    replay = [ShortConv(width), own]
    return LayerRef.recurrent(layer.name, layer.past, layer.state, replay=replay, **dtype)


def operators_differ(modules: Sequence[object]) -> str | None:
    """Say in a sentence how an operator of recurrent layers differs from the known one; else None.

    Compared are its name, its parameters, and that vLLM uses it; not its code.
    """
    from ..seam.state_layers import kind_of

    kinds = {kind_of(module): type(module) for module in modules}
    if GATED_DELTA in kinds and (wrong := cpu_states.core_differs()) is not None:
        return wrong
    for kind in (MAMBA2, SHORT_CONV):
        if kind in kinds:
            name, parameters = cpu_states.FORWARDS[kind]
            wrong = check_methods(kinds[kind], {name: parameters})
            wrong = wrong or not_called(getattr(kinds[kind], name))
            if wrong is not None:
                return wrong
    return None


def hook_states(
    steps: StateSteps, layers: Sequence[StateLayer], batch: Callable[[], StateBatch | None]
) -> Callable[[], None]:
    """Let layers compute drafts over copies of their states, and hand the rows to the steps.

    Args:
        steps: get the draft rows of each layer, by ``verified``.
        layers: the layers.
        batch: returns the requests of the step under way, or None for a step that vLLM computes by
            itself; gated delta nets do not ask.

    Returns:
        A function that undoes it.
    """
    undo = cpu_states.hook_core() if any(one.kind == GATED_DELTA for one in layers) else None

    def hook(layer: StateLayer) -> None:
        ref = steps.manager.layers[layer.name]
        if layer.kind == GATED_DELTA:
            cpu_states.hook_layer(layer, lambda rows: steps.verified(ref, rows))
        else:
            cpu_states.hook_mixer(layer, batch, lambda rows: steps.verified(ref, rows))

    for layer in layers:
        hook(layer)

    def unhook() -> None:
        cpu_states.unhook_layers(layers)
        cpu_states.unhook_mixers(layers)
        if undo is not None:
            undo()

    return unhook


class States(Part):
    """Asks for one state per request, and says which requests a forward has while it runs."""

    def __init__(self, runner: HookedRunnerV1) -> None:
        self._runner = runner
        self._drafts: Sequence[int] = ()  # of each request of the present step
        self.batch: StateBatch | None = None

    def caches_wanted(self) -> None:
        """Let the layers keep one state per request, if the windows will hold the states.

        They will if the policy is ``deferred`` and vLLM's operators are known. Sets
        ``kvtxn_one_state``; ``kvtxn_unhook`` gives the layers theirs back. Called before the caches
        are made; nothing if it was decided so before.
        """
        runner = self._runner
        if runner.kvtxn_one_state:
            return
        facts = with_state_dtype(runner, runner_facts(runner))
        policy, _ = decide(runner.kvtxn_config.policy, facts)
        if policy == "deferred" and unknown_operator(runner) is None:
            runner.kvtxn_unhook.callback(state_layers.hold_one_state(runner))
            runner.kvtxn_one_state = True

    def wants_one_state(self) -> bool:
        """Tell whether the caches have one state per request, which the windows hold."""
        return self._runner.kvtxn_one_state

    def caches_made(self) -> None:
        """Refuse an engine without windows, which cannot run over these caches.

        Raises:
            KVTxnError: the caches have one state per request, and the runner has no steps.
        """
        refuse_without_windows(self._runner)

    def planned(self, step: PlannedStep) -> None:
        """Remember the drafts of each request, if the runner has windows.

        If that fails, it counts as a fallback and is tried once more; a second error is raised.
        """
        steps = self._runner.kvtxn
        if steps is not None:
            try:
                self._drafts, _ = drafts_and_ends(step.rows())
            except Exception as error:  # without them no state can be committed: read them again
                steps.manager.note_fallback("begin", error)
                self._drafts, _ = drafts_and_ends(step.rows())

    def forward_begins(self, step: PlannedStep | None, inputs: Mapping[str, object]) -> None:
        """Set ``batch`` to the requests of the step, if the runner has windows.

        Layers ask for it while they compute.
        """
        steps = self._runner.kvtxn
        if steps is not None:
            self.batch = step_batch(self._runner, self._drafts, state_groups(steps))

    def forward_ended(self) -> None:
        """Forget the requests of the step."""
        self.batch = None

    def failed(self, error: BaseException) -> None:
        """Forget the requests of the step."""
        self.batch = None


class RowAndStateCaches(RowCaches):
    """Caches of attention, and of recurrent layers with one state per request."""

    def __init__(self, runner: HookedRunnerV1, states: States) -> None:
        super().__init__(runner)
        self._states = states

    def facts(self, layers: Sequence[TargetLayer], facts: EngineFacts) -> EngineFacts:
        """Return the facts with the dtype of the states."""
        return with_state_dtype(self._runner, facts)

    def make_steps(
        self, layers: Sequence[TargetLayer], kv_dtype: str, settings: TxnConfig
    ) -> tuple[EagerSteps, dict[str, object]]:
        """Make the steps, and hook the attention and the recurrent layers.

        The runner's ``kvtxn_undo`` unhooks them. Staging "auto" is "reference".

        Returns:
            The steps, and facts for the log.

        Raises:
            KVTxnError: a recurrent layer has an operator that kvtxn does not know; nothing is
                hooked.
        """
        wrong = unknown_operator(self._runner)
        if wrong is not None:
            raise KVTxnError("vllm", f"an operator of recurrent layers is unknown: {wrong}")
        states = state_layers.state_layers(self._runner)
        refs = [*cache_layout.layer_refs(layers, kv_dtype), *map(state_ref, states)]
        staging = "reference" if settings.staging == "auto" else settings.staging
        manager = TransactionManager(refs, attrs.evolve(settings, staging=staging))
        steps = StateSteps(manager, batches.vocab_size(self._runner))
        undo = self._runner.kvtxn_undo
        undo.callback(attention.unhook_attention, layers)
        attention.hook_attention(steps, layers)
        undo.callback(hook_states(steps, states, lambda: self._states.batch))
        return steps, {"states": len(states), "state_blocks": 1}

    def slots(self, steps: EagerSteps, inputs: Mapping[str, object]) -> Mapping[str, Tensor] | str:
        """Return the slots of the step's rows, and the block of each request's state, by group.

        A string says why the step cannot have a window; see ``batches.step_slots``.
        """
        rows = row_slots(steps)
        if isinstance(rows, str):
            return rows
        return {**rows, **state_layers.state_slots(self._runner, state_groups(steps))}


def with_state_dtype(runner: HookedRunnerV1, facts: EngineFacts) -> EngineFacts:
    """Return the facts about a runner's engine with the dtype of its states."""
    return attrs.evolve(facts, state_dtype=state_layers.state_dtype(runner))


def unknown_operator(runner: HookedRunnerV1) -> str | None:
    """Say in a sentence how vLLM's operators of a model's states differ from the known ones.

    None if they do not.
    """
    return operators_differ(list(state_layers.modules_of(runner).values()))


def state_groups(steps: EagerSteps) -> list[str]:
    """Return the names of the KV-cache groups with states."""
    return [group for group, kind in steps.manager.kinds.items() if kind.per_request]
