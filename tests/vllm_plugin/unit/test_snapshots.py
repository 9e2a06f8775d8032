"""The front end, on stand-ins: what a client keeps for its end, and what a page shows."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from threading import Event
from types import SimpleNamespace

import pytest
from kvtxn.integrations.vllm_plugin import engine_calls
from kvtxn.integrations.vllm_plugin.engine_calls import audit_report
from kvtxn.integrations.vllm_plugin.policy.settings import asks_for_windows
from kvtxn.integrations.vllm_plugin.seam import frontend as front
from kvtxn.integrations.vllm_plugin.seam.workers import REPORT

from kvtxn import ConfigError
from kvtxn.audit import KINDS
from kvtxn.metrics import OPERATIONS, Family, Metrics

prometheus = pytest.importorskip("prometheus_client")
ASKED = {"kvtxn": {"policy": "undo"}}


class Client:
    """Looks like vLLM's, from outside."""

    def __init__(self, answer=None):
        self.answer, self.calls, self.downs = answer or (lambda n: [{"count": n}]), 0, 0

    def collective_rpc(self, method):
        assert method == "kvtxn_snapshot"
        if self.downs:
            raise RuntimeError("the engine is dead")
        self.calls += 1
        return self.answer(self.calls)

    def shutdown(self, timeout=None):
        self.downs += 1
        return timeout


def engine(asked, client):
    model = SimpleNamespace(served_model_name="m")
    config = SimpleNamespace(additional_config=asked, model_config=model)
    return SimpleNamespace(vllm_config=config, engine_core=client, log_stats=True)


@pytest.fixture
def hooked(monkeypatch):
    """Makes hooked clients of ``LLM`` engines."""
    monkeypatch.setattr(front, "is_async", lambda client: False)
    monkeypatch.setattr(engine_calls, "_ended", [])

    def make(answer=None, asked=ASKED):
        client = Client(answer)
        engine_calls.on_engine(engine(asked, client))
        return client

    return make


def test_the_last_snapshot_is_taken_right_before_the_end_and_once(hooked):
    client = hooked()
    llm = SimpleNamespace(llm_engine=engine(ASKED, client))
    assert engine_calls.snapshots(llm) == [{"count": 1}]
    assert client.shutdown(timeout=3) == 3
    assert client.shutdown() is None
    assert engine_calls.snapshots(llm) == engine_calls.snapshots(llm.llm_engine) == [{"count": 2}]
    assert (client.calls, client.downs) == (2, 2)
    engine_calls.snapshots(llm)[0].clear()  # the caller's own
    assert engine_calls.last_snapshots() == [[{"count": 2}]]


def test_a_client_that_is_collected_is_asked_first(hooked):
    client = hooked()
    del client
    gc.collect()
    assert engine_calls.last_snapshots() == [[{"count": 1}]]


def test_an_engine_that_is_dead_says_so(hooked):
    """Nothing is made up, and the shutdown goes on."""
    client = hooked(lambda n: 1 / 0)
    client.shutdown()
    assert client.downs == 1
    with pytest.raises(RuntimeError, match="engine is dead"):
        engine_calls.snapshots(engine(ASKED, client))
    assert engine_calls.last_snapshots() == []


@pytest.mark.parametrize("deleted", [False, True])
def test_an_engine_that_hangs_is_shut_down_all_the_same(hooked, monkeypatch, deleted):
    monkeypatch.setattr(engine_calls, "_PATIENCE", 0.05)
    down, never = Event(), Event()
    monkeypatch.setattr(Client, "shutdown", lambda self: down.set())
    client = hooked(lambda n: never.wait(20))
    if deleted:
        del client
        gc.collect()
    else:
        client.shutdown()
    assert down.is_set()
    never.set()


def test_a_forked_copy_reaches_nothing(hooked):
    client = hooked()
    client.kvtxn_pid = os.getpid() + 1
    client.shutdown()
    assert (client.calls, client.downs) == (0, 1)


def test_nothing_is_asked_at_the_very_end_of_the_interpreter(hooked, monkeypatch):
    """A client collected while Python exits, when module names are None, asks no engine."""
    client = hooked()
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    for name in ("_take_last", "sys", "os", "log"):
        monkeypatch.setattr(engine_calls, name, None)
    client.__del__()
    assert client.shutdown(timeout=3) == 3
    assert (client.calls, client.downs) == (0, 1)


@pytest.mark.parametrize(
    ("call", "method"), [(engine_calls.snapshots, "kvtxn_snapshot"), (audit_report, REPORT)]
)
def test_an_engine_that_answers_later_is_refused_with_the_way_to_ask_it(call, method):
    """vLLM's own error has no words."""

    def later(method):
        raise NotImplementedError

    with pytest.raises(ConfigError, match="does not answer at once") as refused:
        call(SimpleNamespace(engine_core=SimpleNamespace(collective_rpc=later)))
    assert f"await engine.collective_rpc('{method}')" in str(refused.value)
    with pytest.raises(ConfigError, match="this is no engine; expected an LLM or LLMEngine"):
        call("no engine")


def test_engines_that_did_not_ask_are_left_alone(hooked):
    assert type(hooked(asked={})) is Client
    assert type(hooked(asked=None)) is Client


# -- the page -----------------------------------------------------------------------


