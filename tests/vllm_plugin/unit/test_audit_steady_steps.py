"""Steps that go on with the ones before them: told to the ledger in one call, or later."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from kernels_here import ON_GPU

pytest.importorskip("vllm")

import v2_rig
from graph_rig import Capture
from test_watching_graphs import Steady
from v2_kernel_rig import Graphed, rig_maker

from kvtxn.errors import KVTxnError

pytestmark = pytest.mark.skipif(ON_GPU, reason="the rig's tensors are on the host")


@pytest.fixture
def made(monkeypatch):
    return rig_maker(monkeypatch)


@pytest.fixture
def steady(made, monkeypatch):
    """A rig whose requests go on with as many drafts in each step; and what ``repeat`` said."""
    rig = made(Graphed, capture=Capture(monkeypatch))
    monkeypatch.setattr(rig.watch.ledger, "require", lambda *given, **named: None)
    rig.chance, rig.went = Steady(), []
    repeat = rig.watch.repeat
    rig.watch.repeat = lambda grown: (rig.went.append(repeat(grown)), rig.went[-1])[1]
    rig.add("one", [*range(1, 8)])
    rig.add("two", [*range(11, 20)])
    for _ in range(3):
        rig.step()
    del rig.went[:]
    return rig


def test_a_steady_step_is_told_in_one_call(steady):
    """It hands out blocks and has the last step's outcome; then others come and go."""
    rig, calls, tell = steady, [], type(steady.runner).kvtxn_tell
    rig.runner.kvtxn_tell = lambda what: (calls.append(what), tell(rig.runner, what))[1]
    grown = rig.free[0]
    for _ in range(5):
        rig.step()
    assert rig.went == [True] * 5
    assert calls == []
    assert rig.free[0] > grown
    assert rig.watch.outcome is not None
    assert rig.watch.counters()["kvtxn_audit_steps_total"] == 8  # the last outcome is told now
    assert rig.watch.outcome is None
    rig.step()
    assert len(calls) == 4  # the graph, and in it changes and rows; what was sampled
    rig.step()
    assert len(calls) == 4
    assert rig.went[5:] == [True]
    rig.replay(8)  # nobody's
    rig.step()
    rig.end(rig.running[0])
    rig.step()
    rig.add("three", [*range(21, 30)])
    for _ in range(4):
        rig.step()
    assert rig.went[6:] == [False, True, True]  # the step before the first was no graph
    assert rig.watch.report() == []
    counters = rig.watch.counters()
    assert counters["kvtxn_audit_steps_total"] == 16
    assert counters["kvtxn_audit_rows_checked_total"] > 400
    assert counters["kvtxn_audit_unjudged_total"] == 0
    assert counters["kvtxn_audit_active"] == 1


def let_draft(rig, *numbers):
    """Let requests have these numbers of drafts, one after the other, and then always the most."""
    drawn, batch, sample = iter(numbers), type(rig)._batch, type(rig)._sample

    def drafting(chunk):
        rig.chance.randrange = lambda end, last=None: next(drawn, end - 1) if last is None else 7
        return batch(rig, chunk)

    def sampling(batch):
        rig.chance.randrange = lambda end, last=None: end - 1 if last is None else 7
        return sample(rig, batch)

    rig._batch, rig._sample = drafting, sampling


def test_steps_of_an_engine_without_drafts_are_told_in_one_call(made, monkeypatch):
    monkeypatch.setattr(v2_rig, "DRAFTS", 0)
    rig = made(Graphed, capture=Capture(monkeypatch))
    monkeypatch.setattr(rig.watch.ledger, "require", lambda *given, **named: None)
    monkeypatch.setattr(rig.runner, "speculative_config", None)
    let_draft(rig)
    read, rows = [], rig.runner.kvtxn_reader.rows
    rig.runner.kvtxn_reader.rows = lambda *given: (read.append(given), rows(*given))[1]
    for name, prompt in (("one", range(1, 8)), ("two", range(11, 20))):
        rig.add(name, [*prompt])
    for _ in range(8):
        rig.step()
    assert len(read) == 2  # the prompts, and the first of the others
    anothers_table(rig)
    assert len(read) == 2
    assert {each["kind"] for each in rig.watch.report()} == {"foreign"}
    counters = rig.watch.counters()
    assert counters["kvtxn_audit_steps_total"] == 9
    assert counters["kvtxn_audit_unjudged_total"] == 0


def test_steps_with_the_same_number_of_other_drafts_are_read(steady):
    """The total alone tells nothing, unless each request has the most drafts."""
    rig, read = steady, []
    let_draft(rig, 2, 3, 3, 2)
    rows = rig.runner.kvtxn_reader.rows
    rig.runner.kvtxn_reader.rows = lambda *given: (read.append(given), rows(*given))[1]
    for number in (1, 2, 3, 3, 3):
        rig.step()
        assert len(read) == number
    assert rig.watch.report() == []


