"""Blocks that are handed out wait for the next step's graph, or for any other pass before it."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernels_here import ON_GPU, importing_kernels
from ledger_pairs import DEVICE, FewPrograms, assert_equal_books, step_of
from passing_event import Event
from test_audit_passes import every_call

from kvtxn.audit import Step
from kvtxn.audit.books import STEP
from kvtxn.audit.digest import UNWRITTEN
from kvtxn.errors import WindowStateError
from kvtxn.testing.audit_connector import ConnectedEngine
from kvtxn.testing.audit_life import live, new_engine, new_ledger, said
from kvtxn.testing.audit_mutants import MUTANTS

with importing_kernels():
    from kvtxn.backends.audit import next_step
    from kvtxn.backends.audit.graph_steps import TritonGraphSteps
    from kvtxn.backends.audit.next_step import MOST, MOST_LINES, RECORDS, NextStep


class Deferring(TritonGraphSteps):
    """Counts the outcomes that wait."""

    def resolve(self, *given):
        deferred = super().resolve(*given)
        self._recorded.deferred += deferred
        return deferred


class Replayed(FewPrograms):
    """Passes of which two steps of three are written by graphs, whose launches are made here."""

    graph_steps = Deferring

    def __init__(self, books):
        super().__init__(books)
        self.pending.next.used = True
        self.pending.make_room(256)
        self._turn = itertools.count()
        self.waited = self.resolved = self.deferred = 0

    def write(self, step):
        self.resolved += self.pending.next.resolves
        if next(self._turn) % 3:
            self.waited += self.pending.next.blocks
            self.pending.replayed(step)
            self.pending.take()
            self.write_rows(step)
        else:
            super().write(step)


@pytest.fixture
def pair():
    """Make two ledgers of one key for the groups of a name: one in torch, and a replayed one."""

    def made(name):
        one = new_ledger(name, device=DEVICE, backend="torch", journal=128)
        named = {"key": one.books.key, "journal": 128, "backend": Replayed}
        other = new_ledger(name, device=DEVICE, **named)
        resolves_later(other)
        return one, other

    return made


def resolves_later(ledger):
    """Let a ledger's outcomes wait for the next step, in tensors that stay as they are."""
    own = ledger.resolve

    def resolve(accepted, sampled=None, *, besides=0):
        given = [None if each is None else torch.as_tensor(each) for each in (accepted, sampled)]
        there = [None if each is None else each.to(DEVICE) for each in given]
        own(*there, besides=besides, later=True)

    ledger.resolve = resolve


def let_wait(ledger):
    """Let the first blocks wait, too: on a GPU they do once it has passed an event."""
    if ON_GPU:
        ledger.passes.pending.next.add([])
        torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["plain", "sliding", "states"])
def test_a_healthy_life(pair, name):
    ledgers = pair(name)
    live(new_engine(ConnectedEngine, name, ledgers, seed=2, device=DEVICE), 60 if ON_GPU else 14)
    assert ledgers[1].passes.waited > 5
    assert ledgers[1].passes.resolved > 0  # by the next step itself
    assert ledgers[1].passes.deferred > 5
    ledgers[1].passes.settle()
    assert_equal_books(*ledgers)
    assert said(ledgers[0]) == said(ledgers[1]) == []
    glance = ledgers[1].glance()
    glance.wait()
    assert glance.steps == ledgers[0].counters()["kvtxn_audit_steps_total"] > 5
    ledgers[1].findings.require_all_steps(glance)


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if not m.contested and not m.needs])
def test_the_same_is_found(pair, mutant):
    ledgers = pair("plain")
    live(new_engine(mutant, "plain", ledgers, seed=3, device=DEVICE), 9)
    one, other = ({(v.kind, v.step) for v in ledger.violations()} for ledger in ledgers)
    assert one == other
    ledgers[1].passes.settle()
    assert torch.equal(ledgers[0].books.words, ledgers[1].books.words)


def test_every_call_agrees(pair):
    """Calls that copy, load, take out or publish rows find the blocks as they were handed out."""
    ledgers = pair("states")
    for ledger in ledgers:
        every_call(ledger)
    one, other = ([str(v) for v in ledger.violations()] for ledger in ledgers)
    assert one == other
    assert len(one) > 5
    assert_equal_books(*ledgers)