@pytest.fixture
def page(monkeypatch):
    """A page in a registry of its own; what it shows, by name and labels."""
    from kvtxn.integrations.serving import metrics_page

    registry = prometheus.CollectorRegistry()
    kinds = {"registry": registry}
    for kind in ("Counter", "Gauge"):
        plain = getattr(prometheus, kind)
        monkeypatch.setattr(
            prometheus, kind, type(kind, (plain,), {"__init__": _into(plain, kinds)})
        )
    metrics_page._metric.cache_clear()
    yield (
        engine_calls.Page("m", windows=True),
        lambda name, **labels: registry.get_sample_value(
            name, {"model_name": "m", "engine": "0"} | labels
        ),
    )
    metrics_page._metric.cache_clear()


def _into(plain, extra):
    return lambda self, *args, **kwargs: plain.__init__(self, *args, **kwargs, **extra)


def snapshot(staged=0, fallbacks=0, written=0):
    labels = dict.fromkeys((f"kvtxn_fallbacks_total_{name}" for name in OPERATIONS), 0)
    torch = pytest.importorskip("torch")
    empty = Metrics("undo", (1,), (False,), torch.zeros(3, 1, 4, dtype=torch.int64)).snapshot()
    return empty | labels | {
        "kvtxn_active": 1.0,
        "kvtxn_rows_staged_total": staged,
        "kvtxn_fallbacks_total_attend": fallbacks,
        "kvtxn_bytes_written_total": written,
    }  # fmt: skip


def test_ranks_count_the_same_windows_once_and_their_own_bytes(page):
    shown, value = page
    shown.show(0, [{"kvtxn_active": 0.0}, snapshot(5, 1, 10), snapshot(5, 0, 10)])
    assert [value("kvtxn_active", rank=str(rank)) for rank in range(3)] == [0, 1, 1]
    assert value("kvtxn_rows_staged_total") == 5
    assert value("kvtxn_bytes_written_total", rank="0") is None
    assert value("kvtxn_bytes_written_total", rank="2") == 10
    assert value("kvtxn_fallbacks_total", rank="1", reason="attend") == 1
    assert value("kvtxn_fallbacks_total", rank="2", reason="attend") == 0


def test_an_audit_alone_does_not_look_like_windows_that_stay_out(page):
    """The guide's alert is ``kvtxn_active == 0``."""
    from kvtxn.audit import Ledger, RowGroup

    pytest.importorskip("torch")
    counts = Ledger([RowGroup("a", 4, 4)], max_requests=1, max_length=8).counters()
    shown, value = page
    alone = type(shown)("m", windows=False)
    alone.show(0, [{"kvtxn_active": 0.0, **counts}])
    assert value("kvtxn_active", rank="0") is None
    assert value("kvtxn_audit_active", rank="0") == 1
    for kind in KINDS:  # there from the start: an alert has to see the step from zero to one
        assert value("kvtxn_audit_violations_total", rank="0", kind=kind) == 0
    shown.show(0, [{"kvtxn_active": 0.0, "kvtxn_audit_active": 0.0}])
    assert value("kvtxn_active", rank="0") == value("kvtxn_audit_active", rank="0") == 0


@pytest.mark.parametrize(
    ("given", "windows"),
    [({"audit": "ledger"}, False), ({"audit": "ledger", "policy": "auto"}, True)],
)
def test_windows_are_asked_for_by_a_policy(given, windows):
    assert asks_for_windows({"kvtxn": given}) is windows


def test_counters_follow_and_never_fall(page):
    """New caches begin at zero; what Prometheus sees only grows."""
    shown, value = page
    for staged, total in ((5, 5), (5, 5), (9, 9), (2, 11), (3, 12)):
        shown.show(0, [snapshot(staged)])
        assert value("kvtxn_rows_staged_total") == total
    shown.show(1, [snapshot(7)])
    assert value("kvtxn_rows_staged_total", engine="1") == 7
    assert value("kvtxn_rows_staged_total") == 12


def test_names_that_begin_alike_are_told_apart():
    """``windows`` beside ``windows_refused``, a sum beside its parts."""
    family = Family("a_total", "", "reason")
    found = dict(family.values({"a_total": 3, "a_total_x": 1, "a_total_y_z": 2, "ab_total": 9}))
    assert found == {"x": 1, "y_z": 2}


# -- the server's clock ---------------------------------------------------------------


def test_a_server_is_read_until_its_engines_are_dead(page, monkeypatch, caplog):
    """An error in between is said once, and the next reading counts again."""
    shown, value = page
    answers = iter([snapshot(1), RuntimeError("busy"), RuntimeError("busy"), snapshot(4)])
    client = SimpleNamespace(engine_ranks_managed=[0], core_engines=[b"0"], resources=None)
    client.resources = SimpleNamespace(engine_dead=False)

    async def call(method, name, *_, engine):
        assert (method, name, engine) == ("collective_rpc", "kvtxn_snapshot", b"0")
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        client.resources.engine_dead = answer["kvtxn_rows_staged_total"] == 4
        return [answer]

    client._call_utility_async = call
    monkeypatch.setattr(engine_calls, "INTERVAL", 0)
    with caplog.at_level(logging.WARNING, "kvtxn"):
        asyncio.run(engine_calls._publish(lambda: client, shown))
    assert value("kvtxn_rows_staged_total") == 4
    assert caplog.text.count("kvtxn.no_metrics") == 1


@pytest.mark.parametrize(("index", "log_stats"), [(1, True), (0, False)])
def test_one_server_speaks_for_all_and_none_where_nobody_counts(monkeypatch, index, log_stats):
    client = SimpleNamespace(client_index=index)
    monkeypatch.setattr(front, "is_async", lambda client: True)
    asked = engine(ASKED, client)
    asked.log_stats = log_stats
    engine_calls.on_engine(asked)
    assert not hasattr(client, "kvtxn_task")