@pytest.mark.parametrize("part", ["kvtxn_reader", "kvtxn_audit"])
def test_an_error_of_the_audit_ends_the_audit_alone(steady, part, monkeypatch):
    """Whoever raises it: what reads the engine's step, or the ledger."""
    rig = steady
    owner, name = {
        "kvtxn_reader": (rig.runner.kvtxn_reader, "goes_on"),
        "kvtxn_audit": (rig.watch.ledger, "repeat"),
    }[part]

    def fails(*given):
        raise AttributeError("it is called something else now")

    monkeypatch.setattr(owner, name, fails)
    rig.watch._repeat = None
    rig.step()
    assert rig.watch.counters()["kvtxn_audit_active"] == 0
    for _ in range(2):
        rig.step()
    assert len(rig.runner.cudagraph_manager.replayed) >= 3


def test_a_steady_step_takes_the_host_few_functions(steady, monkeypatch):
    """Each of them, found in memory anew in each step, takes the host as long as what it does."""
    rig, watching = steady, steady.runner.kvtxn_watching
    monkeypatch.delattr(rig.watch, "repeat")  # the fixture's
    let_draft(rig)
    for _ in range(2):
        rig.step()
    entered = functions_of(watching, monkeypatch)
    for _ in range(2):
        rig.step()
    assert entered == ["before_replay", "goes_on", "repeat", "same"] * 2


def functions_of(watching, monkeypatch):
    """Return a list that gets the names of the functions which a replay's call enters."""
    entered = []

    def profiled(*, included):
        sys.setprofile(
            lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else 0
        )
        try:
            type(watching).before_replay(watching, included=included)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(watching, "before_replay", profiled)
    return entered


@pytest.fixture
def leaving(made, monkeypatch):
    """A rig of four requests with the most drafts, one of which ends: there were as few before."""
    rig = made(Graphed, capture=Capture(monkeypatch))
    monkeypatch.setattr(rig.watch.ledger, "require", lambda *given, **named: None)
    rig.chance, rig.went = Steady(), []
    let_draft(rig)
    for number in range(3):
        rig.add(f"one {number}", [*range(1 + 10 * number, 8 + 10 * number)])
    for _ in range(3):
        rig.step()
    rig.add("four", [*range(41, 50)])
    for _ in range(3):
        rig.step()
    repeat = rig.watch.repeat_without
    rig.watch.repeat_without = lambda *given: (rig.went.append(repeat(*given)), rig.went[-1])[1]
    rig.end(rig.running[1])
    return rig


def test_a_step_that_lacks_a_request_is_told_in_one_call(leaving):
    """What comes after it is told as ever: the same again, others that come, and faults."""
    rig, calls, tell = leaving, [], type(leaving.runner).kvtxn_tell
    rig.runner.kvtxn_tell = lambda what: (calls.append(what), tell(rig.runner, what))[1]
    for _ in range(3):
        rig.step()
    assert (rig.went, calls) == ([True], [])
    rig.end(rig.running[0])  # two requests, of which there was no step
    rig.step()
    assert (rig.went, len(calls)) == ([True, False], 4)
    for _ in range(2):
        rig.step()
    rig.add("five", [*range(21, 30)])
    rig.step()
    assert rig.watch.report() == []
    for _ in range(3):
        rig.step()
    rig.end(rig.running[1])
    rig.step()
    assert rig.went == [True, False, True]
    assert rig.watch.report() == []
    anothers_table(rig)
    assert "foreign" in {each["kind"] for each in rig.watch.report()}
    counters = rig.watch.counters()
    assert counters["kvtxn_audit_steps_total"] == 18
    assert counters["kvtxn_audit_unjudged_total"] == 0


@pytest.mark.parametrize("why", ["drafts", "preempted", "a new one", "unknown", "another graph"])
def test_other_steps_that_lack_a_request_are_told_one_thing_after_the_other(leaving, why):
    rig = leaving
    if why == "drafts":
        let_draft(rig, 2, 3, 3)
    elif why == "preempted":
        rig.preempted.add(rig.running[0].name)
        rig.running.pop(0)
    elif why == "a new one":
        rig.add("five", [*range(21, 30)])
    elif why == "unknown":
        rig.watch._sized.clear()
    else:
        rig.watch._quiet_until, rig.watch._repeat = 0, None
        rig.replay(8)  # nobody's
    for _ in range(3):
        rig.step()
    assert rig.went in ([], [False])
    assert rig.watch.report() == []
    assert rig.watch.counters()["kvtxn_audit_unjudged_total"] == 0


def test_a_step_that_lacks_a_request_takes_the_host_few_functions(leaving, monkeypatch):
    rig, watching = leaving, leaving.runner.kvtxn_watching
    monkeypatch.delattr(rig.watch, "repeat_without")  # the fixture's
    entered = functions_of(watching, monkeypatch)
    rig.step()
    few = ["before_replay", "goes_on", "_goes_on_without", "lacks_requests", "gone_and_left"]
    few += ["repeat_without", "lines_of", "lines_of", "padded", "repeat_fewer", "fewer", "same"]
    few += ["repeated", "holds", "went_on"]
    assert [each for each in entered if each[0] != "<"] == few


