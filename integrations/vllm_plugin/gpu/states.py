"""Recurrent states of vLLM's model runners on a GPU, which only commits write.

Each request has one block for its state, where stock has one more per draft; see ``held_states``.
So vLLM alone can no longer speculate over these caches: if kvtxn cannot make its steps, the engine
does not start.

``StateCaches`` asks for the caches and holds the states, which the runner's windows commit with
the rows; ``StatesV1`` and ``StatesV2`` tell them of each step of the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import attrs
from torch import Tensor

from ....cuda_graphs import GraphCache
from ....errors import KVTxnError
from ....log import get_logger
from ....manager import TransactionManager
from ....state_supplier import Capture
from ...serving.graph_steps import GraphSteps, PackedGraphSteps
from ...serving.parts import Part
from ...serving.step import PlannedStep, known
from ..policy.engine_facts import GATED_DELTA, MAMBA2, EngineFacts
from ..policy.rules import decide
from ..policy.state_rules import measured_fast, takes
from ..runners.hooked_runner import HookedRunner, HookedRunnerV1, HookedRunnerV2
from ..runners.window_steps import refuse_without_windows
from ..seam import (
    aligned_states,
    batches,
    held_states,
    state_commits,
    state_layers,
)
from ..seam.engine_config import runner_facts
from ..seam.held_states import HeldStates
from ..seam.hooks import check_methods, mix_in
from ..seam.layers import attention_of
from ..seam.state_commits import captures, uses_graphs

log = get_logger()


class StateCaches(Part):
    """Asks for caches with one state per request, and lets the layers read what commits write.

    The states are the runner's ``kvtxn_states``.

    Args:
        runner: the hooked runner.
        teller: tells the states of its steps.

    Attributes:
        steps: the runner's, whose windows hold the states; None without caches. They commit states
            even while the runner has no windows, as in a self-test.
    """

    def __init__(self, runner: HookedRunner, teller: StatesV1 | StatesV2) -> None:
        self._runner = runner
        self._teller = teller
        self.steps: GraphSteps | None = None
        self._decided = False  # whether commits will write the states

    @property
    def _fast(self) -> bool:
        """True if kvtxn's own kernels are to verify, where it has one: "recurrent" is "fast"."""
        return self._runner.kvtxn_settings.recurrent == "fast"

    def unknown(self) -> str | None:
        """Say in a sentence why commits cannot write the model's states; None if they can."""
        return held_states.launches_differ(self._runner, fast=self._fast) or self._teller.unknown()

    def are_written_by_commits(self) -> bool:
        """Tell whether commits will write the states; decided once, when the model is loaded.

        They will if the policy has windows and kvtxn knows the layers; if it does not, that is
        logged. Sets the runner's ``kvtxn_one_state``.
        """
        if not self._decided:
            runner = self._runner
            facts = self.facts(runner_facts(runner))
            facts = attrs.evolve(facts, attention=attention_of(runner, facts.device))
            policy, _ = decide(runner.kvtxn_config.policy, facts)
            wrong = None if policy == "off" else self.unknown()
            if wrong is not None:
                log.warning("kvtxn.states_unknown", rank=runner.kvtxn_rank, why=wrong)
            runner.kvtxn_one_state = policy != "off" and wrong is None
            self._decided = True
        return self._runner.kvtxn_one_state

    def num_bytes(self) -> int:
        """Return the bytes that the states need beside their caches; 0 if no commit writes them."""
        if not self.are_written_by_commits():
            return 0
        return held_states.bytes_of_buffers(self._runner, fast=self._fast)

    def facts(self, facts: EngineFacts) -> EngineFacts:
        """Return the facts with those of the states: their dtype, and inner states of prompts."""
        return attrs.evolve(
            facts,
            state_dtype=state_layers.state_dtype(self._runner),
            inner_states=state_layers.leaves_inner_states(self._runner),
        )

    def wants_one_state(self) -> bool:
        """Tell whether commits will write the states, for which each request has one."""
        return self.are_written_by_commits()

    def caches_dropped(self) -> None:
        """Forget the states in the caches that go, and the steps that held them."""
        self._runner.kvtxn_states = self.steps = None

    def profiling_caches_made(self) -> None:
        """Let the layers read states, so that vLLM measures the forward that is to come.

        Nothing unless commits write the states. No cache is kept, as vLLM frees these.
        """
        if self._runner.kvtxn_one_state:
            self._hook(None).forget_caches()

    def caches_made(self) -> None:
        """Refuse an engine without windows, which cannot run over these caches.

        Raises:
            KVTxnError: no window would commit the one state that each request has.
        """
        refuse_without_windows(self._runner)

    def hold(self, manager: TransactionManager) -> tuple[HeldStates, dict[str, object]]:
        """Let the layers use the states; return the supplier that commits them, and log fields.

        The supplier is the runner's ``kvtxn_states`` from now on.

        Raises:
            KVTxnError: kvtxn does not know the model's recurrent layers.
        """
        if not self.are_written_by_commits():
            wrong = self.unknown()
            raise KVTxnError("vllm", f"the model's recurrent layers are unknown: {wrong}")
        make = captures() if uses_graphs(self._runner) else None
        states = self._hook(make, manager.executor.graphs)
        self._runner.kvtxn_states = states
        kinds = {layer.kind for layer in states.layers} & {GATED_DELTA, MAMBA2}
        recurrent = self._runner.kvtxn_settings.recurrent
        chosen = recurrent == "auto"
        return states, {
            "states": len(states.layers),
            "recurrent": "exact" if chosen else recurrent,
            **({"recurrent_why": takes(runner_facts(self._runner))} if chosen else {}),
            **({"with_fast": measured_fast(min(kinds))} if kinds and not self._fast else {}),
            "state_blocks": 1,
            "state_buffer_bytes": states.nbytes,
            "commit_graphs": 0 if states.graphs is None else states.graphs.count,
        }

    def join(self, steps: GraphSteps) -> None:
        """Keep the steps whose windows hold the states, to commit without windows, too."""
        self.steps = steps

    def stray_steps(self) -> GraphSteps | None:
        """Return the steps, if the runner has states but no windows now; else None."""
        return self.steps if self._runner.kvtxn is None else None

    def _hook(self, make: Capture | None, kept: GraphCache | None = None) -> HeldStates:
        """Make and warm up the states; layers use them until ``kvtxn_undo`` is closed.

        Args:
            make: captures commits; None commits layer by layer.
            kept: keeps the captured commits.
        """
        runner, undo = self._runner, self._runner.kvtxn_undo
        states = HeldStates(runner, make, fast=self._fast, kept=kept)
        states.warm_up()
        undo.callback(states.unhook)
        states.hook()
        undo.callback(self._teller.follow(states))
        if states.aligned:
            undo.callback(aligned_states.hook_copies(runner, ends=not states.writes_ends))
        return states


