"""The windows of vLLM's model runners on a GPU.

``WindowCaches`` makes a runner's steps over its caches, with all that these need: memory, buffers,
attention that reads waiting rows. ``WindowsV1`` and ``WindowsV2`` say when a step of the runner
begins and ends. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from torch import Tensor

from ....config import TxnConfig
from ....cuda_graphs import MOST_BYTES
from ....errors import KVTxnError
from ....log import get_logger
from ....manager import TransactionManager
from ....row_io import LayerRows
from ....state_supplier import StateSupplier
from ...serving.graph_steps import GraphSteps, PackedGraphSteps
from ...serving.parts import Part
from ...serving.pipeline_steps import PipelineSteps
from ...serving.step import PlannedStep, known
from ..policy.engine_facts import EngineFacts
from ..policy.rules import decide
from ..runners.hooked_runner import HookedRunner, HookedRunnerV1, HookedRunnerV2, keep_for_graphs
from ..runners.window_steps import end_unheard, open_steps
from ..seam import (
    Foreign,
    backends,
    batches,
    connectors,
    engine_config,
    gpu_cache_layout,
    state_layers,
    whole_graphs,
    workers,
)
from ..seam import layers as attention_layers
from ..seam.gpu_cache_layout import (
    SpareBlocks,
    by_rows,
    keys_and_values,
    layer_refs,
    waiting_rows,
    with_spare_blocks,
)
from ..seam.layers import TargetLayer

if TYPE_CHECKING:
    from .flash_backend import FlashHook  # their modules make classes of vLLM's for GPUs
    from .slot_reading import SlotHook

log = get_logger()


class StatesBeside(Protocol):
    """The recurrent states of a model, which the windows hold beside the rows of attention."""

    def num_bytes(self) -> int:
        """Return the bytes that the states need beside their caches."""

    def facts(self, facts: EngineFacts) -> EngineFacts:
        """Return the facts with those about the states."""

    def hold(self, manager: TransactionManager) -> tuple[StateSupplier, dict[str, object]]:
        """Let the layers use the states; return the supplier that commits them, and log fields."""

    def join(self, steps: GraphSteps) -> None:
        """Keep the steps that were made with the states."""


class WindowCaches(Part):
    """Makes the runner's steps over new caches, in fixed buffers, which captured graphs read.

    vLLM sizes the caches without the memory of the steps, which take it once the caches exist.
    The steps are the runner's ``kvtxn``; a self-test takes them away for a while.

    Attributes:
        spare: blocks behind vLLM's own, for drafts that wait; None without any.
    """

    def __init__(
        self,
        runner: HookedRunnerV1 | HookedRunnerV2,
        maker: WindowsV1 | WindowsV2,
        states: StatesBeside | None = None,
    ) -> None:
        self._runner = runner
        self._maker = maker
        self._states = states
        self.spare: SpareBlocks | None = None

    def memory_wanted(self) -> int:
        """Return the bytes that the steps take on the GPU, with the buffers of states."""
        more = 0 if self._states is None else self._states.num_bytes()
        return bytes_of_steps(self._runner) + more

    def caches_dropped(self) -> None:
        """Forget the steps over the caches that go, and their spare blocks."""
        self._runner.kvtxn = self.spare = None

    def caches_planned(self, config: Foreign) -> Foreign:
        """Return the configuration with more blocks, in which drafts may wait, if any can.

        vLLM's scheduler does not know of them; a KV connector is told.
        """
        planned = self._with_spare_blocks(config)
        if self.spare is not None:
            connectors.adopt(config, planned)
        return planned

    def caches_made(self) -> None:
        """Set the runner's ``kvtxn`` to steps over new caches; or to None, and log why."""
        self._runner.kvtxn = open_steps(self._runner, self.facts, self.make_steps)

    def raised(self, error: Exception) -> None:
        """End this rank's process after an error of a window that vLLM would not hear of.

        Does nothing after other errors.
        """
        end_unheard(self._runner, error)

    def released(self) -> None:
        """Abort an open window, mark no row as a draft, and keep the buffers on the runner.

        Captured graphs that still run read them.
        """
        steps = self._runner.kvtxn
        if steps is not None:
            steps.abandon()
            if steps.deferred:
                steps.windows.mark(None)
            keep_for_graphs(self._runner, steps)

    def facts(self, layers: Sequence[TargetLayer], facts: EngineFacts) -> EngineFacts:
        """Return the facts with those about states, and whether drafts can wait in spare blocks.

        They can if there are such blocks, and each layer's attention reads its cache by slot.
        """
        if self._states is not None:
            facts = self._states.facts(facts)
        waits = all(
            backends.takes_slots(layer.impl) and by_rows(layer.cache) is not None
            for layer in layers
        )
        return attrs.evolve(facts, spare_blocks=waits and self.spare is not None)

    def make_steps(
        self, layers: Sequence[TargetLayer], kv_dtype: str, settings: TxnConfig
    ) -> tuple[GraphSteps | PipelineSteps, dict[str, object]]:
        """Make the steps, hook attention under ``deferred`` and layers with states, warm up.

        Drafts wait behind vLLM's own blocks. Returns the steps, and fields for the log, as
        ``open_steps`` wants them.
        """
        spare, own = self.spare, layers
        if spare is not None:
            own = [attrs.evolve(one, cache=one.cache[: spare.begin(one.cache)]) for one in layers]
        manager = TransactionManager(layer_refs(own, kv_dtype), settings)
        rows = None
        if settings.policy == "deferred":
            assert spare is not None  # else the policy is another one
            rows = {
                ref.name: waiting_rows(ref, spare.first[ref.group], settings.max_rows)
                for ref in layer_refs(layers, kv_dtype)
            }
        states: StateSupplier | None = None
        more: dict[str, object] = {}
        if self._states is not None:
            states, more = self._states.hold(manager)
        steps = self._maker.make(manager, rows, layers, states)
        if settings.policy == "deferred":
            assert isinstance(steps, GraphSteps)  # stages before the last one never defer
            assert spare is not None
            names = {layer.name for layer in layers}
            builders = batches.metadata_builders(self._runner, names)
            self._runner.kvtxn_undo.callback(unhook_attention, layers, builders)
            hook_attention(steps, layers, spare.first, builders)
        steps.warm_up()
        if self._states is not None:
            assert isinstance(steps, GraphSteps)
            self._states.join(steps)
        return steps, {"buffer_bytes": steps.nbytes, **more}

    def _with_spare_blocks(self, config: Foreign) -> Foreign:
        """Return a configuration with spare blocks for drafts, and set ``spare``.

        If no drafts can wait, or if that fails, which is logged, it is the given one.

        Raises:
            Exception: whatever failed, if the user wants errors to be raised.
        """
        runner, wanted = self._runner, self._runner.kvtxn_config
        try:
            if rows_may_wait(runner) and gpu_cache_layout.has_rows_in_line(config):
                others = attention_layers.draft_layers(runner)
                others |= set(state_layers.modules_of(runner))
                config, self.spare = with_spare_blocks(config, wanted.max_rows, others)
        except Exception as error:
            if wanted.on_error == "raise":
                raise
            log.warning("kvtxn.no_spare_blocks", rank=runner.kvtxn_rank, why=repr(error))
        return config


