"""Everything that kvtxn takes from vLLM's inside, one small function per thing.

No other file here imports vLLM's modules or reads the attributes of its
objects. Checked against the releases in ``vllm_facts.SUPPORTED``; a method
that looks different is noticed when the runner is hooked (``vllm_hooks``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from .vllm_facts import ATTENTION, SUPPORTED, Facts

#: Methods that are overridden or called, with the parameters they have to have; "?" marks one
#: that not every release has.
RUNNER_METHODS: Final = {
    "initialize_kv_cache": ("kv_cache_config", "is_profiling", "kv_cache_allocation_context?"),
    "_update_states": ("scheduler_output",),
    "_prepare_inputs": ("scheduler_output", "num_scheduled_tokens"),
    "_model_forward": (
        *("input_ids", "positions", "intermediate_tensors", "inputs_embeds", "model_kwargs"),
    ),
    "_sample": ("logits", "spec_decode_metadata"),
}
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
    ),
}


# -- the package ------------------------------------------------------------------


def version() -> str:
    """The release, without a build suffix such as ``+cpu``."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


def hook_workers(
    after_init_device: Callable[[Any], None], methods: Mapping[str, Callable[[Any], Any]]
) -> Callable[[], None]:
    """Run something in every worker once it has a model runner, and add methods for RPC.

    Args:
        after_init_device: gets the worker's wrapper.
        methods: by name; each gets the worker's wrapper.

    Returns:
        Undoes it.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase as Wrapper

    original = Wrapper.init_device

    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        after_init_device(self)
        return result

    Wrapper.init_device = init_device
    for name, method in methods.items():
        setattr(Wrapper, name, method)

    def undo() -> None:
        Wrapper.init_device = original
        for name in methods:
            delattr(Wrapper, name)

    return undo


# -- the configuration ------------------------------------------------------------


def device_type() -> str:
    """The device that vLLM would run on here."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def config_from(engine_args: Mapping[str, Any]) -> Any:
    """The ``VllmConfig`` of an engine with these arguments; reads the model's configuration."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**engine_args).create_engine_config()


def engine_config(wrapper: Any) -> Any:
    """A worker's ``VllmConfig``."""
    return wrapper.vllm_config


def additional_config(config: Any) -> object:
    """What the user gave as ``additional_config``."""
    return config.additional_config


def most_window_rows(config: Any) -> int:
    """The most rows that requests with drafts have in one step."""
    speculation = config.speculative_config
    drafts = int(speculation.num_speculative_tokens) if speculation is not None else 0
    return (drafts + 1) * int(config.scheduler_config.max_num_seqs)


def config_facts(config: Any) -> Facts:
    """What a ``VllmConfig`` says, if its release was checked; ``target_layers`` knows the rest."""
    if (number := version()) not in SUPPORTED:
        return Facts(version=number)
    from vllm import envs

    parallel, model = config.parallel_config, config.model_config
    speculation, on_gpu = config.speculative_config, config.device_config.device_type == "cuda"
    context = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    return Facts(
        version=number,
        device=config.device_config.device_type,
        runner="v2" if config.use_v2_model_runner else "v1",
        method=None if speculation is None else speculation.method,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=config.cache_config.cache_dtype,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        context_parallel=context,
        connector=getattr(config.kv_transfer_config, "kv_connector", None),
        mla=model.use_mla,
        recurrent=model.is_hybrid,
        microbatches=parallel.use_ubatching,
        adaptive=on_gpu and _adapts(speculation),
        batch_invariant=bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)),
        graph_writes=on_gpu
        and bool(getattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", False))
        | bool(config.compilation_config.use_inductor_graph_partition),
    )


def _adapts(speculation: Any) -> bool:
    """Whether the number of drafts changes from step to step; older releases do not say."""
    return speculation is not None and bool(
        speculation.enable_adaptive_verification
        or speculation.num_speculative_tokens_per_batch_size is not None
    )


# -- the runner -------------------------------------------------------------------


