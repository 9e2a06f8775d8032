"""vLLM's scheduler: new ones, and the rows of the prefix cache that its requests cannot use.

When vLLM looks how much of a request it has, it takes off what it cannot use: the last token has to
be computed for its logits, a drafter such as EAGLE needs a block anew, all groups have to agree on
one end, and some requests look for nothing. So the cache is looked into once more, from where vLLM
has stopped. The workers are told when the request is scheduled: it may be looked up in each step
until there is room for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import attrs

from .hooks import kept_on, replace_method, when_imported

if TYPE_CHECKING:  # vLLM's processes that register kvtxn import no more than they need
    from .engine_protocols import (
        CacheCoordinator,
        CacheGroupManager,
        CacheManager,
        KVCacheGroup,
        KVCacheSpec,
        Request,
        Scheduler,
        SchedulerOutput,
        VllmConfig,
    )

#: Methods that the audit overrides, of the scheduler and of its cache manager, with the parameters
#: they must have; "?" marks one that not every release has.
PLANNING_METHODS: Final = {"schedule": ("throttle_prefills",)}
LOOKING_METHODS: Final = {"get_computed_blocks": ("request", "max_cache_hit_length?")}

#: The attribute by which a request has the number of its own wrong reads; see ``containment``.
CONTAINED: Final = "kvtxn_contained"
#: The attributes by which a manager has its groups, a request what was found of it, and a step what
#: is not used.
_GROUPS: Final = "kvtxn_groups"
_FOUND: Final = "kvtxn_found"
_UNUSED: Final = "kvtxn_unused"


def hook_schedulers(
    after_init: Callable[[Scheduler, VllmConfig | None], None],
) -> Callable[[], None]:
    """Call a function with every new scheduler of this process and its ``VllmConfig``.

    The module of vLLM's scheduler is hooked once it is imported. The configuration is None if the
    scheduler keeps none.

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
        """Return, by reason, how many cached rows are computed again; zeros are left out.

        Args:
            used: the rows that the request begins with, including those that a connector brings.
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
    """Note on a request what the prefix cache has of it, and what vLLM takes off, for ``tell``.

    Args:
        manager: the scheduler's manager of the cache.
        request: the request, which gets an attribute.
        found: vLLM's result of looking it up; the second is the number of rows that it can use.
    """
    used = found[1]
    assert isinstance(used, int)
    groups = kept_on(manager, _GROUPS, partial(_Groups.of, manager))
    setattr(request, _FOUND, _Cache(groups, request).found(used))


def spec_of(group: KVCacheGroup) -> KVCacheSpec:
    """Return a group's cache specification; where layers differ in size, the first layer's."""
    spec = group.kv_cache_spec
    return next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)


@attrs.frozen(eq=False)
class _Groups:
    """The groups of a cache manager that can keep a prefix; they are the same for each request.

    Attributes:
        coordinator: of all groups.
        whole_groups: groups that keep every row.
        window_groups: groups that keep the last rows, or otherwise not every row.
        state_groups: groups of recurrent states.
    """

    coordinator: CacheCoordinator
    whole_groups: Sequence[CacheGroupManager]
    window_groups: Sequence[CacheGroupManager]
    state_groups: Sequence[CacheGroupManager]

    @classmethod
    def of(cls, manager: CacheManager) -> _Groups:
        """Read a manager's groups; left out are those of one request alone, such as rings."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

        coordinator = manager.coordinator
        whole: list[CacheGroupManager] = []
        windows: list[CacheGroupManager] = []
        states: list[CacheGroupManager] = []
        groups = manager.kv_cache_config.kv_cache_groups
        for group, each in zip(groups, coordinator.single_type_managers, strict=True):
            spec = spec_of(group)
            if not getattr(spec, "prefix_cacheable", True):
                continue
            if isinstance(spec, FullAttentionSpec):
                whole.append(each)
            else:
                (states if isinstance(spec, MambaSpec) else windows).append(each)
        return cls(coordinator, whole, windows, states)


