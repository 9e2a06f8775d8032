"""What kvtxn takes from vLLM's inside on GPUs; what it imports comes from ``vllm_internals``.

Both model runners, their batches and graphs, and how their caches lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..errors import LayerError
from . import vllm_internals as internals

#: Methods of the V2 runner that are overridden, with the parameters they have to have.
RUNNER_METHODS: Final = {
    "profile_run": ("randomize_inputs",),
    "initialize_kv_cache": ("kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
    "prepare_attn": ("input_batch",),
    "postprocess_sampled": (
        *("idx_mapping", "sampled_tokens", "num_sampled", "num_rejected", "query_start_loc"),
    ),
}

#: Likewise for the V1 runner.
V1_METHODS: Final = {
    "profile_run": ("randomize_inputs",),
    "_may_reorder_batch": ("scheduler_output",),
    **{
        name: internals.RUNNER_METHODS[name]
        for name in ("initialize_kv_cache", "_update_states", "_prepare_inputs", "_sample")
    },
}


def after_warm_up(wrapper: Any, then: Callable[[], None]) -> None:
    """Do something once a worker has warmed up.

    With the V2 runner vLLM goes through whole steps for that, drafts and all, of requests that
    nobody sent and that its own counters leave out.

    Args:
        wrapper: the worker's.
        then: what to do.
    """
    own = wrapper.worker.compile_or_warm_up_model

    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        then()
        return result

    wrapper.worker.compile_or_warm_up_model = compile_or_warm_up_model


# -- the V2 runner ------------------------------------------------------------------


#: The rows of a batch as the host knows them, numpy ``[num_requests]`` each: drafts per request, or
#: None where the batch has none; rows per request; and whether these are still the prompt's.
#: A plain tuple: in the middle of a step, with the processor's caches full of all else, making an
#: object takes long.
BatchRows = tuple[Any, Any, Any]


def batch_rows(batch: Any) -> BatchRows:
    """What ``prepare_attn`` is given."""
    drafts = batch.num_draft_tokens_per_req if batch.num_draft_tokens else None
    return drafts, batch.num_scheduled_tokens, batch.is_prefilling_np


def query_len(runner: Any) -> int:
    """Most rows of a request with drafts: all of them, and the token sampled last."""
    v1 = getattr(runner, "uniform_decode_query_len", None)
    return int(runner.decode_query_len if v1 is None else v1)


def prepared_rows(runner: Any, prepared: Any, lengths: Any) -> BatchRows:
    """What the V1 runner's ``_prepare_inputs`` was given and returned."""
    metadata, batch = prepared[1], runner.input_batch
    count = len(lengths)
    drafts = None
    if metadata is not None and any(metadata.num_draft_tokens):
        drafts = lengths.copy()
        drafts[:] = metadata.num_draft_tokens
    known = batch.num_computed_tokens_cpu[:count]
    return drafts, lengths, known < batch.num_prompt_tokens[:count]


def lead_with_drafts(runner: Any, scheduler_output: Any) -> None:
    """Let the requests with drafts lead the V1 runner's batch."""
    batch, drafts = runner.input_batch, scheduler_output.scheduled_spec_decode_tokens
    leading = 0
    for place, request in enumerate(list(batch.req_ids)):
        if drafts.get(request):
            if place != leading:
                batch.swap_states(leading, place)
            leading += 1


def slots_of_groups(runner: Any, groups: Sequence[str]) -> list[Tensor]:
    """The V1 runner's slots of these groups, int64 ``[max_tokens]`` each."""
    tables = runner.input_batch.block_table
    return [tables[int(group.partition(".")[2])].slot_mapping.gpu for group in groups]


