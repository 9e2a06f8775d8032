"""Faults in the V2 runner that the CPU's engines do not have: counts and drafts on the device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import attrs
import planted_blocks
import planted_dead
import planted_ends
import planted_rows
import planted_states
import planted_transfers
import torch
from model_files import VOCAB
from planting import Batch, Rig, around, prepared


def compare_all(rig: Rig) -> None:
    """Let the audit compare each row at each read, not a sample."""
    scrub = rig.watch.scrub
    scrub.passes = rig.watch.ledger.passes.byte_passes(attrs.evolve(scrub.books, every=1))


def accepted_one_too_many(rig: Rig) -> Any:
    """The sampler counts one more draft as accepted than were."""
    seen: dict[str, tuple[int, int, int]] = {}

    def tamper(batch: Batch) -> None:
        seen.clear()
        for index, name in enumerate(batch.names):
            if batch.drafts[index]:
                begin = batch.first[index] + batch.settled(index)
                seen[name] = index, begin, batch.drafts[index]

    def after(result: Any, *args: Any, **kwargs: Any) -> None:
        output, sampled, rejected = result
        for name, (index, begin, drafts) in seen.items():
            kept = int(sampled[index]) - 1
            if rig.struck is not None or not 0 <= kept < drafts:
                continue
            position = begin + kept
            output.sampled_token_ids[index, kept + 1] = 5
            sampled[index] += 1
            rejected[index] -= 1
            rig.strike(name, position, rig.slot(name, position))

    stack = ExitStack()
    stack.enter_context(prepared(rig, tamper))
    stack.enter_context(around(rig.runner, "sample", after=after))
    return stack


def accepted_one_too_few(rig: Rig) -> Any:
    """The device takes one accepted row back, and leaves the sampled tokens as they are.

    The next step computes that row again, of the token sampled last. It is wrong if that is another
    token than the row's own, and if there is a next step.
    """

    def after(result: Any, *args: Any, **kwargs: Any) -> None:
        output, sampled, rejected = result
        names = args[1].req_ids
        for index, count in enumerate(sampled.tolist()):
            if rig.struck is not None or count < 3:
                continue
            request = rig.scheduler.requests[names[index]]
            left = request.max_tokens - request.num_output_tokens
            own, last = output.sampled_token_ids[index, count - 2 : count].tolist()
            if own != last and left > count + 4:
                rejected[index] += 1
                position = request.num_tokens + count - 2
                rig.strike(names[index], position, rig.slot(names[index], position), later=1)

    return around(rig.runner, "sample", after=after)


def other_last_token(rig: Rig) -> Any:
    """The runner keeps another token than the one that it sampled last."""

    def after(result: Any, idx_mapping: Any, *args: Any, **kwargs: Any) -> None:
        states = rig.runner.req_states
        lengths = states.total_len.gpu[idx_mapping].tolist()
        for index, length in zip(idx_mapping.tolist(), lengths, strict=True):
            name = states.index_to_req_id[index]
            request = rig.scheduler.requests[name]
            left = request.max_tokens - request.num_output_tokens
            if rig.struck is None and request.num_output_tokens > 4 and left > 12:
                token = (int(states.last_sampled_tokens[index]) + 1) % VOCAB
                states.last_sampled_tokens[index] = token
                rig.strike(name, length - 1, rig.slot(name, length - 1), later=1)

    return around(rig.runner, "postprocess_sampled", after=after)


def other_drafts_verified(rig: Rig) -> Any:
    """The forward gets other drafts than those compared with the samples, one of which is kept."""
    changed: dict[str, tuple[int, int, int]] = {}
    real: dict[int, int] = {}

    def tamper(batch: Batch) -> None:
        changed.clear()
        real.clear()
        for index, name in enumerate(batch.names):
            if batch.drafts[index]:
                row = batch.starts[index] + batch.settled(index)
                real[row] = int(batch.tokens[row])
                position = batch.first[index] + batch.settled(index)
                changed[name] = index, position, int(batch.slots[row])
                batch.tokens[row] = (real[row] + 1) % VOCAB

    def before(*args: Any, **kwargs: Any) -> None:
        for row, token in real.items():
            rig.runner.input_buffers.input_ids[row] = token

    def after(result: Any, *args: Any, **kwargs: Any) -> None:
        for row, token in real.items():
            rig.runner.input_buffers.input_ids[row] = (token + 1) % VOCAB
        for name, (index, position, slot) in changed.items():
            if rig.struck is None and int(result[1][index]) > 1:
                rig.strike(name, position, slot)

    stack = ExitStack()
    stack.enter_context(prepared(rig, tamper))
    stack.enter_context(around(rig.runner, "sample", before, after))
    return stack


# -- bytes ----------------------------------------------------------------------------------


def _row(rig: Rig, slot: int, drafters: bool) -> torch.Tensor:
    """Return the bytes of a row in the last layer of the target, or of the drafter."""
    modules = rig.runner.compilation_config.static_forward_context
    v1 = getattr(getattr(rig.runner, "drafter", None), "_draft_attn_layer_names", ())
    v2 = getattr(getattr(rig.runner, "speculator", None), "draft_attn_layer_names", ())
    names = [name for name in modules if (name in {*v1, *v2}) == drafters]
    cache = modules[[name for name in names if hasattr(modules[name], "kv_cache")][-1]].kv_cache
    size = cache.shape[-2]
    block = cache[slot // size]
    row = block[slot % size] if cache.dim() == 3 else block[0, slot % size]
    return row.view(torch.uint8)


def _change(rig: Rig, change: Any, *, drafters: bool = False) -> Any:
    """Change a row of a request with more than two blocks, between two steps."""

    def strike(request: Any) -> None:
        slot = rig.slot(request.request_id, 37)
        change(_row(rig, slot, drafters))
        rig.strike(request.request_id, 37, slot)

    return planted_dead.later(rig, strike)


def _flip(row: torch.Tensor) -> None:
    row[6] ^= 1


def flipped_bit(rig: Rig) -> Any:
    """One bit of one number flips."""
    return _change(rig, _flip)


def stray_writer(rig: Rig) -> Any:
    """Somebody writes a row of zeros."""
    return _change(rig, lambda row: row.zero_())


def flipped_drafters_row(rig: Rig) -> Any:
    """One bit of a drafter's row flips."""
    return _change(rig, _flip, drafters=True)


