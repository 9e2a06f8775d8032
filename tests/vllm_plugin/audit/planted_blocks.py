"""Faults in vLLM's scheduler and its blocks: computed counts, hashes, hand-outs, preemption."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any

from planting import Rig, around

# -- counts of computed tokens ------------------------------------------------------------


def _rejected(rig: Rig, wrong: Any) -> Any:
    """Count rows of rejected drafts as computed: ``wrong(rejected)`` of them, once."""
    seen: dict[str, int] = {}

    def before(scheduler_output: Any, output: Any) -> None:
        seen.clear()
        for name, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            kept = len(output.sampled_token_ids[output.req_id_to_index[name]])
            if kept and len(drafts) + 1 > kept:
                seen[name] = len(drafts) + 1 - kept

    def schedule(*args: Any) -> None:
        for request in rig.scheduler.running:
            number = wrong(seen.get(request.request_id, 0))
            if rig.struck or not number or len(request.spec_token_ids) < number:
                continue
            position = request.num_computed_tokens
            rig.strike(request.request_id, position, rig.slot(request.request_id, position))
            request.num_computed_tokens += number

    stack = ExitStack()
    stack.enter_context(around(rig.scheduler, "update_from_output", before))
    stack.enter_context(around(rig.scheduler, "schedule", schedule))
    return stack


def rollback_one_short(rig: Rig) -> Any:
    """The scheduler takes back one rejected row too few."""
    return _rejected(rig, lambda rejected: min(rejected, 1))


def no_rollback(rig: Rig) -> Any:
    """The scheduler takes back no rejected row."""
    return _rejected(rig, lambda rejected: rejected if rejected > 1 else 0)


def prompt_rows_skipped(rig: Rig) -> Any:
    """The second chunk of a prompt begins five tokens too late."""

    def schedule(*args: Any) -> None:
        for request in rig.scheduler.running:
            left = request.num_prompt_tokens - request.num_computed_tokens
            if rig.struck is None and request.num_computed_tokens and left > 10:
                position = request.num_computed_tokens
                later = position // 32 >= len(rig.manager.get_block_ids(request.request_id)[0])
                slot = None if later else rig.slot(request.request_id, position)
                rig.strike(request.request_id, position, slot)
                request.num_computed_tokens += 5

    return around(rig.scheduler, "schedule", schedule)


# -- hashes -------------------------------------------------------------------------------


def hashes_of_another(rig: Rig) -> Any:
    """A request comes with the hashes of another prompt, and hits its blocks."""
    first: list[Any] = []

    def before(request: Any) -> None:
        if len(request.block_hashes) < 2:
            return
        if not first:
            first.append(request)
            return
        other = request.prompt_token_ids[0] != first[0].prompt_token_ids[0]
        if (
            rig.struck is None
            and other
            and rig.pool.get_cached_block(first[0].block_hashes[0], [0])
        ):
            request.block_hashes[:2] = first[0].block_hashes[:2]
            block = rig.pool.get_cached_block(first[0].block_hashes[0], [0])[0].block_id
            rig.strike(request.request_id, 0, block * 32)

    return around(rig.scheduler, "add_request", before)


@contextmanager
def hashes_swapped(rig: Rig) -> Any:
    """Two blocks get each other's hashes; the next request with this prompt hits them."""
    swapped: list[Any] = []

    def before(request: Any, blocks: Any, **given: Any) -> None:
        cached, full = given["num_cached_blocks"], given["num_full_blocks"]
        if not swapped and full - cached >= 2:
            swapped.append(request)
            hashes = request.block_hashes
            hashes[cached], hashes[cached + 1] = hashes[cached + 1], hashes[cached]
            swapped.append((cached, blocks[cached + 1].block_id))

    def after(result: Any, request: Any, **given: Any) -> None:
        if len(swapped) == 2 and swapped[0] is request:
            cached = swapped[1][0]
            hashes = request.block_hashes
            hashes[cached], hashes[cached + 1] = hashes[cached + 1], hashes[cached]
            swapped.append(None)

    def come(request: Any) -> None:
        if len(swapped) == 3 and rig.struck is None:
            cached, block = swapped[1]
            if request.block_hashes[: cached + 2] == swapped[0].block_hashes[: cached + 2]:
                rig.strike(request.request_id, cached * 32, block * 32)

    with (
        around(rig.pool, "cache_full_blocks", before, after),
        around(rig.scheduler, "add_request", come),
    ):
        yield