def runner_of(wrapper: Any) -> Any:
    """A worker's model runner."""
    return wrapper.worker.model_runner


def rank_of(wrapper: Any) -> int:
    """A worker's rank among the engine's."""
    return int(wrapper.rpc_rank)


@attrs.frozen(eq=False)
class TargetLayer:
    """An attention layer of the target model.

    Attributes:
        name: as vLLM knows it.
        group: of its KV cache, as a name.
        module: the layer; ``impl`` carries out its attention.
        impl: writes rows and attends.
        cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, or of latent rows
            ``[num_blocks, block_size, latent_size]``.
        row_shape: ``(num_kv_heads, head_size)``, of keys and of values, or ``(latent_size,)``.
        dtype: of rows before they are stored.
    """

    name: str
    group: str
    module: Any
    impl: Any
    cache: Tensor
    row_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def latent(self) -> bool:
        """Whether it keeps latent rows instead of keys and values."""
        return len(self.row_shape) == 1


def draft_layers(runner: Any) -> set[str]:
    """Names of the drafter's own attention layers; V1 and V2 keep them in different places."""
    v1 = getattr(getattr(runner, "drafter", None), "_draft_attn_layer_names", ())
    return set(v1 or getattr(getattr(runner, "speculator", None), "draft_attn_layer_names", ()))


def target_layers(runner: Any) -> tuple[list[TargetLayer], Facts]:
    """Layers whose rows belong into windows, and what the layers say about the engine."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.v1.attention.backend import AttentionType

    mine = {id(module) for module in runner.get_model().modules()}
    by_name = runner.compilation_config.static_forward_context
    shared = {n for n in by_name if getattr(by_name[n], "kv_sharing_target_layer_name", None)}
    not_ours = shared | draft_layers(runner)
    layers, foreign = [], None
    for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            module = by_name.get(name)
            if name in not_ours:
                continue
            shape: tuple[int, ...] | None = None
            if type(module) is MLAAttention and not module.use_sparse:
                shape = module.kv_cache.shape[-1:]
            elif type(module) is Attention and module.attn_type == AttentionType.DECODER:
                even = module.head_size == module.head_size_v
                shape = (module.num_kv_heads, module.head_size) if even else None
            if shape is None or id(module) not in mine:
                foreign = name
                continue
            layers.append(
                TargetLayer(
                    *(name, f"group.{gid}", module, module.impl, module.kv_cache, shape),
                    dtype=runner.dtype,
                )
            )
    known = config_facts(runner.vllm_config)
    backends = [layer.module.get_attn_backend().get_name() for layer in layers]
    backends.sort(key=lambda name: name in ATTENTION.get(known.device, ()))
    versions = (getattr(layer.impl, "vllm_flash_attn_version", None) for layer in layers)
    facts = attrs.evolve(
        known,
        foreign_layer=foreign,
        kv_sharing=bool(shared),
        last_stage=getattr(runner, "is_last_pp_rank", True),
        attention=next(iter(backends), None),
        sinks=any(getattr(layer.impl, "sinks", None) is not None for layer in layers),
        alibi=any(getattr(layer.impl, "alibi_slopes", None) is not None for layer in layers),
        flash=max(filter(None, versions), default=None),
    )
    return layers, facts


def vocab_size(runner: Any) -> int:
    """The vocabulary's size; ids at or above it do not count as tokens."""
    return int(runner.input_batch.vocab_size)


def drafts_and_ends(runner: Any, prepared: Any) -> tuple[list[int], list[int]]:
    """Drafts per request of the batch, and one past the last row of each request.

    Args:
        runner: after ``_prepare_inputs``.
        prepared: what that returned.
    """
    metadata = prepared[1]
    if metadata is None:
        return [], []
    drafts = list(metadata.num_draft_tokens)
    return drafts, runner.query_start_loc.np[1 : len(drafts) + 1].tolist()


def sampled_ids(output: Any) -> Tensor:
    """Sampled token ids ``[num_requests, drafts + 1]``, -1 where there is none."""
    ids: Tensor = output.sampled_token_ids
    return ids


