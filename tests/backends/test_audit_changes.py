"""Requests that come and go and blocks that are handed out, put in place by one launch."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from kernels_here import importing_kernels
from ledger_kit.life import new_ledger
from ledger_pairs import DEVICE, assert_equal_books, pair  # noqa: F401

from kvtxn.audit import Admission
from kvtxn.audit.books import DURABLE, SERIAL
from kvtxn.errors import CapacityError, ConfigError

with importing_kernels():
    from kvtxn.backends.audit import staging
    from kvtxn.backends.audit.staging import Staging


class Event:
    """An event that has passed when it is told to."""

    made: ClassVar[list[Event]] = []

    def __init__(self):
        self.passed, self.recorded = False, 0
        self.made.append(self)

    def record(self):
        self.passed, self.recorded = False, self.recorded + 1

    def query(self):
        return self.passed


def admission(name, count, **more):
    return Admission(name, [(7 * i + len(name)) % 900 for i in range(count)], **more)


def test_one_change_is_what_the_calls_do_one_after_the_other(pair):  # noqa: F811
    """Also where a line of one that ended is given to one that comes."""
    for together, apart in (pair("plain"), pair("plain")[::-1]):
        for ledger in (together, apart):
            ledger.admit_all([admission("a", 5), admission("bb", 9, extras=[3])])
            ledger.books.words.fill_(77)
            ledger.books.facts[DURABLE] = 2
        coming = [admission("a", 3), admission("ccc", 20, embedded={4: 99})]
        lines = together.change(["bb", "nobody"], coming, {"full": [3, 1]})
        apart.release("bb")
        apart.release("nobody")
        assert apart.admit_all(coming) == lines
        apart.hand_out("full", [3, 1])
        assert_equal_books(together, apart)
        for line, each in zip(lines, coming, strict=True):
            own = slice(len(each.tokens) + 1)
            assert torch.equal(together.books.own[line, own], apart.books.own[line, own])
        together.change(["a", "ccc"])
        assert int(together.books.facts[SERIAL].max()) == -1
        assert "a" not in together


def test_a_change_that_does_not_fit_changes_nothing():
    """Lines that are given back in the same change count."""
    ledger = new_ledger("plain", device=DEVICE, backend="torch")
    most = ledger.books.sizes.max_requests
    ledger.admit_all([admission(f"r{i}", 3) for i in range(most)])
    before = [ledger.books.words.clone(), ledger.books.facts.clone()]
    with pytest.raises(CapacityError, match="'too many'"):
        ledger.change(["r0"], [admission("one", 2), admission("too many", 2)], {"full": [1]})
    with pytest.raises(ConfigError, match="hand_out: blocks"):
        ledger.change(["r0"], [admission("one", 2)], {"full": [1 << 20]})
    with pytest.raises(ConfigError, match="hand_out: 'none'"):
        ledger.change(["r0"], [], {"none": [1]})
    assert torch.equal(ledger.books.words, before[0])
    assert torch.equal(ledger.books.facts, before[1])
    assert "r0" in ledger
    ledger.change(["r0"], [admission("one", 2)])
    assert "one" in ledger


def test_blocks_that_are_handed_out_are_not_sealed(pair):  # noqa: F811
    for ledger in pair("plain"):
        seals = torch.full_like(ledger.books.words, 5)
        ledger.books.words.fill_(5)
        ledger.watch_bytes(SimpleNamespace(seals=seals))
        ledger.change(given={"full": [2]})
        assert torch.equal(seals, ledger.books.words)
        assert int((seals == 0).sum()) == ledger.books.layout.places["full"].stride


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_numbers_are_put_into_a_tensor(pair, dtype):  # noqa: F811
    for ledger in pair("plain"):
        target = torch.full((700,), -5, dtype=dtype, device=DEVICE)
        ledger.input.put(target[:600], torch.arange(600))
        ledger.input.put(target[600:603], [3, 1 << 20, 0])
        ledger.input.put(target[:0], [])
        assert target.tolist() == [*range(600), 3, 1 << 20, 0, *[-5] * 97]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_sampled_tokens_are_counted(pair, dtype):  # noqa: F811
    """Padding among tokens, and requests that are left out, do not count."""
    chance = torch.Generator().manual_seed(7)
    for width in (1, 5, 40):
        ids = torch.randint(-2, 60, (6, width), dtype=dtype, generator=chance).to(DEVICE)
        left_out = torch.tensor([0, 1, 0, 0, 1, 0, 1, 1], device=DEVICE).bool()
        for ledger in pair("plain"):
            counts = torch.full((6,), -5, device=DEVICE)
            kept = torch.full((6, width), -5, device=DEVICE)
            ledger.input.count(ids, left_out, 50, counts, kept)
            own = [
                [token if 0 <= token < 50 and not out else -1 for token in row]
                for row, out in zip(ids.tolist(), left_out.tolist()[:6], strict=True)
            ]
            assert kept.tolist() == own
            found = [sum(token >= 0 for token in row) for row in own]
            assert counts.tolist() == found
            drafts = torch.arange(6, device=DEVICE)
            ledger.input.count(ids, left_out, 50, counts, kept, drafts)
            assert counts.tolist() == [min(n, i + 1) for i, n in enumerate(found)]


@pytest.fixture
def memory(monkeypatch):
    """Three parts of eight numbers, with events as on a GPU."""
    Event.made.clear()
    own = Staging(torch.device("cpu"), parts=3, numbers=8)
    own._on_gpu = True
    monkeypatch.setattr(staging.torch.cuda, "Event", Event)
    return own


def pieces(*lengths):
    return [memoryview(array("q", range(length, 2 * length))) for length in lengths]


def test_memory_is_filled_part_after_part_and_anew_once_it_was_read(memory):
    parts = [each.data_ptr() for each in memory._parts]
    found = [memory.put(pieces(2, 1)) for _ in range(6)]
    assert [each.data_ptr() for each in found] == [
        address for part in parts for address in (part, part + 32)
    ]
    assert all(each.tolist() == [2, 3, 1] for each in found)
    assert [event.recorded for event in Event.made] == [1, 1]
    later = memory.put(pieces(2, 1))  # the first part was not read yet
    assert not parts[0] <= later.data_ptr() < parts[2] + 64
    assert later.tolist() == [2, 3, 1]
    Event.made[0].passed = True
    assert memory.put(pieces(2, 1)).data_ptr() == parts[0]
    assert [event.recorded for event in Event.made] == [1, 1, 1]


def test_what_does_not_fit_is_copied(memory):
    assert memory.put(pieces(9)).tolist() == [*range(9, 18)]
    assert memory.put(pieces(8)).data_ptr() == memory._parts[0].data_ptr()


@pytest.mark.parametrize("embedded", [None, {2: 99}])
def test_tokens_may_come_in_an_array_of_32_bits(pair, embedded):  # noqa: F811
    """None of these is too large; longer ones are looked at."""
    tokens = [5, (1 << 32) - 1, 0, 77]
    for ledger in (one for name in ("plain", "sliding") for one in pair(name)):
        lines = ledger.change(
            (),
            [
                Admission("a", tokens, (), embedded),
                Admission("b", array("I", tokens), (), embedded),
                Admission("c", array("q", tokens), (), embedded),
                Admission("none", array("I")),
            ],
        )
        own = ledger.books.own[lines[:3], :5]
        assert torch.equal(own[0], own[1])
        assert torch.equal(own[0], own[2])
        assert len({*own[0].tolist()}) == 5
        with pytest.raises(CapacityError, match="too many tokens"):
            ledger.admit("long", array("I", [1] * 100))
        with pytest.raises(ConfigError, match="tokens"):
            ledger.admit("wrong", array("q", [1 << 40]))
