"""The V2 runner's captured forwards write and check their steps; graphs are stand-ins."""

from __future__ import annotations

import logging

import pytest
import torch
from kernels_here import importing_kernels

pytest.importorskip("vllm")

from graph_rig import Capture
from test_audit_v2 import engine_facts, prompt, work  # noqa: F401  # a fixture
from v2_rig import Rig

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.attach import is_swapped, unhook_runner
    from kvtxn.integrations.vllm_plugin.internals import scheduling


class Silent(torch.nn.Identity):
    """A model that is compiled as a whole: nobody is told that its forward begins."""

    def __call__(self, given):
        return given


def started(monkeypatch, model=torch.nn.Identity, **options):
    """A rig whose graphs are captured, and a list of the steps that the host writes."""
    rig = Rig(capture=Capture(monkeypatch), **options)
    rig.runner.initialize_kv_cache(rig.config)
    rig.runner.cudagraph_manager.capture(model())
    rig.watch.begin()
    written, write = [], rig.watch.ledger.write
    monkeypatch.setattr(rig.watch.ledger, "write", lambda step: (written.append(step), write(step)))
    return rig, written


@pytest.mark.parametrize("window", [None, 9])
def test_a_healthy_engine_counts_the_same_with_and_without_graphs(monkeypatch, window):
    plain = Rig(window=window)
    plain.start()
    work(plain)
    rig, written = started(monkeypatch, window=window)
    assert {len(graph) for graph in rig.runner.cudagraph_manager.graphs.values()} == {1}
    work(rig)
    replays = len(rig.runner.cudagraph_manager.replayed)
    assert replays > 5
    assert len(written) == 17 - replays
    assert rig.watch.counters() == plain.watch.counters()
    assert rig.watch.report() == []


def test_replays_of_nobodys_steps_change_nothing(monkeypatch):
    """A rank that has no request replays a graph to keep others company."""
    rig, _ = started(monkeypatch)
    one = rig.add("one", prompt(1, 9))
    rig.step()
    checked = rig.watch.counters()["kvtxn_audit_rows_checked_total"]
    for _ in range(3):
        rig.replay(8)
        assert rig.watch.counters()["kvtxn_audit_rows_checked_total"] == checked
    for _ in range(4):
        rig.step()
        rig.replay(16)
    rig.end(one)
    rig.replay(4)
    assert rig.watch.report() == []
    assert rig.watch.counters()["kvtxn_audit_rows_checked_total"] > checked
    assert rig.watch.counters()["kvtxn_audit_unjudged_total"] == 0


def test_a_wrong_table_is_found_by_the_replay_itself(monkeypatch):
    """The table is changed when the step was told already, just before its graph is replayed."""
    rig, _ = started(monkeypatch)
    rig.add("one", prompt(1, 9))
    rig.add("two", prompt(2, 9))
    for _ in range(3):
        rig.step()
    tables, run = rig.runner.tables[0], type(rig.runner.cudagraph_manager).run_fullgraph

    def run_fullgraph(manager, desc):
        tables[0, 0] = tables[1, 0]
        return run(manager, desc)

    monkeypatch.setattr(type(rig.runner.cudagraph_manager), "run_fullgraph", run_fullgraph)
    rig.step()
    found = rig.watch.report()
    assert {(each["request"], each["kind"]) for each in found} == {("one", "foreign")}
    assert {each["position"] for each in found} == {0}  # told once


@pytest.mark.parametrize("how", ["compiled whole", "narrow window", "recorded"])
def test_engines_whose_steps_the_host_launches(monkeypatch, how):
    """No graph includes the passes; nothing is wrong, and every step is written once."""
    options = {"narrow window": {"window": 3}, "recorded": {"record": True}}.get(how, {})
    rig, written = started(
        monkeypatch, Silent if how == "compiled whole" else torch.nn.Identity, **options
    )
    assert not any(rig.runner.cudagraph_manager.graphs.values())
    work(rig)
    assert len(written) == 17
    assert rig.watch.report() == []


@pytest.mark.parametrize("how", ["one graph too many", "rows elsewhere", "never replayed"])
def test_engines_that_are_not_understood_run_on_without_an_audit(monkeypatch, caplog, how):
    rig, _ = started(monkeypatch)
    rig.add("one", prompt(1, 9))
    rig.step()
    if how == "one graph too many":
        rig.runner.cudagraph_manager.graphs["of somebody else"] = []
    elif how == "rows elsewhere":
        rig.runner.tables = [table.clone() for table in rig.runner.tables]
    else:
        rig.runner.postprocess_sampled = lambda *given: None
        rig.replay = lambda rows: None
    with caplog.at_level(logging.INFO, logger="kvtxn"):
        for _ in range(3):
            rig.step()
    assert rig.watch.counters()["kvtxn_audit_active"] == 0
    assert "captured" in caplog.text or "replayed" in caplog.text


def test_a_step_that_was_sampled_and_not_replayed_is_written_late(monkeypatch):
    rig, written = started(monkeypatch)
    rig.add("one", prompt(1, 9))
    rig.replay = lambda rows: None
    for _ in range(5):
        rig.step()
    assert len(written) == 5
    assert rig.watch.report() == []
    assert rig.watch.counters()["kvtxn_audit_active"] == 1