@contextmanager
def hash_survives(rig: Rig) -> Any:
    """A block that is handed out again keeps its old hash, too."""
    kept: list[Any] = []
    prompts: dict[Any, Any] = {}

    def before(block: Any) -> None:
        if not kept and block.block_hash is not None and block.block_hash in prompts:
            kept.extend((block.block_hash, block))

    def after(result: Any, block: Any) -> None:
        if len(kept) == 2 and kept[1] is block:
            rig.pool.cached_block_hash_to_block.insert(*kept)
            kept.append(None)

    def come(request: Any) -> None:
        for block in rig.pool.get_cached_block(request.block_hashes[0], [0]) or ():
            if len(kept) == 3 and block is kept[1] and rig.struck is None:
                rig.strike(request.request_id, 0, block.block_id * 32)

    def cached(result: Any, request: Any, blocks: Any, **given: Any) -> None:
        if not given["num_cached_blocks"] and blocks[0].block_hash is not None:
            prompts[blocks[0].block_hash] = request

    with (
        around(rig.pool, "_maybe_evict_cached_block", before, after),
        around(rig.pool, "cache_full_blocks", after=cached),
        around(rig.scheduler, "add_request", come),
    ):
        yield
    if len(kept) == 3:
        rig.pool.cached_block_hash_to_block.pop(kept[0], kept[1].block_id)


# -- hand-outs ----------------------------------------------------------------------------


@contextmanager
def handed_out_twice(rig: Rig) -> Any:
    """A new request gets the last block of a request that runs."""
    shared: list[Any] = []

    def before(request: Any, blocks: Any, **given: Any) -> None:
        for block in shared:  # vLLM would notice that it has the hash of its other owner
            if block in blocks:
                rig.pool._maybe_evict_cached_block(block)

    def after(blocks: Any, *args: Any) -> None:
        if rig.struck is not None or not blocks:
            return
        for request in rig.scheduler.running:
            name, computed = request.request_id, request.num_computed_tokens
            table = rig.manager.coordinator.single_type_managers[0].req_to_blocks[name]
            victim = table[(computed - 1) // 32] if computed > 32 and computed % 32 > 4 else None
            if victim is None or victim.block_hash is not None or victim in blocks:
                continue
            position = (computed - 1) // 32 * 32
            rig.pool.free_blocks([blocks[0]])
            rig.pool.touch([victim])
            blocks[0] = victim
            shared.append(victim)
            rig.strike(name, position, victim.block_id * 32)
            return

    with (
        around(rig.pool, "get_new_blocks", after=after),
        around(rig.pool, "cache_full_blocks", before),
    ):
        yield


# -- preemption ---------------------------------------------------------------------------


@contextmanager
def resumed_as_computed(rig: Rig) -> Any:
    """A preempted request keeps its count of computed tokens, without its blocks."""
    counts: dict[str, int] = {}
    wrong: list[str] = []

    def before(request: Any, *args: Any, **kwargs: Any) -> None:
        counts[request.request_id] = request.num_computed_tokens

    def after(result: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        if not wrong and counts[request.request_id] >= 32:
            request.num_computed_tokens = counts[request.request_id] // 32 * 32
            wrong.append(request.request_id)

    def scheduled(output: Any, *args: Any) -> None:
        if (
            rig.struck is None
            and wrong
            and wrong[0] in output.scheduled_cached_reqs.resumed_req_ids
        ):
            rig.strike(wrong[0], 0, rig.slot(wrong[0], 0))

    with (
        around(rig.scheduler, "_preempt_request", before, after),
        around(rig.scheduler, "schedule", after=scheduled),
    ):
        yield


def resumed_with_old_table(rig: Rig) -> Any:
    """The runner keeps the blocks that a resumed request had before."""

    def before(scheduler_output: Any) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        for name in sorted(cached.resumed_req_ids):
            old = [list(blocks) for blocks in rig.runner.requests[name].block_ids]
            index = cached.req_ids.index(name)
            new = cached.new_block_ids[index]
            taken = {block for other in rig.scheduler.running if other.request_id != name
                     for block in rig.manager.get_block_ids(other.request_id)[0]}  # fmt: skip
            count = len(new[0])
            if rig.struck or len(old[0]) < count or not taken.intersection(old[0][:1]):
                continue
            computed = cached.num_computed_tokens[index]
            if computed:
                continue
            for other in rig.scheduler.running:
                table = rig.manager.get_block_ids(other.request_id)[0]
                at = table.index(old[0][0]) if old[0][0] in table else None
                if at is not None and (at + 2) * 32 <= other.num_computed_tokens:
                    cached.new_block_ids[index] = (old[0][:count],)
                    rig.strike(other.request_id, at * 32, old[0][0] * 32)
                    return

    return around(rig.runner, "_update_states", before)


FAULTS = (
    *(rollback_one_short, no_rollback, prompt_rows_skipped),
    *(hashes_of_another, hashes_swapped, hash_survives),
    *(handed_out_twice, resumed_as_computed, resumed_with_old_table),
)
