"""The audit inside the plug-in: its settings, what it stays out of, and how it tells."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest
import torch
from kvtxn.integrations.serving.ledger.violation_log import AuditError
from kvtxn.integrations.serving.ledger.watch import Watch
from kvtxn.integrations.serving.step import Arrival, Changes, Room
from kvtxn.integrations.vllm_plugin.policy import doctor
from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts
from kvtxn.integrations.vllm_plugin.policy.settings import is_audited, settings
from kvtxn.integrations.vllm_plugin.policy.supported import MOST_CHECKED
from kvtxn.integrations.vllm_plugin.seam import audited_steps_gpu
from kvtxn.integrations.vllm_plugin.seam.audited_requests import unwatched
from watched_rows import GROUP, forward, rows

from kvtxn import ConfigError, log
from kvtxn.audit import RowGroup, Violation
from kvtxn.audit.byte_books import EVERY
from kvtxn.audit.weights import EVERY as WEIGHTS_EVERY


def asked(**given):
    return settings({"kvtxn": given}, 1, "cpu")


def test_an_audit_needs_no_policy():
    """Without one there are no windows; with one there are both."""
    alone = asked(audit="ledger")
    assert (alone.audit, alone.windows, alone.on_violation) == ("ledger", False, "log")
    both = asked(audit="ledger", policy="undo", on_violation="raise")
    assert (both.audit, both.windows, both.on_violation) == ("ledger", True, "raise")
    assert asked(policy="undo").audit == "off"
    assert asked(audit="bytes", on_violation="contain").audit == "bytes"
    assert both.record is alone.record is False
    assert asked(audit="ledger", record=True).record
    assert (alone.stale, alone.weights_every, alone.evicts) == ("count", WEIGHTS_EVERY, False)
    contains = asked(audit="ledger", stale="contain", weights_every=8)
    assert (contains.stale, contains.weights_every, contains.evicts) == ("contain", 8, True)
    assert (alone.audit_store, alone.audit_key_file) == (None, None)
    stored = asked(audit="ledger", audit_store="sqlite:////data/a.db")
    assert stored.audit_store == "sqlite:////data/a.db"
    assert stored.audit_key_file == "/data/a.db.key"
    other = asked(audit="ledger", audit_store="sqlite:///a.db", audit_key_file="/keys/a")
    assert other.audit_key_file == "/keys/a"
    many = asked(audit="ledger", audit_store="redis://h:1/2", audit_key_file="/keys/a")
    assert (many.audit_store, many.audit_key_file) == ("redis://h:1/2", "/keys/a")
    assert asked(audit="bytes").audit_every == EVERY
    assert asked(audit="bytes", audit_every=64).audit_every == 64
    assert is_audited({"kvtxn": {"audit": "ledger"}})
    assert is_audited({"kvtxn": {"audit": "bytes"}})
    assert not is_audited({"kvtxn": {"audit": "off"}})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"audit": "ledgr"}, "audit is not valid; expected one of 'off', 'ledger'"),
        ({"audit": "ledger", "on_violation": "stop"}, "on_violation is not valid"),
        ({"audit": "ledger", "record": "yes"}, "record is not valid; expected true or false"),
        ({"audit": "ledger", "log_tokens": 1}, "log_tokens is not valid; expected true or false"),
        ({"policy": "undo", "log_tokens": True}, "log_tokens has no effect without an audit"),
        ({"audit": "ledger", "stale": "alarms"}, "stale is not valid; .*did you mean 'alarm'"),
        ({"policy": "undo", "stale": "count"}, "stale has no effect without an audit"),
        ({"policy": "undo", "weights_every": 9}, "weights_every has no effect without an audit"),
        ({"audit": "ledger", "weights_every": 0}, "weights_every is not valid; expected an int"),
        ({"audit": "ledger", "audit_store": "mysql://a"}, "audit_store is not valid.*sqlite:///P"),
        ({"audit": "ledger", "audit_store": 3}, "audit_store is not valid; expected sqlite:///PA"),
        ({"policy": "undo", "audit_store": "sqlite:///a"}, "audit_store has no effect without an"),
        ({"policy": "undo", "audit_store": "redis://u:secret@h"}, "^((?!secret).)*no effect.*$"),
        ({"audit": "ledger", "audit_key_file": "a"}, "audit_key_file has no effect without a sto"),
        (
            {"audit": "ledger", "audit_store": "sqlite:///a", "audit_key_file": 3},
            "audit_key_file is not valid; expected the path of a file",
        ),
        (
            {"audit": "ledger", "audit_store": "redis://h"},
            "audit_key_file is not valid; expected the path of a file.*to every machine",
        ),
        (
            {"audit": "ledger", "audit_store": "redis://a:secret@h/x", "audit_key_file": "/k"},
            "audit_store is not valid; .*got another URL, with a user or a password",
        ),
        ({"audit": "off"}, "names neither a policy nor an audit.*; got only audit; add"),
        ({"audit": "ledger", "poison": True}, "poison has no effect without an audit of bytes"),
        ({"audit": "bytes", "poison": True}, "poison has no effect on device cpu"),
        ({"audit": "bytes", "poison": 1}, "poison is not valid"),
        ({"audit": "ledger", "audit_every": 64}, "audit_every has no effect without an audit of b"),
        ({"policy": "undo", "audit_every": 64}, "audit_every has no effect without an audit of by"),
        *(
            ({"audit": "bytes", "audit_every": every}, "audit_every is not valid; expected an int")
            for every in (0, -1, True, 1.0, "64", None, 2**31)
        ),
    ],
)
def test_mistakes_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        asked(**given)


def connector():
    """vLLM's configuration of a KV connector."""
    return SimpleNamespace(kv_connector="OffloadingConnector")