class WindowsV1(Part):
    """Opens a window for each step of the V1 runner with drafts, and commits the accepted ones.

    The commit comes before the drafter or a connector sees the cache.

    Attributes:
        caches: makes the steps; a part that hears events before this one.
        keeps_order: vLLM's order of a batch must stay, since sums depend on it.
    """

    def __init__(self, runner: HookedRunnerV1, states: StatesBeside | None = None) -> None:
        self._runner = runner
        self.caches = WindowCaches(runner, self, states)
        self.keeps_order = False

    def make(
        self,
        manager: TransactionManager,
        rows: LayerRows | None,
        layers: Sequence[TargetLayer],
        states: StateSupplier | None,
    ) -> PackedGraphSteps:
        """Make steps over slots of their own, since this runner keeps them by group.

        Notes in ``keeps_order`` whether the layers' sums depend on the batch's order.
        """
        self.keeps_order = attention_layers.depend_on_order(layers)
        runner = self._runner
        return PackedGraphSteps(
            *(manager, batches.query_len(runner), batches.vocab_size(runner), rows), states=states
        )

    def step_begins(self) -> None:
        """Abort a window that an abandoned step left open, if there is one."""
        if self._runner.kvtxn is not None:
            self._runner.kvtxn.abandon()

    def batch_ordered(self, lead_with_drafts: Callable[[], None]) -> None:
        """Call ``lead_with_drafts`` if drafts wait, so that windows have no other requests' rows.

        Where the order decides about sums it stays vLLM's, and the windows take other requests in.
        """
        steps = self._runner.kvtxn
        if steps is not None and steps.deferred and not self.keeps_order:
            lead_with_drafts()

    def planned(self, step: PlannedStep) -> None:
        """Let the steps open a window over the step's drafts, now that its slots are in place."""
        steps = self._runner.kvtxn
        if steps is not None:
            slots = batches.slots_of_groups(self._runner, list(steps.manager.groups))
            steps.begin_among(*step.rows(), slots)

    def sampled(self, ids: Tensor | None, counts: Tensor | None) -> None:
        """Commit the drafts that the sampled ids accept, if the runner has windows.

        Raises:
            KVTxnError: there are no ids.
        """
        if self._runner.kvtxn is not None:
            self._runner.kvtxn.commit_ids(known(ids))