def step_slots(layers: Mapping[str, str], *, reads_window: bool) -> dict[str, Tensor] | str:
    """The slots of the forward that is about to run, or why it cannot have a window.

    Args:
        layers: one layer's name for each group.
        reads_window: refuse a batch whose attention cannot read rows that are not in the cache.
    """
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

    context = get_forward_context()
    if not isinstance(context.slot_mapping, dict) or not isinstance(context.attn_metadata, dict):
        return "microbatches"
    for name in layers.values():
        metadata = context.attn_metadata[name]
        if not reads_window:
            continue
        if isinstance(metadata, MLACommonMetadata):
            # Requests with more than one row read the cache only before their own rows.
            if metadata.num_decode_tokens != metadata.num_decodes:
                return "decoded_from_the_cache"
        elif metadata.causal is not True or metadata.dynamic_causal is not None:
            return "not_causal"
    return {group: context.slot_mapping[name] for group, name in layers.items()}


# -- the attention ----------------------------------------------------------------


@attrs.frozen(eq=False)
class Batch:
    """The batch that a layer attends for.

    Attributes:
        starts: int ``[num_requests + 1]``, the first row of each request, and the end.
        seq_lens: int ``[num_requests]``.
        block_table: int ``[num_requests, max_blocks]``.
        num_rows: rows without padding.
    """

    starts: Tensor
    seq_lens: Tensor
    block_table: Tensor
    num_rows: int


def batch_of(metadata: Any) -> Batch:
    """The batch in a backend's attention metadata."""
    return Batch(
        metadata.query_start_loc, metadata.seq_lens, metadata.block_table,
        int(metadata.num_actual_tokens),
    )  # fmt: skip


@attrs.frozen
class Scores:
    """How a layer turns queries and keys into scores; None is "no limit"."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None


def scores_of(impl: Any) -> Scores:
    """A layer's settings; vLLM says -1 and 0 where there is no window and no cap."""
    window, cap = int(impl.sliding_window), float(impl.logits_soft_cap)
    return Scores(float(impl.scale), window if window > 0 else None, cap if cap > 0 else None)


def stored_scales(module: Any) -> tuple[float, float]:
    """Scales of 8-bit keys and values."""
    return float(module._k_scale_float), float(module._v_scale_float)


def kernel_of(layer: TargetLayer) -> str:
    """Which instruction set's packing the rows of a layer have; releases keep it in two places."""
    return str(getattr(layer.module, "isa", None) or getattr(layer.impl, "isa", ""))


def write_rows(layer: TargetLayer, parts: Sequence[Tensor], cache: Tensor, slots: Tensor) -> None:
    """Let a layer write rows ``[num_rows, *row_shape]``, keys and values or latents, to a cache."""
    module, impl = layer.module, layer.impl
    if layer.latent:
        first, second = parts[0].split(
            [impl.kv_lora_rank, parts[0].shape[1] - impl.kv_lora_rank], 1
        )
        rotary = second.unsqueeze(1)
        impl.do_kv_cache_update(first, rotary, cache, slots, module.kv_cache_dtype, module._k_scale)
    else:
        impl.do_kv_cache_update(module, *parts, cache, slots)


def scratch_blocks(cache: Tensor, count: int) -> Tensor:
    """A zeroed cache of ``count`` blocks with the layout of ``cache``."""
    return cache.new_zeros(count, *cache.shape[1:])


# -- FlashAttention ---------------------------------------------------------------


def flash_attention() -> Any:
    """The module of the FlashAttention backend."""
    from vllm.v1.attention.backends import flash_attn

    return flash_attn


def register_flash_attention(path: str) -> None:
    """Let vLLM find the class at ``path`` under the name FLASH_ATTN."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.FLASH_ATTN, path)


def metadata_of(module: Any) -> Any:
    """A layer's attention metadata in the forward that is under way; None without any."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    return metadata.get(module.layer_name) if isinstance(metadata, dict) else None
