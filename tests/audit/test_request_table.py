"""Names of requests: those of admitted ones are kept, however many others come and go."""

from __future__ import annotations

import pytest
import torch

from kvtxn.audit import Admission, Ledger, RowGroup, Step, request_table


@pytest.fixture
def few(monkeypatch):
    """The names of two released requests are remembered."""
    monkeypatch.setattr(request_table, "REMEMBERED", 2)


def step(ledger, request, first, tokens, slots, table):
    one = Step(
        lines=torch.tensor([ledger.line(request)]),
        starts=torch.tensor([0, len(tokens)]),
        first=torch.tensor([first]),
        tokens=torch.tensor(tokens),
        slots={"rows": torch.tensor(slots)},
        tables={"rows": torch.tensor([table])},
    )
    ledger.write(one)
    ledger.check(one)


def test_a_request_that_lives_long_is_named(few):
    """A session that reads a wrong block after many others came and went, with its extras."""
    ledger = Ledger([RowGroup("rows", 4, 16)], max_requests=4, max_length=32, backend="torch")
    ledger.admit("session", [1, 2, 3, 4, 5], extras=(7,))
    ledger.hand_out("rows", [1, 2])
    step(ledger, "session", 0, [1, 2, 3, 4, 5], [4, 5, 6, 7, 8], [1, 2])
    for number in range(8):
        names = [f"{number}-{i}" for i in range(3)]
        ledger.admit_all([Admission(name, [1]) for name in names])
        ledger.change(gone=names)
    step(ledger, "session", 5, [6], [9], [3, 2])
    (found,) = {violation.request for violation in ledger.violations()}
    assert found == "session"


def test_of_released_requests_the_first_names_are_forgotten(few):
    table = request_table.RequestTable(2)
    serials = {}
    for name in "abcd":
        ((_, serials[name]),) = table.admit([name])
        table.remember_seed(serials[name], 5)
        table.release(name)
    known = {name: (table.name(serial), table.seed(serial)) for name, serial in serials.items()}
    assert known == {"a": (None, None), "b": (None, None), "c": ("c", 5), "d": ("d", 5)}


def test_a_request_that_comes_again_has_a_new_number(few):
    """Also while its old one is remembered."""
    table = request_table.RequestTable(2)
    ((line, first),) = table.admit(["a"])
    assert table.admit(["a"]) == [(line, first)]
    table.release("a")
    ((_, second),) = table.admit(["a"])
    assert second != first
    assert table.name(first) == table.name(second) == "a"


def test_a_request_without_a_name_is_one_too():
    table = request_table.RequestTable(2)
    ((_, serial),) = table.admit([""])
    assert table.name(serial) == ""
    table.release("")
    assert table.name(serial) == ""
