"""Reading vLLM's runners for the ledger: cache groups, and requests that begin and end."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from typing import Final

import attrs
import torch
from torch import Tensor

from ....audit import RowGroup
from ...serving.step import NO_CHANGES, Arrival, Changes, EncodedPart, EncoderStep, Room
from ..policy.supported import cannot_watch
from . import batches
from .engine_protocols import (
    BlockCopy,
    CachedRequests,
    Feature,
    RequestContent,
    SchedulerOutput,
    VllmConfig,
)
from .hooks import kept_on
from .layers import draft_layers
from .lora_adapters import Adapters, hash_of
from .media_contents import Media
from .prefix_lookups import spec_of, unused_prefixes
from .runner_protocols import BlockTable, Runner, RunnerV1, RunnerV2

#: Methods that an audit overrides, with the parameters they must have; "?" as in ``batches``.
AUDITED_METHODS: Final = {**batches.V1_METHODS, "sample_tokens": ("grammar_output",)}
#: Of the V2 runner:
AUDITED_V2_METHODS: Final = {
    **{
        name: batches.V2_METHODS[name]
        for name in ("initialize_kv_cache", "prepare_attn", "sample", "postprocess_sampled")
    },
    "update_requests": ("scheduler_output",),
    "sample_tokens": ("grammar_output",),
}


#: Finds the number of a layer in its name.
_NUMBERS: Final = re.compile(r"\d+")


def samples(runner: Runner) -> bool:
    """Tell whether an engine samples tokens; a pooling engine does not."""
    return bool(runner.model_config.runner_type != "pooling")


def unwatched(config: VllmConfig) -> str | None:
    """Say why the ledger cannot watch an engine with this ``VllmConfig``; None if it can.

    It depends on the device, the runner and context parallelism, see ``supported.cannot_watch``.
    """
    parallel = config.parallel_config
    context = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    runner = "v2" if config.use_v2_model_runner else "v1"
    return cannot_watch(config.device_config.device_type, runner, context)


def uncontained(config: VllmConfig) -> str | None:
    """Say in a sentence why a scheduler cannot contain what the audit finds; None if it can.

    It cannot with pipeline stages, in pooling engines, and in classes that do not derive from
    vLLM's ``Scheduler``.
    """
    if config.parallel_config.pipeline_parallel_size > 1:
        return (
            "an engine with pipeline stages has begun its next step when the scheduler takes in "
            "the last one's output, to which stages before the last add nothing"
        )
    if config.model_config.runner_type == "pooling":
        return "a pooling engine ends a request in the step that reads the row"
    return foreign_scheduler(config)


def foreign_scheduler(config: VllmConfig) -> str | None:
    """Say in a sentence that the scheduler's class does not derive from vLLM's; None if it does."""
    if config.scheduler_config.scheduler_cls is None:
        return None
    from vllm.v1.core.sched.scheduler import Scheduler

    own = config.scheduler_config.get_scheduler_cls()
    if issubclass(own, Scheduler):
        return None
    return f"the scheduler {own.__name__} does not derive from vLLM's Scheduler"


def groups_left_out(runner: Runner, groups: Iterable[str]) -> list[str]:
    """Name the KV-cache groups that are not in ``groups``, as ``"group.0 (FullAttentionSpec)"``.

    The guide says of each kind why its rows are not compared.
    """
    kinds = [type(spec_of(group)).__name__ for group in runner.kv_cache_config.kv_cache_groups]
    return [
        f"group.{number} ({kind})"
        for number, kind in enumerate(kinds)
        if f"group.{number}" not in {*groups}
    ]


def most_drafts(runner: Runner) -> int:
    """Return the most drafts of a request in one step; 0 if the engine does not speculate."""
    speculation = runner.speculative_config
    return 0 if speculation is None else int(speculation.num_speculative_tokens)


def row_groups(runner: Runner) -> dict[str, RowGroup]:
    """Return, by name, the KV-cache groups of attention whose caches have one row per token.

    Left out are recurrent states, encoder-only and cross attention, the kinds of some releases that
    keep other rows, and caches whose rows stand for several tokens each.
    """
    from vllm.v1 import kv_cache_interface as kinds

    config = runner.kv_cache_config
    drafters = draft_layers(runner)
    others = (kinds.EncoderOnlyAttentionSpec, kinds.CrossAttentionSpec)
    # Not every release has all of these kinds.
    unknown = ("CircularBufferSpec", "HiddenStateCacheSpec", "RSWASpec", "SinkFullAttentionSpec")
    others += tuple(getattr(kinds, name) for name in unknown if hasattr(kinds, name))
    found = {}
    for number, group in enumerate(config.kv_cache_groups):
        spec = spec_of(group)
        if not isinstance(spec, kinds.AttentionSpec) or isinstance(spec, others):
            continue
        if getattr(spec, "tokens_per_state", 1) != 1:
            continue
        sliding = isinstance(spec, kinds.SlidingWindowSpec)
        chunked = isinstance(spec, kinds.ChunkedLocalAttentionSpec)
        name = f"group.{number}"
        found[name] = RowGroup(
            name,
            int(spec.block_size),
            int(config.num_blocks),
            window=int(spec.sliding_window) if sliding else None,
            chunk=int(spec.attention_chunk_size) if chunked else None,
            pool="blocks",
            drafter=any(layer in drafters for layer in group.layer_names),
            context_free=all(_NUMBERS.findall(layer) == ["0"] for layer in group.layer_names),
        )
    return found


def room(runner: Runner) -> Room:
    """Return the sizes that a ledger needs of a runner; see ``Room``.

    A request's length is the model's longest, and one step's drafts and last token.
    """
    return Room(
        int(runner.max_num_reqs),
        int(runner.max_model_len) + most_drafts(runner) + 1,
        bool(runner.cache_config.enable_prefix_caching),
    )


def changes(runner: RunnerV1, scheduler_output: SchedulerOutput) -> Changes:
    """Read a step's changes: requests that end, come, come back or grow, and copied blocks.

    Call this once per step, after the V1 runner has updated its states: what it remembers of the
    requests that were put back, and of their images, depends on that.
    """
    return _with_encoder(runner, scheduler_output, _changes(runner, scheduler_output))


def _with_encoder(runner: Runner, told: SchedulerOutput, found: Changes) -> Changes:
    """Return the changes with what the step's encoder does; unchanged if no item is in use."""
    step = encoder_step(runner, told)
    return found if step is None else attrs.evolve(found, encoder=step)


