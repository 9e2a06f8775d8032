"""vLLM's attention layers on any device: which are the target's, and how they write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeGuard

import attrs
import torch
from torch import Tensor

from ..policy.engine_facts import EngineFacts
from ..policy.supported import ATTENTION
from . import Foreign, backends, state_layers
from .engine_config import runner_facts
from .engine_protocols import KVCacheSpec
from .runner_protocols import AttentionLayer, Runner

#: Methods of attention classes that kvtxn overrides or calls, with the parameters they must have.
ATTENTION_METHODS: Final = {
    "do_kv_cache_update": ("layer", "key", "value", "kv_cache", "slot_mapping"),
    "forward": (
        *("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        *("output_scale", "output_block_scale"),
    ),
}
LATENT_METHODS: Final = {
    "do_kv_cache_update": (
        *("kv_c_normed", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "k_scale"),
        "skip_scale?",
    ),
}


@attrs.frozen(eq=False)
class TargetLayer:
    """An attention layer of the target model.

    Attributes:
        name: vLLM's name of the layer.
        group: name of its KV-cache group, such as ``"group.0"``.
        module: vLLM's layer.
        impl: vLLM's attention of the layer, which writes rows and attends.
        cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``; of latent rows
            ``[num_blocks, block_size, latent_size]``.
        row_shape: ``(num_kv_heads, head_size)`` of keys and of values, or ``(latent_size,)``.
        dtype: dtype of rows before they are stored.
    """

    name: str
    group: str
    module: AttentionLayer
    impl: Foreign
    cache: Tensor
    row_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def latent(self) -> bool:
        """Tell whether the layer keeps latent rows instead of keys and values."""
        return len(self.row_shape) == 1


def draft_layers(runner: Runner) -> set[str]:
    """Return the names of the drafter's attention layers, of a V1 or a V2 runner; may be empty."""
    v1 = getattr(getattr(runner, "drafter", None), "_draft_attn_layer_names", ())
    return set(v1 or getattr(getattr(runner, "speculator", None), "draft_attn_layer_names", ()))


def row_specs(runner: Runner) -> list[KVCacheSpec]:
    """Return the cache specifications of all layers that have rows, a drafter's too."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    return [s for s in runner.get_kv_cache_spec().values() if isinstance(s, AttentionSpec)]


def target_layers(runner: Runner) -> tuple[list[TargetLayer], EngineFacts]:
    """Return the layers whose rows belong into windows, group by group, and the engine's facts.

    Left out are layers with a state, the drafter's, and those that share another one's cache. A
    layer that kvtxn cannot address is left out, too, and named in the facts as ``foreign_layer``.
    Of facts that differ between layers, the least known attention backend counts, the newest
    version of FlashAttention and the largest block.
    """
    mine = {id(module) for module in runner.get_model().modules()}
    by_name = runner.compilation_config.static_forward_context
    shared = {n for n in by_name if getattr(by_name[n], "kv_sharing_target_layer_name", None)}
    not_ours = shared | draft_layers(runner)
    layers, foreign = [], None
    for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            module = by_name.get(name)
            if name in not_ours or state_layers.kind_of(module):
                continue
            layer = _layer(name, gid, module, runner.dtype)
            if layer is None or id(module) not in mine:
                foreign = name
            else:
                layers.append(layer)
    known = runner_facts(runner)
    impls = [layer.impl for layer in layers]
    backends = [layer.module.get_attn_backend().get_name() for layer in layers]
    backends.sort(key=lambda name: name in ATTENTION.get(known.device, ()))
    versions = (getattr(impl, "vllm_flash_attn_version", None) for impl in impls)
    facts = attrs.evolve(
        known,
        foreign_layer=foreign,
        kv_sharing=bool(shared),
        attention=next(iter(backends), None),
        sinks=any(getattr(impl, "sinks", None) is not None for impl in impls),
        alibi=any(getattr(impl, "alibi_slopes", None) is not None for impl in impls),
        flash=max(filter(None, versions), default=None),
        block_size=max((int(layer.cache.shape[-2]) for layer in layers), default=None),
    )
    return layers, facts


def attention_of(runner: Runner, device: str) -> str | None:
    """Return the attention backend of a loaded model's layers by name; None without attention.

    If they differ, it is one that kvtxn does not know on ``device``, if there is one. Draft layers
    do not count.
    """
    by_name, others = runner.compilation_config.static_forward_context, draft_layers(runner)
    found = [
        module.get_attn_backend().get_name()
        for name, module in by_name.items()
        if name not in others and _is_attention(module)
    ]
    known = ATTENTION.get(device, ())
    return next(iter(sorted(found, key=lambda name: name in known)), None)


def _is_attention(module: object) -> TypeGuard[AttentionLayer]:
    """Tell whether a layer's class is vLLM's ``Attention`` or ``MLAAttention``, and no subclass."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    return type(module) in (Attention, MLAAttention)


