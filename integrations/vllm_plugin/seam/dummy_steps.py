"""Steps of requests that no user sent, handed to a model runner as the scheduler would hand them.

vLLM itself warms its V2 runner up in this way. A runner has to be between two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Sizes:
    """The numbers by which dummy requests are made.

    Attributes:
        block_sizes: tokens per block of each KV-cache group, in vLLM's order.
        num_blocks: blocks of the cache.
        drafts: drafts per request and step.
        max_requests: requests of one step.
        max_tokens: tokens of one step.
        max_length: tokens of a request.
        vocabulary: number of token ids.
    """

    block_sizes: tuple[int, ...]
    num_blocks: int
    drafts: int
    max_requests: int
    max_tokens: int
    max_length: int
    vocabulary: int


@attrs.frozen
class Dummy:
    """A request: its name, its prompt, and its blocks in each KV-cache group."""

    name: str
    prompt: list[int]
    blocks: tuple[list[int], ...]


def sizes(runner: Any) -> Sizes:
    """Read the sizes of a runner that has caches."""
    config = runner.vllm_config
    groups = runner.kv_cache_config.kv_cache_groups
    return Sizes(
        tuple(int(group.kv_cache_spec.block_size) for group in groups),
        int(runner.kv_cache_config.num_blocks),
        int(config.speculative_config.num_speculative_tokens),
        int(config.scheduler_config.max_num_seqs),
        int(config.scheduler_config.max_num_batched_tokens),
        int(config.model_config.max_model_len),
        int(config.model_config.get_vocab_size()),
    )


def begin(runner: Any, request: Dummy) -> dict[str, list[int]]:
    """Compute the prompt of a new request in one step, with greedy sampling.

    Returns:
        By the request's name, the sampled token.
    """
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData(
            req_id=request.name,
            prompt_token_ids=list(request.prompt),
            mm_features=[],
            sampling_params=sampling,
            pooling_params=None,
            block_ids=tuple(list(blocks) for blocks in request.blocks),
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=list(request.prompt),
        )
    ]
    return _run(runner, output, {request.name: len(request.prompt)})


def verify(
    runner: Any,
    requests: Sequence[Dummy],
    sampled: Mapping[str, list[int]],
    drafts: Mapping[str, list[int]],
) -> dict[str, list[int]]:
    """Verify drafts in one step, after ``begin``; return the tokens that each request gets.

    A step without these requests comes first, so that no runner takes their drafts from the device.

    Args:
        runner: the runner.
        requests: of the step.
        sampled: by name, what ``begin`` returned.
        drafts: by name; a request without an entry has none.

    Returns:
        By name, the accepted drafts and one more token.
    """
    from vllm.v1.core.sched.output import SchedulerOutput

    _run(runner, SchedulerOutput.make_empty(), {})
    output = SchedulerOutput.make_empty()
    cached = output.scheduled_cached_reqs
    cached.req_ids = [each.name for each in requests]
    cached.new_block_ids = [None for _ in requests]
    cached.num_computed_tokens = [len(each.prompt) for each in requests]
    cached.num_output_tokens = [1 for _ in requests]
    cached.all_token_ids = {each.name: [*each.prompt, *sampled[each.name]] for each in requests}
    output.scheduled_spec_decode_tokens = {
        name: list(tokens) for name, tokens in drafts.items() if tokens
    }
    return _run(
        runner, output, {each.name: 1 + len(drafts.get(each.name, ())) for each in requests}
    )


def end(runner: Any, requests: Sequence[Dummy]) -> None:
    """Let the runner forget these requests by an empty step, whatever a failed step has left."""
    from vllm.v1.core.sched.output import SchedulerOutput

    if getattr(runner, "execute_model_state", None) is not None:
        runner.execute_model_state = None  # else the next step is refused
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {each.name for each in requests}
    _run(runner, output, {})


def _run(runner: Any, output: Any, scheduled: Mapping[str, int]) -> dict[str, list[int]]:
    """Run a step of the runner; return the sampled tokens by request, none without ``scheduled``.

    Args:
        runner: the runner.
        output: vLLM's ``SchedulerOutput``, into which the counts of tokens are written.
        scheduled: tokens of each request, by name.
    """
    output.num_scheduled_tokens = dict(scheduled)
    output.total_num_scheduled_tokens = sum(scheduled.values())
    if hasattr(output, "num_spec_tokens_to_schedule"):
        speculation = runner.vllm_config.speculative_config
        output.num_spec_tokens_to_schedule = int(speculation.num_speculative_tokens)
    with torch.inference_mode():
        found = runner.execute_model(output)
        if found is None:
            found = runner.sample_tokens(None)
        if hasattr(found, "get_output"):  # of asynchronous scheduling
            found = found.get_output()
    tokens = found.sampled_token_ids if scheduled else []
    return {name: list(each) for name, each in zip(found.req_ids, tokens, strict=False)}


@contextmanager
def borrowed(runner: Any, blocks: Collection[int]) -> Iterator[None]:
    """Put the bytes of these blocks back, in every layer's cache, when the ``with`` block ends.

    Also if it raises. The bytes are kept on each cache's device.

    Args:
        runner: a runner whose layers have one cache each.
        blocks: numbers of the scheduler's blocks, of which kernels may have several in each.
    """
    config, modules = runner.kv_cache_config, runner.compilation_config.static_forward_context
    chosen = torch.tensor(sorted(blocks))
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    for name in [name for group in config.kv_cache_groups for name in group.layer_names]:
        cache: Tensor = modules[name].kv_cache
        parts = cache.shape[0] // int(config.num_blocks)  # kernels may have smaller blocks
        rows = (chosen[:, None] * parts + torch.arange(parts)).flatten().to(cache.device)
        kept.append((cache, rows, cache[rows]))
    try:
        yield
    finally:
        with torch.inference_mode():
            for cache, rows, content in kept:
                cache[rows] = content
