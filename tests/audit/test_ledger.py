"""``Ledger`` call by call: what a report says, what is counted, what is refused."""

from __future__ import annotations

import copy
import pickle

import attrs
import pytest
import torch

from kvtxn import CapacityError, ConfigError, WindowStateError
from kvtxn.audit import KINDS, Ledger, RowGroup, StateGroup, Step, Violation
from kvtxn.audit.books import Sizes
from kvtxn.errors import ManagerCopyError

GROUPS = (RowGroup("full", 4, 10), StateGroup("mamba", 6))


@pytest.fixture
def ledger():
    return Ledger(GROUPS, max_requests=4, max_length=32)


def step_of(ledger, *parts, drafts=None, told=None):
    """Make a step.

    ``parts``: (request, first position, tokens, slots, table, state blocks by row, source).
    """
    counts = [len(part[2]) for part in parts]

    def column(index):
        return torch.tensor([number for part in parts for number in part[index]])

    return Step(
        lines=torch.tensor([ledger.line(part[0]) for part in parts]),
        starts=torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)]),
        first=torch.tensor([part[1] for part in parts]),
        tokens=column(2),
        slots={"full": column(3), "mamba": column(5)},
        tables={"full": torch.tensor([part[4] for part in parts])},
        sources={"mamba": torch.tensor([part[6] for part in parts])},
        drafts=None if drafts is None else torch.tensor(drafts),
        told=None if told is None else torch.tensor(told),
    )


def run(ledger, *parts, accepted=None, sampled=None, **named):
    step = step_of(ledger, *parts, **named)
    ledger.write(step)
    ledger.check(step)
    if accepted is not None:
        ledger.resolve(accepted, sampled)


PROMPT = [11, 12, 13, 14, 15, 16]
FILL = ("a", 0, PROMPT, [4, 5, 6, 7, 8, 9], [1, 2, -1], [-1] * 5 + [1], -1)


def filled(ledger):
    ledger.admit("a", PROMPT)
    run(ledger, FILL)


def test_a_draft_that_is_read_after_it_was_rejected(ledger):
    """The report names the reader, the place, and the write that left the row there."""
    filled(ledger)
    run(
        ledger,
        ("a", 6, [17, 18, 19], [10, 11, 12], [1, 2, 3], [1, 2, 3], 1),
        drafts=[2],
        accepted=[0],
        sampled=[[20, -1, -1]],
    )
    # One row too many is kept: position 7 should have been computed anew.
    run(ledger, ("a", 8, [21], [12], [1, 2, 3], [1], 2))
    state, row = ledger.violations()
    assert row == Violation(
        kind="rejected",
        step=3,
        request="a",
        group="full",
        layer=None,
        position=7,
        block=2,
        slot=11,
        found="rejected",
        expected=(16, 17, 20),
        written_for=(16, 17, 18),
        written_position=7,
        written_step=2,
        written_request="a",
    )
    assert (state.kind, state.found, state.position, state.slot) == ("state", "rejected", 7, 2)
    assert (state.written_for, state.written_step) == ((16, 17, 18), 2)
    assert str(row).endswith("found rejected, written in step 2 by request a for position 7")
    assert row.as_dict()["expected"] == [16, 17, 20]
    assert ledger.violations() == []


def test_what_a_request_was_told_of_is_silent_until_it_goes_back(ledger):
    filled(ledger)
    ledger.admit("b", [1, 2, 3, 4, 5, 6])
    wrong = ("b", 5, [6], [13], [1, 3, -1], [2], -1)  # reads the first block of "a"
    run(ledger, wrong)
    assert [(v.kind, v.found, v.slot, v.written_request) for v in ledger.violations()] == [
        ("state", "unwritten", None, None),
        ("foreign", "foreign", 4, "a"),
        ("unwritten", "unwritten", 12, None),
    ]
    run(ledger, ("b", 6, [7], [14], [1, 3, -1], [2], 2))
    assert ledger.violations() == []
    run(ledger, ("a", 0, PROMPT, *FILL[3:]))
    run(ledger, ("b", 7, [8], [15], [1, 3, -1], [2], 2))
    assert ledger.violations() == []
    run(ledger, ("b", 5, [6], [13], [1, 3, -1], [2], -1))
    found = [(v.kind, v.slot, v.written_step) for v in ledger.violations()]
    assert ("foreign", 4, 4) in found


