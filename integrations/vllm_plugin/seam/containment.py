"""Wrong rows in vLLM's scheduler: blocks leave the prefix cache, their readers are preempted."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import attrs

from ...serving.ledger.rank_agreement import Wrong
from .engine_protocols import Request, Scheduler, SchedulerOutput
from .prefix_lookups import CONTAINED
from .runner_protocols import RunnerV1

#: Methods that the audit overrides or calls, with the parameters they must have.
SCHEDULER_METHODS: Final = {
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "_preempt_request": ("request", "timestamp", "drop_stale_output"),
}

#: The attribute by which an output has the wrong reads of its step.
_MARK: Final = "kvtxn_wrong"

#: vLLM's block that belongs to nobody.
_NOBODYS: Final = 0
#: A request that has to be computed again for the second time ends with an error.
_ONCE: Final = 1
#: What its client is told, by releases that tell it.
_WHY_ENDED: Final = (
    "The request read wrong rows of the KV cache, and computing it again did not help. "
    "The engine's log has the rows, as kvtxn.audit_violation."
)


def mark(output: object, wrong: Wrong) -> None:
    """Add the ranks' wrong reads to the output of their step, as an attribute that ``marks`` finds.

    Nothing is added to an output without sampled ids. An asynchronous output's inner one gets it.
    """
    inner = output
    for name in ("_model_runner_output", "model_runner_output"):  # V1's, V2's asynchronous output
        inner = getattr(output, name, inner)
    if hasattr(inner, "sampled_token_ids"):
        setattr(inner, _MARK, wrong)


def marks(output: object) -> Wrong | None:
    """Return the wrong reads that ``mark`` added to an output; None if nothing was added."""
    found: Wrong | None = getattr(output, _MARK, None)
    return found


def scheduled(scheduler_output: SchedulerOutput) -> Mapping[str, int]:
    """Return the number of tokens of each request that a step has, by name."""
    return scheduler_output.num_scheduled_tokens


def evict(scheduler: Scheduler, blocks: Collection[int]) -> None:
    """Take blocks out of the prefix cache; requests that have them go on with them."""
    scheduler.kv_cache_manager.evict_blocks(set(blocks) - {_NOBODYS})


def contain(scheduler: Scheduler, wrong: Wrong, scheduled: Mapping[str, int]) -> set[str]:
    """Take wrong blocks out of the prefix cache; preempt every request whose step they spoil.

    A request is spoilt if it read a wrong row, or if its table has a wrong block, or a block with a
    row that a spoilt request computed in this step. A preempted request gives its blocks back and
    is computed again, with no row of any cache. If it reads a wrong row then, it ends with an
    error; one that only shares a block with a reader, or whose rows earlier weights have computed,
    is computed again as often as that happens.

    A request with a block whose bytes changed ends at once, since its earlier tokens may be wrong;
    and as any cached row may come from such a block, the prefix cache is emptied then.

    Of a request of the step that has left meanwhile, or lost its blocks, nobody knows which blocks
    it has read and computed; nor of reads that were counted and not kept. Then the prefix cache is
    emptied, too, and every request that runs is computed again.

    vLLM drops the tokens that the step sampled for a preempted request: they are stale output.

    Args:
        scheduler: the engine's, between the step and its outputs.
        wrong: what the ranks found.
        scheduled: by name of each request of the step, its rows.

    Returns:
        The names of the requests that are computed again or end with an error, as far as the
        scheduler still has them.
    """
    manager = scheduler.kv_cache_manager
    sizes = [int(g.kv_cache_spec.block_size) for g in scheduler.kv_cache_config.kv_cache_groups]
    running = [
        _Reader(
            request,
            list(zip(manager.get_block_ids(request.request_id), sizes, strict=True)),
            scheduled.get(request.request_id, 0),
        )
        for request in scheduler.running
    ]
    ended, _ = _readers(running, frozenset(), wrong.changed, whole=True)
    spoilt, spoils = _readers(running, wrong.readers | set(ended), wrong.blocks, whole=False)
    away = _away(scheduler, {*scheduled, *wrong.readers})
    unknown = wrong.lost or bool(away)
    again = {one.request.request_id: one.request for one in running} if unknown else spoilt
    everything = range(1, int(scheduler.kv_cache_config.num_blocks))
    manager.evict_blocks(everything if wrong.changed or unknown else spoils)
    for request in reversed(again.values()):
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.running.remove(request)  # after: one that cannot be preempted runs on
        request.is_prefill_chunk = True  # or else it would get the drafts of this step
    for left in away.values():
        left.drop_stale_output = True
    every: dict[str, Request | _Left] = {**again, **away}
    for name, each in every.items():
        each.skip_reading_prefix_cache = True
        read = int(name in wrong.requests)  # not of one that only shares a block
        times = getattr(each, CONTAINED, 0) + read
        setattr(each, CONTAINED, times)
        if times > _ONCE or name in ended:
            _end_with_error(scheduler, name)
    return {*every} & {*scheduler.requests}


def repeat_prompt_logprobs(runner: RunnerV1, told: SchedulerOutput) -> None:
    """Let a V1 runner compute logprobs of prompts again that it has handed out with dropped tokens.

    That is of requests that are resumed without an output token. The runner takes the logprobs of a
    whole prompt for delivered, and vLLM has dropped them with the first token.

    Args:
        runner: the runner, before it updates its requests.
        told: the step's plan.
    """
    cached = told.scheduled_cached_reqs
    for name, outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True):
        if outputs or name not in cached.resumed_req_ids:
            continue
        params = runner.requests[name].sampling_params
        number = None if params is None else params.prompt_logprobs
        if number is not None:
            every = runner.input_batch.vocab_size
            runner.num_prompt_logprobs[name] = every if number == -1 else number


def _away(scheduler: Scheduler, names: Collection[str]) -> dict[str, Request | _Left]:
    """Return, by name, the requests of a step that no longer run as they did in it.

    Those are not running any more, or have stale output. A request that has left for good has a
    placeholder as its object.
    """
    running = {each.request_id for each in scheduler.running}
    found: dict[str, Request | _Left] = {}
    for name in names:
        request = scheduler.requests.get(name)
        if request is None or request.is_finished():
            found[name] = _Left()
        elif name not in running or int(getattr(request, "num_stale_output_tokens", 0)):
            found[name] = request
    return found


class _Left:
    """Stands for a request that has left."""

    drop_stale_output: bool
    skip_reading_prefix_cache: bool | None


def _end_with_error(scheduler: Scheduler, name: str) -> None:
    """Let the scheduler end a request with an error when it takes in the step's output."""
    ending = scheduler.grammar_compile_error_reqs
    if isinstance(ending, set):  # up to 0.32
        ending.add(name)
        return
    from vllm.outputs import RequestError

    ending[name] = RequestError(code="kv_cache_error", message=_WHY_ENDED)


