"""The verdict's sentences: plain, whole, and 100 columns wide at most."""

from __future__ import annotations

import pytest
import recorded
from kvtxn.integrations.audit_command.verdict import MEANING, judge, judge_found, tell
from ledger_kit.mutants import KeepsOneRowTooMany

from kvtxn.audit import KINDS

VIOLATION = {
    "kind": "foreign", "step": 37, "request": "session 5", "group": "group.0", "layer": None,
    "position": 41, "block": 37, "slot": 1187, "found": "foreign", "expected": [5, 7, 9],
    "written_for": [5, 7, 12], "written_position": 41, "written_step": 35,
    "written_request": "session 5", "brought": False, "differs": "tokens",
}  # fmt: skip


def test_each_kind_has_a_meaning():
    assert [*MEANING] == [*KINDS]


def test_a_healthy_engine():
    counts = {"kvtxn_audit_rows_checked_total": 123_456, "kvtxn_audit_steps_total": 410}
    verdict = judge([counts], [], 24)
    assert (verdict.word, verdict.exit_code) == ("healthy", 0)
    assert str(verdict) == (
        "Healthy: 123,456 rows were read in 410 steps of 24 requests, and every one was the "
        "right one."
    )
    states = judge([counts | {"kvtxn_audit_states_checked_total": 1}], [], 1)
    assert "123,456 rows and 1 state were read in 410 steps of 1 request," in states.headline
    alone = judge([{"kvtxn_audit_states_checked_total": 2, "kvtxn_audit_steps_total": 1}], [], 1)
    assert alone.headline.startswith("Healthy: 2 states were read in 1 step of 1 request, ")


ROWS = {"kvtxn_audit_rows_checked_total": 9000, "kvtxn_audit_steps_total": 3}
WRONG = {"kvtxn_audit_violations_total": 1, "kvtxn_audit_violations_total_foreign": 1}
AGES, UNUSED = "kvtxn_audit_rows_read_by_age", "kvtxn_audit_cached_rows_unused_total"