_SCHEDULER = tuple(
    getattr(planted_blocks, name)
    for name in ("hashes_of_another", "hashes_swapped", "hash_survives", "handed_out_twice")
)
_INPUTS = tuple(
    getattr(planted_rows, name)
    for name in (
        *("nobodys_block", "lost_write", "slot_off_by_one", "slots_swapped"),
        *("write_into_anothers_block", "columns_swapped", "table_shifted", "anothers_table"),
        *(
            "one_block_in_two_tables",
            "anothers_last_block",
            *("positions_off_by_one", "positions_after_the_first", "positions_of_drafts"),
            "wrong_prompt_token",
            "wrong_last_token",
        ),
    )
)

V2 = (
    *_INPUTS,
    *(accepted_one_too_many, accepted_one_too_few, other_last_token, other_drafts_verified),
    *_SCHEDULER,
)
V1 = (
    *_INPUTS,
    *(planted_rows.other_drafts_verified, planted_rows.one_more_kept),
    *(planted_rows.another_token_kept, planted_blocks.rollback_one_short),
    *_SCHEDULER,
)
BYTES = (flipped_bit, stray_writer)
DRAFTERS = (flipped_drafters_row,)


def by_name(*, v2: bool) -> dict[str, Any]:
    """Every fault by its name, as it is planted in a runner; few are planted in each in its way."""
    others = (*BYTES, *DRAFTERS, *planted_transfers.FAULTS, *planted_states.FAULTS)
    others += (*planted_dead.FAULTS, *planted_dead.HARMLESS, *planted_ends.FAULTS)
    found: dict[str, Any] = {}
    for fault in (*(V2 if v2 else V1), *others):
        if found.setdefault(fault.__name__, fault) is not fault:
            raise ValueError(f"two faults are named {fault.__name__}: one would hide the other")
    return found
