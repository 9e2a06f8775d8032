"""The batch of a step: which rows are drafts, where all rows go, which tokens were sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
from torch import Tensor

from ....errors import LayerError
from ...serving.step import Array, BatchRows
from .engine_protocols import SchedulerOutput
from .runner_protocols import (
    AttentionLayer,
    InputBatchV2,
    MetadataBuilder,
    Prepared,
    Runner,
    RunnerV1,
    RunnerV2,
    SamplerOutput,
    StageHandler,
)

#: Methods that windows need overridden, with the parameters they must have; "?" marks one that
#: not every release has. Of the V1 runner on a CPU:
V1_METHODS: Final = {
    "initialize_kv_cache": ("kv_cache_config", "is_profiling", "kv_cache_allocation_context?"),
    "_update_states": ("scheduler_output",),
    "_prepare_inputs": ("scheduler_output", "num_scheduled_tokens"),
    "_model_forward": (
        *("input_ids", "positions", "intermediate_tensors", "inputs_embeds", "model_kwargs"),
    ),
    "_sample": ("logits", "spec_decode_metadata"),
}
#: Of the V1 runner on a GPU:
V1_GPU_METHODS: Final = {
    "_may_reorder_batch": ("scheduler_output",),
    **{
        name: V1_METHODS[name]
        for name in ("initialize_kv_cache", "_update_states", "_prepare_inputs", "_sample")
    },
}
#: Of the V1 runner on a GPU, if recurrent states are in the windows:
V1_STATE_METHODS: Final = {
    "_determine_batch_execution_and_padding": (
        *("num_tokens", "num_reqs", "num_scheduled_tokens_np", "max_num_scheduled_tokens"),
        *("use_cascade_attn", "allow_microbatching", "force_eager", "force_uniform_decode"),
        *("force_has_lora", "force_num_active_loras", "num_encoder_reqs"),
    ),
    "_build_attention_metadata": (
        *("num_tokens", "num_reqs", "max_query_len", "num_tokens_padded", "num_reqs_padded"),
        *("ubatch_slices", "logits_indices", "max_num_sampled_tokens", "use_spec_decode"),
        *("for_cudagraph_capture", "num_scheduled_tokens", "cascade_attn_prefix_lens?"),
        "slot_mappings",
    ),
}
#: Of the V2 runner:
V2_METHODS: Final = {
    "initialize_kv_cache": ("kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
    "prepare_inputs": (
        *("scheduler_output", "batch_req_state", "batch_desc", "num_active_loras?"),
    ),
    "prepare_attn": ("input_batch",),
    "sample": ("hidden_states", "input_batch", "grammar_output"),
    "postprocess_sampled": (
        *("idx_mapping", "sampled_tokens", "num_sampled", "num_rejected", "query_start_loc"),
        "draft_tokens?",
    ),
    "update_pp_decode_requests": (),
}


def vocab_size(runner: RunnerV1) -> int:
    """Return the vocabulary's size; sampled ids at or above it do not count as tokens."""
    return int(runner.input_batch.vocab_size)


def query_len(runner: RunnerV1 | RunnerV2) -> int:
    """Return the most rows of a request with drafts: one, and the most drafts."""
    if hasattr(runner, "uniform_decode_query_len"):
        return runner.uniform_decode_query_len
    return runner.decode_query_len


def sampled_ids(output: SamplerOutput) -> Tensor | None:
    """Return sampled token ids ``[num_requests, drafts + 1]``, -1 where there is none.

    None for an output without ids.
    """
    return getattr(output, "sampled_token_ids", None)


# -- on a CPU -------------------------------------------------------------------------


def step_slots(layers: Mapping[str, str], *, drafts_wait: bool) -> dict[str, Tensor] | str:
    """Find the slots of the forward that is about to run.

    Args:
        layers: one layer's name for each group.
        drafts_wait: refuse a batch whose latent attention reads its own rows from the cache.

    Returns:
        The engine's own tensors of slots by group, int64 ``[num_rows]`` each, padding (-1)
        included. Or why the step cannot have a window, as a counter's label: "microbatches", and
        with ``drafts_wait`` "decoded_from_the_cache".
    """
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

    context = get_forward_context()
    if not isinstance(context.slot_mapping, dict) or not isinstance(context.attn_metadata, dict):
        return "microbatches"
    for name in layers.values():
        metadata = context.attn_metadata[name]
        if not drafts_wait or not isinstance(metadata, MLACommonMetadata):
            continue
        # Requests with more than one row read the cache only before their own rows.
        if metadata.num_decode_tokens != metadata.num_decodes:
            return "decoded_from_the_cache"
    return {group: context.slot_mapping[name] for group, name in layers.items()}