def config(**changes):
    parallel = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    known = {
        "device_config": SimpleNamespace(device_type=changes.get("device", "cpu")),
        "use_v2_model_runner": changes.get("v2", False),
        "kv_transfer_config": changes.get("connector"),
        "parallel_config": SimpleNamespace(**(parallel | changes.get("parallel", {}))),
        "model_config": SimpleNamespace(runner_type=changes.get("work", "generate")),
        "scheduler_config": SimpleNamespace(
            scheduler_cls=changes.get("scheduler"), get_scheduler_cls=lambda: changes["scheduler"]
        ),
    }
    return SimpleNamespace(**known)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"device": "xpu"}, "on CPUs and on CUDA GPUs only"),
        ({"device": "cuda"}, None),
        ({"device": "cuda", "v2": True}, None),
        ({"v2": True}, "V1 model runner only"),
        ({"connector": connector()}, None),
        ({"device": "cuda", "v2": True, "connector": connector()}, None),
        ({"parallel": {"pipeline_parallel_size": 2}}, None),
        ({"parallel": {"decode_context_parallel_size": 2}}, "context parallelism"),
    ],
)
def test_engines_that_it_cannot_watch(changes, why):
    said = unwatched(config(**changes))
    assert said is None if why is None else why in said


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({}, "the ledger can watch this engine"),
        ({"device": "cuda", "runner": "v2"}, "the ledger can watch this engine"),
        ({"device": "xpu"}, "cannot watch this engine: the ledger watches engines on CPUs and"),
        ({"runner": "v2"}, "cannot watch this engine: on a CPU the ledger watches the V1 model"),
        ({"context_parallel": 2}, "cannot watch this engine: context parallelism"),
        ({"version": "9.9"}, "not known of this release"),
    ],
)
def test_the_doctor_says_whether_the_ledger_can_watch(monkeypatch, facts, says):
    judged = attrs.evolve(EngineFacts(version=MOST_CHECKED, device="cpu", runner="v1"), **facts)
    monkeypatch.setattr(doctor.engine_config, "plain_facts", lambda: judged)
    assert says in doctor.report(None)["audit"]


STAGES = {"parallel": {"pipeline_parallel_size": 2}}
CONTAIN = {"audit": "ledger", "on_violation": "contain"}
STARTS = "required -> the engine starts, unless its loaded model"