def _changes(runner: RunnerV1, scheduler_output: SchedulerOutput) -> Changes:
    """Read a V1 runner's changes, without the encoder's; ``NO_CHANGES`` if there are none.

    Also notes which requests the step puts back.
    """
    told, cached = scheduler_output, scheduler_output.scheduled_cached_reqs
    new, copies = told.scheduled_new_reqs, told.kv_cache_block_copies or ()
    put_back = kept_on(runner, "kvtxn_put_back", PutBack)
    put_back.hear(told)
    came = new or cached.resumed_req_ids
    if not (came or told.finished_req_ids or copies or any(cached.new_block_ids)):
        return NO_CHANGES
    arrivals = [
        arrival_of(
            *(runner, runner.requests[each.req_id], each.req_id, tokens_of(each)),
            *(each.num_computed_tokens, each.block_ids, put_back.take(each.req_id)),
        )
        for each in new
    ]
    grown: list[list[int]] = [[] for _ in runner.kv_cache_config.kv_cache_groups]
    for index, name in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[index]
        if name in cached.resumed_req_ids:
            ids = cached.all_token_ids.get(name)
            tokens = list(ids) if ids else own_tokens(runner, name)
            computed = cached.num_computed_tokens[index]
            had = put_back.take(name)
            state = runner.requests[name]
            arrivals.append(arrival_of(runner, state, name, tokens, computed, blocks or (), had))
        elif blocks is not None:
            for known, more in zip(grown, blocks, strict=True):
                known += more
    return Changes(
        gone=sorted(told.finished_req_ids),
        arrivals=arrivals,
        grown=grown,
        copies=[pair(copy) for copy in copies],
        unused=unused_prefixes(told),
    )


def pair(copy: BlockCopy) -> tuple[int, int]:
    """Return the numbers of the block that is copied, and of the one that gets its bytes."""
    return int(copy.src_block_id), int(copy.dst_block_id)


