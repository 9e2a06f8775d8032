"""A fault of vLLM's n-gram drafter that engines are compared without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_moved_prompts(
    update: Callable[..., None], requests: dict[str, Any]
) -> Callable[..., None]:
    """Mend vLLM's copy of tokens for n-grams, or drafts depend on the batch's order.

    A request that moves while its prompt is computed keeps the tokens of whoever was at its new
    place (``upstream/drafts-from-another-request.md``).

    Args:
        update: vLLM's ``update_ngram_gpu_tensors_incremental``.
        requests: the runner's, by name.
    """

    def updated(batch: Any, tokens: Any, counts: Any, new: list[Any], *rest: Any, **named: Any):
        known = {*(batch.prev_req_id_to_index or {}), *(each.req_id for each in new)}
        moved = [requests[name] for name in batch.req_id_to_index if name not in known]
        update(batch, tokens, counts, [*new, *moved], *rest, **named)

    return updated