class StatesV1(Part):
    """Tells states of the steps of the V1 runner.

    Graphs read the tables of states at fixed addresses. So each forward's metadata, which are made
    before it, name the blocks of its requests there, and those of a forward that is captured name
    none. The windows commit the states before vLLM counts the accepted drafts and the drafter sees
    the cache.

    By its rows alone vLLM takes a prompt of as many rows as a verify step has for drafts, and
    replays a graph of such steps, which knows nothing of the prompt. Here no step with a prompt
    replays one.

    Attributes:
        caches: holds the states; a part that hears events before this one.
        told: the states that are told of each step; those of a profiling run are never committed.
    """

    def __init__(self, runner: HookedRunnerV1) -> None:
        self._runner = runner
        self._has_prompts = False  # a request has other rows than one and its drafts
        self.caches = StateCaches(runner, self)
        self.told: HeldStates | None = None

    def unknown(self) -> str | None:
        """Say in a sentence that the V1 runner's copies of states are not as known; else None.

        They count only if the prefix cache keeps states.
        """
        if not aligned_states.is_aligned(self._runner):
            return None
        return check_methods(type(self._runner), aligned_states.V1_METHODS)

    def follow(self, states: HeldStates) -> Callable[[], None]:
        """Hand each step's metadata to the states from now on; return a function that ends it."""
        self.told = states
        return self._tell_none

    def planned(self, step: PlannedStep) -> None:
        """Note whether a request is at its prompt, or has other rows than one and its drafts."""
        self._has_prompts = batches.has_prompts(step.rows())

    def graph_sought(self, arguments: MutableMapping[str, object]) -> None:
        """Keep a step with a prompt out of graphs for steps that only verify drafts.

        Sets ``force_uniform_decode`` to False in ``arguments``. Steps of vLLM's warm-up say
        themselves of which kind they are, and stay so.
        """
        told = self.told is not None and arguments.get("force_uniform_decode") is None
        if told and self._has_prompts:
            arguments["force_uniform_decode"] = False

    def attention_described(self, metadata: Mapping[str, object]) -> None:
        """Hand the step's metadata to the states that are followed, which name its blocks."""
        if self.told is not None:
            self.told.begin(metadata, batches.StepRows.of(self._runner))

    def sampled(self, ids: Tensor | None, counts: Tensor | None) -> None:
        """Commit the states by the sampled ids if the runner has states but no windows now.

        Windows commit them else.

        Raises:
            KVTxnError: there are no ids.
        """
        steps = self.caches.stray_steps()
        if isinstance(steps, PackedGraphSteps):
            steps.commit_ids(known(ids))

    def _tell_none(self) -> None:
        """Hand no more metadata to the states."""
        self.told = None


class ReportedModelState:
    """A mixin of vLLM's ``model_state``: tells the states about the metadata of each step."""

    kvtxn_states: HeldStates

    def prepare_attn(self, input_batch: Any, cudagraph_mode: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the step's metadata, after naming its blocks to the states' kernels."""
        metadata = super().prepare_attn(  # type: ignore[misc]
            input_batch, cudagraph_mode, *args, **kwargs
        )
        captured = state_commits.is_capture(args, kwargs)
        replayed = not captured and state_commits.is_replay(cudagraph_mode)
        self.kvtxn_states.begin(metadata, input_batch, captured=captured, replayed=replayed)
        return metadata


class StatesV2(Part):
    """Tells states of the steps of the V2 runner, whose ``model_state`` makes their metadata.

    Attributes:
        caches: holds the states; a part that hears events before this one.
    """

    def __init__(self, runner: HookedRunnerV2) -> None:
        self._runner = runner
        self.caches = StateCaches(runner, self)

    def unknown(self) -> str | None:
        """Say in a sentence how ``model_state`` differs from the known one; None if it does not.

        Its methods' names and parameters are compared.
        """
        return check_methods(
            type(held_states.model_state(self._runner)), state_commits.MODEL_STATE_METHODS
        )

    def follow(self, states: HeldStates) -> Callable[[], None]:
        """Let the runner's ``model_state`` hand each step's metadata to the states.

        Returns:
            A function that undoes it.
        """
        state = held_states.model_state(self._runner)
        return mix_in(state, ReportedModelState, kvtxn_states=states)

    def outcome_known(self, counts: Tensor) -> None:
        """Commit the states by the counts if the runner has states but no windows now.

        Windows commit them else.
        """
        steps = self.caches.stray_steps()
        if steps is not None:
            steps.commit(counts)
