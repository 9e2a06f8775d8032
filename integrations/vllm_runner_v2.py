"""vLLM's V2 model runner on a GPU, with windows.

The runner object changes its class; no class of vLLM's is patched. Per step: ``prepare_attn``
has just said which rows go where, so the step is planned there, before the forward; and
``postprocess_sampled`` is told what was accepted, so the commit is there: the sampled tokens are
on their way to the host by then, and neither drafter nor connector has seen the cache. The
forward itself may be a replayed graph and is not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import attrs
from torch import Tensor

from .. import __version__
from ..config import Policy, TxnConfig
from ..executor import AttentionArgs
from ..layers import LayerRef
from ..log import get_logger
from ..manager import TransactionManager
from . import vllm_internals as internals
from . import vllm_internals_gpu as inside
from .vllm_gpu import GpuSteps
from .vllm_hooks import hook_runner
from .vllm_policy import decide

log = get_logger()

StepsT = TypeVar("StepsT", bound=GpuSteps)


@cache
def window_runner(own: Any) -> Any:
    """A subclass of a runner's own class; an object of that class can become one of this."""

    class WindowRunner(own):  # type: ignore[misc]
        """Every method is vLLM's, plus a window.

        Attributes:
            kvtxn: the steps, once the KV cache exists; None while kvtxn stays out.
            kvtxn_config: the settings.
            kvtxn_rank: the worker's rank.
            kvtxn_room: memory held while vLLM measures what is free, for the steps to take.
        """

        kvtxn: GpuSteps | None = None
        kvtxn_config: TxnConfig
        kvtxn_rank: int = 0
        kvtxn_room: Tensor | None = None

        def profile_run(self, randomize_inputs: bool = False) -> None:
            """What the steps will need is taken before vLLM sizes the KV cache by what is left."""
            hold_room(self)
            super().profile_run(randomize_inputs)

        def initialize_kv_cache(
            self,
            kv_cache_config: Any,
            is_profiling: bool = False,
            kv_cache_allocation_context: Any = None,
        ) -> None:
            """Caches are new: so are the steps. None for a profiling run's caches."""
            self.kvtxn = None
            super().initialize_kv_cache(
                kv_cache_config,
                is_profiling,
                kv_cache_allocation_context=kv_cache_allocation_context,
            )
            if not is_profiling:
                self.kvtxn = open_steps(self, steps_over)

        def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
            """A graph writes settled rows after it reads: one with a new request must not."""
            state, uniform = super().gather_batch_req_state(scheduler_output, dummy_run)
            steps = self.kvtxn
            if steps is not None and steps.deferred and inside.admits(state):
                uniform = None
            return state, uniform

        def prepare_attn(self, input_batch: Any) -> Any:
            """Slots are in place after this: plan the step."""
            prepared = super().prepare_attn(input_batch)
            if self.kvtxn is not None:
                rows = inside.batch_rows(input_batch)
                self.kvtxn.begin(rows.drafts, rows.lengths, rows.prefilling)
            return prepared

        def postprocess_sampled(
            self,
            idx_mapping: Any,
            sampled_tokens: Any,
            num_sampled: Any,
            num_rejected: Any,
            query_start_loc: Any = None,
        ) -> None:
            """What was sampled is on its way to the host: commit, before the drafter runs.

            Only ranks that sample say what was accepted in the step that is under way.
            """
            if self.kvtxn is not None and inside.samples(self):
                self.kvtxn.commit(num_sampled)
            super().postprocess_sampled(
                idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc
            )

    return WindowRunner


def attach(runner: Any, config: TxnConfig, rank: int) -> None:
    """Hook a runner; the KV cache does not exist yet. Hooking it twice is harmless."""
    hook_runner(runner, config, rank, inside.RUNNER_METHODS, window_runner)


