"""Rows that are computed again for requests that were put back, and requests that only spin."""

from __future__ import annotations

from kvtxn.audit import repeated_work
from kvtxn.audit.repeated_work import RepeatedWork


def counts(work):
    return tuple(work.counters().values())[:3]


def test_reuse_that_is_lost_is_counted_by_reason():
    work, name = RepeatedWork(), "kvtxn_audit_cached_rows_unused_total"
    assert work.counters()[name] == work.counters()[f"{name}_states"] == 0
    work.leave_unused({"states": 64, "last_token": 16})
    work.leave_unused({"states": 32})
    found = {k.removeprefix(name): v for k, v in work.counters().items() if name in k and v}
    assert found == {"": 112, "_states": 96, "_last_token": 16}


def test_rows_that_are_not_found_again_are_computed_again():
    work = RepeatedWork()
    assert counts(work) == (0, 0, 0)
    work.begin_again("a", 120, had=119, found=64, prompt=100)
    assert counts(work) == (1, 0, 55)
    work.begin_again("b", 120, had=119, found=119, prompt=100)
    assert counts(work) == (2, 0, 55)


def test_rows_of_rejected_drafts_are_no_loss():
    """Nor is a row that the last token never had; a prompt in chunks may be whole and have none."""
    work = RepeatedWork()
    work.begin_again("a", 120, had=123, found=0, prompt=100)
    assert counts(work) == (1, 0, 119)
    work.begin_again("b", 100, had=100, found=0, prompt=100)
    assert counts(work)[2] == 219


def test_a_request_that_spins():
    """It is put back in the middle of its prompt each time."""
    work = RepeatedWork()
    for _ in range(3):
        work.begin_again("a", 100, had=96, found=32, prompt=100)
    assert counts(work) == (3, 3, 192)
    work.begin_again("a", 101, had=100, found=32, prompt=100)
    assert counts(work)[:2] == (4, 3)
    work.begin_again("a", 101, had=100, found=32, prompt=100)
    assert counts(work)[:2] == (5, 4)


def test_it_remembers_so_many_requests(monkeypatch):
    monkeypatch.setattr(repeated_work, "_REMEMBERED", 2)
    work = RepeatedWork()
    for name in "abc":
        work.begin_again(name, 101, had=100, found=0, prompt=100)
    assert [*work._lengths] == ["b", "c"]