def test_a_run_of_wrong_rows_is_one_report(ledger):
    """Named by its first row; blocks are told apart, and kinds."""
    filled(ledger)
    ledger.admit("b", [1] * 7)
    ledger.publish("b", "full", [1, 2, 0], 0, 7)
    found = ledger.violations()
    assert [(v.kind, v.found, v.position, v.slot) for v in found] == [
        ("published", "foreign", 0, 4),
        ("published", "foreign", 4, 8),
        ("published", "unwritten", 6, 10),
    ]
    ledger.publish("b", "full", [1, 2, 0], 0, 7)
    assert len(ledger.violations()) == 3  # whoever publishes is told each time
    ledger.hand_out("full", [1])
    ledger.publish("b", "full", [1, 2, 0], 0, 7)
    first, *_ = ledger.violations()
    assert (first.found, first.slot) == ("unwritten", 4)


def test_rows_leave_only_when_they_are_durable(ledger):
    filled(ledger)
    step = step_of(ledger, ("a", 6, [17, 18], [10, 11], [1, 2, 3], [1, 2], 1), drafts=[1])
    ledger.write(step)
    ledger.export("a", "full", [1, 2, 3], 4, 8)
    (violation,) = ledger.violations()
    assert (violation.kind, violation.found, violation.position) == ("exported", "draft", 7)
    ledger.resolve([1])
    ledger.export("a", "full", [1, 2, 3], 4, 8)
    assert ledger.violations() == []


def test_rows_stay_durable_when_the_tokens_are_given_again(ledger):
    """They may leave before the request's next step; open drafts may not, as before."""
    filled(ledger)
    ledger.admit("a", [*PROMPT, 30, 31])  # the session's next turn: two rows are not there yet
    ledger.export("a", "full", [1, 2], 0, 6)
    assert ledger.violations() == []
    for _ in range(2):
        ledger.export("a", "full", [1, 2], 0, 8)
        assert [v.found for v in ledger.violations()] == ["unwritten"]
    ledger.write(step_of(ledger, ("a", 6, [30, 31], [10, 11], [1, 2], [1, 2], 1), drafts=[1]))
    ledger.admit("a", [*PROMPT, 30, 31])
    ledger.export("a", "full", [1, 2], 0, 8)
    assert [(v.found, v.position) for v in ledger.violations()] == [("draft", 7)]
    ledger.admit("a", PROMPT[:4])  # a turn that was cut short: the rows after it may not leave
    ledger.export("a", "full", [1, 2], 0, 6)
    assert [(v.found, v.position) for v in ledger.violations()] == [("draft", 4)]


def test_a_draft_that_leaves_again_is_reported_again(ledger):
    """And a rejected one: letting it out is the cause."""
    filled(ledger)
    ledger.write(step_of(ledger, ("a", 6, [17, 18], [10, 11], [1, 2], [1, 2], 1), drafts=[1]))
    for _ in range(2):
        ledger.export("a", "full", [1, 2], 4, 8)
        assert [(v.found, v.position) for v in ledger.violations()] == [("draft", 7)]
    ledger.resolve([0])
    for _ in range(2):
        ledger.export("a", "full", [1, 2], 4, 8)
        assert [v.found for v in ledger.violations()] == ["rejected"]


def test_rows_that_come_are_judged_by_what_they_were_stored_of(ledger):
    filled(ledger)
    digests = ledger.export("a", "full", [1], 0, 4)
    ledger.admit("b", PROMPT)
    ledger.admit("c", [9, *PROMPT])
    ledger.import_rows("b", "full", [5], 0, 4, digests)
    ledger.import_rows("b", "full", [5, 6], 4, 6)  # believed
    assert ledger.counters()["kvtxn_audit_rows_unverified_total"] == 2
    assert ledger.violations() == []
    ledger.import_rows("c", "full", [7], 0, 4, digests)
    (violation,) = ledger.violations()
    assert (violation.kind, violation.request, violation.written_request) == ("imported", "c", "c")
    assert violation.written_for == ()
    assert str(violation).endswith(", brought in step 1 for request c")