def layer_refs(layers: list[internals.TargetLayer], kv_dtype: str) -> list[LayerRef]:
    """The target layers over their caches.

    Every backend in ``vllm_policy.ATTENTION`` sees ``[num_blocks, heads, block_size,
    2 * head_size]``, a row's keys before its values, with strides of its own (of latent rows:
    ``[num_blocks, block_size, latent_size]``); so strides are all that differs between them.
    """
    refs = []
    for layer in layers:
        scales = (None, None) if kv_dtype == "auto" else internals.stored_scales(layer.module)
        if layer.latent:
            refs.append(
                LayerRef.latent(
                    layer.name, layer.cache, group=layer.group, scale=scales[0], kv_dtype=kv_dtype
                )
            )
            continue
        key, value = layer.cache.transpose(1, 2).split(layer.row_shape[-1], -1)
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


def hook_attention(steps: GpuSteps, layers: list[internals.TargetLayer], builders: Any) -> None:
    """Let the layers' attention read the windows."""
    from .vllm_flash import FlashHook, warm_up

    for layer, ref in zip(layers, steps.layers, strict=True):
        scores = inside.scores_of(layer.impl)
        steps.uniform |= scores.sliding_window is not None
        args = AttentionArgs(
            block_table=steps.window.position,  # the metadata's is used
            seq_lens=steps.window.position,
            scale=scores.scale,
            sliding_window=scores.sliding_window,
            soft_cap=scores.soft_cap,
        )
        layer.impl.kvtxn = FlashHook(steps, ref, args, steps.window.keep(ref, None))
    for builder in builders:
        builder.kvtxn = steps
    forms = {}
    for layer in layers:
        hook = layer.impl.kvtxn
        args, block_size = hook.args, hook.ref.planes[0].block_size
        alike = (args.sliding_window is None, args.soft_cap is None, layer.row_shape, block_size)
        forms[alike] = layer, hook
    for layer, hook in forms.values():
        warm_up(hook, inside.query_heads(layer.impl), layer.dtype)


def steps_over(runner: Any, manager: TransactionManager) -> GpuSteps:
    """Steps that read the slots where this runner keeps them."""
    slots = inside.slot_mappings(runner, list(manager.groups))
    return GpuSteps(manager, slots, inside.query_len(runner))


def hold_room(runner: Any) -> None:
    """Take what the steps will need, until ``open_steps``: vLLM measures what is free."""
    config: TxnConfig = runner.kvtxn_config
    try:
        runner.kvtxn_room = inside.room_for_rows(runner, config.max_rows)
    except Exception as error:
        if config.on_error == "raise":
            raise
        log.warning("vllm.unmeasured", rank=runner.kvtxn_rank, why=repr(error))


def open_steps(runner: Any, make: Callable[[Any, TransactionManager], StepsT]) -> StepsT | None:
    """Steps over a runner's new caches, or None and the reason in the log.

    Args:
        runner: hooked, with its KV cache.
        make: makes the steps over a manager of the target's layers.
    """
    config: TxnConfig = runner.kvtxn_config
    runner.kvtxn_room = None  # the allocator keeps it, and gives it to the steps
    try:
        layers, facts = internals.target_layers(runner)
        policy, why = decide(config.policy, facts)
        if policy == "off":
            log.warning("vllm.inactive", rank=runner.kvtxn_rank, why=why)
            return None
        settings = attrs.evolve(config, policy=cast(Policy, policy), staging="reference")
        manager = TransactionManager(layer_refs(layers, facts.kv_cache_dtype), settings)
        steps = make(runner, manager)
        if policy == "deferred":
            names = {layer.name for layer in layers}
            hook_attention(steps, layers, inside.metadata_builders(runner, names))
        steps.warm_up()
    except Exception as error:
        if config.on_error == "raise":
            raise
        log.exception("vllm.inactive", rank=runner.kvtxn_rank, why=repr(error))
        return None
    log.info(
        "vllm.active",
        rank=runner.kvtxn_rank,
        policy=policy,
        why=why,
        backend=manager.executor.name,
        layers=len(manager.layers),
        groups=len(manager.groups),
        max_rows=settings.max_rows,
        buffer_bytes=steps.window.nbytes,
        kvtxn=__version__,
        vllm=internals.version(),
    )
    return steps
