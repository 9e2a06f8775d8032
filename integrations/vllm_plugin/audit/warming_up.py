"""A launch of each of a watch's passes, so that no request waits until they are compiled."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ....audit import Ledger, Scrub, Step
from .published_blocks import FilledBlocks, PublishedBlocks


def launch_all(
    ledger: Ledger,
    groups: Collection[str],
    states: Collection[str],
    scrub: Scrub | None,
    published: FilledBlocks | PublishedBlocks,
) -> None:
    """Launch every pass once, over a step of padding.

    Args:
        ledger: on a GPU, without requests; it has to be restarted afterwards.
        groups: the names of its groups of rows.
        states: the names of its groups of states.
        scrub: compares bytes beside it; None without one.
        published: checks its blocks.
    """
    device = ledger.device
    ledger.admit("of the warm-up", [0])
    one = torch.zeros(1, dtype=torch.int64, device=device)
    starts = torch.zeros(2, dtype=torch.int32, device=device)
    tokens = torch.zeros(1, dtype=torch.int32, device=device)
    tables = dict.fromkeys(groups, tokens[None])
    slots = dict.fromkeys((*groups, *states), one - 1)
    sources = dict.fromkeys(states, one - 1)
    told = one - 1 if states else None
    step_input = ledger.input
    for target in (one.clone(), tokens.clone()):
        step_input.put(target, [0])
    step_input.count(tokens[None], tokens.bool(), 1, one.clone(), one[None].clone())
    # Counts as the two runners have them, with drafts and without.
    for drafts, counts in ((None, tokens), (tokens, tokens), (None, one), (tokens, one)):
        step = Step(
            *(one - 1, starts, None, tokens, slots, tables, drafts, sources, told), positions=one
        )
        if scrub is not None:
            scrub.compare(step)
        ledger.write(step)
        ledger.check(step)
        ledger.resolve(counts, one[None], besides=1)
        if scrub is not None:
            scrub.trace(step, one[None].float(), one - 1)
            scrub.seal(step, counts, besides=1)
    published.publish(step)
