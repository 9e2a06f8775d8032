"""Rows that vLLM's prefix cache has of a request and cannot use, with vLLM's own managers."""

from __future__ import annotations

from math import lcm
from types import SimpleNamespace

import pytest
from kvtxn.integrations.vllm_plugin.audit import audited_scheduler
from kvtxn.integrations.vllm_plugin.audit.audited_scheduler import (
    LookingCacheManager,
    TellingScheduler,
)
from kvtxn.integrations.vllm_plugin.seam import prefix_lookups
from kvtxn.integrations.vllm_plugin.seam.hooks import is_swapped, swap_class
from kvtxn.integrations.vllm_plugin.seam.prefix_lookups import Found, unused_prefixes
from test_audit_watch import config

from kvtxn import KVTxnError

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

HASHED = 4
ROWS = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


def whole(size=4):
    return kinds.FullAttentionSpec(block_size=size, **ROWS)


def window(size=4):
    return kinds.SlidingWindowSpec(block_size=size, sliding_window=8, **ROWS)


def states(size=4):
    return kinds.MambaSpec(block_size=size, shapes=((1, 1),), dtypes=(torch.float32,))


def manager_of(*specs, **changes):
    """A manager over groups of layers, which looks."""
    init_none_hash(sha256)
    groups = [kinds.KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)]
    made = KVCacheManager(
        kinds.KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=200, enable_caching=True, hash_block_size=HASHED,
        scheduler_block_size=lcm(*(spec.block_size for spec in specs)), **changes,
    )  # fmt: skip
    swap_class(made, LookingCacheManager)
    return made


def request_of(tokens, name="a", **changes):
    params = SamplingParams(max_tokens=9, **changes)
    params.update_from_generation_config({}, eos_token_id=100)
    return Request(
        request_id=name, prompt_token_ids=tokens, sampling_params=params, pooling_params=None,
        block_hasher=get_request_block_hasher(HASHED, sha256),
    )  # fmt: skip


def filled(manager, length, steps=None):
    """Let a request of so many tokens leave its blocks in the cache."""
    request = request_of([*range(length)], "writer")
    for step in steps or [length]:
        manager.new_step_starts()
        assert manager.allocate_slots(request, step) is not None
        request.num_computed_tokens += step
    manager.free(request)


def lost(manager, request):
    """The rows that vLLM uses, and by reason those that it does not."""
    used = manager.get_computed_blocks(request)[1]
    return used, request.kvtxn_found.unused(used)


def drop(manager, group, number):
    """Take one block of the writer's out of the cache."""
    request = request_of([*range(40)])
    own = manager.coordinator.single_type_managers[group]
    at = (number + 1) * own.block_size // HASHED - 1
    (block,) = own.block_pool.get_cached_block(request.block_hashes[at], [group])
    own.block_pool.evict_blocks({block.block_id})


@pytest.mark.parametrize(
    ("length", "used", "unused"),
    [
        (20, 16, {"last_token": 4}),  # all of it is there
        (21, 20, {}),
        (30, 20, {}),
        (9, 8, {}),
        (3, 0, {}),
    ],
)
def test_the_last_token(length, used, unused):
    manager = manager_of(whole())
    filled(manager, 20)
    assert lost(manager, request_of([*range(length)])) == (used, unused)
    other = request_of([1000 + token for token in range(length)])
    assert lost(manager, other) == (0, {})


@pytest.mark.parametrize(
    ("length", "used", "unused"),
    [
        (20, 12, {"last_token": 4, "drafter": 4}),
        (21, 16, {"drafter": 4}),
        (30, 16, {"drafter": 4}),
        (4, 0, {"last_token": 4}),
    ],
)
def test_a_drafter(length, used, unused):
    manager = manager_of(whole(), use_eagle=True)
    filled(manager, 20)
    assert lost(manager, request_of([*range(length)])) == (used, unused)


def test_a_drafter_beside_several_groups():
    """There the drafter's block is that of the last token."""
    manager = manager_of(whole(), window(), use_eagle=True)
    filled(manager, 20)
    assert lost(manager, request_of([*range(20)])) == (16, {"last_token": 4})
    assert lost(manager, request_of([*range(30)])) == (16, {"drafter": 4})


def test_requests_that_look_for_nothing():
    manager = manager_of(whole())
    filled(manager, 20)
    tokens = [*range(30)]
    assert lost(manager, request_of(tokens, prompt_logprobs=1)) == (0, {"prompt_logprobs": 20})
    skips = request_of(tokens, skip_reading_prefix_cache=True)
    assert lost(manager, skips) == (0, {"skipped": 20})
    skips.kvtxn_contained = 1
    assert lost(manager, skips) == (0, {"contained": 20})
    none = request_of([5] * 30, prompt_logprobs=1)
    assert lost(manager, none) == (0, {})


def test_a_boundary_of_groups_with_other_blocks():
    """Blocks of 4 and of 8 rows: five blocks of 4 are there, and the end is at 16."""
    manager = manager_of(whole(), window(8))
    filled(manager, 24)
    drop(manager, 0, 5)
    used, unused = lost(manager, request_of([*range(30)]))
    assert (used, unused) == (16, {"boundary": 4})