@pytest.mark.parametrize(
    ("given", "facts", "changes", "said"),
    [
        (None, {}, {}, ['nothing: "kvtxn" is not in additional_config']),
        ({"policy": "undo"}, {}, {}, ["policy undo -> undo (asked for)"]),
        (
            {"policy": "auto", "required": True}, {}, {},
            ["policy auto -> undo (", STARTS],
        ),
        (
            {"policy": "deferred", "required": True}, {"kv_sharing": True}, {},
            ["policy deferred -> off (policy 'deferred' cannot",
             "required -> the start stops: kvtxn is required, but policy 'deferred' cannot"],
        ),
        ({"policy": "deferred"}, {"method": None}, {}, ["policy deferred -> off (the engine does"]),
        (
            {"policy": "undo", "required": True}, {"head_size": 16}, {},
            ["policy undo -> off (vLLM's attention on CPUs has no kernel for heads of 16 numbers",
             "required -> the start stops, and would without it: vLLM itself does not run this"],
        ),
        (
            {"audit": "bytes"}, {}, {},
            ["audit bytes -> bytes (a slot in 256 is compared in each step)", "on_violation log"],
        ),
        (
            {"audit": "bytes", "audit_every": 7, "required": True}, {}, {},
            ["audit bytes -> bytes (a slot in 7 is compared in each step)", "on_violation", STARTS],
        ),
        (
            {**CONTAIN, "policy": "undo", "required": True}, {}, STAGES,
            ["policy undo -> undo", "audit ledger -> ledger",
             "on_violation contain -> log (an engine with pipeline stages",
             "required -> the start stops: kvtxn is required, but an engine with pipeline stages"],
        ),
        (CONTAIN, {}, {}, ["audit ledger -> ledger", "on_violation contain -> contain"]),
        (
            {"audit": "ledger", "stale": "alarm"}, {}, {},
            ["audit ledger -> ledger", "on_violation log -> log",
             "stale alarm -> alarm (untold changes of weights are looked for every 64 steps)"],
        ),
        (
            {"audit": "ledger", "stale": "contain"}, {}, {"work": "pooling"},
            ["audit ledger -> ledger", "on_violation log -> log",
             "stale contain -> alarm (a pooling engine ends"],
        ),
        (
            CONTAIN, {}, {"work": "pooling"},
            ["audit ledger -> ledger", "on_violation contain -> log (a pooling engine ends"],
        ),
        ({"audit": "ledger"}, {}, {"v2": True}, ["audit ledger -> off (on a CPU the ledger"]),
        (
            {"audit": "ledger", "required": True}, {}, {"v2": True},
            ["audit ledger -> off", "required -> the start stops: kvtxn is required, but on a CPU"],
        ),
        (
            {"audit": "bytes", "required": True},
            {"device": "cuda", "runner": "v2", "attention": "CUTLASS_MLA"},
            {"device": "cuda", "v2": True},
            ["audit bytes -> ledger (the rows of attention backend CUTLASS_MLA", "on_violation log",
             "required -> the start stops: kvtxn is required, but the rows of attention"],
        ),
        (
            {"audit": "bytes", "required": True},
            {"device": "cuda", "runner": "v2"},
            {"device": "cuda", "v2": True},
            ["audit bytes -> bytes", "on_violation log -> log", STARTS],
        ),
    ],
)  # fmt: skip
def test_the_doctor_says_what_becomes_of_each_setting(given, facts, changes, said):
    """As the plug-in decides it; required settings that it cannot have stop the start."""
    wanted = None if given is None else asked(**given)
    found = doctor._asked(wanted, EngineFacts(**facts), config(**changes))
    assert len(found) == len(said)
    for line, begin in zip(found, said, strict=True):
        assert line.startswith(begin)


@pytest.mark.parametrize(
    ("given", "facts", "changes", "lacks"),
    [
        (None, {}, {}, []),
        (None, {"head_size": 16}, {}, ["stock vLLM"]),
        ({"policy": "auto", "audit": "ledger"}, {}, {}, []),
        ({**CONTAIN, "policy": "deferred"}, {"kv_sharing": True}, {}, ["policy deferred"]),
        ({**CONTAIN, "policy": "undo"}, {}, STAGES, ["on_violation contain"]),
    ],
)
def test_the_doctor_names_what_an_engine_does_not_get(given, facts, changes, lacks):
    """Its exit code is 1 then."""
    wanted = None if given is None else asked(**given)
    assert doctor._lacking(wanted, EngineFacts(**facts), config(**changes), None) == lacks


def test_the_doctor_says_which_hook_is_gone():
    facts, wanted = EngineFacts(version="9.9", unchecked=True), asked(policy="undo", required=True)
    assert doctor._asked(wanted, facts, config(), "vLLM 9.9 lacks a.b") == [
        "policy undo -> off (vLLM 9.9 lacks a.b)",
        "required -> the start stops: kvtxn is required, but vLLM 9.9 lacks a.b",
    ]


def watch(on_violation="log", requests=2):
    room = Room(requests, 32, caches_prefixes=True)
    return Watch({"group.0": GROUP}, room, 0, on_violation)


def arrival(name, tokens, table, computed=0):
    return Arrival(name, tokens, [], {}, computed, [table])


def come(*arrivals, gone=(), grown=(), copies=()):
    return Changes(gone, arrivals, [list(grown)], copies)