@pytest.mark.parametrize("refuses", ["step", "ledger"])
def test_a_call_that_is_refused_has_looked_once(leaving, refuses, monkeypatch):
    """The step is told one thing after the other then, and one look was for it."""
    rig, looked = leaving, []
    glance = rig.watch.ledger.glance
    monkeypatch.setattr(
        rig.watch.ledger,
        "glance",
        lambda *given, **named: looked.append(1) or glance(*given, **named),
    )
    monkeypatch.setattr("kvtxn.integrations.vllm_plugin.audit.device_watch._LOOK_EVERY", 1)
    rig.watch._quiet_until = 0
    if refuses == "step":
        rig.watch._sized.clear()
    else:
        rig.watch.ledger.repeat_fewer = lambda *given: False
    before = rig.watch.steps
    rig.step()
    assert rig.went == [False]
    assert (rig.watch.steps - before, len(looked)) == (1, 1)


def rejected_row(rig):
    """One more draft counts as accepted than was sampled, and its row is read."""
    rig.wrong_count = 1
    rig.step()
    rig.wrong_count = 0
    for request in rig.running:
        request.computed += 1
        request.tokens.append(5)
    rig.step()


def row_of_the_one_before(rig):
    """A block is handed out, and the row that its owner is to write is left as it was."""
    one = rig.running[0]
    rig.tamper = lambda rig, batch: rig.runner.block_tables.slot_mappings[0, : len(one.fed)].fill_(
        -1
    )
    for _ in range(5):
        rig.step()


def anothers_table(rig):
    rig.tamper = lambda rig, batch: rig.runner.tables[0][0].copy_(rig.runner.tables[0][1])
    rig.step()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (rejected_row, "rejected"),
        (row_of_the_one_before, "unwritten"),
        (anothers_table, "foreign"),
    ],
)
def test_what_is_wrong_in_steady_steps_is_found(steady, fault, kind):
    steady.step()
    fault(steady)
    assert all(steady.went)
    found = steady.watch.report()
    assert kind in {each["kind"] for each in found}
    assert found[0]["step"] in (5, 6)


@pytest.mark.parametrize("action", ["pause", "forget", "fails"])
def test_what_waits_is_told_or_forgotten(steady, action):
    """Before the watch pauses, forgets, or hears that the next forward has failed."""
    rig = steady
    rig.step()
    assert rig.watch.outcome is not None
    if action == "fails":

        def failing(rows):
            raise KVTxnError("replay", "a kernel failed")

        rig.replay, rig.runner.forward = failing, rig.step
        with pytest.raises(KVTxnError, match="a kernel failed"):
            rig.runner.execute_model(None)
        del rig.replay
        for request in rig.running:  # as vLLM's scheduler does when it schedules a step
            request.computed += 1
            request.tokens.append(7)
    else:
        getattr(rig.watch, action)()
    assert rig.watch.outcome is None
    if action == "pause":
        rig.step()  # nobody's
        assert rig.watch.counters()["kvtxn_audit_active"] == 0
        rig.watch.begin()
    if action != "fails":
        for request in [*rig.running]:
            rig.end(request)
        rig.add("new", [*range(31, 40)])
    for _ in range(4):
        rig.step()
    found = {(each["kind"], each["request"]) for each in rig.watch.report()}
    # The slot of the one is new; the other's has a draft of the step before.
    unwritten = {("unwritten", "one"), ("rejected", "two")}
    assert found == (unwritten if action == "fails" else set())
    assert rig.watch.counters()["kvtxn_audit_active"] == 1
    assert rig.watch.counters()["kvtxn_audit_unjudged_total"] == 0


def test_a_scheduler_that_only_ends_requests_is_heard(steady):
    """Such a step has no forward; the ledger is told of them when others come."""
    rig = steady
    for request in [*rig.running]:
        rig.end(request)
    rig.runner.forward = lambda: rig._tell({})
    rig.runner.execute_model(None)
    assert "one" in rig.watch.ledger
    del rig.runner.forward
    rig.add("two", [*range(31, 40)])  # another one of this name
    for _ in range(3):
        rig.step()
    assert "one" not in rig.watch.ledger
    assert rig.watch.report() == []
    assert rig.watch.counters()["kvtxn_audit_active"] == 1


@pytest.mark.parametrize("on_violation", ["log", "raise"])
def test_beside_other_ranks_a_steady_step_is_told_in_one_call(steady, on_violation):
    """The end of a step leaves its outcome to the next one, unless wrong reads are contained."""
    steady.watch.on_violation = on_violation
    steady.watch.peers = SimpleNamespace(
        after_step=lambda number, own, _: None, copies_prints=lambda number: False
    )
    for _ in range(5):
        steady.step()
    assert steady.went == [True] * 5
    assert steady.watch.outcome is not None
