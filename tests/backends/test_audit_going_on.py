"""``Ledger.repeat``: a step that follows one like it is told in one call, when it is replayed."""

from __future__ import annotations

import attrs
import pytest
import torch
from kernels_here import importing_kernels
from ledger_pairs import DEVICE, FewPrograms, assert_equal_books
from test_audit_handed_out import replay_of

from kvtxn.audit import Step
from kvtxn.errors import AcceptanceError, ConfigError, WindowStateError
from kvtxn.testing.audit_life import new_ledger

with importing_kernels():
    from kvtxn.backends.audit.next_step import MOST, MOST_LINES

DRAFTS = 3


class Steps:
    """Two requests with drafts in buffers that stay; which drafts are kept is drawn by lot.

    Attributes:
        ledgers: one that is told in the usual calls, and one whose steps a graph writes.
    """

    def __init__(self):
        one = new_ledger("plain", device=DEVICE, backend="torch")
        other = new_ledger("plain", device=DEVICE, key=one.books.key, backend=FewPrograms)
        self.ledgers, self.generator = (one, other), torch.Generator().manual_seed(5)
        rows = 2 * (DRAFTS + 1)
        self.step = Step(
            lines=torch.full((2,), -1, device=DEVICE),
            starts=torch.arange(0, rows + 1, DRAFTS + 1, device=DEVICE).int(),
            first=None,
            tokens=torch.zeros(rows, device=DEVICE).int(),
            slots={"full": torch.zeros(rows, device=DEVICE).long()},
            tables={"full": torch.arange(20, device=DEVICE).view(2, 10).int()},
            drafts=torch.full((2,), DRAFTS, device=DEVICE),
            positions=torch.zeros(rows, device=DEVICE).long(),
        )
        self.now = self.step  # of the requests that still run
        self.replay = replay_of(other, self.step)
        self.known = [[7], [8]]
        for ledger in self.ledgers:
            ledger.restart()
            lines = [ledger.admit("a", [7]), ledger.admit("b", [8])]
            self.step.lines.copy_(torch.tensor(lines))

    def draw(self, end, shape=(1,)):
        return torch.randint(0, end, shape, generator=self.generator)

    def feed(self):
        """Fill the buffers with the rows of the next step, which the first ledger writes."""
        fed = [[request[-1], *self.draw(3, (DRAFTS,)).tolist()] for request in self.known]
        rows = len(fed) * (DRAFTS + 1)
        begin = torch.tensor([[len(request) - 1] for request in self.known])
        positions = begin + torch.arange(DRAFTS + 1)
        blocks = self.now.tables["full"].cpu().long().gather(1, positions // 4)
        self.step.tokens[:rows].copy_(torch.tensor(fed).flatten())
        self.step.positions[:rows].copy_(positions.flatten())
        self.step.slots["full"][:rows].copy_((blocks * 4 + positions % 4).flatten())
        self.ledgers[0].write(self.now)
        self.ledgers[0].check(self.now)
        return [each[1:] for each in fed]

    def sample(self, fed, one_too_many, *, told=True):
        """Return counts, ids, and a block that is handed out; the first ledger may be told."""
        ids = torch.full((len(fed), DRAFTS + 1), -1)
        counts = torch.zeros(len(fed)).int()
        for index, request in enumerate(self.known):
            stay = int(self.draw(DRAFTS + 1))
            drawn = [*fed[index][:stay], 5]
            ids[index, : len(drawn)] = torch.tensor(drawn)
            counts[index] = min(len(drawn) + one_too_many, DRAFTS + 1)
            request += drawn
        counts, ids = counts.to(DEVICE), ids.to(DEVICE)
        block = int(self.now.tables["full"][-1, (len(self.known[-1]) + 3) // 4])
        if told:
            self.ledgers[0].resolve(counts, ids, besides=1)
            self.ledgers[0].hand_out("full", [block])
        return counts, ids, [([block],)]  # of one request, by group

    def leave(self):
        """End the first request: the second one takes its row; returns the new lines."""
        step = self.step
        step.tables["full"][0].copy_(step.tables["full"][1].clone())
        step.starts[2] = step.starts[1]
        self.known = self.known[1:]
        self.now = attrs.evolve(
            step,
            lines=step.lines[:1],
            starts=step.starts[:2],
            tables={"full": step.tables["full"][:1]},
            drafts=step.drafts[:1],
        )
        return [self.ledgers[0].line("b"), -1]


@pytest.mark.parametrize("later", [False, True], ids=["as a whole", "in its parts"])
def test_what_waited_is_resolved_although_the_buffers_have_the_next_step(later):
    """In one call, or in the usual ones; and at once where nothing can wait."""
    steps, waiting, repeat, at_once = Steps(), None, None, 0
    ledger = steps.ledgers[1]
    for turn in range(8):
        fed = steps.feed()
        if waiting is None:
            ledger.replayed(steps.step)
        elif later:
            ledger.resolve_waiting(*waiting[:2], 1)
            ledger.change(given={"full": waiting[2][0][0]})
            ledger.replayed(steps.step)
        else:
            repeat = repeat or ledger.repeat(steps.step, *waiting[:2], 1, ["full"])
            assert repeat.same(*waiting)
            at_once += 1
        steps.replay()
        assert_equal_books(*steps.ledgers)
        waiting = steps.sample(fed, one_too_many=turn % 2)
        if not ledger.can_wait(*waiting[:2]):  # on a GPU, until it has passed an event
            ledger.resolve(*waiting[:2], besides=1)
            ledger.change(given={"full": waiting[2][0][0]})
            waiting = repeat = None
            if DEVICE == "cuda":
                torch.cuda.synchronize()
    assert later or at_once > 3
    one, other = (each.violations() for each in steps.ledgers)
    assert one == other == []
    assert ledger.counters()["kvtxn_audit_unjudged_total"] == 0
    assert ledger.counters()["kvtxn_audit_steps_total"] == 8
    glance = ledger.glance()
    glance.wait()
    ledger.findings.require_all_steps(glance)


def first(steps):
    """Write a step whose outcome can wait."""
    ledger = steps.ledgers[1]
    while True:
        fed = steps.feed()
        ledger.replayed(steps.step)
        steps.replay()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        counts, ids, _ = steps.sample(fed, one_too_many=0)
        if ledger.can_wait(counts, ids):
            return counts, ids
        ledger.resolve(counts, ids, besides=1)


OTHERWISE = {
    "a request came": lambda ledger, step, *outcome: ledger.admit("c", [1, 2]),
    "a request left": lambda ledger, step, *outcome: ledger.release("b"),
    "blocks wait": lambda ledger, step, *outcome: ledger.hand_out("full", [3]),
    "it was resolved": lambda ledger, step, *outcome: ledger.resolve(*outcome, besides=1),
    "its outcome waits": lambda ledger, step, *outcome: ledger.resolve_waiting(*outcome, 1),
    "nobody's replay": lambda ledger, step, *outcome: ledger.replayed(None),
    "another replay": lambda ledger, step, *outcome: ledger.replayed(step),
    "numbers wait": lambda ledger, step, *outcome: ledger.graphs.put(step.lines, [1, 0]),
    "numbers came": lambda ledger, step, *outcome: ledger.input.put(step.lines, [1, 0]),
    "a graph is captured": lambda ledger, step, *outcome: ledger.launch_step(step),
    "all was forgotten": lambda ledger, step, *outcome: ledger.reset(),
}


@pytest.mark.parametrize("otherwise", OTHERWISE.values(), ids=OTHERWISE)
def test_where_something_else_came_the_usual_calls_are_needed(otherwise):
    steps = Steps()
    ledger, outcome = steps.ledgers[1], first(steps)
    repeat = ledger.repeat(steps.step, *outcome, 1, ["full"])
    otherwise(ledger, steps.step, *outcome)
    before = ledger.graphs.num_steps
    assert not repeat.same(*outcome, [])
    assert ledger.graphs.num_steps == before


@pytest.mark.parametrize(
    "otherwise", ["a request came", "blocks wait", "it was resolved", "nobody's replay"]
)
def test_there_is_no_call_after_something_else(otherwise):
    steps = Steps()
    ledger, outcome = steps.ledgers[1], first(steps)
    OTHERWISE[otherwise](ledger, steps.step, *outcome)
    assert ledger.repeat(steps.step, *outcome, 1, ["full"]) is None


LATER = {
    "another has the line": lambda ledger, step: (ledger.release("a"), ledger.admit("c", [1, 2])),
    "it was told anew": lambda ledger, step: ledger.admit("a", [7, 8]),
    "a graph was captured": lambda ledger, step: ledger.launch_step(step),
}


@pytest.mark.parametrize("later", LATER.values(), ids=LATER)
def test_an_outcome_that_waited_is_refused_after_something_else(later):
    """Before that it could be told at once, and nothing is told by the call that is refused."""
    steps = Steps()
    ledger, outcome = steps.ledgers[1], first(steps)
    later(ledger, steps.step)
    assert not ledger.can_wait(*outcome)
    before = ledger.books.facts.clone()
    with pytest.raises(WindowStateError, match=r"^resolve_waiting: .*cannot be told later"):
        ledger.resolve_waiting(*outcome, 1)
    assert torch.equal(ledger.books.facts, before)
    ledger.resolve(*outcome, besides=1)
    # What is launched before a capture is a step more, by which the drafts are not resolved.
    assert ledger.unresolved == (2 if later is LATER["a graph was captured"] else 0)


@pytest.mark.parametrize("besides", [-1, 1 << 70, "1", None, 1.0])
def test_tokens_besides_are_a_number(besides):
    steps = Steps()
    ledger, outcome = steps.ledgers[1], first(steps)
    for call in (
        lambda: ledger.resolve_waiting(*outcome, besides),
        lambda: ledger.repeat(steps.step, *outcome, besides, ["full"]),
        lambda: ledger.resolve(*outcome, besides=besides, later=True),
    ):
        with pytest.raises(AcceptanceError, match="besides is not valid"):
            call()
    ledger.resolve_waiting(*outcome, 1)


def test_an_outcome_without_ids_does_not_wait():
    steps = Steps()
    ledger, (counts, ids) = steps.ledgers[1], first(steps)
    assert not ledger.can_wait(counts, None)
    assert not ledger.can_wait(counts.tolist(), ids)
    assert ledger.repeat(steps.step, counts, None, 1, ["full"]) is None
    with pytest.raises(WindowStateError, match="got Tensor and NoneType"):
        ledger.resolve_waiting(counts, None, 1)
    with pytest.raises(ConfigError, match="groups"):
        ledger.repeat(steps.step, counts, ids, 1, "full")


def test_there_is_no_call_where_graphs_do_not_save_their_steps():
    """A step that was launched is saved all the same, but the one that follows would not be."""
    steps = Steps()
    ledger = steps.ledgers[1]
    rows = torch.zeros(64, device=DEVICE)
    wide = attrs.evolve(
        steps.step,
        tokens=rows.int(),
        slots={"full": rows.long()},
        positions=rows.long(),
        lines=torch.full((2,), -1, device=DEVICE),
    )
    ledger.launch_step(wide)  # more rows than there is room for
    fed = steps.feed()
    ledger.write(steps.step)
    ledger.check(steps.step)
    outcome = steps.sample(fed, one_too_many=0)[:2]
    if DEVICE == "cpu":
        assert ledger.can_wait(*outcome)
    assert ledger.repeat(steps.step, *outcome, 1, ["full"]) is None


def test_blocks_that_cannot_be_told_at_once():
    """Too many of them, or one that the group does not have; other groups' do not count."""
    steps = Steps()
    ledger, outcome = steps.ledgers[1], first(steps)
    with pytest.raises(ConfigError, match="'other' is not a group of the ledger"):
        ledger.repeat(steps.step, *outcome, 1, ["other"])
    repeat = ledger.repeat(steps.step, *outcome, 1, [None, "full"])
    before = ledger.graphs.num_steps
    assert not repeat.same(*outcome, [([], [1 << 40])])
    assert not repeat.same(*outcome, [([], [3]), ([], [-1])])
    assert not repeat.same(*outcome, [([], [3] * (MOST + 1))])
    assert ledger.graphs.num_steps == before
    assert repeat.same(*outcome, [([1 << 40], [3] * MOST)])
    assert ledger.graphs.num_steps == before + 1


def test_forms_that_cannot_be_read_from_their_addresses():
    """Such an outcome is brought into another form, or refused: its rows are overwritten."""
    steps = Steps()
    ledger, (counts, ids) = steps.ledgers[1], first(steps)
    assert not ledger.can_wait(counts.short(), ids)
    assert not ledger.can_wait(counts, ids[:1])
    assert ledger.repeat(steps.step, counts.short(), ids, 1, ["full"]) is None
    repeat = ledger.repeat(steps.step, counts, ids, 1, ["full"])
    steps.feed()
    assert not repeat.same(counts, ids.t().contiguous().t(), [])
    assert not repeat.same(counts[:1], ids, [])
    assert not repeat.same(counts, ids[:, :1].contiguous(), [])
    assert not repeat.same(counts.short(), ids, [])
    assert not repeat.same(counts, ids.int(), [])
    with pytest.raises(WindowStateError, match="cannot be told later"):
        ledger.resolve_waiting(counts.short(), ids, 1)
    ledger.resolve_waiting(counts, ids.t().contiguous().t(), 1)
    ledger.replayed(steps.step)
    steps.replay()
    assert not ledger.violations()
    assert_equal_books(*steps.ledgers)


def test_a_torch_ledgers_outcomes_do_not_wait():
    """All that it needs of a step lies in the step's tensors."""
    steps = Steps()
    waiting = steps.sample(steps.feed(), one_too_many=0, told=False)
    assert not steps.ledgers[0].can_wait(*waiting[:2])


def steady(steps):
    """Take steps until one was told in one call; returns that call, and what waits."""
    ledger, waiting = steps.ledgers[1], first(steps)
    repeat = ledger.repeat(steps.step, *waiting, 1, ["full"])
    fed = steps.feed()
    assert repeat.same(*waiting, [])
    steps.replay()
    return repeat, steps.sample(fed, one_too_many=0)


def test_a_request_left():
    """The step before is resolved with its own requests, and each one after it goes on alone."""
    steps = Steps()
    repeat, waiting = steady(steps)
    ledger = steps.ledgers[1]
    lines = steps.leave()
    for turn in range(4):
        before = steps.step.lines.clone()
        steps.step.lines.copy_(torch.tensor(lines))
        fed = steps.feed()
        steps.step.lines.copy_(before)
        if turn == 0:
            assert ledger.repeat_fewer(repeat, steps.now, *waiting, (steps.step.lines, lines))
        else:
            assert repeat.same(*waiting)
        steps.replay()
        assert steps.step.lines.tolist() == lines
        assert_equal_books(*steps.ledgers)
        waiting = steps.sample(fed, one_too_many=turn % 2)
        assert ledger.can_wait(*waiting[:2])
    ledger.resolve_waiting(*waiting[:2], 1)  # what comes then is told as it always is
    ledger.change(given={"full": waiting[2][0][0]})
    fed = steps.feed()
    ledger.replayed(steps.now)
    steps.replay()
    assert_equal_books(*steps.ledgers)
    one, other = (each.violations() for each in steps.ledgers)
    assert one == other == []
    assert ledger.counters()["kvtxn_audit_unjudged_total"] == 0


@pytest.mark.parametrize("otherwise", [each for each in OTHERWISE if each != "all was forgotten"])
def test_a_request_that_left_is_not_told_after_something_else(otherwise):
    steps = Steps()
    repeat, (counts, ids, grown) = steady(steps)
    ledger, lines = steps.ledgers[1], steps.leave()
    OTHERWISE[otherwise](ledger, steps.step, counts, ids)
    before = ledger.graphs.num_steps
    put = steps.step.lines, lines
    assert not ledger.repeat_fewer(repeat, steps.now, counts, ids, grown, put)
    assert ledger.graphs.num_steps == before


def test_too_many_lines_are_not_told_at_once():
    steps = Steps()
    repeat, (counts, ids, grown) = steady(steps)
    lines, target = [-1] * (MOST_LINES + 1), torch.zeros(MOST_LINES + 1, device=DEVICE).long()
    steps.leave()
    before = steps.ledgers[1].graphs.num_steps
    assert not repeat.fewer(steps.now, counts, ids, grown, (target, lines))
    assert steps.ledgers[1].graphs.num_steps == before
    assert repeat.fewer(steps.now, counts, ids, grown, (target, lines[1:]))


def test_there_is_no_call_while_a_launch_reads_the_record():
    """A device that is behind reads it later, and would find other blocks or lines there."""
    for settled in (
        lambda ledger, step: (ledger.hand_out("full", [3]), ledger.publish("a", "full", [0], 0, 1)),
        lambda ledger, step: (ledger.graphs.put(step.lines, [0, 1]), ledger.passes.settle()),
    ):
        steps = Steps()
        ledger, outcome = steps.ledgers[1], first(steps)
        repeat = ledger.repeat(steps.step, *outcome, 1, ["full"])
        settled(ledger, steps.step)
        assert not repeat.same(*outcome, [([9],)])
        assert ledger.repeat(steps.step, *outcome, 1, ["full"]) is None
        if ledger.can_wait(*outcome):  # what the launch does not read can be told
            ledger.resolve_waiting(*outcome, 1)


def test_a_call_is_good_until_another_one_tells_of_fewer_requests():
    steps = Steps()
    repeat, (counts, ids, grown) = steady(steps)
    ledger = steps.ledgers[1]
    other = ledger.repeat(steps.step, counts, ids, 1, ["full"])
    put = steps.step.lines, steps.leave()
    assert ledger.repeat_fewer(repeat, steps.now, counts, ids, grown, put)
    assert not other.same(counts, ids, [])
    assert repeat.same(counts[1:], ids[1:], [])