def test_hits_are_not_handed_out_anew(lines):
    """Blocks that are computed keep their rows; those after them count as unwritten."""
    w = watch()
    w.change(come(arrival("a", [1, 2, 3, 4, 5], [1, 2])))
    forward(w, rows("a", 0, [1, 2, 3, 4, 5], [4, 5, 6, 7, 8], [1, 2]))
    w.change(come(arrival("b", [1, 2, 3, 4, 6], [1, 3], computed=4), gone=["a"]))
    forward(w, rows("b", 4, [6], [12], [1, 3]))
    w.change(come(arrival("c", [1, 2, 3, 4, 7], [1, 4]), gone=["b"]))
    forward(w, rows("c", 4, [7], [16], [1, 4]))
    found = [(v["kind"], v["request"], v["slot"]) for v in w.report()]
    assert found == [("unwritten", "c", 4), ("published", "c", 4)]
    assert len(lines) == 2
    assert "event='kvtxn.audit_violation'" in lines[0] or "kvtxn.audit_violation" in lines[0]


@pytest.mark.parametrize("pools", [("blocks", "blocks"), (None, None), ("one", "other")])
def test_copies_reach_every_group_once(pools, monkeypatch):
    """Groups of one pool have their words there; others of an engine have blocks of their own."""
    names = ["group.0", "group.1"]
    groups = {n: RowGroup(n, 4, 12, pool=pool) for n, pool in zip(names, pools, strict=True)}
    w, copied = Watch(groups, Room(2, 32, caches_prefixes=False), 0, "log"), []
    monkeypatch.setattr(w.ledger, "copy", lambda group, *more: copied.append(group))
    w.change(Changes((), (), ((), ()), [(1, 2)]))
    assert not w.stopped
    assert sorted(copied) == (["group.0"] if pools[0] == "blocks" else names)


def test_copies_carry_their_rows(lines):
    w = watch()
    w.change(come(arrival("a", [1, 2, 3], [1])))
    forward(w, rows("a", 0, [1, 2, 3], [4, 5, 6], [1]))
    w.change(come(arrival("b", [1, 2, 3, 4], [2], computed=3), copies=[(1, 2)]))
    forward(w, rows("b", 3, [4], [11], [2]))
    assert w.report() == []


def test_a_published_block_is_checked_where_no_query_sees_it(lines):
    """Of a sliding window; its publisher's own reads are past the wrong row."""
    group = RowGroup("group.0", 4, 12, window=2, pool="blocks")
    w = Watch({"group.0": group}, Room(2, 32, caches_prefixes=True), 0, "log")
    w.change(come(arrival("a", [1, 2, 3, 4], [1])))
    forward(w, rows("a", 0, [1], [-1], [1]))
    (first,) = w.report()
    w.change(come())
    w.ledger.hand_out("group.0", [1])
    forward(w, rows("a", 1, [2, 3, 4], [5, 6, 7], [1]))
    assert [v["kind"] for v in w.report()] == ["unwritten", "published"]
    assert first["position"] == 0


def test_one_that_was_forgotten_returns(lines):
    """More requests wait than the ledger has lines for: the one that waits longest makes room."""
    w = watch(requests=1)
    for number in range(12):
        w.change(come(arrival(f"r{number}", [1, 2], [1])))
        forward(w, rows(f"r{number}", 0, [1, 2], [4, 5], [1]))
    asked_for = []

    def returning(name):
        asked_for.append(name)
        return arrival(name, [1, 2, 3], [1], computed=2)

    forward(w, rows("r0", 2, [3], [6], [1]), returning)
    assert asked_for == ["r0"]
    assert w.report() == []


def test_the_life_of_slots_is_kept_if_asked_for(lines):
    """Publications, too; no other watch keeps it."""
    kept = Watch({"group.0": GROUP}, Room(2, 32, caches_prefixes=True), 0, "log", record=True)
    for w in (kept, watch()):
        w.change(come(arrival("a", [1, 2, 3, 4, 5], [1, 2])))
        forward(w, rows("a", 0, [1, 2, 3, 4, 5], [4, 5, 6, 7, 8], [1, 2]))
    recording = kept.recording()
    assert [life["name"] for life in recording["requests"]] == ["a"]
    happened = [recording["happenings"][number] for number in recording["runs"][1::7]]
    assert happened == ["handed_out", "durable", "published"]
    assert w.recording() is None


def drawn(ids, drafts, discarded=(False,)):
    """What the plug-in reads of a sampler's output."""
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(vocab_size=50),
        discard_request_mask=SimpleNamespace(gpu=torch.tensor(discarded)),
        max_num_reqs=len(ids),
    )
    reader = audited_steps_gpu.SampledReader(runner, watch().ledger.input)
    return reader.sampled(torch.tensor(ids, dtype=torch.int32), drafts)


