"""The verdict's sentences: plain, whole, and 100 columns wide at most."""

from __future__ import annotations

import pytest
import recorded
from kvtxn.integrations.audit_command.verdict import MEANING, judge, tell

from kvtxn.audit import KINDS
from kvtxn.testing.audit_mutants import KeepsOneRowTooMany

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


def test_nothing_read_is_no_health():
    verdict = judge([{"kvtxn_audit_steps_total": 0}], [], 0)
    assert (verdict.word, verdict.exit_code) == ("nothing read", 2)


def test_what_could_not_be_judged_is_no_health():
    counts = {
        "kvtxn_audit_rows_checked_total": 9, "kvtxn_audit_steps_total": 3,
        "kvtxn_audit_unjudged_total": 3, "kvtxn_audit_unjudged_total_malformed": 1,
        "kvtxn_audit_unjudged_total_unresolved": 2,
    }  # fmt: skip
    verdict = judge([counts], [], 2)
    assert (verdict.word, verdict.exit_code) == ("not all judged", 2)
    assert "and no wrong one was found" in verdict.headline
    assert [sentence[:26] for sentence in verdict.sentences] == [
        "1 request of steps did not", "2 requests of steps had dr",
    ]  # fmt: skip
    wrong = {"kvtxn_audit_violations_total": 1, "kvtxn_audit_violations_total_foreign": 1}
    verdict = judge([counts | wrong], [VIOLATION], 2)
    assert verdict.exit_code == 1
    assert "nobody said how many of them were accepted" in verdict.sentences[-1]


def test_an_audit_that_ended_before_its_engine_is_no_health():
    """Whatever was read until then; a violation that was found stays one."""
    counts = {"kvtxn_audit_active": 1.0, "kvtxn_audit_rows_checked_total": 100}
    ended = counts | {"kvtxn_audit_active": 0.0, "kvtxn_audit_steps_total": 20}
    verdict = judge([counts, ended], [], 5)
    assert (verdict.word, verdict.exit_code) == ("not all judged", 2)
    says = "The audit of rank 1 ended by an error after 20 steps"
    assert [sentence.startswith(says) for sentence in verdict.sentences] == [True]
    wrong = {"kvtxn_audit_violations_total": 1, "kvtxn_audit_violations_total_foreign": 1}
    verdict = judge([counts | wrong, ended], [VIOLATION], 5)
    assert (verdict.word, verdict.exit_code) == ("violations", 1)
    assert verdict.sentences[-1].startswith(says)
    nothing = judge([ended | {"kvtxn_audit_rows_checked_total": 0}], [], 5)
    assert (nothing.word, len(nothing.sentences)) == ("nothing read", 1)


def test_groups_that_are_not_watched_are_no_health():
    """Stages of a pipeline, and their ranks, have groups of their own."""
    counts = {"kvtxn_audit_rows_checked_total": 9000, "kvtxn_audit_unwatched_groups": 0.0}
    assert judge([counts, counts], [], 5).exit_code == 0
    verdict = judge([counts, counts | {"kvtxn_audit_unwatched_groups": 3.0}], [], 5)
    assert (verdict.word, verdict.exit_code) == ("not all judged", 2)
    assert "does not watch 3 KV-cache groups of this engine" in verdict.sentences[0]


def test_the_number_of_bytes_that_were_compared_is_told():
    """Every one that was read was the right one; not every one had its bytes compared."""
    counts = {"kvtxn_audit_rows_checked_total": 9000, "kvtxn_audit_bytes_compared_total": 1200}
    verdict = judge([counts, counts], [], 5)
    says = ["The bytes of 2,400 of them were compared with their checksums."]
    assert (verdict.exit_code, verdict.sentences) == (0, says)


def test_what_had_to_be_believed_is_told():
    counts = {"kvtxn_audit_rows_checked_total": 9000, "kvtxn_audit_rows_unverified_total": 1200}
    verdict = judge([counts, counts], [], 5)
    assert (verdict.word, verdict.exit_code) == ("healthy", 0)
    assert verdict.sentences == [
        "2,400 of the rows and states that a connector or a storage brought were taken for right: "
        "nobody can vouch for where they are from."
    ]


