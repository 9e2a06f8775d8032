"""Requests that vLLM's scheduler puts back: how far they had come, and what they find again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvtxn.integrations.vllm_plugin.seam import audited_requests
from kvtxn.integrations.vllm_plugin.seam.audited_requests import PutBack


def told(new=(), cached=(), scheduled=None, finished=(), preempted=None):
    """A step: new requests and running ones, each with its computed tokens, and the scheduled."""
    found = [SimpleNamespace(req_id=name, num_computed_tokens=at) for name, at in new]
    running = SimpleNamespace(
        req_ids=[name for name, _ in cached], num_computed_tokens=[at for _, at in cached]
    )
    return SimpleNamespace(
        scheduled_new_reqs=found, scheduled_cached_reqs=running,
        num_scheduled_tokens=scheduled or {}, finished_req_ids=set(finished),
        preempted_req_ids=preempted,
    )  # fmt: skip


@pytest.mark.parametrize(
    "before",
    [
        told(new=[("b", 0), ("a", 32)], scheduled={"b": 8, "a": 64}),
        told(cached=[("b", 3), ("a", 92)], scheduled={"b": 1, "a": 4}),
    ],
)
def test_a_request_had_the_rows_of_the_step_before(before):
    put_back = PutBack()
    put_back.hear(before)
    put_back.hear(told(preempted={"a"}))
    put_back.hear(told())
    assert put_back.take("b") is None
    assert put_back.take("a") == 96
    assert put_back.take("a") is None


def test_a_request_had_the_rows_of_the_last_step_in_which_it_took_part():
    """It sat steps out, or its batch is not the one before, as in a pipeline."""
    put_back = PutBack()
    put_back.hear(told(cached=[("a", 5)], scheduled={"a": 2}))
    put_back.hear(told(cached=[("b", 9)], scheduled={"b": 1}))
    put_back.hear(told(cached=[("b", 10)], scheduled={"b": 1}))
    put_back.hear(told(preempted={"a"}))
    assert put_back.take("a") == 7


def test_no_row_counts_of_a_request_that_sat_out_too_many_steps():
    put_back = PutBack()
    put_back.hear(told(cached=[("a", 5)], scheduled={"a": 2}))
    for _ in range(audited_requests._STEPS):
        put_back.hear(told())
    put_back.hear(told(preempted={"a"}))
    assert put_back.take("a") == 0


def test_a_request_that_ended_while_it_waited_does_not_come_again():
    put_back = PutBack()
    put_back.hear(told(cached=[("a", 5)], scheduled={"a": 1}))
    put_back.hear(told(preempted={"a"}))
    put_back.hear(told(finished=["a"]))
    assert put_back.take("a") is None


def test_a_v2_runner_hears_of_it(monkeypatch):
    """There a request that was put back comes as a new one."""
    runner = SimpleNamespace(
        model_config=SimpleNamespace(is_encoder_decoder=False),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
    )

    def step(**more):
        found = told(**more)
        found.kv_cache_block_copies = found.free_encoder_mm_hashes = ()
        found.scheduled_cached_reqs.new_block_ids = []
        for new in found.scheduled_new_reqs:
            new.prompt_token_ids, new.prefill_token_ids = [7] * 40, [7] * 43
            new.prompt_embeds = new.mm_features = new.lora_request = None
            new.block_ids = ([1, 2],)
        return audited_requests.changes_v2(runner, found)

    (first,) = step(new=[("a", 0)], scheduled={"a": 40}).arrivals
    assert (first.prompt, first.had) == (40, None)
    step(cached=[("a", 42)], scheduled={"a": 1})
    assert step(preempted={"a"}).gone == ["a"]
    (again,) = step(new=[("a", 16)], scheduled={"a": 27}).arrivals
    assert (again.prompt, again.had, again.computed) == (40, 43, 16)
