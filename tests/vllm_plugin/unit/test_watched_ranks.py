"""Ranks that share a model are watched together or not at all: they compare what they wrote."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from kvtxn.integrations.vllm_plugin.audit import watch_opening
from kvtxn.integrations.vllm_plugin.policy import RequiredError
from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts
from kvtxn.integrations.vllm_plugin.policy.settings import PluginSettings, settings
from kvtxn.integrations.vllm_plugin.seam import audited_requests, audited_states, ranks

from kvtxn import LayerError, TxnConfig
from kvtxn.audit import RowGroup

GROUPS = {"group.0": RowGroup("group.0", 4, 12, pool="blocks")}


class Peer:
    """The other one of two ranks, which has a ledger or none."""

    def __init__(self, watched: bool) -> None:
        self.watched = watched
        self.calls: list[str] = []

    def from_first(self, value: object) -> object:
        self.calls.append("from_first")
        return value

    def of_all(self, value: object) -> list[object]:
        self.calls.append("of_all")
        return [value, self.watched]


@pytest.fixture(params=["cpu", "cuda"])
def opened(request, monkeypatch):
    """Open a watch on one of two ranks; returns it, and what the other one was told."""

    def open_it(*, peer: bool, fails: str = "", required: bool = False):
        other = Peer(peer)
        monkeypatch.setattr(ranks, "number_of_ranks", lambda: 2)
        monkeypatch.setattr(ranks, "from_first", other.from_first)
        monkeypatch.setattr(ranks, "of_all", other.of_all)
        monkeypatch.setattr(ranks, "are_asked_together", lambda runner: True)
        found = {} if fails == "groups" else GROUPS
        monkeypatch.setattr(audited_requests, "row_groups", lambda runner: found)
        monkeypatch.setattr(audited_states, "state_groups", lambda runner: {})
        monkeypatch.setattr(audited_requests, "groups_left_out", lambda runner, watched: [])
        monkeypatch.setattr(
            audited_requests, "room", lambda runner: audited_requests.Room(4, 64, False)
        )
        settings = PluginSettings(TxnConfig(), required=required, windows=False, audit="ledger")
        runner = SimpleNamespace(
            kvtxn_rank=0,
            kvtxn_required=required,
            kvtxn_settings=settings,
            device="cpu",
            speculative_config=None,
        )
        on_cpu = request.param == "cpu"
        monkeypatch.setattr(watch_opening, "follow_transfers", lambda *args: None)
        monkeypatch.setattr(watch_opening, "follow_weights", lambda *args: None)
        monkeypatch.setattr(watch_opening, "follow_adapters", lambda *args: None)
        if fails == "ledger":
            error = LayerError("Ledger", "no room")

            def broken(*args: object, **kwargs: object) -> None:
                raise error

            monkeypatch.setattr(watch_opening, "Watch", broken)
        if on_cpu:
            return watch_opening.open_watch(runner), other.calls
        facts = EngineFacts(device="cuda", runner="v2")
        monkeypatch.setattr(watch_opening.engine_config, "runner_facts", lambda runner: facts)
        monkeypatch.setattr(watch_opening.workers, "version", lambda: "0.32.0")
        if fails != "ledger":
            ledger = SimpleNamespace(books=SimpleNamespace(num_bytes=1))
            watch = SimpleNamespace(
                ledger=ledger, found=SimpleNamespace(), stop=None, groups={}, states={}
            )
            watch.warm_up = lambda: None
            monkeypatch.setattr(watch_opening, "Watch", lambda *args, **kwargs: watch)
        return watch_opening.open_watch(runner, on_device=True), other.calls

    return open_it


def test_both_ranks_are_watched(opened):
    watch, calls = opened(peer=True)
    assert watch is not None
    assert calls == ["from_first", "of_all"]


@pytest.mark.parametrize("fails", ["ledger", "groups"])
def test_a_rank_that_cannot_be_watched_says_so(opened, fails, caplog):
    """It takes part in every exchange, or else the other rank would wait for it for ever."""
    with caplog.at_level(logging.WARNING, logger="kvtxn"):
        watch, calls = opened(peer=True, fails=fails)
    assert watch is None
    assert calls == ["from_first", "of_all"]
    assert "kvtxn.inactive" in caplog.text


def test_no_rank_is_watched_if_another_one_cannot_be(opened, caplog):
    """A ledger alone would wait for fingerprints that nobody sends."""
    with caplog.at_level(logging.WARNING, logger="kvtxn"):
        watch, _ = opened(peer=False)
    assert watch is None
    assert "another rank cannot be watched" in caplog.text


def test_an_audit_that_is_required_stops_the_start_on_every_rank(opened):
    with pytest.raises(RequiredError, match="another rank cannot be watched"):
        opened(peer=False, required=True)


@pytest.mark.parametrize("on_device", [True, False])
def test_the_rate_of_comparing_bytes_is_the_user_s(monkeypatch, on_device):
    """On a CPU and on a GPU the scrub is told."""
    told = {}

    def scrub(ledger, refs, **named):
        told.update(named)

    facts = SimpleNamespace(attention="FLASH_ATTN", kv_cache_dtype="auto")
    monkeypatch.setattr(watch_opening, "Scrub", scrub)
    monkeypatch.setattr(watch_opening.attention_layers, "target_layers", lambda runner: ([], facts))
    monkeypatch.setattr(watch_opening.attention_layers, "rows_of_drafters", lambda runner: [])
    wanted = settings({"kvtxn": {"audit": "bytes", "audit_every": 64}}, 1, "cpu")
    runner = SimpleNamespace(kvtxn_settings=wanted, kvtxn_required=False, kvtxn_rank=0)
    watch = SimpleNamespace(groups={}, states={}, ledger=None)
    monkeypatch.setattr(audited_states, "state_refs", lambda runner, states: [])
    watch_opening._compare_bytes(runner, watch, on_device=on_device)
    assert told.pop("every") == 64
    assert not any(told.values())  # nothing is poisoned unless the user asks for it