def test_states_that_are_not_there():
    """The rows of five blocks are there, and no state after the fifth."""
    manager = manager_of(whole(), states())
    filled(manager, 20)
    used, unused = lost(manager, request_of([*range(30)]))
    assert unused == ({"states": 20 - used} if used < 20 else {})
    drop(manager, 1, 4)
    used, unused = lost(manager, request_of([*range(30)]))
    assert used < 20
    assert unused == {"states": 20 - used}


def test_a_window_that_has_left():
    manager = manager_of(whole(), window())
    filled(manager, 20)
    drop(manager, 1, 4)
    used, unused = lost(manager, request_of([*range(30)]))
    assert used < 20
    assert unused == {"window": 20 - used}


@pytest.mark.parametrize("spec", [window, states])
def test_without_a_group_that_keeps_every_row(spec):
    manager = manager_of(spec())
    filled(manager, 20)
    assert lost(manager, request_of([*range(30)])) == (20, {})
    used, unused = lost(manager, request_of([*range(30)], prompt_logprobs=1))
    assert (used, unused) == (0, {"prompt_logprobs": 20})


def test_rows_that_a_connector_brings_are_not_computed_again():
    found = Found(20, [("last_token", 28), ("drafter", 16), ("boundary", 16), ("states", 0)])
    assert found.unused(8) == {"drafter": 4, "states": 8}
    assert found.unused(16) == {"drafter": 4}
    assert found.unused(18) == {"drafter": 2}
    assert found.unused(24) == {}


class Plain:
    """vLLM's scheduler, which has one request that it plans in its second step."""

    def __init__(self, manager, request):
        self.kv_cache_manager, self.requests = manager, {request.request_id: request}
        self.resumes, self.waits = False, 1

    def schedule(self, throttle_prefills=False):
        (request,) = self.requests.values()
        if request.num_computed_tokens == 0:
            used = self.kv_cache_manager.get_computed_blocks(request)[1]
        cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
        output = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached)
        if self.waits:
            self.waits -= 1
        elif self.resumes:
            cached.req_ids, cached.num_computed_tokens = ["b", "a"], [3, used]
            cached.resumed_req_ids = {"a"}
        else:
            output.scheduled_new_reqs = [SimpleNamespace(req_id="a", num_computed_tokens=used)]
        return output


@pytest.mark.parametrize("resumes", [False, True])
def test_the_workers_are_told_once_a_request_is_planned(resumes):
    manager = manager_of(whole())
    filled(manager, 20)
    scheduler = Plain(manager, request_of([*range(20)]))
    scheduler.resumes = resumes
    swap_class(scheduler, TellingScheduler)
    assert unused_prefixes(scheduler.schedule()) == {}
    assert unused_prefixes(scheduler.schedule()) == {"last_token": 4}


@pytest.mark.parametrize("part", ["look", "tell"])
def test_an_error_costs_the_count_and_not_the_engine(monkeypatch, lines, part):
    def fail(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(prefix_lookups, part, fail)
    scheduler = Plain(manager_of(whole()), request_of([*range(20)]))
    swap_class(scheduler, TellingScheduler)
    for _ in range(3):
        assert unused_prefixes(scheduler.schedule()) == {}
    (line,) = lines
    assert "kvtxn.audit_reuse_not_counted" in line
    assert "planted" in line


@pytest.mark.parametrize("part", ["look", "tell"])
def test_an_error_behind_a_class_of_somebody_else(monkeypatch, lines, part):
    """A manager whose class was changed after the hook keeps it: the engine goes on, one line."""

    def fail(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(prefix_lookups, part, fail)
    manager = manager_of(whole())
    theirs = manager.__class__ = type("Theirs", (type(manager),), {})
    scheduler = Plain(manager, request_of([*range(20)]))
    swap_class(scheduler, TellingScheduler)
    for _ in range(3):
        assert unused_prefixes(scheduler.schedule()) == {}
    (line,) = lines
    assert "planted" in line
    assert type(manager) is theirs


def test_a_class_of_somebody_else_keeps_no_other_class_hooked():
    """It is refused; every other scheduler and manager gets its own class back."""
    schedulers = []
    for _ in range(3):
        manager = KVCacheManager.__new__(KVCacheManager)
        manager.enable_caching = True
        schedulers.append(Plain(manager, request_of([1, 2])))
        audited_scheduler.follow_scheduler(schedulers[-1], config(), contains=False, required=True)
    theirs = schedulers[1].kv_cache_manager
    theirs.__class__ = type("Theirs", (type(theirs),), {})
    with pytest.raises(KVTxnError, match="not a class that swap_class made"):
        audited_scheduler.unhook_schedulers()
    hooked = [
        each for one in schedulers for each in (one, one.kv_cache_manager) if is_swapped(each)
    ]
    assert hooked == [theirs]


def test_a_release_that_looks_in_another_way_is_left_alone(lines):
    class Other(Plain):
        def schedule(self, more, and_more):
            pass

    manager = KVCacheManager.__new__(KVCacheManager)
    manager.enable_caching = True
    scheduler = Other(manager, request_of([1, 2]))
    audited_scheduler.follow_scheduler(scheduler, config(), contains=False, required=True)
    assert type(scheduler) is Other
    assert type(manager) is KVCacheManager
    (line,) = lines
    assert "Other.schedule takes" in line