def test_states_and_counts(ledger):
    """A state is of exactly the kept tokens; written by its request, unless it was published."""
    filled(ledger)
    ledger.admit("b", PROMPT)
    run(ledger, ("b", 0, PROMPT, [12, 13, 14, 15, 16, 17], [3, 4, -1], [-1] * 5 + [2], -1))
    run(
        ledger,
        ("a", 6, [17, 18], [10, 11], [1, 2, -1], [1, 3], 1),
        ("b", 6, [17, 18], [18, 19], [3, 4, -1], [2, 4], 2),
        drafts=[1, 1],
        accepted=[1, 1],
    )
    assert ledger.violations() == []
    run(
        ledger,
        ("a", 8, [19], [20], [1, 2, 5], [3], 4),  # the right state, of the other request
        ("b", 8, [19], [24], [3, 4, 6], [4], 4),
        told=[1, 0],
    )
    assert [(v.kind, v.request, v.found, v.slot) for v in ledger.violations()] == [
        ("state", "a", "owner", 4),
        ("state", "b", "count", None),
    ]
    ledger.publish_state("a", "mamba", 3, 9)
    run(ledger, ("b", 9, [20], [25], [3, 4, 6], [4], 3))
    assert ledger.violations() == []
    assert ledger.counters()["kvtxn_audit_states_checked_total"] == 5


def test_copies_are_what_they_are_copies_of(ledger):
    filled(ledger)
    ledger.copy("full", [1, 2], [5, 6])
    ledger.copy("mamba", [1], [5])
    run(ledger, ("a", 6, [17], [26], [5, 6, -1], [5], 5))
    assert ledger.violations() == []