def window_rows(config: Any) -> int:
    """Most rows of a window, unless the user says: what requests with drafts have in one step.

    Where that is far beyond the largest captured graph, buffers for it would be out of proportion;
    so they take no more than twice what the rows of that graph take.
    """
    most = internals.most_window_rows(config)
    captured = int(config.compilation_config.max_cudagraph_capture_size or 0)
    return min(most, captured * 15 // 8) if captured else most  # the rest is for tables


def bytes_of_rows(runner: Any, rows: int) -> int:
    """What ``rows`` rows of the target's layers take."""
    drafters = internals.draft_layers(runner)
    return rows * sum(
        int(-(-spec.page_size_bytes // spec.block_size))
        for name, spec in runner.get_kv_cache_spec().items()
        if name not in drafters
    )


def bytes_of_tables(runner: Any) -> int:
    """What the block tables by slot take in the largest captured graph, one for each group.

    The groups do not exist yet: vLLM makes them as large as the rarest kind of layer is frequent.
    """
    kinds, config = Counter(runner.get_kv_cache_spec().values()), runner.vllm_config
    groups = sum(-(-count // min(kinds.values())) for count in kinds.values())
    compilation = config.compilation_config
    rows = int(compilation.max_cudagraph_capture_size or 0)
    mixed = compilation.cudagraph_mode.mixed_mode().name == "FULL"
    requests = min(rows if mixed else rows // query_len(runner), int(runner.max_num_reqs))
    return 4 * groups * requests * int(runner.max_model_len)


def room(runner: Any, size: int) -> Tensor:
    """So many bytes on the runner's device."""
    return torch.empty(size, dtype=torch.uint8, device=runner.device)


def slot_mappings(runner: Any, groups: Sequence[str]) -> Tensor:
    """The slots of these groups, int64 ``[num_groups, max_tokens]``, one buffer for ever.

    Raises:
        LayerError: they are not neighbours in the runner's buffer.
    """
    slots: Tensor = runner.block_tables.slot_mappings
    numbers = [int(group.partition(".")[2]) for group in groups]
    first = numbers[0]
    if numbers != list(range(first, first + len(numbers))):
        raise LayerError(
            "vllm",
            "the target's KV-cache groups are not neighbours",
            expected="consecutive groups",
            got=numbers,
        )
    return slots[first : first + len(numbers)]


def metadata_builders(runner: Any, names: set[str]) -> list[Any]:
    """The builders that make the attention metadata of these layers."""
    return [
        builder
        for groups in runner.attn_groups
        for group in groups
        if not names.isdisjoint(group.layer_names)
        for builder in group.metadata_builders
    ]


# -- FlashAttention -------------------------------------------------------------------


def flash_version(config: Any = None) -> int | None:
    """The FlashAttention that vLLM takes on this machine's GPU, for an engine or by default."""
    named = config and config.attention_config.flash_attn_version
    found: int | None = named or internals.flash_attention().get_flash_attn_version()
    return found


def takes_slots(impl: Any) -> bool:
    """Whether a layer's attention is ours, and FlashAttention 3, which takes blocks of one row.

    It is vLLM's own class where a model names it, or where vLLM remembers it from an engine that
    this process had before.
    """
    return hasattr(impl, "kvtxn") and getattr(impl, "vllm_flash_attn_version", None) == 3


def all_take_slots(runner: Any) -> bool:
    """Whether all of the target's layers do; the model is loaded."""
    drafters = internals.draft_layers(runner)
    modules = runner.compilation_config.static_forward_context
    return all(takes_slots(getattr(modules[n], "impl", None)) for n in modules if n not in drafters)


@attrs.frozen
class SpareBlocks:
    """Blocks behind those that vLLM hands out, for drafts that wait.

    Attributes:
        own: blocks that vLLM hands out.
        total: those and the spare ones.
        first: by group, the first slot that is its alone; groups may share their memory.
    """

    own: int
    total: int
    first: Mapping[str, int]

    @classmethod
    def none(cls) -> SpareBlocks:
        """Where there are none."""
        return cls(1, 1, {})

    def begin(self, cache: Tensor) -> int:
        """The first spare block of a layer's cache; its kernels may count smaller blocks."""
        return int(cache.shape[0]) // self.total * self.own


def with_spare_blocks(config: Any, rows: int, without: set[str]) -> tuple[Any, SpareBlocks]:
    """A KV-cache configuration with room for so many more rows of each group.

    Args:
        config: vLLM's ``KVCacheConfig``; stays as it is.
        rows: that can wait at once.
        without: layers that need no such room.

    Raises:
        LayerError: the caches do not lie as they were checked.
    """
    own, added, first = config.num_blocks, 0, {}
    for number, group in enumerate(config.kv_cache_groups):
        if without.issuperset(group.layer_names):
            continue
        size = group.kv_cache_spec.block_size
        first[f"group.{number}"] = (own + added) * size
        added += -(-rows // size)
    more = deepcopy(config)
    more.num_blocks = own + added
    for tensor in more.kv_cache_tensors:
        # Where a block holds all layers' pages, more blocks follow. Else each layer has a region
        # of its own, and all of these grow.
        regions = tensor.block_stride * own != tensor.size
        for name in ("size", "offset", "layer_stride") if regions else ("size",):
            each, rest = divmod(getattr(tensor, name), own)
            if rest:
                raise LayerError(
                    "vllm",
                    "the KV cache is not laid out by blocks",
                    expected=f"{name} of a KVCacheTensor a multiple of {own} blocks",
                    got=getattr(tensor, name),
                    hint="use policy 'undo'",
                )
            setattr(tensor, name, each * more.num_blocks)
    return more, SpareBlocks(own, more.num_blocks, first)


def has_rows_in_line(config: Any) -> bool:
    """Whether in each layer's cache row follows row, block after block, as ``by_rows`` needs it.

    Args:
        config: vLLM's ``KVCacheConfig``, whose layout orders layers, blocks, heads and rows ("N");
            one that does not say how is left for the caches themselves to tell.
    """
    return config.kv_cache_layout is None or "BN" in config.kv_cache_layout


def by_rows(cache: Tensor) -> Tensor | None:
    """A layer's cache as blocks of one row; None where rows do not follow each other evenly.

    Args:
        cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.

    Returns:
        ``[num_blocks * block_size, num_kv_heads, 1, 2 * head_size]``, by slot.
    """
    if cache.dim() != 4 or cache.stride(0) != cache.shape[2] * cache.stride(2):
        return None
    blocks, heads, size, width = cache.shape
    _, head, row, each = cache.stride()
    return cache.as_strided((blocks * size, heads, 1, width), (row, head, row, each))


def keys_and_values(cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Both halves of a layer's cache, by block and row.

    Args:
        cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.
        head_size: of the keys, which come first in a row.

    Returns:
        Views of it, ``[num_blocks, block_size, num_kv_heads, head_size]`` each.
    """
    key, value = cache.transpose(1, 2).split(head_size, -1)
    return key, value


def flash_settings(impl: Any, rows: Tensor) -> dict[str, Any] | None:
    """What a layer's calls of FlashAttention always get; None where vLLM gives them more.

    Outside of graphs the host has to keep up, and to make these anew in each call, as vLLM does,
    takes it a third of the call.

    Args:
        impl: vLLM's attention of the layer.
        rows: its cache by slot.
    """
    if impl.kv_cache_dtype not in ("auto", "float16", "bfloat16") or impl.alibi_slopes is not None:
        return None
    own = internals.flash_attention()
    key, value = keys_and_values(rows, impl.head_size)
    return {
        "k": own.canonicalize_singleton_dim_strides(key),
        "v": own.canonicalize_singleton_dim_strides(value),
        "softmax_scale": impl.scale,
        "window_size": list(impl.sliding_window),
        "softcap": impl.logits_soft_cap,
        "s_aux": impl.sinks,
        "fa_version": impl.vllm_flash_attn_version,
    }


def flash_batch(metadata: Any) -> dict[str, Any] | None:
    """What FlashAttention gets in all layers of a step; None where vLLM decides by the layer."""
    if metadata.causal is not True:
        return None
    return {
        "cu_seqlens_q": metadata.query_start_loc,
        "seqused_k": metadata.seq_lens,
        "max_seqlen_q": metadata.max_query_len,
        "max_seqlen_k": metadata.max_seq_len,
        "causal": True,
        "block_table": metadata.block_table,
        "scheduler_metadata": metadata.scheduler_metadata,
        "num_splits": metadata.max_num_splits,
    }


def flash_schedule(builder: Any, metadata: Any) -> Any:
    """FlashAttention's schedule of a batch over blocks of one row, in one launch.

    Its metadata builder makes it, but for blocks of its own size: of large ones FlashAttention
    reads otherwise, and may divide the work differently.
    """
    size, builder.block_size = builder.block_size, 1
    try:
        return builder._get_scheduler_metadata(
            aot_schedule=True,
            batch_size=metadata.seq_lens.shape[0],
            cu_query_lens=metadata.query_start_loc,
            max_query_len=metadata.max_query_len,
            seqlens=metadata.seq_lens,
            max_seq_len=metadata.max_seq_len,
            causal=metadata.causal,
            max_num_splits=metadata.max_num_splits,
        )
    finally:
        builder.block_size = size