class _Cache:
    """The blocks that a prefix cache has of one request.

    Args:
        groups: the cache's.
        request: the request.
    """

    def __init__(self, groups: _Groups, request: Request) -> None:
        self._groups: Final = groups
        self._request: Final = request

    def _has(self, group: CacheGroupManager, number: int) -> bool:
        """Tell whether the cache has a group's block of the request, by the block's number from 0.

        False for blocks that the request has not filled.
        """
        pool, hashes = group.block_pool, self._request.block_hashes
        at = (number + 1) * group.block_size // pool.hash_block_size - 1
        if at >= len(hashes):
            return False
        return pool.get_cached_block(hashes[at], [group.kv_cache_group_id]) is not None

    def _rows(self, used: int) -> int:
        """Return the rows of the request that the cache has, at least ``used``.

        The groups that keep every row count, as far as all of them have blocks without a gap after
        ``used``. Without such a group, these are the rows up to the last block that each has.
        """
        ends, own = [], self._groups
        for group in own.whole_groups:
            number = used // group.block_size
            while self._has(group, number):
                number += 1
            ends.append(max(number * group.block_size, used))
        for group in () if own.whole_groups else (*own.window_groups, *own.state_groups):
            number = int(self._request.num_tokens) // group.block_size
            while number * group.block_size > used and not self._has(group, number - 1):
                number -= 1
            ends.append(max(number * group.block_size, used))
        return min(ends, default=used)

    def found(self, used: int) -> Found:
        """Return the cached rows of the request, and by reason where vLLM ends them.

        The reasons are in vLLM's order; there are none if vLLM can use all rows. Of a request that
        reads no prefix cache, the one reason is why.

        Args:
            used: the rows that vLLM can use.
        """
        rows, request, own = self._rows(used), self._request, self._groups
        if request.skip_reading_prefix_cache:
            return Found(rows, [(_why_skipped(request), 0)])
        if rows <= used:
            return Found(rows, ())
        ends = []
        size = min(
            each.block_size for each in (*own.whole_groups, *own.window_groups, *own.state_groups)
        )
        end = (int(request.num_tokens) - 1) // size * size
        ends.append(("last_token", end))
        # With several groups the drafter's block may be the one of the last token.
        matched = rows if len(own.coordinator.single_type_managers) > 1 else min(rows, end)
        end = min(end, max(matched - self._dropped(), 0))
        ends.append(("drafter", end))
        step = int(own.coordinator.scheduler_block_size)
        end = end // step * step
        ends += [("boundary", end), (self._lacking(end), 0)]
        return Found(rows, ends)

    def _dropped(self) -> int:
        """Return the rows of the last block if a drafter such as EAGLE computes it anew; else 0."""
        own = self._groups.coordinator
        groups = getattr(own, "drop_eagle_group_ids", own.eagle_group_ids)
        sizes = (each.block_size for each in own.single_type_managers)
        return max((size for number, size in enumerate(sizes) if number in groups), default=0)

    def _lacking(self, end: int) -> str:
        """Name the kind of group that lacks the block before a position: "states" or "window".

        If none lacks it, the first of these kinds that the model has, or "other".
        """
        kinds = {"states": self._groups.state_groups, "window": self._groups.window_groups}
        lacks = [
            kind
            for kind, groups in kinds.items()
            if end and any(not self._has(each, end // each.block_size - 1) for each in groups)
        ]
        there = [kind for kind, groups in kinds.items() if groups]
        return (lacks or there or ["other"])[0]


def _why_skipped(request: Request) -> str:
    """Say why a request reads no prefix cache: "contained", "prompt_logprobs" or "skipped"."""
    if hasattr(request, CONTAINED):
        return "contained"
    asked = getattr(request.sampling_params, "prompt_logprobs", None)
    return "skipped" if asked is None else "prompt_logprobs"


def tell(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Add to a step, for the workers, how many cached rows its requests compute again, and why.

    Counted are the requests that the step begins or resumes; what ``look`` noted of them is taken
    away. Nothing is added if there are no such rows.
    """
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
    """Return, by reason, the cached rows that a step computes again, as ``tell`` added them."""
    found: Mapping[str, int] = getattr(output, _UNUSED, {})
    return found