class WindowsV2(Part):
    """Opens a window for each step of the V2 runner with drafts, and commits the accepted ones.

    On pipeline stages before the last one the outcome of a step is known when a later one begins:
    ``serving.pipeline_steps`` says why a commit there is right.

    Under ``undo`` a step would cost the host two launches, one that saves the rows which drafts
    overwrite and one that commits. Where the forward is one captured graph, the save is captured as
    its beginning. It reads the slots in place as the forward does, and writes into kvtxn's own
    memory alone: a replay without a window saves for nobody. Forwards that are not one graph have
    their rows saved when a step begins.

    Attributes:
        caches: makes the steps; a part that hears events before this one.
        whole: the mode of steps whose graphs save rows; None if no graph does.
        connected: the engine has a KV connector, which may read rows once a step is over.
    """

    def __init__(self, runner: HookedRunnerV2, states: StatesBeside | None = None) -> None:
        self._runner = runner
        self.caches = WindowCaches(runner, self, states)
        self.whole: object = None
        self.connected = False
        self._graph: object = None  # of the step that is under way

    def make(
        self,
        manager: TransactionManager,
        rows: LayerRows | None,
        layers: Sequence[TargetLayer],
        states: StateSupplier | None,
    ) -> GraphSteps | PipelineSteps:
        """Make steps that read the slots where this runner keeps them.

        They are ``PipelineSteps`` on a pipeline stage before the last. Under ``undo`` graphs of
        whole forwards are to save rows on the others.

        Raises:
            KVTxnError: states cannot wait on such a stage.
            LayerError: the windows' groups are not neighbours.
        """
        runner = self._runner
        slots = batches.slot_mappings(runner, list(manager.groups))
        later = batches.steps_until_known(runner)
        if later is not None:
            if states is not None:
                raise KVTxnError(
                    "vllm",
                    "states cannot wait on an earlier pipeline stage",
                    hint="start the engine without the setting 'recurrent'",
                )
            return PipelineSteps(manager, slots, batches.query_len(runner), later)
        steps = GraphSteps(manager, slots, batches.query_len(runner), rows, states=states)
        if manager.policy == "undo":
            self.let_graphs_save(steps)
        return steps

    def let_graphs_save(self, steps: GraphSteps) -> None:
        """Let the graphs of whole forwards save the rows that drafts overwrite, if they can.

        Sets ``whole`` to their mode then; ``kvtxn_undo`` undoes both.
        """
        undo = whole_graphs.let_graphs_save(self._runner, steps)
        if undo is not None:
            self._runner.kvtxn_undo.callback(self._no_graph_saves)
            self._runner.kvtxn_undo.callback(undo)
            self.whole = whole_graphs.whole()

    def caches_planned(self, config: Foreign) -> Foreign:
        """Note whether a connector will read the caches, for ``sampled``; change nothing."""
        self.connected = connectors.connector() is not None
        return config

    def outcomes_arrive(self) -> None:
        """On an earlier pipeline stage, find the step whose acceptance the runner takes now.

        Other stages do nothing.
        """
        steps = self._runner.kvtxn
        if isinstance(steps, PipelineSteps):
            steps.advance(*batches.arriving(self._runner))

    def outcomes_arrived(self) -> None:
        """On an earlier pipeline stage, abort that step's window if no acceptance came for it.

        Other stages do nothing.
        """
        steps = self._runner.kvtxn
        if isinstance(steps, PipelineSteps):
            steps.settle()

    def graph_chosen(self, graph: object) -> None:
        """Note the graph of the forward for ``planned``: its mode says whether it saves rows."""
        self._graph = graph

    def planned(self, step: PlannedStep) -> None:
        """Let the steps open a window over the step's drafts, now that its slots are in place.

        They are told whether the replayed graph saves rows.
        """
        steps = self._runner.kvtxn
        if isinstance(steps, PipelineSteps):
            steps.begin(*step.rows(), step.name())
        elif steps is not None:
            replayed = self.whole is not None and whole_graphs.mode(self._graph) is self.whole
            steps.begin(*step.rows(), replayed, step.alike(steps.query_len))

    def sampled(self, ids: Tensor | None, counts: Tensor | None) -> None:
        """Commit at once if the engine has a KV connector; else ``outcome_known`` does.

        In any release the scheduler may hand a request's blocks on once it has the sampled tokens;
        so what a connector loads into them must not come before this step's last write.

        Raises:
            KVTxnError: there are no counts.
        """
        if self._runner.kvtxn is not None and self.connected:
            self._runner.kvtxn.commit(known(counts))

    def outcome_known(self, counts: Tensor) -> None:
        """Commit the drafts that the counts accept, if there are windows.

        The drafter runs later.
        """
        if self._runner.kvtxn is not None:
            self._runner.kvtxn.commit(counts)

    def _no_graph_saves(self) -> None:
        """Let rows be saved when a step begins, since graphs save none any more."""
        self.whole = None