def test_violations_are_told_one_by_one():
    result = recorded.found(engine=KeepsOneRowTooMany)
    violations = result.recordings[0]["violations"]
    verdict = judge(result.counters, violations, result.requests)
    assert (verdict.word, verdict.exit_code) == ("violations", 1)
    assert verdict.headline.startswith(f"{len(violations)} violations: ")
    assert sum(verdict.kinds.values()) == len(violations)
    assert verdict.sentences[0] == f"rejected, {verdict.kinds['rejected']}: {MEANING['rejected']}."
    assert verdict.sentences[-1] == f"{len(violations) - 8} more are not told here."
    assert max(map(len, str(verdict).splitlines())) <= 100


def test_ranks_add_up():
    counts = {"kvtxn_audit_rows_checked_total": 5, "kvtxn_audit_steps_total": 2}
    wrong = {"kvtxn_audit_violations_total": 1, "kvtxn_audit_violations_total_foreign": 1}
    verdict = judge([counts, counts | wrong], [VIOLATION], 1)
    assert verdict.headline == "1 violation: 10 rows were read in 2 steps of 1 request."
    assert verdict.kinds == {"foreign": 1}
    assert len(verdict.sentences) == 2


def test_who_wrote_it_is_named():
    assert tell(VIOLATION) == (
        "In step 37 session 5 read slot 1187 (block 37) of group.0 as its position 41, tokens "
        "...[5 7 9]; the same request had written it in step 35 for position 41, tokens "
        "...[5 7 12]."
    )
    other = tell({**VIOLATION, "written_request": "request 8", "found": "rejected"})
    assert "; request 8 had written it in step 35" in other
    assert other.endswith(", a draft that was rejected.")


def test_what_a_connector_brought_is_told_as_such():
    """The request that a row was brought for has not written it."""
    brought = {**VIOLATION, "found": "rejected", "written_for": [], "written_position": None,
               "brought": True, "differs": None}  # fmt: skip
    said = tell({**brought, "kind": "rejected"})
    assert said.endswith(
        "; a connector had brought it for the same request in step 35, a draft that was rejected."
    )
    said = tell({**brought, "kind": "imported", "step": 35})
    assert said.startswith("In step 35 session 5 was given slot 1187 (block 37) of group.0 as ")
    assert said.endswith("...[5 7 9]: what was stored was a draft that was rejected.")
    copied = tell({**brought, "written_request": None, "brought": False})
    assert "; a request whose name is not known any more had written it in step 35" in copied
    bytes_of = tell({**brought, "kind": "imported", "found": "bytes"})
    assert bytes_of.endswith(": its bytes are not those that were stored.")
    draft = tell({**brought, "kind": "imported", "found": "draft"})
    assert draft.endswith(": what was stored was a draft that nobody had accepted yet.")
    stored = {**VIOLATION, "kind": "imported", "brought": True, "written_request": "request 2"}
    assert tell(stored).endswith(
        "; request 2 had stored it in step 35 for position 41, tokens ...[5 7 12]."
    )
    adapter = {**stored, "written_for": [5, 7, 9], "differs": "extras"}
    assert tell(adapter).endswith("tokens ...[5 7 9], with another adapter or encoder input.")


def test_what_is_wrong_is_said_where_tokens_and_position_are_right():
    right = {**VIOLATION, "written_for": VIOLATION["expected"], "group": "group.1"}
    layer = "model.layers.3.self_attn.attn"
    changed = tell({**right, "kind": "changed", "found": "bytes", "layer": layer})
    assert f"read slot 1187 (block 37) of group.1, layer {layer}, as its position 41" in changed
    assert changed.endswith("position 41, tokens ...[5 7 9], and its bytes have changed since.")
    unknown = {"written_step": None, "written_request": None, "written_for": []}
    changed = tell({**right, **unknown, "kind": "changed", "found": "bytes", "layer": layer})
    assert ": its bytes are not those that were written, by whom" in changed
    sent = tell({**right, "kind": "exported", "found": "draft"})
    assert sent.endswith("...[5 7 9], a draft that nobody had accepted yet.")
    state = tell({**right, "kind": "state", "found": "owner", "written_request": "request 8"})
    assert state.startswith("In step 37 session 5 went on from state 1187 of group.1 as its ")
    assert "; request 8 had written it in step 35 for position 41, tokens ...[5 7 9]: " in state
    assert state.endswith(": the state of the same tokens, but of another request.")
    first = tell({**right, "kind": "state", "found": "foreign", "position": None, "expected": []})
    assert " of group.1 as the state before its first token; the same request had" in first