def tokens_of(new: RequestContent) -> list[int]:
    """Return a new request's token ids; one zero per vector if its prompt has no ids at all.

    They are the ids to prefill, which of a preempted request include its outputs; else the
    prompt's.
    """
    tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
    return _placeholders(new) if tokens is None else list(tokens)


def _placeholders(state: RequestContent) -> list[int]:
    """Return a zero for each vector of a prompt that has no tokens."""
    assert state.prompt_embeds is not None  # a prompt has one of both
    return [0] * len(state.prompt_embeds)


def own_tokens(runner: RunnerV1, name: str) -> list[int]:
    """Return a request's token ids, prompt and outputs, up to the first that the runner lacks.

    Vectors of a prompt without tokens are zeros.
    """
    state = runner.requests[name]
    prompt = state.prompt_token_ids
    tokens = _placeholders(state) if prompt is None else list(prompt)
    for token in state.output_token_ids:
        if token < 0:
            break
        tokens.append(token)
    return tokens


def returning(runner: RunnerV1, name: str) -> Arrival:
    """Describe a request that the ledger has forgotten, as the V1 runner has it now."""
    state = runner.requests[name]
    tokens = own_tokens(runner, name)
    return arrival_of(runner, state, name, tokens, state.num_computed_tokens, state.block_ids)


def arrival_of(
    runner: Runner,
    state: RequestContent,
    name: str,
    tokens: list[int],
    computed: int,
    tables: Sequence[Sequence[int]],
    had: int | None = None,
) -> Arrival:
    """Describe a request to the ledger: its tokens, and what else its K and V depend on.

    An adapter's identity goes into ``extras``. The hash of an item goes to each of its positions in
    ``embedded``; of an encoder-decoder model, whose items have no positions, into ``extras``.

    Args:
        runner: the worker's runner.
        state: vLLM's content of the request.
        name: the request's name.
        tokens: its token ids, from the first on, with zeros for vectors; not copied.
        computed: number of positions whose rows are in the cache already.
        tables: its blocks, by group.
        had: number of rows that it had when it was put back; None if it was not, or nobody knows.
    """
    lora = getattr(state, "lora_request", None)
    adapters = kept_on(runner, "kvtxn_adapters", Adapters)
    extras = [] if lora is None else [adapters.identity(lora, runner)]
    embedded = _embedded(state, kept_on(runner, "kvtxn_media", Media))
    if runner.model_config.is_encoder_decoder:  # what the encoder takes has no position here
        extras += sorted(set(embedded.values()))
        embedded = {}
    prompt = state.prompt_embeds if state.prompt_token_ids is None else state.prompt_token_ids
    length = None if prompt is None else len(prompt)
    return Arrival(name, tokens, extras, embedded, int(computed), tables, length, had)


#: Steps that are remembered: a request may sit some of them out, or be in another stage's batch.
_STEPS: Final = 16


class PutBack:
    """The rows that requests had when the scheduler put them back, until they come again.

    A step names the requests that it puts back. How far each had come is in the last step in which
    it took part; for one that sat out more steps than are remembered, no row counts.
    """

    def __init__(self) -> None:
        self._before: Final[deque[_StepRows]] = deque(maxlen=_STEPS)
        self._rows: Final[dict[str, int]] = {}

    def hear(self, told: SchedulerOutput) -> None:
        """Note how many rows each request had that a step puts back; forget those that end.

        Call it for each step.
        """
        for name in told.finished_req_ids:
            self._rows.pop(name, None)
        for name in told.preempted_req_ids or ():
            rows = (step.after(name) for step in reversed(self._before))
            self._rows[name] = next((each for each in rows if each is not None), 0)
        self._before.append(_StepRows.of(told))

    def take(self, name: str) -> int | None:
        """Return the rows that a request had when it was put back, and forget it.

        None if it was not put back; 0 if it took part in no step that is remembered.
        """
        return self._rows.pop(name, None)


