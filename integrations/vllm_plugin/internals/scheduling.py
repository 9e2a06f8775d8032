"""vLLM's scheduler, as far as the audit has it compute requests again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, Final

from ....errors import KVTxnError
from . import Foreign

#: Methods that the audit overrides or calls, with the parameters they must have.
SCHEDULER_METHODS: Final = {
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "_handle_invalid_blocks": ("invalid_block_ids", "num_scheduled_tokens"),
    "_preempt_request": ("request", "timestamp", "drop_stale_output"),
}

#: Names no block; it stands for wrong reads of which no block is known.
_NO_BLOCK: Final = -1
#: A request that has to be computed again for the second time ends with an error.
_ONCE: Final = 1


def hook_schedulers(after_init: Callable[[Foreign, Foreign], None]) -> Callable[[], None]:
    """Call a function with every new scheduler of this process and its ``VllmConfig``.

    Returns:
        A function that undoes the hook.

    Raises:
        KVTxnError: schedulers are hooked already.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.__init__
    if hasattr(original, "kvtxn_hook"):
        raise KVTxnError(
            "hook_schedulers", "vLLM's schedulers are hooked already", hint="unhook first"
        )

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        after_init(self, self.vllm_config)

    __init__.kvtxn_hook = True  # type: ignore[attr-defined]
    Scheduler.__init__ = __init__

    def undo() -> None:
        Scheduler.__init__ = original

    return undo


def mark(output: Any, names: Collection[str], blocks: Collection[int]) -> None:
    """Add to a step's output the requests that read wrong rows or states, and their blocks."""
    inner = getattr(output, "_model_runner_output", output)  # of asynchronous scheduling
    if hasattr(inner, "sampled_token_ids"):
        inner.kvtxn_wrong = (sorted(names), sorted(blocks))


def marks(output: Any) -> tuple[list[str], list[int]] | None:
    """Return the requests and blocks that ``mark`` added to an output; None without any."""
    found: tuple[list[str], list[int]] | None = getattr(output, "kvtxn_wrong", None)
    return found


def report_invalid(output: Any, blocks: Collection[int]) -> None:
    """Add blocks to those that a step's output reports as not loaded."""
    from vllm.v1.outputs import KVConnectorOutput

    if output.kv_connector_output is None:
        output.kv_connector_output = KVConnectorOutput()
    output.kv_connector_output.invalid_block_ids |= {_NO_BLOCK, *blocks}


def reported_by_others(invalid: Collection[int], ours: Collection[int]) -> set[int]:
    """Return the invalid blocks that a connector reported."""
    return set(invalid) - {_NO_BLOCK, *ours}


def contain(
    scheduler: Any, names: Collection[str], blocks: Collection[int], scheduled: Mapping[str, int]
) -> set[str]:
    """Take wrong blocks out of the prefix cache; preempt every request whose step they spoil.

    A request is spoilt if it read a wrong row, or if its table has a wrong block, or a block with a
    row that a spoilt request computed in this step. A preempted request gives its blocks back and
    is computed again, with no row of any cache. If it is spoilt then, it ends with an error.

    Args:
        scheduler: the scheduler, while it takes in the output of the step.
        names: requests that read wrong rows or states.
        blocks: wrong blocks.
        scheduled: tokens of each request in the step.

    Returns:
        The names of the spoilt requests.
    """
    manager, wrong = scheduler.kv_cache_manager, {*blocks} - {_NO_BLOCK, 0}
    sizes = [int(g.kv_cache_spec.block_size) for g in scheduler.kv_cache_config.kv_cache_groups]
    spoilt: dict[str, Any] = {}
    grown = True
    while grown:
        grown = False
        for request in scheduler.running:
            name, computed = request.request_id, int(request.num_computed_tokens)
            if name in spoilt:
                continue
            tables = list(zip(manager.get_block_ids(name), sizes, strict=True))
            read = {block for table, size in tables for block in table[: -(-computed // size)]}
            if name in names or not wrong.isdisjoint(read):
                begin = computed - scheduled.get(name, 0)
                wrong |= {block for table, size in tables for block in table[begin // size :]}
                wrong.discard(0)
                spoilt[name] = request
                grown = True
    manager.evict_blocks(wrong)
    scheduler.running = [each for each in scheduler.running if each.request_id not in spoilt]
    for request in reversed(spoilt.values()):
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        request.is_prefill_chunk = True  # or else it would get the drafts of this step
        request.skip_reading_prefix_cache = True
        request.kvtxn_contained = getattr(request, "kvtxn_contained", 0) + 1
        if request.kvtxn_contained > _ONCE:
            scheduler.grammar_compile_error_reqs.add(request.request_id)
    return set(spoilt)