#: By case: the counters of two ranks, and the sentences of a healthy verdict.
HEALTHY = {
    "all groups are watched": ({"kvtxn_audit_unwatched_groups": 0.0}, []),
    "bytes": (
        {"kvtxn_audit_bytes_compared_total": 1200},
        ["The bytes of 2,400 of them were compared with their checksums."],
    ),
    "unverified": (
        {"kvtxn_audit_rows_unverified_total": 1200},
        ["2,400 of the rows and states that a connector or a storage brought were taken for right: "
         "nobody can vouch for where they are from."],
    ),
    "earlier weights": (
        {AGES: 120, f"{AGES}_0": 20, f"{AGES}_1": 48, f"{AGES}_16+": 2},
        ["Rows of earlier weights, by age in epochs: 96 of age 1, 4 of age 16+."],
    ),
    "work done twice": (
        {"kvtxn_audit_requests_restarted_total": 3, "kvtxn_audit_rows_recomputed_total": 1055},
        ["Requests were put back and begun again 3 times: 1,055 rows had to be computed again."],
    ),
    "requests that spin": (
        {"kvtxn_audit_requests_restarted_total": 3, "kvtxn_audit_rows_recomputed_total": 1055,
         "kvtxn_audit_restarts_without_token_total": 2},
        ["Requests were put back and begun again 3 times, 2 of them without a token since the last "
         "time: 1,055 rows had to be computed again."],
    ),
    "reuse that was lost": (
        {UNUSED: 1120, f"{UNUSED}_states": 1104, f"{UNUSED}_last_token": 16, f"{UNUSED}_window": 0},
        ["1,120 rows that the prefix cache had were computed again: 16 as the last token is "
         "computed for its logits, and its block with it; 1,104 as a recurrent layer has no state "
         "there."],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_said_of_a_healthy_engine(name):
    """Ranks read rows of their own, and do the same work twice."""
    counters, sentences = HEALTHY[name]
    verdict = judge([ROWS | counters] * 2, [], 5)
    assert (verdict.word, verdict.exit_code, verdict.sentences) == ("healthy", 0, sentences)


#: By case: the counters of one of two ranks, and the beginnings of the sentences.
NOT_JUDGED = {
    "unjudged": (
        {"kvtxn_audit_unjudged_total_malformed": 1, "kvtxn_audit_unjudged_total_unresolved": 2},
        ["1 request of steps did not fit the ledger", "2 requests of steps had drafts, and nobody"],
    ),
    "ended": (
        {"kvtxn_audit_active": 0.0, "kvtxn_audit_steps_total": 20},
        ["The audit of rank 1 ended by an error after 20 steps"],
    ),
    "unwatched": (
        {"kvtxn_audit_unwatched_groups": 3.0},
        ["The ledger does not watch 3 KV-cache groups of this engine"],
    ),
}


@pytest.mark.parametrize("name", NOT_JUDGED)
def test_what_could_not_be_judged_is_no_health(name):
    """A violation that was found stays one."""
    counters, beginnings = NOT_JUDGED[name]
    verdict = judge([ROWS, ROWS | counters], [], 5)
    assert (verdict.word, verdict.exit_code) == ("not all judged", 2)
    assert "and no wrong one was found" in verdict.headline
    assert [*map(str.startswith, verdict.sentences, beginnings)] == [True] * len(beginnings)
    wrong = judge([ROWS | WRONG, ROWS | counters], [VIOLATION], 5)
    assert (wrong.word, wrong.exit_code) == ("violations", 1)
    assert wrong.sentences[-1] == verdict.sentences[-1]


def test_nothing_read_is_no_health():
    verdict = judge([{"kvtxn_audit_steps_total": 0}], [], 0)
    assert (verdict.word, verdict.exit_code) == ("nothing read", 2)


def test_violations_are_told_one_by_one():
    result = recorded.found(engine=KeepsOneRowTooMany)
    violations, verdict = result.violations, judge_found(result)
    assert (verdict.word, verdict.exit_code) == ("violations", 1)
    assert verdict.headline.startswith(f"{len(violations)} violations: ")
    assert sum(verdict.kinds.values()) == len(violations)
    assert verdict.sentences[0] == f"rejected, {verdict.kinds['rejected']}: {MEANING['rejected']}."
    assert verdict.sentences[-1] == f"{len(violations) - 8} more are not told here."
    assert max(map(len, str(verdict).splitlines())) <= 100


def test_ranks_add_up():
    verdict = judge([ROWS, ROWS | WRONG], [VIOLATION], 1)
    assert verdict.headline == "1 violation: 18,000 rows were read in 3 steps of 1 request."
    assert verdict.kinds == {"foreign": 1}
    assert len(verdict.sentences) == 2


UNKNOWN = {"written_step": None, "written_request": None, "written_for": []}
BROUGHT = {"brought": True, "written_for": [], "written_position": None, "differs": None}
RIGHT = {"written_for": [5, 7, 9], "group": "group.1"}
STORED = {"kind": "imported", "brought": True, "written_request": "request 2"}
SLOT = "In step 37 session 5 read slot 1187 (block 37) of group.0"
READ = f"{SLOT} as its position 41, tokens ...[5 7 9]"

#: What is changed of ``VIOLATION``, and how its sentence begins and ends.
SENTENCES = [
    ({}, READ, "; the same request had written it in step 35 for position 41, tokens ...[5 7 12]."),
    ({"written_request": "request 8", "found": "rejected"}, READ,
     "; request 8 had written it in step 35 for position 41, tokens ...[5 7 12], a draft that was "
     "rejected."),
    (UNKNOWN, READ, ": its writer is not known any more."),
    (UNKNOWN | {"kind": "unwritten", "found": "unwritten"}, READ,
     ": nobody had written it since its block was handed out."),
    (BROUGHT | {"found": "rejected"}, READ,
     "; a connector had brought it for the same request in step 35, a draft that was rejected."),
    (BROUGHT | {"found": "rejected", "kind": "imported"}, "In step 37 session 5 was given slot ",
     "...[5 7 9]: what was stored was a draft that was rejected."),
    (BROUGHT | {"found": "bytes", "kind": "imported"}, "",
     ": its bytes are not those that were stored."),
    (BROUGHT | {"written_request": None, "brought": False}, READ,
     "; a request whose name is not known any more had written it in step 35."),
    (STORED, "", "; request 2 had stored it in step 35 for position 41, tokens ...[5 7 12]."),
    (STORED | RIGHT | {"differs": "extras"}, "",
     "tokens ...[5 7 9], with another adapter or encoder input."),
    (RIGHT | {"kind": "changed", "found": "bytes", "layer": "model.layers.3"},
     "In step 37 session 5 read slot 1187 (block 37) of group.1, layer model.layers.3, as its ",
     "position 41, tokens ...[5 7 9], and its bytes have changed since."),
    (UNKNOWN | {"kind": "changed", "found": "bytes"}, READ,
     ": its bytes are not those that were written, by whom is not known any more."),
    (RIGHT | {"kind": "exported", "found": "draft"}, "In step 37 session 5 sent out slot 1187 ",
     "...[5 7 9], a draft that nobody had accepted yet."),
    (RIGHT | {"kind": "state", "found": "owner", "written_request": "request 8"},
     "In step 37 session 5 went on from state 1187 of group.1 as its position 41, ",
     ": the state of the same tokens, but of another request."),
    (RIGHT | {"kind": "state", "position": None, "expected": []},
     "In step 37 session 5 went on from state 1187 of group.1 as the state before its first token;",
     ""),
    ({"kind": "changed", "found": "nan"}, "In step 37 session 5 put out a NaN at its position 41, ",
     "which came from slot 1187 (block 37) of group.0."),
    ({"kind": "changed", "found": "nan", "slot": None}, "",
     "session 5 put out a NaN at its position 41."),
    ({"expected": [5, 788687773248, 9], "written_for": [2**39 - 1, 2**39]},
     f"{SLOT} as its position 41, tokens ...[5 (embedded) 9];",
     f"tokens ...[{2**39 - 1} (embedded)]."),
    ({"slot": None, "block": None}, "In step 37 session 5 read a place outside of group.0 as ", ""),
    ({"kind": "ranks"}, "In step 37 two ranks wrote different rows.", ""),
    ({"kind": "state", "found": "count", "slot": None}, "In step 37 session 5 was told a number ",
     "of accepted drafts that is not the sampler's, at its position 41."),
    ({"kind": "published"}, "In step 37 session 5 published slot 1187 ", ""),
    ({"kind": "stale", "found": "stale", "differs": None}, READ,
     ", tokens ...[5 7 12], by weights that have changed since."),
    ({"kind": "weights", "request": None, "weights": "target"},
     "In step 37 the target's weights had changed, and nobody had said so.", ""),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "begin", "end"), SENTENCES)
def test_a_violation_is_one_sentence(changes, begin, end):
    said = tell(VIOLATION | changes)
    assert said.startswith(begin)
    assert said.endswith(end)