@attrs.frozen(eq=False)
class _Reader:
    """A running request, its table and block size in each group, and its tokens in the step."""

    request: Request
    tables: Sequence[tuple[Sequence[int], int]]
    scheduled: int

    def read(self) -> set[int]:
        """Return the blocks with rows of the request's computed positions."""
        computed = int(self.request.num_computed_tokens)
        return {block for table, size in self.tables for block in table[: -(-computed // size)]}

    def begin(self) -> int:
        """Return the first position of the step, or one before it, perhaps below 0.

        That is the computed tokens less all that are in flight: those of this step, and those of
        steps that were launched after it.
        """
        under_way = int(getattr(self.request, "num_in_flight_tokens", 0))
        return int(self.request.num_computed_tokens) - max(self.scheduled, under_way)

    def since(self, begin: int) -> set[int]:
        """Return the blocks with rows of position ``begin`` or later; below 0 counts as 0."""
        begin = max(begin, 0)
        found = {block for table, size in self.tables for block in table[begin // size :]}
        return found - {_NOBODYS}


def _readers(
    running: Sequence[_Reader], names: Collection[str], blocks: Collection[int], *, whole: bool
) -> tuple[dict[str, Request], set[int]]:
    """Find the requests that read some blocks, and those that read what these computed.

    Args:
        running: all requests that run.
        names: requests that are found in any case.
        blocks: the blocks.
        whole: every row of a found request may be wrong, not only those of the step.

    Returns:
        The requests by name, and all blocks that may be wrong.
    """
    found: dict[str, Request] = {}
    wrong, grown = set(blocks) - {_NOBODYS}, True
    while grown:
        grown = False
        for reader in running:
            request = reader.request
            if request.request_id in found:
                continue
            if request.request_id in names or not wrong.isdisjoint(reader.read()):
                wrong |= reader.since(0 if whole else reader.begin())
                found[request.request_id] = request
                grown = True
    return found, wrong
