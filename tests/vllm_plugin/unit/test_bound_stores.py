"""What OffloadingConnector stores of a request that has ended, by vLLM's own scheduler's half."""

from __future__ import annotations

from types import SimpleNamespace as Made

import pytest
from engine_jobs import missing

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

from kvtxn.integrations.vllm_plugin import plugin as vllm_plugin
from kvtxn.integrations.vllm_plugin import starting
from kvtxn.integrations.vllm_plugin.internals import connectors, workers
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.request import RequestStatus

PROMPT, TOKENS = 40, 64


@pytest.fixture
def half():
    """The scheduler's half of a connector, as far as it bounds what is stored."""
    found = OffloadingConnectorScheduler.__new__(OffloadingConnectorScheduler)
    found.config = Made(offload_prompt_only=False)
    return found


@pytest.fixture
def scheduler(half):
    """A scheduler whose connector is one of several."""
    others = Made(_connectors=[Made(), Made(connector_scheduler=half)])
    return Made(connector=Made(_connectors=[others, Made(connector_scheduler=Made())]))


def stored(half, status, tokens=TOKENS, asked=TOKENS):
    """The number of rows that may be stored, where vLLM asks for so many."""
    ended = RequestStatus.is_finished(status)
    request = Made(
        status=status, num_tokens=tokens, num_prompt_tokens=PROMPT, is_finished=lambda: ended
    )
    return half._calc_num_offloadable_tokens(Made(req=request, max_offload_tokens=None), asked)


def test_a_token_that_was_not_computed_is_not_stored(half, scheduler):
    """As vLLM asks for up to 0.29; the hook can be undone."""
    assert stored(half, RequestStatus.FINISHED_LENGTH_CAPPED) == TOKENS
    undo = connectors.bound_stores(scheduler)
    for status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
        assert stored(half, status) == TOKENS - 1
        assert stored(half, status, asked=TOKENS - 9) == TOKENS - 9
    undo()
    assert stored(half, RequestStatus.FINISHED_LENGTH_CAPPED) == TOKENS


def test_every_other_number_stays_vllms(half, scheduler):
    """Of running requests, aborted ones, and of a prompt without an output."""
    connectors.bound_stores(scheduler)
    assert stored(half, RequestStatus.RUNNING) == TOKENS
    assert stored(half, RequestStatus.FINISHED_ABORTED) == TOKENS
    assert stored(half, RequestStatus.FINISHED_STOPPED, PROMPT, PROMPT) == PROMPT
    half.config.offload_prompt_only = True
    assert stored(half, RequestStatus.FINISHED_STOPPED) == PROMPT


def test_a_scheduler_without_such_a_connector_is_left_alone():
    for connector in (None, Made(), Made(connector_scheduler=Made())):
        scheduler, half = Made(connector=connector), getattr(connector, "connector_scheduler", None)
        undo = connectors.bound_stores(scheduler)
        assert vars(scheduler) == {"connector": connector}
        assert half is None or vars(half) == {}
        undo()


@pytest.mark.parametrize(
    ("kvtxn", "decision", "bound"),
    [
        ({"policy": "undo"}, "undo", True),
        ({"policy": "undo"}, "off", False),
        ({"audit": "ledger"}, "undo", False),
        (None, "undo", False),
    ],
)
def test_stores_are_bound_beside_windows_alone(
    monkeypatch, half, scheduler, kvtxn, decision, bound
):
    """An audit without windows watches vLLM as it is."""
    from kvtxn.integrations.vllm_plugin.internals import audited
    from kvtxn.integrations.vllm_plugin.internals import config as engine_config

    asked = {} if kvtxn is None else {"kvtxn": kvtxn}
    monkeypatch.setattr(engine_config, "config_facts", lambda config: Made(device="cpu"))
    monkeypatch.setattr(workers, "additional_config", lambda config: asked)
    monkeypatch.setattr(audited, "unwatched", lambda config: None)
    monkeypatch.setattr(starting, "decide", lambda policy, facts: (decision, ""))
    monkeypatch.setattr(starting, "_undo_engines", [])
    vllm_plugin._on_scheduler(scheduler, Made())
    assert (stored(half, RequestStatus.FINISHED_STOPPED) == TOKENS - 1) == bound
    starting._undo_engines and starting._undo_engines.pop()()
    assert stored(half, RequestStatus.FINISHED_STOPPED) == TOKENS


def test_a_scheduler_that_cannot_be_hooked_runs_as_it_is(monkeypatch, half, scheduler):
    def broken(scheduler):
        raise AttributeError("gone")

    from kvtxn.integrations.vllm_plugin.internals import config as engine_config

    monkeypatch.setattr(engine_config, "config_facts", lambda config: Made(device="cpu"))
    monkeypatch.setattr(workers, "additional_config", lambda config: {"kvtxn": {"policy": "undo"}})
    monkeypatch.setattr(starting, "decide", lambda policy, facts: ("undo", ""))
    monkeypatch.setattr(connectors, "bound_stores", broken)
    vllm_plugin._on_scheduler(scheduler, Made())
    assert stored(half, RequestStatus.FINISHED_STOPPED) == TOKENS