def rows_may_wait(runner: HookedRunner) -> bool:
    """Tell, before caches exist, whether drafts may wait: the policy may become ``deferred``.

    All target layers' attention has to read blocks of one row.
    """
    if runner.kvtxn_config.policy not in ("auto", "deferred"):
        return False
    facts = engine_config.runner_facts(runner)
    policy, _ = decide(runner.kvtxn_config.policy, facts)
    return policy == "deferred" and attention_layers.all_take_slots(runner)


def hook_attention(
    steps: GraphSteps,
    layers: Sequence[TargetLayer],
    spare: Mapping[str, int],
    builders: Sequence[Foreign],
) -> None:
    """Let the layers' attention read the windows, and compile the kernels of tables by slot.

    ``unhook_attention`` undoes it.

    Args:
        steps: the runner's steps, whose layers are the same.
        layers: the target's layers.
        spare: by group, the first slot in which drafts wait.
        builders: the builders of the layers' metadata.
    """
    from .slot_reading import SlotHook, warm_up

    for layer, ref in zip(layers, steps.layers, strict=True):
        rows = by_rows(layer.cache)
        assert rows is not None  # else the policy is another one
        hook = SlotHook(steps, ref, spare[ref.group], rows, layer.module)
        own_calls = not layer.latent and backends.flash_version_of(layer.impl) is not None
        layer.impl.kvtxn = flash_hook(layer, hook) if own_calls else hook
    for builder in builders:
        builder.kvtxn = steps
    warm_up({ref.planes[0].block_size for ref in steps.layers}, steps.windows.position)


def flash_hook(layer: TargetLayer, hook: SlotHook) -> FlashHook:
    """Return a layer's hook for FLASH_ATTN: ``hook`` with the arguments of its calls."""
    from .flash_backend import FlashHook

    size, facts = layer.row_shape[-1], (hook.steps, hook.ref, hook.spare, hook.rows, hook.module)
    fixed = backends.fixed_arguments(layer.impl, *keys_and_values(hook.rows, size))
    return FlashHook(*facts, keys_and_values(layer.cache, size), fixed)


def unhook_attention(layers: Sequence[TargetLayer], builders: Sequence[Foreign]) -> None:
    """Take the hooks of ``hook_attention`` from layers and builders: vLLM's own code runs again."""
    for each in (*(layer.impl for layer in layers), *builders):
        each.kvtxn = None
        del each.kvtxn


def reserve_memory(wrapper: Foreign) -> None:
    """Let vLLM size the KV cache without the memory of the parts and of captured commits.

    Where the user gives the size of the KV cache, that stays as it is. ``kvtxn_unhook`` undoes it.
    No memory is held in the meantime: vLLM's profile run gets the addresses that it has without
    kvtxn. It reads memory of Mamba-2 layers that nobody wrote, and ends the engine where that is
    NaN (FAULTS.md).
    """
    runner: Any = workers.runner_of(wrapper)

    def rest(available: int) -> int:
        if gpu_cache_layout.is_given(runner):
            return available
        wanted: int = runner.kvtxn_parts.memory_wanted()
        return max(available - MOST_BYTES - wanted, 0)

    runner.kvtxn_unhook.callback(workers.less_cache_memory(wrapper, rest))


def bytes_of_steps(runner: HookedRunnerV1 | HookedRunnerV2) -> int:
    """Return the bytes that a runner's steps take, its model loaded.

    If nobody can tell, 0, with a warning.

    Raises:
        Exception: whatever went wrong, if the user wants errors to be raised.
    """
    wanted = runner.kvtxn_config
    try:
        size = gpu_cache_layout.bytes_of_rows(runner, wanted.max_rows)
        size *= batches.steps_until_known(runner) or 1  # so many windows are open at one time
        if not rows_may_wait(runner):
            return size
        spare = gpu_cache_layout.bytes_of_spare_blocks(runner, wanted.max_rows)
        return max(size, spare) + gpu_cache_layout.bytes_of_tables(runner)
    except Exception as error:
        if wanted.on_error == "raise":
            raise
        log.warning(
            "kvtxn.memory_not_reserved",
            rank=runner.kvtxn_rank,
            why=repr(error),
            hint="kvtxn may run out of GPU memory: lower gpu_memory_utilization",
        )
        return 0