CALLS = {
    "copy": lambda ledger: ledger.copy("full", [1], [3]),
    "import": lambda ledger: ledger.import_rows("a", "full", [1, 2], 0, 4),
    "publish": lambda ledger: ledger.publish("a", "full", [1, 2], 0, 4),
    "resolve": lambda ledger: ledger.resolve(torch.tensor([0, 0], device=DEVICE)),
    "release": lambda ledger: ledger.release("a"),
    "reset": lambda ledger: ledger.reset(),
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_no_other_call_comes_before_what_was_handed_out(pair, make):
    ledgers = pair("states")
    for ledger in ledgers:
        ledger.admit("a", [1, 2, 3, 4, 5])
        step = step_of(ledger, "a", 0, [1, 2, 3, 4, 5], range(4, 9), [1, 2], [-1] * 5, -1)
        ledger.write(step)
        ledger.check(step)
        let_wait(ledgers[1])
        ledger.hand_out("full", [1, 7])
        waits = ledger is ledgers[1]
        assert bool(int(ledger.books.words[4]) != UNWRITTEN) == waits
        make(ledger)
    assert ledgers[1].passes.pending.next.blocks == 0
    assert_equal_books(*ledgers)
    assert [str(v) for v in ledgers[0].violations()] == [str(v) for v in ledgers[1].violations()]


def test_a_replay_takes_what_was_handed_out_for_it(pair):
    """A steady step has no launch for it; more than a record holds is launched at once."""
    ledger = pair("plain")[1]
    passes, launched = ledger.passes, []
    launch = passes._changing.launch
    passes._changing.launch = lambda *given: (launched.append(given), launch(*given))
    words = ledger.books.layout.places["full"].pool_of(ledger.books.words)
    let_wait(ledger)
    for number in range(3):
        words.fill_(77)
        ledger.hand_out("full", [number])
        ledger.hand_out("full", [number + 10, number + 20])
        assert int((words == UNWRITTEN).sum()) == 0
        ledger.replayed(None)
        passes.pending.take()
        fresh = [number, number + 10, number + 20]
        assert (words == UNWRITTEN).any(1).nonzero().flatten().tolist() == fresh
        assert (words == UNWRITTEN).all(1).sum() == 3
        ledger.books.counters[STEP] += 1
    assert not launched
    words.fill_(77)
    ledger.hand_out("full", [5])
    ledger.graphs.hand_out([(ledger.books.layout.places["full"], [1] * MOST)])
    ledger.hand_out("full", [*range(30)] * 5)
    assert len(launched) == 2
    assert (words == UNWRITTEN).all(1).nonzero().flatten().tolist() == [*range(30)]
    ledger.hand_out("full", [35])  # its record is read by a launch already
    assert len(launched) == 3


def replay_of(ledger, step):
    """Return a function that replays a graph of ``launch_step``; its launches, without a GPU."""
    ledger.launch_step(step)
    if not ON_GPU:
        return lambda: (
            ledger.passes.pending.take(),
            ledger.passes.write_rows(step),
            ledger.passes.check(step),
        )
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        ledger.launch_step(step)
    return graph.replay


def test_a_graph_follows_steps_whose_blocks_change_hands():
    """Three requests in turn have the same blocks; nothing waits for the device in between."""
    ledgers = [new_ledger("plain", device=DEVICE, backend="torch")]
    ledgers.append(
        new_ledger("plain", device=DEVICE, key=ledgers[0].books.key, backend=FewPrograms)
    )
    lines = torch.full((1,), -1, device=DEVICE)
    starts, first = torch.tensor([0, 4], device=DEVICE), torch.zeros_like(lines)
    tokens, slots = torch.zeros(4, device=DEVICE).long(), torch.zeros(4, device=DEVICE).long()
    table = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
    step = Step(lines, starts, first, tokens, {"full": slots}, {"full": table})
    replay = replay_of(ledgers[1], step)
    for ledger in ledgers:
        ledger.restart()
        if ON_GPU:  # the first blocks do not wait: nobody knows what the device reads
            ledger.hand_out("full", [30])
            torch.cuda.synchronize()
    for turn in range(12):
        for ledger in ledgers:
            if turn % 4 == 0:
                line = ledger.admit(f"r{turn}", [turn * 20 + at for at in range(16)])
            blocks = [1 + turn % 4, 5 + turn % 4]
            ledger.change(given={"full": blocks})
        written, read = blocks[turn < 4], blocks[turn < 4 or turn == 7]
        rows = torch.arange(4, device=DEVICE)
        lines.fill_(line)
        first.fill_(turn % 4 * 4)
        tokens.copy_(turn // 4 * 80 + turn % 4 * 4 + rows)
        slots.copy_(written * 4 + rows)
        table[0, turn % 4] = read
        ledgers[0].write(step)
        ledgers[0].check(step)
        assert ledgers[1].passes.pending.next.blocks == 2
        ledgers[1].replayed(step)
        replay()
        if turn % 4 == 3:
            for ledger in ledgers:
                ledger.release(f"r{turn - 3}")
    one, other = ([str(v) for v in ledger.violations()] for ledger in ledgers)
    assert one == other
    assert [text.partition(":")[0] for text in one] == ["unwritten"]
    assert_equal_books(*ledgers)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_graph_resolves_the_step_before_it(dtype):
    """Buffers have the next step's rows by then; a block of rejected rows is handed out between."""
    ledgers = [new_ledger("plain", device=DEVICE, backend="torch")]
    ledgers.append(
        new_ledger("plain", device=DEVICE, key=ledgers[0].books.key, backend=FewPrograms)
    )
    generator, width = torch.Generator().manual_seed(5), 6
    lines, starts = torch.full((2,), -1, device=DEVICE), torch.zeros(3, device=DEVICE).int()
    drafts = torch.zeros_like(lines)
    tokens, slots = torch.zeros(12, device=DEVICE).int(), torch.zeros(12, device=DEVICE).long()
    tables = torch.arange(20, device=DEVICE).view(2, 10).int()
    step = Step(
        *(lines, starts, None, tokens, {"full": slots}, {"full": tables}),
        drafts=drafts, positions=torch.zeros(12, device=DEVICE).long(),
    )  # fmt: skip
    replay = replay_of(ledgers[1], step)
    known, launched, changed = [[7], [8]], [], False
    for ledger in ledgers:
        ledger.restart()
        ledger.hand_out("full", [30])
        lines[:] = torch.tensor([ledger.admit("a", [7]), ledger.admit("b", [8])], device=DEVICE)
    if ON_GPU:
        torch.cuda.synchronize()
    passes = ledgers[1].passes
    for name in ("_changing", "_resolving", "_writing", "_putting"):
        launches = getattr(passes, name)
        made = launches.launch
        launches.launch = lambda *given, made=made: (launched.append(given), made(*given))[1]
    own = passes.pending.resolve_last
    passes.pending.resolve_last = lambda: (launched.append("settled"), own())
    for turn in range(8):
        rows = []
        for index, request in enumerate(known):
            count = int(torch.randint(0, width, (1,), generator=generator))
            given = [request[-1], *torch.randint(1, 3, (count,), generator=generator).tolist()]
            starts[index + 1] = len(rows) + len(given)
            drafts[index] = count
            for at, token in enumerate(given):
                rows.append((token, len(request) - 1 + at, index))
        for row, (token, position, index) in enumerate(rows):
            tokens[row], step.positions[row] = token, position
            slots[row] = int(tables[index, position // 4]) * 4 + position % 4
        fed = [[t for t, _, i in rows if i == index][1:] for index in range(2)]
        ledgers[0].write(step)
        ledgers[0].check(step)
        ledgers[1].replayed(step)
        replay()
        assert_equal_books(*ledgers)
        del launched[:]
        ids = torch.full((2, width + 1), -1)
        counts = torch.zeros(2)
        for index, request in enumerate(known):
            stay = int(torch.randint(0, len(fed[index]) + 1, (1,), generator=generator))
            drawn = [*fed[index][:stay], 5 + turn]
            ids[index, : len(drawn)] = torch.tensor(drawn)
            counts[index] = len(drawn)
            request += drawn
        if turn % 2:  # a draft counts that was not sampled
            counts = (counts + 1).minimum(drafts.cpu() + 1)
        ids, counts = ids.to(DEVICE, dtype), counts.to(DEVICE, torch.int32)
        for ledger in ledgers:
            ledger.resolve(counts, ids, besides=1, later=True)
            ledger.hand_out("full", [int(tables[1, (len(known[1]) + 2) // 4])])
        assert passes.pending.next.resolves
        assert not launched
        del ids, counts  # the ledger holds what it needs
        if turn % 3 == 2:
            words = ledgers[1].books.words.clone()
            passes.settle()
            assert_equal_books(*ledgers)
            passes.pending.take()
            assert_equal_books(*ledgers)  # once is enough
            changed |= not torch.equal(words, ledgers[1].books.words)
    assert changed
    one, other = ([str(v) for v in ledger.violations()] for ledger in ledgers)
    assert one == other == []
    assert ledgers[1].counters()["kvtxn_audit_unjudged_total"] == 0


def test_lines_are_put_by_the_next_step(pair):
    """By its graph, or before anything else is put or launched."""
    ledger = pair("plain")[1]
    passes, target = ledger.passes, torch.full((9,), -7, device=DEVICE)
    let_wait(ledger)
    assert ledger.graphs.put(target, [3, 1, -1])
    assert not ledger.graphs.put(target, [5])
    assert target.tolist() == [-7] * 9
    ledger.replayed(None)
    passes.pending.take()
    assert target.tolist() == [3, 1, -1] + [-7] * 6
    passes.books.counters[STEP] += 1
    assert ledger.graphs.put(target, [4, 4, 4, 4])
    ledger.input.put(target[1:2], [9])
    assert target.tolist() == [4, 9, 4, 4] + [-7] * 5
    assert not ledger.graphs.put(target, [5])  # its record is read by a launch already
    ledger.replayed(None)
    passes.pending.take()
    passes.books.counters[STEP] += 1
    assert target.tolist() == [4, 9, 4, 4] + [-7] * 5
    assert not ledger.graphs.put(target, [0] * (MOST_LINES + 1))


def test_replays_that_nobody_told_of_are_noticed(pair):
    ledger = pair("plain")[1]
    ledger.replayed(None)
    glance = ledger.glance()
    glance.wait()
    with pytest.raises(WindowStateError, match="expected 1 steps, got 0"):
        ledger.findings.require_all_steps(glance)
    ledger.restart()
    ledger.findings.require_all_steps(glance)
    glance = ledger.glance()
    glance.wait()
    ledger.findings.require_all_steps(glance)


def test_a_record_is_filled_anew_once_it_was_read(monkeypatch):
    """Each half of the ring waits for an event behind the steps that had it before."""
    Event.made.clear()
    monkeypatch.setattr(next_step.torch.cuda, "Event", Event)
    place = new_ledger("plain", backend="torch").books.layout.places["full"]
    ring = NextStep(torch.device("cpu"))
    ring._on_gpu, ring.used = True, True
    given, half = [(place, [2])], RECORDS // 2

    def until(step):
        while ring.steps + 1 < step:
            ring.launched()

    assert not ring.add(given)  # nobody knows what was launched before
    [event] = Event.made
    event.passed = True
    assert ring.add(given)
    blocks = ring.records[1, next_step.HANDED_OUT :].tolist()
    assert blocks[:4] == [1, 1, 2 * place.stride, place.stride]
    until(half)
    assert ring.add(given)  # nobody had the second half before
    until(2 * half)
    assert not ring.add(given)  # the device may be anywhere in the first half
    assert not ring.add(given)
    event.passed = True
    assert ring.add(given)
    until(3 * half)
    event.passed = True  # the steps before the third half are done, and so all of the second
    assert ring.add(given)
    assert event.recorded == 4
    until(6 * half)  # halves without any blocks: what was recorded lies too far back
    event.passed = True
    assert not ring.add(given)
    event.passed = True
    assert ring.add(given)
    ring.restart()
    assert not ring.add(given)
    assert int(ring.records[:, [0, next_step.LINES, next_step.HANDED_OUT]].max()) == -1