# -- on a GPU -------------------------------------------------------------------------


def steps_until_known(runner: Runner) -> int | None:
    """Return after how many steps a pipeline stage learns what was accepted.

    None if the stage is the last one, or the runner has no stages: it samples itself.
    """
    handler: StageHandler | None = getattr(runner, "pp_handler", None)
    if handler is None or handler.is_last_rank:
        return None
    return len(handler.queue)


def arriving(runner: RunnerV2) -> tuple[object, Array | None]:
    """Return the batch whose acceptance a pipeline stage takes from its queue next.

    The queue stays as it is.

    Returns:
        ``PlannedV2.name`` of the batch, and numpy bool ``[num_requests]``, True for requests whose
        index was freed meanwhile; None twice if nothing comes.
    """
    handler = runner.pp_handler
    assert handler is not None  # the runner is a pipeline stage's
    entry = handler.queue[0]
    if entry is None:
        return None, None
    now = handler.req_idx_gen_np[entry.idx_mapping_np]
    return entry.idx_mapping_np, now != entry.gen_at_receive_np


def num_sampled(output: object) -> Tensor | None:
    """Return how many tokens the V2 runner's ``sample`` got for each request, int32.

    None if its output does not say so, as in some releases; windows have none there.
    """
    return output[1] if isinstance(output, tuple) else None


def prepared_rows(runner: RunnerV1, prepared: Prepared, lengths: Array) -> BatchRows:
    """Return the V1 runner's drafts, rows, and who is at its prompt, after ``_prepare_inputs``.

    Args:
        runner: the runner.
        prepared: what ``_prepare_inputs`` returned.
        lengths: numpy int ``[num_requests]``, the rows of each request; returned as they are.

    Returns:
        Drafts of each request, None without any; ``lengths``; and bool ``[num_requests]``.
    """
    metadata, batch = prepared[1], runner.input_batch
    count = len(lengths)
    drafts = None
    if metadata is not None and any(metadata.num_draft_tokens):
        drafts = lengths.copy()
        drafts[:] = metadata.num_draft_tokens
    known = batch.num_computed_tokens_cpu[:count]
    return drafts, lengths, known < batch.num_prompt_tokens[:count]


def has_prompts(rows: BatchRows) -> bool:
    """Tell whether a request is at its prompt, or has more rows than one and its drafts.

    Args:
        rows: drafts, rows, and who is at its prompt, as ``prepared_rows`` returns them.
    """
    drafts, lengths, prefilling = rows
    settled = lengths if drafts is None else lengths - drafts
    return bool((prefilling | (settled > 1)).any())


@attrs.define(eq=False)
class PlannedV1:
    """A step of the V1 runner after ``_prepare_inputs``; see ``PlannedStep``.

    Attributes:
        runner: the runner.
        prepared: the result of ``_prepare_inputs``.
        lengths: its argument ``num_scheduled_tokens``, numpy int32 ``[num_requests]``.
    """

    runner: RunnerV1
    prepared: Prepared
    lengths: Array

    def rows(self) -> BatchRows:
        """Return each request's drafts, None without any, and rows, and who is at its prompt."""
        return prepared_rows(self.runner, self.prepared, self.lengths)

    def alike(self, rows: int) -> int:
        """Return 0: this runner cannot tell it quickly."""
        return 0

    def name(self) -> object:
        """Return None: this runner has no name for a step."""
        return None

    def outputs(self) -> Tensor:
        """Return the numbers of the rows whose outputs are sampled, int ``[num_outputs]``."""
        return self.prepared[0]