def test_embedded_positions_are_told_apart_by_content():
    """Their tokens are placeholders; two images are two prefixes, from there on."""
    groups = (RowGroup("full", 4, 10),)
    ledger = Ledger(groups, max_requests=4, max_length=32)

    def fill(request, image, slots):
        ledger.admit(request, [1, 0, 0, 2], embedded={1: image, 2: image})
        step = Step(
            lines=torch.tensor([ledger.line(request)]),
            starts=torch.tensor([0, 4]),
            first=torch.tensor([0]),
            tokens=torch.tensor([1, 77, 78, 2]),
            slots={"full": torch.tensor(slots)},
            tables={"full": torch.tensor([[slots[0] // 4]])},
        )
        ledger.write(step)
        ledger.check(step)

    fill("a", 111, [4, 5, 6, 7])
    fill("b", 222, [8, 9, 10, 11])
    fill("c", 111, [12, 13, 14, 15])
    assert ledger.violations() == []
    ledger.publish("c", "full", [1], 0, 4)
    assert ledger.violations() == []
    ledger.publish("b", "full", [1], 0, 4)
    (violation,) = ledger.violations()
    assert violation.position == 1


def test_extras_tell_requests_apart(ledger):
    filled(ledger)
    ledger.admit("b", PROMPT, extras=[5])
    ledger.publish("b", "full", [1], 0, 4)
    assert [v.position for v in ledger.violations()] == [0]


def test_violations_that_found_no_room_are_counted():
    ledger = Ledger((RowGroup("full", 1, 10),), max_requests=2, max_length=9, capacity=3)
    ledger.admit("a", [1, 2, 3, 4, 5])
    ledger.publish("a", "full", [0, 1, 2, 3, 4], 0, 5)
    assert [v.position for v in ledger.violations()] == [0, 1, 2]
    assert ledger.lost == 2
    assert ledger.counters()["kvtxn_audit_violations_total_published"] == 5
    ledger.publish("a", "full", [5, 6, 7, 8, 9], 0, 5)
    assert [v.slot for v in ledger.violations()] == [5, 6, 7]


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_request_begins_with_zeros(backend):
    """A state that an earlier request left is a wrong read at position 0, like anywhere else."""
    ledger = Ledger(GROUPS, max_requests=4, max_length=32, backend=backend)
    filled(ledger)
    ledger.release("a")
    ledger.admit("b", [7, 8])
    before = ledger.counters()["kvtxn_audit_states_checked_total"]
    run(ledger, ("b", 0, [7, 8], [12, 13], [3], [-1, 1], 1))
    (found,) = ledger.violations()
    assert (found.kind, found.request, found.found) == ("state", "b", "foreign")
    assert (found.group, found.block, found.position, found.expected) == ("mamba", 1, None, ())
    assert (found.written_request, found.written_step, found.step) == ("a", 1, 2)
    assert "went on from slot 1 (block 1) of group 'mamba' as the state before" in str(found)
    assert ledger.counters()["kvtxn_audit_states_checked_total"] == before + 1


@pytest.mark.parametrize(("source", "block"), [(5, 5), (99, None)])
def test_a_request_that_begins_from_nothing_names_it(ledger, source, block):
    ledger.admit("b", [7, 8])
    run(ledger, ("b", 0, [7, 8], [12, 13], [3], [-1, 1], source))
    (found,) = ledger.violations()
    assert (found.kind, found.found, found.block) == ("state", "unwritten", block)


def test_padding_is_ignored(ledger):
    """A captured step has room for more requests than take part."""
    ledger.admit("a", PROMPT)
    step = step_of(ledger, FILL)
    padded = attrs.evolve(
        step,
        lines=torch.tensor([*step.lines, -1, -1]),
        starts=torch.tensor([0, 6, 6, 6]),
        first=torch.tensor([0, 0, 0]),
        tokens=torch.tensor([*step.tokens, 5, 5]),
        slots={name: torch.tensor([*slots, 0, 0]) for name, slots in step.slots.items()},
        tables={"full": torch.tensor([[1, 2], [0, 0], [0, 0]])},
        sources={"mamba": torch.tensor([-1, -1, -1])},
    )
    ledger.write(padded)
    ledger.check(padded)
    ledger.resolve([0, 3, 3])
    assert ledger.violations() == []
    assert ledger.counters()["kvtxn_audit_rows_checked_total"] == 6


def test_counters_have_their_names(ledger):
    filled(ledger)
    assert set(ledger.counters()) == {
        "kvtxn_audit_active",
        "kvtxn_audit_steps_total",
        "kvtxn_audit_rows_checked_total",
        "kvtxn_audit_states_checked_total",
        "kvtxn_audit_violations_total",
        *(f"kvtxn_audit_violations_total_{kind}" for kind in KINDS),
        "kvtxn_audit_unjudged_total",
        "kvtxn_audit_unjudged_total_malformed",
        "kvtxn_audit_unjudged_total_unresolved",
        "kvtxn_audit_rows_unverified_total",
    }


@pytest.mark.parametrize(
    "groups",
    [
        GROUPS,
        (
            RowGroup("a", 4, 9, pool="p"),
            RowGroup("b", 2, 9, pool="p"),
            StateGroup("s", 9, pool="p"),
        ),
        (RowGroup("a", 4, 9), RowGroup("b", 4, 9, reads="a")),
    ],
)
def test_memory_is_known_before(groups):
    """8 bytes per slot and group, once per pool; 8 per request and position; and a constant."""
    ledger = Ledger(groups, max_requests=3, max_length=50, journal=16, capacity=2)
    assert ledger.books.num_bytes == Sizes(3, 50, 16, 2).num_bytes(groups)
    more = Sizes(3, 51, 16, 2).num_bytes(groups) - ledger.books.num_bytes
    assert more == 3 * 8


def test_memory_per_slot():
    one = Sizes(1, 1).num_bytes([RowGroup("a", 16, 1000)])
    assert Sizes(1, 1).num_bytes([RowGroup("a", 16, 1001)]) - one == 16 * 8


def test_reset_forgets(ledger):
    filled(ledger)
    ledger.reset()
    assert "a" not in ledger
    ledger.admit("a", PROMPT)
    ledger.publish("a", "full", [1], 0, 4)
    assert [v.found for v in ledger.violations()] == ["unwritten"]


def test_misuse_is_refused(ledger):
    with pytest.raises(WindowStateError, match="no step waits to be resolved"):
        ledger.resolve([0])
    with pytest.raises(ConfigError, match="'x' is not admitted"):
        ledger.line("x")
    with pytest.raises(CapacityError, match="at most 32"):
        ledger.admit("a", [1] * 33)
    for name in "abcd":
        ledger.admit(name, [1])
    with pytest.raises(CapacityError, match="all 4 lines are taken"):
        ledger.admit("e", [1])
    ledger.release("a")
    ledger.release("a")
    ledger.admit("e", [1])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "no group"),
        ([RowGroup("a", 4, 9), RowGroup("a", 4, 9)], "one name"),
        ([RowGroup("a", 4, 9, pool="p"), RowGroup("b", 4, 8, pool="p")], "differently"),
        ([RowGroup("a", 4, 9, reads="b")], "reads 'b'"),
        ([RowGroup("a", 4, 9, reads="b"), RowGroup("b", 2, 9)], "reads 'b'"),
    ],
)
def test_groups_have_to_fit_together(groups, message):
    with pytest.raises(ConfigError, match=message):
        Ledger(groups, max_requests=1, max_length=8)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_ledger_is_not_copied(ledger, way):
    """The passes of a copy would go on with the books of the first."""
    with pytest.raises(ManagerCopyError, match=r"neither copied nor pickled.*make a new ledger"):
        way(ledger)
    filled(ledger)
    assert not ledger.violations()