@attrs.frozen(eq=False)
class _StepRows:
    """Numbers of rows of a step's requests after it; the step, with its prompts, is not kept.

    Attributes:
        computed: by name of a request that the step begins, the rows that it had before.
        cached: the other requests of the step.
        scheduled: by name, the rows that the step computes, drafts included.
    """

    computed: Mapping[str, int]
    cached: CachedRequests
    scheduled: Mapping[str, int]

    @classmethod
    def of(cls, told: SchedulerOutput) -> _StepRows:
        """Read a step."""
        computed = {each.req_id: each.num_computed_tokens for each in told.scheduled_new_reqs}
        return cls(computed, told.scheduled_cached_reqs, told.num_scheduled_tokens)

    def after(self, name: str) -> int | None:
        """Return the rows that a request has after the step; None if it took no part."""
        if name not in self.scheduled:
            return None
        before = self.computed.get(name)
        if before is None:
            if name not in self.cached.req_ids:
                return None
            before = self.cached.num_computed_tokens[self.cached.req_ids.index(name)]
        return before + self.scheduled[name]


def follow_adapters(runner: Runner) -> Callable[[], None]:
    """Note each LoRA adapter that a runner's worker loads; return the undo.

    Both do nothing if the runner takes no adapters.
    """
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        return lambda: None
    return kept_on(runner, "kvtxn_adapters", Adapters).follow(manager)


def _embedded(state: RequestContent, media: Media) -> dict[int, int]:
    """Return, by position, the hash of each vector or image that stands there for a token.

    All positions of an image have one hash. Which of them is meant follows from the positions, as a
    digest is that of all positions before, too. Positions that keep their tokens are left out.
    """
    found: dict[int, int] = {}
    if state.prompt_embeds is not None and len(state.prompt_embeds):
        vectors = state.prompt_embeds.contiguous().view(torch.uint8).numpy()
        raw, size = vectors.reshape(-1).data, vectors[0].size
        is_token = state.prompt_is_token_ids
        for position in range(len(vectors)):
            if is_token is None or not is_token[position]:
                found[position] = hash_of(raw[position * size : (position + 1) * size])
    for feature, content in media.hashes(state):
        place = feature.mm_position
        taken: Iterable[int] = range(place.offset, place.offset + place.length)
        if place.is_embed is not None:  # others keep their tokens, such as the ends of lines
            taken = compress(taken, place.is_embed.tolist())
        found |= dict.fromkeys(taken, content)
    return found


# -- encoders -------------------------------------------------------------------------------

#: A modality whose items are vectors already: no encoder computes them.
_VECTORS: Final = "prompt_embeds"


class EncoderSteps:
    """The encoder outputs that steps make, forget and use, of the requests' images and audio.

    vLLM keeps outputs by the names of the items, also when no request has them any more. A request
    that comes later with the same item takes the output from there.
    """

    def __init__(self) -> None:
        self._items: Final[dict[str, Sequence[Feature]]] = {}

    def read(self, told: SchedulerOutput) -> EncoderStep | None:
        """Return which outputs a step encodes, drops and uses. Call this for each step.

        None as long as no request has an item, and nothing is dropped. What the step uses is found
        when it is asked for, by the requests known by then. Items of requests that ended are
        forgotten.
        """
        for name in told.finished_req_ids:
            self._items.pop(name, None)
        for new in told.scheduled_new_reqs:
            if new.mm_features:
                self._items[new.req_id] = new.mm_features
        if not (self._items or told.free_encoder_mm_hashes):
            return None
        encoded = [
            self._items[name][number].identifier
            for name, numbers in told.scheduled_encoder_inputs.items()
            for number in numbers
            if name in self._items
        ]
        return EncoderStep(
            encoded, told.free_encoder_mm_hashes, lambda: list(_parts(self._items, told))
        )


def _parts(items: dict[str, Sequence[Feature]], told: SchedulerOutput) -> Iterator[EncodedPart]:
    """Yield each part of an item whose positions lie among the step's rows.

    A part is a range of the item's own positions. Vectors that no encoder computes are left out.
    """
    cached = told.scheduled_cached_reqs
    computed = {new.req_id: new.num_computed_tokens for new in told.scheduled_new_reqs}
    computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for name, begin in computed.items():
        end = begin + told.num_scheduled_tokens.get(name, 0)
        for item in items.get(name, ()):
            place = item.mm_position
            first, last = max(place.offset, begin), min(place.offset + place.length, end)
            if first < last and item.modality != _VECTORS:
                yield EncodedPart(name, item.identifier, first - begin, last - begin)


