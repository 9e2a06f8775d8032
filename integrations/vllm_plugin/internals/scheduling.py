"""The prefix cache of vLLM's scheduler: what leaves it, and what requests cannot use of it.

Blocks with wrong rows leave it, and their readers are preempted.

When vLLM looks how much of a request it has, it takes off what it cannot use: the last token has to
be computed for its logits, a drafter such as EAGLE needs a block anew, all groups have to agree on
one end, and some requests look for nothing. So the cache is looked into once more, from where vLLM
has stopped. The workers are told when the request is scheduled: it may be looked up in each step
until there is room for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import attrs

from .hooks import replace_method, when_imported

if TYPE_CHECKING:  # vLLM's processes that register kvtxn import no more than they need
    from ...serving.ledger.rank_agreement import Wrong
    from .engine_protocols import (
        CacheGroupManager,
        CacheManager,
        KVCacheGroup,
        KVCacheSpec,
        Request,
        Scheduler,
        SchedulerOutput,
        VllmConfig,
    )

#: Methods that the audit overrides or calls, with the parameters they must have; "?" marks one that
#: not every release has. To contain violations:
SCHEDULER_METHODS: Final = {
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "_preempt_request": ("request", "timestamp", "drop_stale_output"),
}
#: To tell of reuse that is lost, of the scheduler and of its cache manager:
PLANNING_METHODS: Final = {"schedule": ("throttle_prefills",)}
LOOKING_METHODS: Final = {"get_computed_blocks": ("request", "max_cache_hit_length?")}

#: The attributes by which an output has the wrong reads of its step, and a request the number of
#: its own.
_MARK: Final = "kvtxn_wrong"
_CONTAINED: Final = "kvtxn_contained"
#: The attributes by which a request has what was found of it, and a step what is not used.
_FOUND: Final = "kvtxn_found"
_UNUSED: Final = "kvtxn_unused"

#: vLLM's block that belongs to nobody.
_NOBODYS: Final = 0
#: A request that has to be computed again for the second time ends with an error.
_ONCE: Final = 1
#: What its client is told, by releases that tell it.
_WHY_ENDED: Final = (
    "The request read wrong rows of the KV cache, and computing it again did not help. "
    "The engine's log has the rows, as kvtxn.audit_violation."
)


def hook_schedulers(
    after_init: Callable[[Scheduler, VllmConfig | None], None],
) -> Callable[[], None]:
    """Call a function with every new scheduler of this process and its ``VllmConfig``.

    From the import of vLLM's module on; the configuration is None if the scheduler keeps none.

    Returns:
        A function that undoes it.
    """

    def then(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Scheduler, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            after_init(self, getattr(self, "vllm_config", None))

        return __init__

    def hook(module: ModuleType) -> Callable[[], None]:
        return replace_method(module.Scheduler, "__init__", then, "schedulers")

    return when_imported("vllm.v1.core.sched.scheduler", hook)


def mark(output: object, wrong: Wrong) -> None:
    """Add wrong reads to the output of their step."""
    inner = output
    for name in ("_model_runner_output", "model_runner_output"):  # V1's, V2's asynchronous output
        inner = getattr(output, name, inner)
    if hasattr(inner, "sampled_token_ids"):
        setattr(inner, _MARK, wrong)


def marks(output: object) -> Wrong | None:
    """Return what ``mark`` added to an output; None if nothing was added."""
    found: Wrong | None = getattr(output, _MARK, None)
    return found


def scheduled(scheduler_output: SchedulerOutput) -> Mapping[str, int]:
    """Return how many tokens of each request a step has."""
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
    At once ends a request with a block whose bytes changed, since its earlier tokens may be wrong;
    and as any cached row may come from such a block, the prefix cache is emptied then.

    Of a request of the step that has left meanwhile, or lost its blocks, nobody knows which blocks
    it has read and computed; nor of reads that were counted and not kept. Then the prefix cache is
    emptied, too, and every request that runs is computed again. A request that did not read a wrong
    row itself may be computed again any number of times.

    vLLM drops the tokens that the step sampled for a preempted request: they are stale output.

    Args:
        scheduler: the engine's, between the step and its outputs.
        wrong: what the ranks found.
        scheduled: by name of each request of the step, its rows.

    Returns:
        The names of the requests that are computed again, as far as the scheduler still has them.
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
        times = getattr(each, _CONTAINED, 0) + read
        setattr(each, _CONTAINED, times)
        if times > _ONCE or name in ended:
            _end_with_error(scheduler, name)
    return {*every} & {*scheduler.requests}


def _away(scheduler: Scheduler, names: Collection[str]) -> dict[str, Request | _Left]:
    """Return the requests, by name, of a step that do not run any more as they did in it.

    A request that has left for good has a placeholder as its object.
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
    """Let a request end with an error when the scheduler has taken in the step's output."""
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
        """Return the blocks with rows of position ``begin`` or later."""
        begin = max(begin, 0)
        found = {block for table, size in self.tables for block in table[begin // size :]}
        return found - {_NOBODYS}


def _readers(
    running: Sequence[_Reader], names: Collection[str], blocks: Collection[int], *, whole: bool
) -> tuple[dict[str, Request], set[int]]:
    """Find the requests that read some blocks, and those that read what these computed.

    Args:
        running: all requests that run.
        names: requests that are known to be among them.
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


# -- reuse that is lost ---------------------------------------------------------------------


@attrs.frozen
class Found:
    """The rows that a prefix cache has of a request.

    Attributes:
        rows: their number, from the first position on.
        ends: by reason, the rows that are left of them when that reason has taken its share off.
    """

    rows: int
    ends: Sequence[tuple[str, int]]

    def unused(self, used: int) -> dict[str, int]:
        """Return, by reason, the rows that are computed again.

        Args:
            used: the rows that the request begins with, those included that a connector brings.
        """
        found, left = {}, self.rows
        for reason, end in self.ends:
            end = max(end, used)
            if end < left:
                found[reason], left = left - end, end
        return found


def manager_of(scheduler: Scheduler) -> CacheManager:
    """Return a scheduler's manager of the cache."""
    return scheduler.kv_cache_manager


def caches(scheduler: Scheduler) -> bool:
    """Tell whether a scheduler has a prefix cache."""
    return bool(scheduler.kv_cache_manager.enable_caching)


def look(manager: CacheManager, request: Request, found: Sequence[object]) -> None:
    """Note on a request what the prefix cache has of it, for ``tell``.

    Args:
        manager: the scheduler's manager of the cache.
        request: the request.
        found: vLLM's result of looking it up; the second is the number of rows that it can use.
    """
    used = found[1]
    assert isinstance(used, int)
    setattr(request, _FOUND, _Cache(manager, request).found(used))


def spec_of(group: KVCacheGroup) -> KVCacheSpec:
    """Return the kind of a group; that of its first layer, where layers differ in their sizes."""
    spec = group.kv_cache_spec
    return next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)


class _Cache:
    """The blocks that a prefix cache has of one request."""

    def __init__(self, manager: CacheManager, request: Request) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

        self._request: Final = request
        self._coordinator: Final = manager.coordinator
        self._whole: Final[list[CacheGroupManager]] = []
        self._windows: Final[list[CacheGroupManager]] = []
        self._states: Final[list[CacheGroupManager]] = []
        groups = manager.kv_cache_config.kv_cache_groups
        for group, each in zip(groups, self._coordinator.single_type_managers, strict=True):
            spec = spec_of(group)
            if not getattr(spec, "prefix_cacheable", True):  # such as a ring of one request's
                continue
            if isinstance(spec, FullAttentionSpec):
                self._whole.append(each)
            else:
                (self._states if isinstance(spec, MambaSpec) else self._windows).append(each)

    def _has(self, group: CacheGroupManager, number: int) -> bool:
        """Tell whether the cache has a block of the request, by its number."""
        pool, hashes = group.block_pool, self._request.block_hashes
        at = (number + 1) * group.block_size // pool.hash_block_size - 1
        if at >= len(hashes):
            return False
        return pool.get_cached_block(hashes[at], [group.kv_cache_group_id]) is not None

    def _rows(self, used: int) -> int:
        """Return the rows that the cache has, of all groups that keep every row.

        Without such a group, these are the rows up to the last block that it has.
        """
        ends = []
        for group in self._whole:
            number = used // group.block_size
            while self._has(group, number):
                number += 1
            ends.append(max(number * group.block_size, used))
        for group in () if self._whole else (*self._windows, *self._states):
            number = int(self._request.num_tokens) // group.block_size
            while number * group.block_size > used and not self._has(group, number - 1):
                number -= 1
            ends.append(max(number * group.block_size, used))
        return min(ends, default=used)

    def found(self, used: int) -> Found:
        """Return the cached rows of the request, and what vLLM takes off, in vLLM's order.

        Args:
            used: the rows that vLLM can use.
        """
        rows, request = self._rows(used), self._request
        if request.skip_reading_prefix_cache:
            return Found(rows, [(_why_skipped(request), 0)])
        if rows <= used:
            return Found(rows, ())
        ends = []
        size = min(each.block_size for each in (*self._whole, *self._windows, *self._states))
        end = (int(request.num_tokens) - 1) // size * size
        ends.append(("last_token", end))
        # With several groups the drafter's block may be the one of the last token.
        matched = rows if len(self._coordinator.single_type_managers) > 1 else min(rows, end)
        end = min(end, max(matched - self._dropped(), 0))
        ends.append(("drafter", end))
        step = int(self._coordinator.scheduler_block_size)
        end = end // step * step
        ends += [("boundary", end), (self._lacking(end), 0)]
        return Found(rows, ends)

    def _dropped(self) -> int:
        """Return the rows of the last block, which a drafter such as EAGLE computes anew."""
        own = self._coordinator
        groups = getattr(own, "drop_eagle_group_ids", own.eagle_group_ids)
        sizes = (each.block_size for each in own.single_type_managers)
        return max((size for number, size in enumerate(sizes) if number in groups), default=0)

    def _lacking(self, end: int) -> str:
        """Name the kind of group that lacks what a request needs to go on from a position."""
        kinds = {"states": self._states, "window": self._windows}
        lacks = [
            kind
            for kind, groups in kinds.items()
            if end and any(not self._has(each, end // each.block_size - 1) for each in groups)
        ]
        there = [kind for kind, groups in kinds.items() if groups]
        return (lacks or there or ["other"])[0]


def _why_skipped(request: Request) -> str:
    """Return why a request looks for nothing."""
    if hasattr(request, _CONTAINED):
        return "contained"
    asked = getattr(request.sampling_params, "prompt_logprobs", None)
    return "skipped" if asked is None else "prompt_logprobs"


def tell(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Add to a step, for the workers, how many cached rows its requests compute again, and why."""
    cached = output.scheduled_cached_reqs
    begin = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
    if cached.resumed_req_ids:
        computed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        begin |= {name: rows for name, rows in computed if name in cached.resumed_req_ids}
    unused: Counter[str] = Counter()
    for name, used in begin.items():
        found: Found | None = vars(scheduler.requests[name]).pop(_FOUND, None)
        if found is not None:
            unused.update(found.unused(used))
    if unused:
        setattr(output, _UNUSED, dict(unused))


def unused_prefixes(output: SchedulerOutput) -> Mapping[str, int]:
    """Return the rows that a step computes again although they are in the cache, by reason."""
    found: Mapping[str, int] = getattr(output, _UNUSED, {})
    return found