def test_what_is_hooked_is_unhooked(monkeypatch):
    """Graphs that were captured still have the ledger's memory, and find padding in it or not."""
    rig, _ = started(monkeypatch)
    rig.add("one", prompt(1, 9))
    rig.step()
    rig.step()
    watch, manager = rig.watch, rig.runner.cudagraph_manager
    assert is_swapped(manager)
    unhook_runner(rig.runner)
    assert not is_swapped(manager)
    assert not [name for name in vars(manager) if name.startswith("kvtxn")]
    assert vars(rig.runner)["kvtxn_kept"] == [watch]
    manager.run_fullgraph(8)


def test_while_a_watch_pauses_replays_find_nothing_and_nothing_is_healed(monkeypatch):
    """The graphs would go on with the last requests' lines, over other requests' rows."""
    rig, _ = started(monkeypatch, on_violation="contain")
    old = rig.add("old", prompt(1, 9))
    for _ in range(3):
        rig.step()
    assert rig.step() is None
    checked = rig.watch.counters()["kvtxn_audit_rows_checked_total"]
    rig.watch.pause()
    marked = []
    monkeypatch.setattr(scheduling, "mark", lambda output, wrong: marked.append(wrong))
    rig.end(old)
    rig.add("new", prompt(2, 9))
    for _ in range(4):
        rig.step()
    assert rig.watch.counters()["kvtxn_audit_rows_checked_total"] == checked
    assert rig.watch.counters()["kvtxn_audit_active"] == 0
    assert (rig.watch.report(), marked) == ([], [])
    rig.end(rig.running[0])
    rig.watch.begin()
    rig.add("newest", prompt(3, 9))
    for _ in range(4):
        rig.step()
    assert rig.watch.counters()["kvtxn_audit_active"] == 1
    assert rig.watch.counters()["kvtxn_audit_rows_checked_total"] > 9
    assert (rig.watch.report(), marked) == ([], [])


def test_rows_that_were_forgotten_are_not_read_again(monkeypatch):
    """The engine has slept: what is computed afterwards is right, a hit on old rows is not."""
    rig, _ = started(monkeypatch)
    old = rig.add("old", prompt(1, 9))
    for _ in range(3):
        rig.step()
    steps = rig.watch.counters()["kvtxn_audit_steps_total"]
    rig.end(old)
    rig.watch.forget()
    rig.replay(8)  # nobody's
    rig.add("new", prompt(1, 9))
    for _ in range(3):
        rig.step()
    assert rig.watch.report() == []
    assert rig.watch.counters()["kvtxn_audit_steps_total"] == steps + 3
    assert rig.watch.counters()["kvtxn_audit_unjudged_total"] == 0
    rig.add("wrong", prompt(1, 9), hit=old)
    rig.step()
    assert {(each["request"], each["kind"]) for each in rig.watch.report()} == {
        ("wrong", "unwritten")
    }


class Steady:
    """Draws as many drafts as there can be; of these, all but one are accepted."""

    def __init__(self):
        self._drawn = 0

    def randrange(self, first, last=None):
        if last is not None:
            return first + 7
        self._drawn += 1
        return first - 1 if self._drawn % 2 else first - 2


def test_steps_of_the_same_requests_and_drafts_are_told_without_being_read(monkeypatch):
    """Blocks are handed out in between; who comes, goes, or has a prompt left is read."""
    rig, _ = started(monkeypatch)
    rig.chance = Steady()
    read, rows = [], rig.runner.kvtxn_reader.rows
    rig.runner.kvtxn_reader.rows = lambda *given: (read.append(given), rows(*given))[1]
    one = rig.add("one", prompt(1, 9))
    for _ in range(8):
        rig.step()
    assert len(read) == 2  # the prompt, and the first of the others
    rig.add("two", prompt(2, 9))
    for _ in range(4):
        rig.step()
    assert len(read) == 4
    rig.replay(8)  # nobody's
    rig.step()
    assert len(read) == 5
    rig.end(one)
    for _ in range(3):
        rig.step()
    assert len(read) == 6
    assert rig.watch.report() == []
    assert rig.watch.counters()["kvtxn_audit_steps_total"] == 16
    assert rig.watch.counters()["kvtxn_audit_unjudged_total"] == 0


def test_drafts_are_put_in_place_where_others_are(monkeypatch):
    """While prompts come there are none; so it is for each request more."""
    rig, _ = started(monkeypatch)
    reader, given = rig.runner.kvtxn_reader, rig.watch.ledger.input
    puts, put = [], given.put
    there = reader._there.data_ptr()
    noted = lambda target, numbers: (puts.append(target.data_ptr() == there), put(target, numbers))  # noqa: E731
    monkeypatch.setattr(given, "put", noted)
    for number in range(3):
        rig.add(f"request {number}", prompt(number, 40))
        rig.step(chunk=3)
    assert puts == [False] * 3
    rig.chance = Steady()
    drafts = []
    rig.tamper = lambda rig, batch: drafts.append(batch.num_draft_tokens_per_req.tolist())
    for _ in range(20):
        rig.step(chunk=15)
        known = reader._there[:3].tolist()
        assert known == drafts[-1]
        assert reader._on_device[:3].tolist() == known
    assert {tuple(each) for each in drafts} == {(0, 0, 0), (3, 2, 3)}
    assert puts.count(True) == 1
    assert rig.watch.report() == []
    assert rig.watch.counters()["kvtxn_audit_unjudged_total"] == 0