def encoder_step(runner: Runner, told: SchedulerOutput) -> EncoderStep | None:
    """Read what the encoder of a runner's model does in a step; call this once per step.

    None without any item, and of an encoder-decoder model, whose rows stand for no positions of the
    encoder's input.
    """
    if runner.model_config.is_encoder_decoder:
        return None
    return kept_on(runner, "kvtxn_encoder_steps", EncoderSteps).read(told)


def own_blocks(
    table: BlockTable, count: int, block_size: int, blocks: Tensor | None = None
) -> Tensor:
    """Return the block tables of a batch in blocks of the scheduler's size.

    Kernels may have smaller blocks than the scheduler hands out; these follow each other.

    Args:
        table: the runner's.
        count: requests of the batch.
        block_size: the scheduler's.
        blocks: a table in its place, with blocks of the same size; None: the runner's own.

    Returns:
        int32 ``[count, blocks]``: a view if kernels have blocks of that size, else a new tensor.
    """
    parts = block_size // int(table.block_size)
    found = (table.block_table.gpu if blocks is None else blocks)[:count]
    return found if parts == 1 else found[:, ::parts] // parts


# -- the V2 runner --------------------------------------------------------------------------


def lacking(runner: RunnerV2) -> str | None:
    """Say why the ledger cannot watch a V2 runner whose model is loaded; None if it can.

    It cannot watch a diffusion model.
    """
    if int(getattr(runner.model_state, "num_new_sampled_tokens_per_step", 1)) != 1:
        return "a diffusion model writes the rows of one position again and again"
    return None


def is_last_stage(runner: RunnerV2) -> bool:
    """Tell whether the runner samples: the stage is the last one, or the only one."""
    return bool(runner.is_last_pp_rank)


def lines(runner: RunnerV2) -> int:
    """Return the lines that the ledger needs for a V2 runner's requests: its most, and one.

    A V2 runner forgets preempted requests.
    """
    return int(runner.max_num_reqs) + 1


def runner_device(runner: Runner) -> torch.device:
    """Return the device of a runner's tensors."""
    return torch.device(runner.device)


def changes_v2(runner: RunnerV2, scheduler_output: SchedulerOutput) -> Changes:
    """Read a V2 runner's changes in a step; call this once per step.

    A request that was preempted has gone, and comes again as a new one.
    """
    return _with_encoder(runner, scheduler_output, _changes_v2(runner, scheduler_output))


def _changes_v2(runner: RunnerV2, scheduler_output: SchedulerOutput) -> Changes:
    """Read a V2 runner's changes, without the encoder's; ``NO_CHANGES`` if there are none.

    Also notes which requests the step puts back.
    """
    told, cached = scheduler_output, scheduler_output.scheduled_cached_reqs
    new, copies = told.scheduled_new_reqs, told.kv_cache_block_copies or ()
    put_back = kept_on(runner, "kvtxn_put_back", PutBack)
    put_back.hear(told)
    gone = told.finished_req_ids or told.preempted_req_ids
    by_request = [blocks for blocks in cached.new_block_ids if blocks]
    if not (gone or new or copies or by_request):
        return NO_CHANGES
    grown: list[list[int]] = [[] for _ in runner.kv_cache_config.kv_cache_groups]
    if by_request:
        by_group = zip(*by_request, strict=True)
        for known, blocks in zip(grown, by_group, strict=True):
            known += chain.from_iterable(blocks)
        if not (gone or new or copies):  # the usual change
            return Changes((), (), grown, ())
    return Changes(
        gone=sorted({*told.finished_req_ids, *(told.preempted_req_ids or ())}),
        arrivals=[
            arrival_of(
                *(runner, each, each.req_id, tokens_of(each), each.num_computed_tokens),
                *(each.block_ids, put_back.take(each.req_id)),
            )
            for each in new
        ],
        grown=grown,
        copies=[pair(copy) for copy in copies],
        unused=unused_prefixes(told),
    )
