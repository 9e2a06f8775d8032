"""Rows and states that leave an engine and come back: right, wrong, and of an open draft."""

from __future__ import annotations

import pytest
import torch

from kvtxn.audit import Key, Ledger, RowGroup, StateGroup, Step

GROUPS = (RowGroup("full", 4, 10), RowGroup("reader", 4, 10, reads="full"), StateGroup("mamba", 6))
PROMPT = [11, 12, 13, 14, 15, 16]
TABLE = [1, 2, 3]


def step_of(ledger, first, tokens, states, source, drafts=0, request="a"):
    slots = [TABLE[p // 4] * 4 + p % 4 for p in range(first, first + len(tokens))]
    return Step(
        lines=torch.tensor([ledger.line(request)]),
        starts=torch.tensor([0, len(tokens)]),
        first=torch.tensor([first]),
        tokens=torch.tensor(tokens),
        slots={"full": torch.tensor(slots), "mamba": torch.tensor(states)},
        tables={"full": torch.tensor([TABLE]), "reader": torch.tensor([TABLE])},
        sources={"mamba": torch.tensor([source])},
        drafts=torch.tensor([drafts]),
    )


@pytest.fixture
def ledger():
    """A ledger whose request "a" has six rows, and its state in block 1."""
    made = Ledger(GROUPS, max_requests=4, max_length=32)
    made.admit("a", PROMPT)
    made.write(step_of(made, 0, PROMPT, [-1] * 5 + [1], -1))
    return made


def goes_on(ledger, request, length, source):
    """Let a request go on from a state, in a block of its own."""
    step = step_of(ledger, length, [17], [5], source, request=request)
    ledger.write(step)


def found(ledger):
    return [(v.kind, v.found, v.request, v.group, v.slot) for v in ledger.violations()]


def test_a_state_goes_to_another_request(ledger):
    digest = ledger.export_state("a", "mamba", 1, 6)
    assert digest.shape == (1,)
    ledger.admit("b", [*PROMPT, 17])
    ledger.hand_out("mamba", [3])
    ledger.import_state("b", "mamba", 3, 6, digest)
    goes_on(ledger, "b", 6, 3)
    assert found(ledger) == []


def test_a_state_may_come_to_a_block_that_another_request_wrote(ledger):
    """Whoever wrote the block before has no part in it, and whoever has its tokens may read it."""
    ledger.admit("b", [*PROMPT, 17])
    ledger.admit("c", [*PROMPT, 18])
    ledger.import_state("b", "mamba", 1, 6)
    goes_on(ledger, "b", 6, 1)
    goes_on(ledger, "c", 6, 1)
    assert found(ledger) == []


def test_a_state_of_other_tokens_is_found_when_it_comes(ledger):
    digest = ledger.export_state("a", "mamba", 1, 6)
    ledger.admit("b", [9, *PROMPT])
    ledger.import_state("b", "mamba", 3, 6, digest)
    assert found(ledger) == [("imported", "foreign", "b", "mamba", 3)]
    goes_on(ledger, "b", 6, 3)
    assert found(ledger) == [("state", "foreign", "b", "mamba", 3)]  # that a step goes on from it


def test_a_state_that_is_said_to_be_one_token_longer(ledger):
    digest = ledger.export_state("a", "mamba", 1, 6)
    ledger.admit("b", [*PROMPT, 17])
    ledger.import_state("b", "mamba", 3, 7, digest)
    assert found(ledger) == [("imported", "foreign", "b", "mamba", 3)]


def test_a_state_that_was_loaded_elsewhere(ledger):
    """The engine reads another block than the connector filled."""
    ledger.admit("b", [*PROMPT, 17])
    ledger.hand_out("mamba", [4])
    ledger.import_state("b", "mamba", 3, 6)
    goes_on(ledger, "b", 6, 4)
    assert found(ledger) == [("state", "unwritten", "b", "mamba", 4)]


def test_a_state_leaves_only_when_it_is_durable(ledger):
    ledger.write(step_of(ledger, 6, [17, 18], [1, 2], 1, drafts=1))
    ledger.export_state("a", "mamba", 2, 8)
    assert found(ledger) == [("exported", "draft", "a", "mamba", 2)]
    ledger.resolve([0])
    ledger.export_state("a", "mamba", 1, 7)
    assert found(ledger) == []
    ledger.export_state("a", "mamba", 2, 8)
    assert found(ledger) == [("exported", "rejected", "a", "mamba", 2)]


def test_rows_of_a_hit_leave_before_the_request_has_run(ledger):
    """Nothing is its draft before its first step; what is not of its tokens is wrong as ever."""
    ledger.admit("b", [*PROMPT[:5], 99])
    ledger.export("b", "full", TABLE, 0, 5)
    ledger.export_state("b", "mamba", 1, 5)
    assert found(ledger) == [("exported", "foreign", "b", "mamba", 1)]
    ledger.export("b", "full", TABLE, 4, 8)
    assert found(ledger) == [
        ("exported", "foreign", "b", "full", 9),
        ("exported", "unwritten", "b", "full", 10),
    ]


def test_rows_behind_a_requests_tokens_are_not_its_rows_to_export(ledger):
    """Whatever lies there, even if the line was a longer request's before."""
    ledger.release("a")
    ledger.admit("b", PROMPT[:4])
    ledger.export("b", "full", TABLE, 0, 6)
    assert [(kind, slot) for kind, *_, slot in found(ledger)] == [("exported", 8)]


def test_a_rejected_row_that_left_is_found_when_it_comes_back(ledger):
    """It left while nobody knew; the digest says which tokens it was computed from."""
    ledger.write(step_of(ledger, 6, [17, 18], [1, 2], 1, drafts=1))
    digests = ledger.export("a", "full", TABLE, 4, 8)
    assert [kind for kind, *_ in found(ledger)] == ["exported"]
    ledger.resolve([0], [[19, -1]])
    ledger.admit("b", [*PROMPT, 17, 19, 20])
    ledger.import_rows("b", "full", [0, 5], 4, 8, digests)
    assert found(ledger) == [("imported", "foreign", "b", "full", 23)]


def test_rows_may_be_named_by_the_group_that_reads_them(ledger):
    digests = ledger.export("a", "reader", TABLE, 0, 6)
    assert torch.equal(digests, ledger.export("a", "full", TABLE, 0, 6))
    ledger.admit("b", PROMPT)
    ledger.import_rows("b", "reader", [7, 8], 0, 6, digests)
    ledger.publish("b", "full", [7, 8], 0, 6)
    assert found(ledger) == []


def test_digests_mean_nothing_under_another_key(ledger):
    """A connector between engines gives no digests, unless the engines share a key."""
    digests = ledger.export("a", "full", TABLE, 0, 4)
    for key, right in ((ledger.books.key, True), (Key.new(), False)):
        other = Ledger(GROUPS, max_requests=4, max_length=32, key=key)
        other.admit("a", PROMPT)
        other.import_rows("a", "full", [4], 0, 4, digests)
        assert (found(other) == []) == right
        other.import_rows("a", "full", [5], 0, 4)
        assert found(other) == []


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_who_exports_a_wrong_row_is_compared_as_before(backend):
    """The request goes on, whatever a connector stored in its name; what it reads is told, once."""
    ledger = Ledger([RowGroup("full", 4, 16)], max_requests=4, max_length=32, backend=backend)

    def step(request, first, tokens, table):
        places = range(first, first + len(tokens))
        one = Step(
            lines=torch.tensor([ledger.line(request)]),
            starts=torch.tensor([0, len(tokens)]),
            first=torch.tensor([first]),
            tokens=torch.tensor(tokens),
            slots={"full": torch.tensor([4 * table[at // 4] + at % 4 for at in places])},
            tables={"full": torch.tensor([table])},
        )
        ledger.write(one)
        ledger.check(one)
        return [(v.kind, v.request, v.position) for v in ledger.violations()]

    ledger.admit("a", list(range(10, 20)))
    ledger.hand_out("full", [1, 2, 3])
    assert step("a", 0, list(range(10, 20)), [1, 2, 3]) == []
    ledger.export("a", "full", [1, 7, 3], 0, 8)  # block 7 is not the request's
    assert [(v.kind, v.position) for v in ledger.violations()] == [("exported", 4)]
    ledger.admit("b", [30, 31, 32, 33])
    ledger.hand_out("full", [1])  # while "a" still has it
    assert step("b", 0, [30, 31, 32, 33], [1]) == []
    assert step("a", 10, [5], [1, 2, 3]) == [("foreign", "a", 0)]
    assert step("a", 11, [6], [1, 2, 3]) == []