@attrs.define(eq=False)
class PlannedV2:
    """A step of the V2 runner after ``prepare_attn``; see ``PlannedStep``."""

    batch: InputBatchV2
    prepared: tuple[Sequence[Tensor], *tuple[object, ...]]

    def rows(self) -> BatchRows:
        """Return each request's drafts, None without any, and rows, and who is at its prompt."""
        batch = self.batch
        drafts = batch.num_draft_tokens_per_req if batch.num_draft_tokens else None
        return drafts, batch.num_scheduled_tokens, batch.is_prefilling_np

    def alike(self, rows: int) -> int:
        """Return the number of requests if each has one settled row and ``rows - 1`` drafts.

        Else 0, as for a batch without drafts, or in which a request prefills. No request has more
        than ``rows - 1`` drafts, so the batch's sums tell it.
        """
        batch = self.batch
        count, drafts = batch.num_reqs, batch.num_draft_tokens
        full = drafts and drafts == count * (rows - 1) and batch.num_tokens == count * rows
        return count if full and not batch.has_prefill else 0

    def name(self) -> object:
        """Return the object by which the runner's queue of pipeline stages knows the batch."""
        return self.batch.idx_mapping_np

    def outputs(self) -> Tensor:
        """Return the numbers of the rows whose outputs are sampled, int ``[num_outputs]``."""
        return self.batch.logits_indices


@attrs.frozen(eq=False)
class StepRows:
    """The places of the rows of a step of the V1 runner, in buffers that each step fills anew.

    Attributes:
        seq_lens: int32 ``[max_requests]``, the tokens of each request, the step's included.
        query_start_loc: int32 ``[max_requests + 1]``, the first row of each, and the end.
    """

    seq_lens: Tensor
    query_start_loc: Tensor

    @classmethod
    def of(cls, runner: RunnerV1) -> StepRows:
        """Return a runner's own buffers."""
        return cls(runner.seq_lens, runner.query_start_loc.gpu)


def metadata_by_layer(
    built: tuple[Mapping[str, object], *tuple[object, ...]] | Mapping[str, object],
) -> Mapping[str, object]:
    """Return the metadata by layer from the result of V1's ``_build_attention_metadata``.

    Releases return a tuple that begins with it, or the mapping alone.
    """
    return built[0] if isinstance(built, tuple) else built


def lead_with_drafts(runner: RunnerV1, scheduler_output: SchedulerOutput) -> None:
    """Move the requests with drafts to the front of the V1 runner's batch, in place.

    These keep their order among themselves; other requests may not.
    """
    batch, drafts = runner.input_batch, scheduler_output.scheduled_spec_decode_tokens
    leading = 0
    for place, request in enumerate(list(batch.req_ids)):
        if drafts.get(request):
            if place != leading:
                batch.swap_states(leading, place)
            leading += 1


def slots_of_groups(runner: RunnerV1, groups: Sequence[str]) -> list[Tensor]:
    """Return the V1 runner's slots of these groups, int64 ``[max_tokens]`` each, on the device.

    They are the runner's own buffers, which each step fills anew.
    """
    tables = runner.input_batch.block_table
    return [tables[int(group.partition(".")[2])].slot_mapping.gpu for group in groups]


def slot_mappings(runner: RunnerV2, groups: Sequence[str]) -> Tensor:
    """Return the V2 runner's slots of these groups, int64 ``[num_groups, max_tokens]``.

    It is a view: the runner fills this one buffer anew for each step.

    Raises:
        LayerError: the groups are not neighbours in the runner's order.
    """
    slots = runner.block_tables.slot_mappings
    numbers = [int(group.partition(".")[2]) for group in groups]
    first = numbers[0]
    if numbers != list(range(first, first + len(numbers))):
        raise LayerError(
            "vllm",
            "the target's KV-cache groups are not neighbours",
            expected="consecutive groups",
            got=numbers,
            hint="kvtxn has no windows over this model's caches with the V2 runner",
        )
    return slots[first : first + len(numbers)]


def metadata_builders(runner: Runner, names: set[str]) -> list[MetadataBuilder]:
    """Return the builders of all attention groups that have one of the layers ``names``."""
    return [
        builder
        for groups in runner.attn_groups
        for group in groups
        if not names.isdisjoint(group.layer_names)
        for builder in group.metadata_builders
    ]


def metadata_of(module: AttentionLayer) -> object | None:
    """Return a layer's attention metadata in the forward that is under way.

    None without any, and in microbatches.
    """
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    return metadata.get(module.layer_name) if isinstance(metadata, dict) else None