def rows_of_drafters(runner: Runner) -> list[TargetLayer]:
    """Find the drafter's layers whose rows can be addressed, in the order of their groups.

    Layers that share another one's cache are left out; the list is empty without a drafter.
    """
    names, by_name = draft_layers(runner), runner.compilation_config.static_forward_context
    if not names:
        return []
    assert runner.speculative_config is not None  # there is a drafter
    dtype = runner.speculative_config.draft_model_config.dtype
    found = [
        _layer(name, gid, by_name.get(name), dtype)
        for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups)
        for name in group.layer_names
        if name in names and not getattr(by_name.get(name), "kv_sharing_target_layer_name", None)
    ]
    return [layer for layer in found if layer is not None]


def _layer(name: str, group: int, module: Any, dtype: torch.dtype) -> TargetLayer | None:
    """Describe a layer of attention; None for a layer that kvtxn cannot address.

    It can address latent rows, unless sparse, and decoders' keys and values of one size.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.v1.attention.backend import AttentionType

    shape: tuple[int, ...] | None = None
    if type(module) is MLAAttention and not module.use_sparse:
        shape = module.kv_cache.shape[-1:]
    elif type(module) is Attention and module.attn_type == AttentionType.DECODER:
        even = module.head_size == module.head_size_v
        shape = (module.num_kv_heads, module.head_size) if even else None
    if shape is None:
        return None
    return TargetLayer(
        name, f"group.{group}", module, module.impl, module.kv_cache, shape, dtype=dtype
    )


def all_take_slots(runner: Runner) -> bool:
    """Tell whether every target layer's attention is kvtxn's, and reads blocks of one row.

    See ``backends.takes_slots``.
    """
    return all(map(backends.takes_slots, _target_impls(runner)))


def lines_by_row(runner: Runner) -> bool:
    """Tell whether some target layer's attention wants a line of the table for each row."""
    return any(getattr(impl, "kvtxn_line_per_row", False) for impl in _target_impls(runner))


def _target_impls(runner: Runner) -> Iterator[object]:
    """Yield the attention of each layer that is neither the drafter's nor has a state.

    None for a layer without attention of its own.
    """
    others = draft_layers(runner) | set(state_layers.modules_of(runner))
    modules = runner.compilation_config.static_forward_context
    return (getattr(modules[name], "impl", None) for name in modules if name not in others)


def depend_on_order(layers: Sequence[TargetLayer]) -> bool:
    """Tell whether some layer's attention sums depend on the order of the batch's requests."""
    return any(getattr(layer.impl, "kvtxn_keeps_order", False) for layer in layers)


# -- rows ---------------------------------------------------------------------------


def stored_scales(module: AttentionLayer) -> tuple[float, float]:
    """Return the scales of a layer's 8-bit keys, and of its values."""
    return float(module._k_scale_float), float(module._v_scale_float)


def kernel_of(layer: TargetLayer) -> str:
    """Name the CPU instruction set for which vLLM packs a layer's rows; "" if it says none.

    Releases keep the name in the layer or in its attention.
    """
    return str(getattr(layer.module, "isa", None) or getattr(layer.impl, "isa", ""))


def write_rows(layer: TargetLayer, parts: Sequence[Tensor], cache: Tensor, slots: Tensor) -> None:
    """Let vLLM's own writer of a layer write rows to a cache.

    Args:
        layer: the layer.
        parts: ``[num_rows, *row_shape]`` each: keys and values; or latents alone, each with its
            rotary part behind the ``kv_lora_rank`` numbers of the latent.
        cache: a cache shaped like the layer's, with any number of blocks.
        slots: int64 ``[num_rows]``, the slot of each row.
    """
    module, impl = layer.module, layer.impl
    if layer.latent:
        first, second = parts[0].split(
            [impl.kv_lora_rank, parts[0].shape[1] - impl.kv_lora_rank], 1
        )
        rotary = second.unsqueeze(1)
        impl.do_kv_cache_update(first, rotary, cache, slots, module.kv_cache_dtype, module._k_scale)
    else:
        impl.do_kv_cache_update(module, *parts, cache, slots)
