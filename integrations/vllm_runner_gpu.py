"""What vLLM's two model runners have in common on a GPU, in front of what is their own.

Before vLLM measures what memory is free, room is taken for the steps; once the caches exist, the
steps take their place. Each runner says when a step begins and what was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from ..config import TxnConfig
from ..errors import LayerError
from ..executor import AttentionArgs
from ..layers import LayerRef
from ..log import get_logger
from ..manager import TransactionManager
from . import vllm_internals as internals
from . import vllm_internals_gpu as inside
from .vllm_gpu import GpuSteps
from .vllm_runner_head import RunnerHead

log = get_logger()


class GpuHead(RunnerHead):
    """Steps in fixed buffers, which captured graphs read."""

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """What the steps will need is taken before vLLM sizes the KV cache by what is left."""
        hold_room(self)
        super().profile_run(*args, **kwargs)  # type: ignore[misc]

    def kvtxn_steps(
        self, layers: Sequence[internals.TargetLayer], kv_dtype: str, settings: TxnConfig
    ) -> tuple[GpuSteps, dict[str, object]]:
        """See ``RunnerHead``; rows are staged where the forward leaves them."""
        manager = TransactionManager(
            layer_refs(layers, kv_dtype), attrs.evolve(settings, staging="reference")
        )
        steps = self.kvtxn_steps_over(manager)
        if settings.policy == "deferred":
            names = {layer.name for layer in layers}
            hook_attention(steps, layers, inside.metadata_builders(self, names))
        steps.warm_up()
        return steps, {"buffer_bytes": steps.window.nbytes}

    def kvtxn_steps_over(self, manager: TransactionManager) -> Any:
        """Steps that read the slots where this runner keeps them."""
        raise NotImplementedError


def layer_refs(layers: Sequence[internals.TargetLayer], kv_dtype: str) -> list[LayerRef]:
    """The target layers over their caches.

    Every backend in ``vllm_facts.ATTENTION`` sees ``[num_blocks, heads, block_size,
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


def hook_attention(steps: GpuSteps, layers: Sequence[internals.TargetLayer], builders: Any) -> None:
    """Let the layers' attention read the windows.

    Raises:
        LayerError: a sliding window is no longer than what a request may have in one step.
            FlashAttention takes what is then left of it before the step, less than nothing, for
            no bound at all.
    """
    from .vllm_flash import FlashHook, warm_up

    for layer, ref in zip(layers, steps.layers, strict=True):
        scores = inside.scores_of(layer.impl)
        if scores.sliding_window is not None:
            steps.uniform = True
            if scores.sliding_window <= steps.query_len:
                raise LayerError(
                    "vllm",
                    f"the sliding window of {ref.name!r} is no longer than a request's rows",
                    expected=f"more than {steps.query_len}",
                    got=scores.sliding_window,
                    hint="verify fewer drafts at once, or use policy 'undo'",
                )
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


def hold_room(runner: Any) -> None:
    """Take what the steps will need, until there are steps: vLLM measures what is free."""
    config: TxnConfig = runner.kvtxn_config
    try:
        runner.kvtxn_room = inside.room_for_rows(runner, config.max_rows)
    except Exception as error:
        if config.on_error == "raise":
            raise
        log.warning("vllm.unmeasured", rank=runner.kvtxn_rank, why=repr(error))
