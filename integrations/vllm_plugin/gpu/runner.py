"""The mixin that vLLM's two model runners on a GPU share: it keeps kvtxn's steps.

Before vLLM measures how much memory is free, kvtxn reserves the memory of its steps; once the
caches exist, the steps take it. Each runner's own mixin says when a step begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from ....config import TxnConfig
from ....cuda_graphs import MOST_BYTES
from ....layers import LayerRef
from ....log import get_logger
from ....manager import TransactionManager
from ....row_io import LayerRows
from ...serving.graph_steps import GraphSteps
from ...serving.pipeline_steps import PipelineSteps
from ..attach import keep_for_graphs
from ..internals import (
    Foreign,
    backends,
    batches,
    cache_sizes,
    config,
    connectors,
    flash,
    kv_cache,
    state_layers,
    workers,
)
from ..internals import layers as attention_layers
from ..internals.layers import TargetLayer
from ..internals.protocols.runners import BeforeRunner
from ..policy.engine import EngineFacts
from ..policy.rules import decide
from ..settings import PluginSettings
from ..window_steps import end_unheard, open_steps
from .spare_blocks import (
    SpareBlocks,
    by_rows,
    keys_and_values,
    waiting_rows,
    with_spare_blocks,
)

if TYPE_CHECKING:
    from .flash_backend import FlashHook  # their modules make classes of vLLM's for GPUs
    from .slot_reading import SlotHook

log = get_logger()


class GpuRunnerMixin(BeforeRunner):
    """Steps in fixed buffers, which captured graphs read, for as long as the KV cache lives.

    Attributes:
        kvtxn: the steps, once the KV cache exists; None while kvtxn stays out.
        kvtxn_audit: the watch over the KV cache; None if nothing is watched.
        kvtxn_settings: the user's settings, those of the audit included.
        kvtxn_config: those of windows among them.
        kvtxn_rank: the worker's rank.
        kvtxn_room: memory reserved while vLLM measures how much is free, for the steps to take.
        kvtxn_required: the user wants no engine without kvtxn.
        kvtxn_on_trial: a self-test decides, after the warm-up, whether windows stay.
        kvtxn_announce: logs that windows are active, once the self-test is passed.
        kvtxn_undo: undoes the hooks of the present steps.
        kvtxn_unhook: undoes the hooks around the runner itself.
        kvtxn_spare: blocks behind vLLM's own, for drafts that wait; None without any.
        kvtxn_keeps_order: vLLM's order of a batch must stay, since sums depend on it.
        kvtxn_connected: the engine has a KV connector, which may read rows once a step is over.
    """

    kvtxn: Any = None
    kvtxn_audit: Any = None
    kvtxn_settings: PluginSettings
    kvtxn_config: TxnConfig
    kvtxn_rank: int = 0
    kvtxn_room: Tensor | None = None
    kvtxn_required: bool = False
    kvtxn_on_trial: bool = False
    kvtxn_announce: Callable[[], None] | None = None
    kvtxn_undo: ExitStack
    kvtxn_unhook: ExitStack
    kvtxn_spare: SpareBlocks | None = None
    kvtxn_keeps_order: bool = False
    kvtxn_connected: bool = False

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """Reserve the steps' memory before vLLM sizes the KV cache by what is left."""
        hold_room(self, self.kvtxn_bytes_of_states())
        super().profile_run(*args, **kwargs)  # type: ignore[misc]

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **others: Any
    ) -> None:
        """Add blocks in which drafts may wait, unknown to the scheduler, and make new steps.

        A profiling run's caches get neither.
        """
        self.kvtxn_spare = None
        self.kvtxn_connected = not is_profiling and connectors.connector() is not None
        given = kv_cache_config
        if not is_profiling:
            kv_cache_config = add_spare_blocks(self, kv_cache_config)
        if self.kvtxn_spare is not None:
            connectors.adopt(given, kv_cache_config)
            self.kvtxn_room = None
            torch.cuda.empty_cache()  # the caches are one allocation: no part of it can be reused
        self.kvtxn = None
        self.kvtxn_undo.close()  # the hooks of the steps over earlier caches
        super().initialize_kv_cache(kv_cache_config, is_profiling, **others)  # type: ignore[misc]
        if not is_profiling:
            self.kvtxn_room = None  # the allocator keeps it, and gives it to the steps
            self.kvtxn = open_steps(self, self.kvtxn_facts, self.make_steps)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step's forward; an error of a window's is heard, whichever rank meets it."""
        return self.kvtxn_heard(super().execute_model, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rest of a step; an error of a window's is heard, whichever rank meets it."""
        return self.kvtxn_heard(super().sample_tokens, *args, **kwargs)  # type: ignore[misc]

    def kvtxn_heard(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a part of a step; an error of a window's is heard, see ``end_unheard``."""
        try:
            return run(*args, **kwargs)
        except Exception as error:
            end_unheard(self, error)
            raise

    def kvtxn_release(self) -> None:
        """Abort an open window, and clear the buffers' drafts for graphs that still run."""
        steps = self.kvtxn
        if steps is not None:
            steps.abandon()
            if steps.deferred:
                steps.windows.mark(None)
            keep_for_graphs(self, steps)

    def kvtxn_facts(self, layers: Sequence[TargetLayer], facts: EngineFacts) -> EngineFacts:
        """Add the fact ``spare_blocks``: True if every layer's attention can read spare blocks."""
        waits = all(
            backends.takes_slots(layer.impl) and by_rows(layer.cache) is not None
            for layer in layers
        )
        return attrs.evolve(facts, spare_blocks=waits and self.kvtxn_spare is not None)

    def make_steps(
        self, layers: Sequence[TargetLayer], kv_dtype: str, settings: TxnConfig
    ) -> tuple[GraphSteps | PipelineSteps, dict[str, object]]:
        """Make the steps; see ``open_steps``. Drafts wait behind vLLM's own blocks."""
        spare = self.kvtxn_spare or SpareBlocks.none()
        own = [attrs.evolve(each, cache=each.cache[: spare.begin(each.cache)]) for each in layers]
        manager = TransactionManager(layer_refs(own, kv_dtype), settings)
        rows = None
        if settings.policy == "deferred":
            rows = {
                ref.name: waiting_rows(ref, spare.first[ref.group], settings.max_rows)
                for ref in layer_refs(layers, kv_dtype)
            }
        steps = self.make_graph_steps(manager, rows)
        if settings.policy == "deferred":
            builders = batches.metadata_builders(self, {layer.name for layer in layers})
            self.kvtxn_undo.callback(unhook_attention, layers, builders)
            self.kvtxn_keeps_order = attention_layers.keep_order(layers)
            hook_attention(steps, layers, spare.first, builders)
        steps.warm_up()
        more = {"buffer_bytes": steps.nbytes, **self.kvtxn_hold_states(manager)}
        self.kvtxn_join_commits(steps)
        return steps, more

    def kvtxn_hold_states(self, manager: TransactionManager) -> dict[str, object]:
        """Let commits write recurrent states, if the model has any; returns fields for the log."""
        return {}

    def kvtxn_join_commits(self, steps: GraphSteps | PipelineSteps) -> None:
        """Let the commits of steps include that of recurrent states, if there are any."""

    def kvtxn_bytes_of_states(self) -> int:
        """Return the bytes that recurrent states need beside their caches."""
        return 0

    def make_graph_steps(self, manager: TransactionManager, rows: LayerRows | None) -> Any:
        """Make steps that read the slots where this runner keeps them.

        Args:
            manager: over the target's layers.
            rows: where drafts wait, see ``make_steps``; None under other policies than deferred.
        """
        raise NotImplementedError


def rows_may_wait(runner: Any) -> bool:
    """Tell, before caches exist, whether the policy may still become ``deferred``."""
    if runner.kvtxn_config.policy not in ("auto", "deferred"):
        return False
    facts = config.runner_facts(runner)
    policy, _ = decide(runner.kvtxn_config.policy, facts)
    return policy == "deferred" and attention_layers.all_take_slots(runner)


def add_spare_blocks(runner: Any, kv_cache_config: Any) -> Any:
    """Return a configuration with spare blocks for drafts, or the given one if none can wait."""
    wanted: TxnConfig = runner.kvtxn_config
    try:
        if rows_may_wait(runner) and kv_cache.has_rows_in_line(kv_cache_config):
            others = attention_layers.draft_layers(runner) | set(state_layers.modules_of(runner))
            kv_cache_config, runner.kvtxn_spare = with_spare_blocks(
                kv_cache_config, wanted.max_rows, others
            )
    except Exception as error:
        if wanted.on_error == "raise":
            raise
        log.warning("kvtxn.no_spare_blocks", rank=runner.kvtxn_rank, why=repr(error))
    return kv_cache_config


def layer_refs(layers: Sequence[TargetLayer], kv_dtype: str) -> list[LayerRef]:
    """Describe the target's layers and their caches for the library.

    Every backend in ``policy.supported.ATTENTION`` sees ``[num_blocks, heads, block_size,
    2 * head_size]``, a row's keys before its values, with strides of its own (of latent rows:
    ``[num_blocks, block_size, latent_size]``); so strides are all that differs between them.
    """
    refs = []
    for layer in layers:
        scales = (
            (None, None) if kv_dtype == "auto" else attention_layers.stored_scales(layer.module)
        )
        if layer.latent:
            refs.append(
                LayerRef.latent(
                    layer.name, layer.cache, group=layer.group, scale=scales[0], kv_dtype=kv_dtype
                )
            )
            continue
        key, value = keys_and_values(layer.cache, layer.row_shape[-1])
        refs.append(
            LayerRef(
                *(layer.name, key, value),
                group=layer.group,
                k_scale=scales[0],
                v_scale=scales[1],
                kv_dtype=kv_dtype,
            )
        )
    return refs


def hook_attention(
    steps: GraphSteps,
    layers: Sequence[TargetLayer],
    spare: Mapping[str, int],
    builders: Sequence[Foreign],
) -> None:
    """Let the layers' attention read the windows.

    Args:
        steps: the runner's steps.
        layers: the target's layers over their whole caches, in the order of the manager's layers.
        spare: for each group, the first slot in which its drafts wait.
        builders: vLLM's builders of these layers' attention metadata.
    """
    from .slot_reading import SlotHook, warm_up

    for layer, ref in zip(layers, steps.layers, strict=True):
        rows = by_rows(layer.cache)
        assert rows is not None  # else the policy is another one
        hook = SlotHook(steps, ref, spare[ref.group], rows, layer.module)
        own_calls = not layer.latent and flash.version_of(layer.impl) is not None
        layer.impl.kvtxn = flash_hook(layer, hook) if own_calls else hook
    for builder in builders:
        builder.kvtxn = steps
    warm_up({ref.planes[0].block_size for ref in steps.layers}, steps.windows.position)


def flash_hook(layer: TargetLayer, hook: SlotHook) -> FlashHook:
    """Add to the hook of a layer with FLASH_ATTN what kvtxn's calls of FlashAttention need.

    Args:
        layer: the layer over its whole cache.
        hook: its hook.
    """
    from .flash_backend import FlashHook

    size, facts = layer.row_shape[-1], (hook.steps, hook.ref, hook.spare, hook.rows, hook.module)
    fixed = flash.fixed_arguments(layer.impl, *keys_and_values(hook.rows, size))
    return FlashHook(*facts, keys_and_values(layer.cache, size), fixed)


def unhook_attention(layers: Sequence[TargetLayer], builders: Sequence[Foreign]) -> None:
    """Undo ``hook_attention``: the attention is vLLM's own again."""
    for each in (*(layer.impl for layer in layers), *builders):
        each.kvtxn = None
        del each.kvtxn


def reserve_graphs(wrapper: Foreign) -> None:
    """Let vLLM size the KV cache without the memory of captured commits, outside of torch's.

    Where the user gives the size of the KV cache, that stays as it is.

    Args:
        wrapper: the wrapper of a worker whose runner is hooked.
    """
    runner: Any = workers.runner_of(wrapper)

    def rest(available: int) -> int:
        return available if cache_sizes.is_given(runner) else max(available - MOST_BYTES, 0)

    runner.kvtxn_unhook.callback(workers.less_cache_memory(wrapper, rest))


def hold_room(runner: Any, more: int = 0) -> None:
    """Reserve the memory of the steps, so that vLLM's profiling does not give it to the cache.

    Args:
        runner: the runner.
        more: bytes to reserve beside those of the rows.
    """
    wanted: TxnConfig = runner.kvtxn_config
    try:
        size = kv_cache.bytes_of_rows(runner, wanted.max_rows)
        size *= batches.steps_until_known(runner) or 1  # so many windows are open at one time
        tables = kv_cache.bytes_of_tables(runner) if rows_may_wait(runner) else 0
        runner.kvtxn_room = kv_cache.room(runner, size + tables + more)
    except Exception as error:
        if wanted.on_error == "raise":
            raise
        log.warning(
            "kvtxn.memory_not_reserved",
            rank=runner.kvtxn_rank,
            why=repr(error),
            hint="kvtxn may run out of GPU memory: lower gpu_memory_utilization",
        )