def test_what_is_no_token_was_not_sampled():
    """Neither placeholders nor numbers beyond the vocabulary, nor what vLLM throws away."""
    ids = [[4, 5, -1], [6, 50, -1], [7, 8, 9], [-1, -1, -1]]
    number, kept = drawn(ids, None, [False, False, True, False])
    assert number.tolist() == [2, 1, 0, 0]
    assert kept.tolist() == [[4, 5, -1], [6, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    assert number.dtype is kept.dtype is torch.int64


def test_more_drafts_than_there_were_are_not_accepted(lines):
    """What a sampler returns beyond a request's drafts is no count that the ledger refuses."""
    w = watch()
    w.change(come(arrival("a", [1, 2, 3], [1])))
    drafted = attrs.evolve(rows("a", 0, [1, 2, 3, 4], [4, 5, 6, 7], [1]), drafts=torch.tensor([1]))
    forward(w, drafted)
    w.sampled(*drawn([[4, 4, 4]], drafted.drafts))
    assert w.counters()["kvtxn_audit_active"] == 1
    assert w.counters()["kvtxn_audit_unjudged_total"] == 0
    assert w.report() == []


def test_raise_stops(lines):
    w = watch("raise")
    w.change(come(arrival("a", [1, 2], [1])))
    forward(w, rows("a", 1, [2], [5], [1]))
    with pytest.raises(AuditError, match="unwritten: in step 1 request a read slot 4"):
        w.end_step()
    assert w.end_step() is None  # it is said once


@pytest.mark.parametrize("wanted", [False, True])
def test_the_log_has_tokens_if_the_user_wants_them(lines, wanted):
    """The report has them in any case."""
    w = watch()
    w.found.log_tokens = asked(audit="ledger", log_tokens=wanted).log_tokens
    w.change(come(arrival("a", [70001, 70002], [1])))
    forward(w, rows("a", 0, [70001, 70002], [4, 5], [1]))
    w.change(come(arrival("b", [70001, 70003, 70004], [1], computed=2), gone=["a"]))
    forward(w, rows("b", 2, [70004], [6], [1]))
    (line,) = (line for line in lines if "kind='foreign'" in line)
    assert ("7000" in line) == ("expected" in line) == ("written_for" in line) == wanted
    assert all(said in line for said in ("position=1", "request='b'", "written_request='a'"))
    assert w.report()[0]["expected"] == [70001, 70003]


def test_changed_rows_of_a_block_are_one_line(lines, monkeypatch):
    """Each is a violation, counted and reported."""
    w = watch()
    rows_of = [("a", 4, 1), ("a", 5, 1), ("a", 6, 1), ("a", 8, 2), ("b", 4, 1)]
    found = [
        Violation(
            "changed", 3, name, "group.0", "layer", at, block, 4 * block + at % 4, "bytes", ()
        )
        for name, at, block in rows_of
    ]
    monkeypatch.setattr(w.ledger, "violations", lambda: [found.pop(0) for _ in list(found)])
    assert len(w.report()) == 5
    assert ["rows=3 last_position=6" in line for line in lines] == [True, False, False]
    assert "number=1 " in lines[0]
    assert "number=4 " in lines[1]
    assert "rows=" not in lines[1]


@pytest.mark.parametrize(("kind", "who"), [("foreign", "requests"), ("stale", "aged")])
def test_readers_of_earlier_weights_are_contained_by_themselves(monkeypatch, kind, who):
    """A second time it is no wrong row of the computation: weights have changed again."""
    w = watch(on_violation="contain")
    found = [Violation(kind, 3, "a", "group.0", None, 4, 1, 4, kind, ())]
    monkeypatch.setattr(w.ledger, "violations", lambda: [found.pop() for _ in list(found)])
    w.report()
    wrong = w.found.take_report().wrong
    assert (wrong.readers, wrong.blocks) == ({"a"}, {1})
    assert getattr(wrong, who) == {"a"}
    assert (wrong | wrong).readers == {"a"}


def after_a_storm(w):
    """Let 40 requests read a wrong row each."""
    for number in range(40):
        w.change(come(arrival(f"r{number}", [1, 2], [1]), gone=[f"r{number - 1}"]))
        forward(w, rows(f"r{number}", 1, [2], [5], [1]))
    assert len(w.report()) == w.counters()["kvtxn_audit_violations_total"] == 40


def test_tests_hear_of_a_whole_storm(lines):
    """An engine serves many tests; the last one has to hear of its wrong row, too."""
    w, heard = watch(), []
    w.found.logs_all = True
    end = log.listen(lambda event: heard.append(event["event"]))
    try:
        after_a_storm(w)
    finally:
        end()
    assert heard.count("kvtxn.audit_violation") == 40
    assert len(lines) == 20  # a log shows the others at another level
