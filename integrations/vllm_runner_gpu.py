"""What vLLM's two model runners have in common on a GPU, in front of what is their own.

Before vLLM measures what memory is free, room is taken for the steps; once the caches exist, the
steps take their place. Each runner says when a step begins and what was accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from ..config import TxnConfig
from ..layers import LayerRef
from ..log import get_logger
from ..manager import TransactionManager
from ..rows import LayerRows
from . import vllm_internals as internals
from . import vllm_internals_gpu as inside
from .vllm_facts import Facts
from .vllm_gpu import GpuSteps
from .vllm_policy import decide
from .vllm_runner_head import RunnerHead

log = get_logger()


class GpuHead(RunnerHead):
    """Steps in fixed buffers, which captured graphs read.

    Attributes:
        kvtxn_spare: blocks behind vLLM's own, for drafts that wait; None without any.
    """

    kvtxn_spare: inside.SpareBlocks | None = None

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """What the steps will need is taken before vLLM sizes the KV cache by what is left."""
        hold_room(self)
        super().profile_run(*args, **kwargs)  # type: ignore[misc]

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **others: Any
    ) -> None:
        """Where drafts may wait, the caches get blocks of which the scheduler is not told."""
        self.kvtxn_spare = None
        if not is_profiling:
            kv_cache_config = add_spare_blocks(self, kv_cache_config)
        if self.kvtxn_spare is not None:
            self.kvtxn_room = None
            torch.cuda.empty_cache()  # the caches are one allocation: no part of it can be reused
        super().initialize_kv_cache(kv_cache_config, is_profiling, **others)

    def kvtxn_facts(self, layers: Sequence[internals.TargetLayer], facts: Facts) -> Facts:
        """See ``RunnerHead``; layers may differ in their attention, and all have to wait."""
        waits = all(
            inside.takes_slots(layer.impl) and inside.by_rows(layer.cache) is not None
            for layer in layers
        )
        return attrs.evolve(facts, spare_blocks=waits and self.kvtxn_spare is not None)

    def kvtxn_steps(
        self, layers: Sequence[internals.TargetLayer], kv_dtype: str, settings: TxnConfig
    ) -> tuple[GpuSteps, dict[str, object]]:
        """See ``RunnerHead``; drafts wait behind vLLM's own blocks."""
        spare = self.kvtxn_spare or inside.SpareBlocks.none()
        own = [attrs.evolve(each, cache=each.cache[: spare.begin(each.cache)]) for each in layers]
        manager = TransactionManager(
            layer_refs(own, kv_dtype), attrs.evolve(settings, staging="reference")
        )
        rows = None
        if settings.policy == "deferred":
            rows = {
                ref.name: waiting_rows(ref, spare.first[ref.group], settings.max_rows)
                for ref in layer_refs(layers, kv_dtype)
            }
        steps = self.kvtxn_steps_over(manager, rows)
        if settings.policy == "deferred":
            names = {layer.name for layer in layers}
            hook_attention(steps, layers, spare.first, inside.metadata_builders(self, names))
        steps.warm_up()
        return steps, {"buffer_bytes": steps.window.nbytes}

    def kvtxn_steps_over(self, manager: TransactionManager, rows: LayerRows | None) -> Any:
        """Steps that read the slots where this runner keeps them; ``rows``: where drafts wait."""
        raise NotImplementedError


def rows_may_wait(runner: Any) -> bool:
    """Whether the policy may come to ``deferred``, by all that is known before there are caches."""
    if runner.kvtxn_config.policy not in ("auto", "deferred"):
        return False
    last = getattr(runner, "is_last_pp_rank", True)
    facts = attrs.evolve(internals.config_facts(runner.vllm_config), last_stage=last)
    policy, _ = decide(runner.kvtxn_config.policy, facts)
    return policy == "deferred" and inside.all_take_slots(runner)


def add_spare_blocks(runner: Any, kv_cache_config: Any) -> Any:
    """A configuration with blocks for drafts that wait, if any may; else the one given."""
    config: TxnConfig = runner.kvtxn_config
    try:
        if rows_may_wait(runner) and inside.has_rows_in_line(kv_cache_config):
            drafters = internals.draft_layers(runner)
            kv_cache_config, runner.kvtxn_spare = inside.with_spare_blocks(
                kv_cache_config, config.max_rows, drafters
            )
    except Exception as error:
        if config.on_error == "raise":
            raise
        log.warning("vllm.no_spare_blocks", rank=runner.kvtxn_rank, why=repr(error))
    return kv_cache_config


def waiting_rows(ref: LayerRef, first: int, count: int) -> tuple[Tensor, ...]:
    """The rows from a slot on, ``[count, *row_shape]`` for each plane; slots follow each other."""
    found = []
    for plane in ref.planes:
        cells = plane.cells
        at = cells.storage_offset() + first * cells.stride(1)
        found.append(
            cells.as_strided((count, *cells.shape[2:]), (cells.stride(1), *cells.stride()[2:]), at)
        )
    return tuple(found)


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
        key, value = inside.keys_and_values(layer.cache, layer.row_shape[-1])
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
    steps: GpuSteps,
    layers: Sequence[internals.TargetLayer],
    spare: Mapping[str, int],
    builders: Sequence[Any],
) -> None:
    """Let the layers' attention read the windows.

    Args:
        steps: the runner's.
        layers: in the order of its layers, over their whole caches.
        spare: by group, the first slot where drafts wait.
        builders: what makes the attention metadata of these layers.
    """
    from .vllm_flash import FlashHook, warm_up

    for layer, ref in zip(layers, steps.layers, strict=True):
        rows = inside.by_rows(layer.cache)
        assert rows is not None  # else the policy is another one
        caches = inside.keys_and_values(layer.cache, layer.row_shape[-1])
        settings = inside.flash_settings(layer.impl, rows)
        layer.impl.kvtxn = FlashHook(steps, ref, spare[ref.group], caches, rows, settings)
    for builder in builders:
        builder.kvtxn = steps
    warm_up({ref.planes[0].block_size for ref in steps.layers}, steps.window.position)


def hold_room(runner: Any) -> None:
    """Take what the steps will need, until there are steps: vLLM measures what is free."""
    config: TxnConfig = runner.kvtxn_config
    try:
        size = inside.bytes_of_rows(runner, config.max_rows)
        tables = inside.bytes_of_tables(runner) if rows_may_wait(runner) else 0
        runner.kvtxn_room = inside.room(runner, size + tables)
    except Exception as error:
        if config.on_error == "raise":
            raise
        log.warning("vllm.unmeasured", rank=runner.kvtxn_rank, why=repr(error))