def test_a_nan_is_told_with_where_it_came_from():
    nan = {**VIOLATION, "kind": "changed", "found": "nan", "expected": []}
    assert tell(nan) == (
        "In step 37 session 5 put out a NaN at its position 41, which came from slot 1187 "
        "(block 37) of group.0."
    )
    unknown = tell({**nan, "slot": None, "block": None, "written_step": None})
    assert unknown == "In step 37 session 5 put out a NaN at its position 41."


def test_content_that_is_embedded_is_told_as_such():
    """An id that stands for a part of an image means nothing to people."""
    embedded = {**VIOLATION, "expected": [5, 788687773248, 9], "written_for": [2**39 - 1, 2**39]}
    said = tell(embedded)
    assert "tokens ...[5 (embedded) 9]; the same request" in said
    assert f"tokens ...[{2**39 - 1} (embedded)]." in said


def test_what_is_not_known_is_not_told():
    unknown = {"written_step": None, "written_request": None, "written_for": []}
    nobody = tell({**VIOLATION, **unknown, "kind": "unwritten", "found": "unwritten"})
    assert nobody.endswith(": nobody had written it since its block was handed out.")
    assert tell({**VIOLATION, **unknown}).endswith(": its writer is not known any more.")
    assert "a place outside of group.0" in tell({**VIOLATION, "slot": None, "block": None})
    assert tell({**VIOLATION, "kind": "ranks"}) == "In step 37 two ranks wrote different rows."
    count = tell({**VIOLATION, "kind": "state", "found": "count", "slot": None})
    assert count == (
        "In step 37 session 5 was told a number of accepted drafts that is not the sampler's, at "
        "its position 41."
    )
    state = tell({**VIOLATION, "kind": "state"})
    assert state.startswith("In step 37 session 5 went on from state 1187 of group.0 as its ")
    assert " published slot 1187" in tell({**VIOLATION, "kind": "published"})


def test_rows_of_earlier_weights_are_said_and_no_violation():
    name = "kvtxn_audit_rows_read_by_age"
    counts = {"kvtxn_audit_rows_checked_total": 120, name: 120, f"{name}_0": 20, f"{name}_1": 96}
    counts |= {f"{name}_16+": 4, "kvtxn_audit_states_read_by_age": 0}
    verdict = judge([counts], [], 2)
    assert verdict.exit_code == 0
    assert verdict.sentences == [
        "Rows of earlier weights, by age in epochs: 96 of age 1, 4 of age 16+."
    ]


@pytest.mark.parametrize(
    ("idle", "sentence"),
    [
        (0, "Requests were put back and begun again 3 times: 1,055 rows had to be computed again."),
        (
            2,
            "Requests were put back and begun again 3 times, 2 of them without a token since the "
            "last time: 1,055 rows had to be computed again.",
        ),
    ],
)
def test_work_that_was_done_twice_is_said_once_for_all_ranks(idle, sentence):
    counts = {"kvtxn_audit_rows_checked_total": 9000, "kvtxn_audit_requests_restarted_total": 3}
    counts["kvtxn_audit_restarts_without_token_total"] = idle
    counts["kvtxn_audit_rows_recomputed_total"] = 1055
    verdict = judge([counts, counts], [], 2)
    assert verdict.sentences == [sentence]
    assert verdict.exit_code == 0


def test_reuse_that_was_lost_is_said_once_for_all_ranks():
    counts, name = {"kvtxn_audit_rows_checked_total": 9}, "kvtxn_audit_cached_rows_unused_total"
    counts |= {name: 1120, f"{name}_states": 1104, f"{name}_last_token": 16, f"{name}_window": 0}
    assert judge([counts, counts], [], 2).sentences == [
        "1,120 rows that the prefix cache had were computed again: 16 as the last token is "
        "computed for its logits, and its block with it; 1,104 as a recurrent layer has no state "
        "there."
    ]


def test_stale_rows_and_weights_that_nobody_told_of():
    stale = {**VIOLATION, "kind": "stale", "found": "stale", "differs": None, "age": 2}
    assert tell(stale).endswith(", tokens ...[5 7 12], by weights that have changed since.")
    weights = {**VIOLATION, "kind": "weights", "request": None, "weights": "target"}
    assert tell(weights) == ("In step 37 the target's weights had changed, and nobody had said so.")
