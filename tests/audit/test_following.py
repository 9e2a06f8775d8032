"""``Ledger.follow``: the end of a window is the outcome of the ledger's step."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from kvtxn import ConfigError, LayerRef, TransactionManager, TxnConfig, WindowStateError
from kvtxn.audit import Ledger, RecordingLedger, RowGroup, StateGroup, Step
from kvtxn.recurrent import ShortConv, StateSlots
from kvtxn.testing.supplied_states import ToyStates

BLOCK, REQUESTS, LENGTH, RING = 4, 3, 40, 5
BLOCKS = LENGTH // BLOCK
POLICIES = ("deferred", "undo", "direct")
KINDS = ("paged", "ring", "state")


class Engine:
    """Requests of which each has blocks, a ring and a state of its own, at fixed places.

    Attributes:
        lengths: the number of rows that each request has kept; the next row is settled.
        told: the accepted drafts that the next step tells, -1 for none.
    """

    def __init__(
        self, policy="deferred", kinds=("paged", "ring"), *, ledger=Ledger, replay=None, **config
    ) -> None:
        caches = torch.zeros(4, REQUESTS * BLOCKS, BLOCK, 1, 2)
        layers = {
            "paged": LayerRef("full", caches[0], caches[1], group="paged"),
            "ring": LayerRef.ring(
                "local", caches[2], caches[3], window=RING, ring_size=RING, group="ring"
            ),
            "state": LayerRef.recurrent(
                "conv", torch.zeros(2 * REQUESTS, 2, 3), group="state", replay=replay
            ),
        }
        groups = {
            "paged": RowGroup("paged", BLOCK, REQUESTS * BLOCKS),
            "ring": RowGroup("ring", BLOCK, REQUESTS * BLOCKS, ring=RING, window=RING),
            "state": StateGroup("state", 2 * REQUESTS),
        }
        self.kinds = kinds
        self.manager = TransactionManager(
            [layers[kind] for kind in kinds], TxnConfig(policy=policy, backend="torch", **config)
        )
        self.ledger = ledger(
            [groups[kind] for kind in kinds], max_requests=REQUESTS + 1, max_length=LENGTH,
            backend="torch",
        )  # fmt: skip
        self.following = self.ledger.follow(self.manager)
        self.lengths = [0] * REQUESTS
        self.told = [-1] * REQUESTS
        for request in range(REQUESTS):
            self.ledger.admit(f"r{request}", [request])

    def slots(self, group, rows):
        if group == "state":
            return torch.arange(REQUESTS)
        places = [(r, p % RING if group == "ring" else p) for r, p in rows]
        return torch.tensor([r * LENGTH + p for r, p in places])

    def write(self, counts, **fields):
        """Write a step to the ledger: one settled row per request, then drafts.

        Returns:
            The slots for a window.
        """
        rows = [(r, self.lengths[r] + i) for r in range(REQUESTS) for i in range(1 + counts[r])]
        tables = [[r * BLOCKS + i for i in range(BLOCKS)] for r in range(REQUESTS)]
        slots = {kind: self.slots(kind, rows) for kind in self.kinds}
        given = {
            "lines": torch.tensor([self.ledger.line(f"r{r}") for r in range(REQUESTS)]),
            "starts": torch.tensor([0, *counts]).cumsum(0) + torch.arange(REQUESTS + 1),
            "first": torch.tensor(self.lengths),
            "tokens": torch.tensor(
                [r if p == 0 else 7 * p + r + i for i, (r, p) in enumerate(rows)]
            ),
            "drafts": torch.tensor(counts),
            "slots": {name: each for name, each in slots.items() if name != "state"},
            "tables": {k: torch.tensor(tables) for k in self.kinds if k != "state"},
            "told": torch.tensor(self.told),
        }
        if "state" in self.kinds:
            began = torch.tensor(self.lengths) > 0
            given["sources"] = {"state": torch.where(began, slots["state"], -1)}
        self.ledger.write_and_check(Step(**given | fields))
        return slots

    def stage(self, window):
        for ref in self.manager.layers.values():
            shapes = [part.staged_shape for part in ref.given]
            window.stage(ref, *(torch.randn(window.num_rows, *shape) for shape in shapes))

    def step(self, drafts, accepted, kept=None):
        """Run a step; the engine goes on from ``kept`` drafts, those of the commit if None."""
        with self.manager.window(drafts, self.write(drafts)) as window:
            self.stage(window)
            window.commit(accepted)
        self.go_on(accepted if kept is None else kept)

    def go_on(self, kept):
        self.lengths = [length + 1 + n for length, n in zip(self.lengths, kept, strict=True)]
        self.told = [*kept]

    def found(self):
        return {(each.kind, each.group, each.position) for each in self.ledger.violations()}


#: Each policy, with the kinds of layers that it can hold.
ENGINES = [("deferred", KINDS), ("undo", KINDS[:2]), ("direct", KINDS[:2])]


@pytest.mark.parametrize(("policy", "kinds"), ENGINES)
@pytest.mark.parametrize("staged", ["all", "some"])
def test_steps_that_end_by_their_windows(policy, kinds, staged):
    """Commits, aborts whose step is repeated, and the rows of rings that a rejection gives back."""
    engine = Engine(policy, kinds)
    generator = torch.Generator().manual_seed(3)
    for number in range(9):
        drafts = torch.randint(0, 4, [REQUESTS], generator=generator).tolist()
        accepted = [int(torch.randint(0, n + 1, [], generator=generator)) for n in drafts]
        if policy == "direct":  # where a rejected row stays in its ring
            accepted = drafts
        if number % 3 == 1:
            window = engine.manager.window(drafts, engine.write(drafts))
            if staged == "all":
                engine.stage(window)
            window.abort()
            if policy == "direct":
                continue
        engine.step(drafts, accepted)
    engine.step([0] * REQUESTS, [0] * REQUESTS)
    if policy != "direct":
        assert engine.ledger.violations() == []
    assert (engine.ledger.unresolved, engine.ledger.refused) == (0, 0)
    assert engine.ledger.counters()["kvtxn_audit_rows_checked_total"] > 100


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_is_repeated_after_an_abort_tells_nothing_twice(policy):
    """The request goes on with the rows that it was told of."""
    engine = Engine(policy, ("paged",))
    engine.step([2, 2, 2], [1, 2, 2], kept=[2, 2, 2])
    engine.step([0, 0, 0], [0, 0, 0])
    assert "rejected" in {violation.kind for violation in engine.ledger.violations()}
    drafts = [1, 0, 2]
    with engine.manager.window(drafts, engine.write(drafts)) as window:
        engine.stage(window)
        window.abort()
    engine.told = [-1] * REQUESTS
    engine.step(drafts, drafts)
    assert engine.ledger.violations() == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rejected_row_evicts_none_from_its_ring(policy):
    """Under "direct" it does, and the ledger says so."""
    engine = Engine(policy)
    for _ in range(RING):
        engine.step([0] * REQUESTS, [0] * REQUESTS)
    engine.step([3, 0, 0], [0, 0, 0])
    engine.step([0, 0, 0], [0, 0, 0])
    wrong = {("rejected", "ring", 2)} if policy == "direct" else set()
    assert engine.found() == wrong


@pytest.mark.parametrize("accepted", [0, 2, RING, None])
def test_rows_of_a_step_that_are_a_whole_ring_apart(accepted):
    """The last kept one is in their slot; after an abort it is the settled one."""
    engine = Engine()
    for _ in range(RING):
        engine.step([0, 0, 0], [0, 0, 0])
    if accepted is None:
        window = engine.manager.window([RING, 0, 1], engine.write([RING, 0, 1]))
        engine.stage(window)
        window.abort()
    engine.step([RING, 0, 1], [accepted or 0, 0, 1])
    engine.step([0, 0, 0], [0, 0, 0])
    engine.step([RING, 1, 0], [1, 0, 0])
    engine.step([0, 0, 0], [0, 0, 0])
    assert engine.ledger.violations() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kept", "name"), [([1, 2, 0], "too few"), ([1, 0, 0], "too many")])
@pytest.mark.parametrize("tells", [True, False])
def test_an_outcome_other_than_the_engines(kind, kept, name, tells):
    """The commit keeps one draft of request 1, the engine goes on from two, or from none."""
    engine = Engine(kinds=(kind,))
    engine.step([0, 0, 0], [0, 0, 0])
    engine.step([1, 2, 2], [1, 1, 0], kept)
    if not tells:
        engine.told = [-1] * REQUESTS
    engine.step([0, 0, 0], [0, 0, 0])
    found = engine.ledger.violations()
    assert {each.request for each in found} == {"r1"}
    assert bool([each for each in found if each.found == "count"]) == tells
    read = {(each.kind, each.group) for each in found if each.found != "count"}
    if kind == "state":
        assert read == {("state", "state")}
    elif name == "too many":  # the row of the draft is written again, of another token
        assert read == {("foreign", kind)}
    else:  # the ring's slot has again what it had before, which was nothing
        assert read == {("rejected" if kind == "paged" else "unwritten", kind)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("commits", [0, 2])
def test_an_outcome_other_than_the_engines_tokens(kind, commits):
    """The engine gives the tokens that it keeps, one draft and one more, before the commit."""
    engine = Engine(kinds=(kind,))
    engine.step([0, 0, 0], [0, 0, 0])
    with engine.manager.window([2, 2, 2], engine.write([2, 2, 2])) as window:
        engine.stage(window)
        fed = engine.ledger._state.step.tokens.view(REQUESTS, 3)
        others = torch.full((REQUESTS, 1), 99)
        engine.following.sampled(torch.cat([fed[:, 1:2], others, torch.full_like(others, -1)], 1))
        window.commit([1, commits, 1])
    engine.go_on([1, 1, 1])
    tokens = torch.full([REQUESTS], 99)
    engine.write([0, 0, 0], tokens=tokens)
    found = engine.ledger.violations()
    assert {each.request for each in found} == {"r1"}
    assert [each.found for each in found if each.found == "count"] == ["count"]
    assert (kind in {each.group for each in found}) == (kind == "state" or commits == 0)


@pytest.mark.parametrize("operation", ["stage", "commit"])
@pytest.mark.parametrize(("policy", "kinds"), ENGINES)
def test_a_window_that_falls_back(operation, policy, kinds):
    """Its commit counts as any other; rings and states are as after any other."""
    engine = Engine(policy, kinds)

    def fail(*_):
        raise RuntimeError("a test made this fail")

    setattr(engine.manager.executor, operation, fail)
    for drafts, accepted in (([0, 0, 0], [0, 0, 0]), ([2, 3, 1], [1, 3, 0])) * 2:
        if policy == "direct":
            accepted = drafts
        engine.step(drafts, accepted)
    engine.step([0, 0, 0], [0, 0, 0])
    assert engine.manager.snapshot()["kvtxn_fallbacks_total"] > 0
    assert engine.ledger.violations() == []


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_a_window_of_the_drafts_alone(policy):
    """Settled rows, and requests without drafts, may be left out; the engine writes them itself."""
    engine = Engine(policy)
    engine.step([0, 0, 0], [0, 0, 0])
    slots = engine.write([2, 0, 3])
    rows = torch.tensor([1, 2, 5, 6, 7])
    drafts = {name: each[rows] for name, each in slots.items()}
    with engine.manager.window([2, 3], drafts, settled=0) as window:
        engine.stage(window)
        window.commit([1, 0])
    engine.go_on([1, 0, 0])
    engine.step([1, 1, 1], [0, 1, 0])
    engine.step([0, 0, 0], [0, 0, 0])
    assert engine.ledger.violations() == []


def test_padding_and_steps_without_drafts():
    """Buffers may be longer than the window; a step without drafts needs no window."""
    engine = Engine()
    engine.write([0, 0, 0], drafts=None)
    engine.go_on([0, 0, 0])
    lines = torch.tensor([engine.ledger.line(f"r{r}") for r in range(REQUESTS)] + [-1])
    tables = {kind: torch.zeros(4, BLOCKS, dtype=torch.int64) for kind in engine.kinds}
    for kind, table in tables.items():
        table[:3] = torch.arange(REQUESTS * BLOCKS).view(REQUESTS, BLOCKS)
        assert kind in engine.kinds
    slots = engine.write(
        [1, 1, 0], lines=lines, tables=tables, told=torch.tensor([0, 0, 0, 0]),
        first=torch.tensor([*engine.lengths, 0]), drafts=torch.tensor([1, 1, 0, 9]),
        starts=torch.tensor([0, 2, 4, 5, 5]),
    )  # fmt: skip
    with engine.manager.window([1, 1, 0], slots) as window:
        engine.stage(window)
        window.commit([1, 0, 0])
    engine.go_on([1, 0, 0])
    engine.step([0, 0, 0], [0, 0, 0])
    assert engine.ledger.violations() == []


def test_a_request_that_left_before_its_step_ended():
    """Another one has its line by then: the outcome is not the new request's."""
    engine = Engine(kinds=KINDS)
    engine.step([0, 0, 0], [0, 0, 0])
    with engine.manager.window([2, 2, 2], engine.write([2, 2, 2])) as window:
        engine.stage(window)
        line = engine.ledger.line("r1")
        engine.ledger.release("r1")
        engine.ledger.release("none")
        while engine.ledger.admit("new", [4, 5]) != line:  # until the line is given again
            engine.ledger.admit(f"other{line}", [1])
        window.commit([1, 2, 0])
    assert "new" in engine.ledger
    assert engine.ledger.violations() == []
    assert int(engine.ledger.books.facts[2, line]) == 2  # all its tokens are its own


@pytest.mark.parametrize("accepted", [0, 2])
def test_states_at_block_boundaries(accepted):
    """A commit that crosses a boundary leaves two states; one that does not, one."""
    engine = Engine(kinds=("state",), replay=ShortConv(3))
    engine.step([0, 0, 0], [0, 0, 0])
    beyond = torch.arange(REQUESTS) + REQUESTS
    slots = StateSlots(engine.write([2, 2, 2])["state"], [2, 1, 0], beyond)
    with engine.manager.window([2, 2, 2], slots) as window:
        engine.stage(window)
        window.commit(accepted)
    engine.go_on([accepted] * 3)
    ends = torch.tensor([1 if accepted else 0, int(accepted > 0), 1]) * REQUESTS + torch.arange(3)
    for request, (length, boundary) in enumerate(zip(engine.lengths, [2, 1, 0], strict=True)):
        engine.ledger.publish_state(f"r{request}", "state", int(ends[request]), length)
        if ends[request] >= REQUESTS:
            engine.ledger.publish_state(f"r{request}", "state", request, 1 + boundary)
    assert engine.ledger.violations() == []


def test_a_state_that_is_written_through():
    """Under "direct" it takes in rejected drafts, and an abort leaves it so."""
    engine = Engine("direct", ("state",))
    engine.step([0, 0, 0], [0, 0, 0])
    engine.step([2, 1, 0], [1, 1, 0])
    engine.step([0, 0, 0], [0, 0, 0])
    assert engine.found() == {("state", "state", 2)}
    window = engine.manager.window([1, 0, 0], engine.write([1, 0, 0])["state"])
    engine.ledger.violations()
    engine.stage(window)
    window.abort()
    engine.step([1, 0, 0], [1, 0, 0])
    assert {kind for kind, *_ in engine.found()} == {"state"}


def test_a_recording_hears_the_outcome():
    engine = Engine(ledger=RecordingLedger)
    engine.step([0, 0, 0], [0, 0, 0])
    engine.step([2, 0, 1], [1, 0, 0])
    assert engine.ledger.recording()["steps"][-1] == [3, 6, 3, 1]


# -- misuse ------------------------------------------------------------------------------------


def test_two_steps_cannot_be_open():
    engine = Engine()
    engine.write([1, 0, 0])
    with pytest.raises(WindowStateError, match="the step before this one is still open"):
        engine.write([1, 0, 0])
    engine.ledger.resolve([0, 0, 0])
    engine.go_on([0, 0, 0])
    engine.step([1, 0, 0], [1, 0, 0])
    assert engine.ledger.violations() == []


@pytest.mark.parametrize("on_error", ["raise", "fallback"])
def test_a_window_of_no_step(on_error):
    """It raises where hooks may, and is logged elsewhere; the window itself is committed."""
    engine = Engine(on_error=on_error)
    rows = [(r, 0) for r in range(REQUESTS)]
    window = engine.manager.window(0, {kind: engine.slots(kind, rows) for kind in engine.kinds})
    engine.stage(window)
    raises = pytest.raises(WindowStateError, match="no step of the ledger goes with window 0")
    with raises if on_error == "raise" else nullcontext():
        window.commit(0)
    assert window.state.name == "COMMITTED"
    engine.step([0, 0, 0], [0, 0, 0])


@pytest.mark.parametrize(
    ("drafts", "settled", "message"),
    [([1, 1, 1], 1, "draft rows"), ([2, 0, 0], 1, "draft rows"), ([1, 0, 0], 2, "slots|rows")],
)
def test_rows_that_do_not_fit_the_step(drafts, settled, message):
    """The window commits; the step stays open, and the next one says why."""
    engine = Engine(on_error="raise")
    engine.write([1, 0, 0])
    rows = [(r, i) for r in range(REQUESTS) for i in range(settled + drafts[r])]
    slots = {kind: engine.slots(kind, rows) for kind in engine.kinds}
    window = engine.manager.window(drafts, slots, settled)
    engine.stage(window)
    with pytest.raises(ConfigError, match=message):
        window.commit(drafts)
    with pytest.raises(WindowStateError, match="a window of other rows") as raised:
        engine.write([1, 0, 0])
    assert isinstance(raised.value.__cause__, ConfigError)


def test_slots_that_are_not_the_steps():
    engine = Engine(on_error="raise")
    slots = engine.write([1, 0, 0])
    window = engine.manager.window([1, 0, 0], {**slots, "paged": slots["paged"] + 1})
    engine.stage(window)
    with pytest.raises(ConfigError, match="the step's slots in group 'paged'"):
        window.commit([0, 0, 0])


def test_a_tree_moves_rows_that_the_ledger_does_not_know():
    engine = Engine(on_error="raise")
    slots = engine.write([2, 0, 0])
    window = engine.manager.window([2, 0, 0], slots, tree=[[-1, -1], [], []])
    engine.stage(window)
    with pytest.raises(ConfigError, match="a tree"):
        window.commit([[1], [], []])


def test_states_have_no_slots_in_a_step():
    engine = Engine(kinds=("state",))
    with pytest.raises(ConfigError, match="a group of states"):
        engine.write([0, 0, 0], slots={"state": torch.tensor([0, 1, 2])})


@pytest.mark.parametrize(
    "groups",
    [
        [RowGroup("other", BLOCK, 100)],
        [RowGroup("paged", BLOCK, 1)],
        [RowGroup("paged", BLOCK, 100, ring=4)],
        [StateGroup("paged", 1000)],
    ],
)
def test_groups_that_differ(groups):
    engine = Engine(kinds=("paged",))
    ledger = Ledger(groups, max_requests=1, max_length=4)
    with pytest.raises(ConfigError, match="the ledger's groups are not the manager's"):
        ledger.follow(engine.manager)


def test_attaching_and_detaching():
    engine = Engine(kinds=("paged",))
    with pytest.raises(ConfigError, match="follows a manager already"):
        engine.ledger.follow(engine.manager)
    with pytest.raises(ConfigError, match="this is no manager"):
        Ledger([RowGroup("paged", 4, 4)], max_requests=1, max_length=4).follow(engine)
    engine.following.remove()
    engine.following.remove()
    engine.write([1, 0, 0])
    engine.write([1, 0, 0])  # as without a window: counted, not refused
    assert engine.ledger.unresolved == 1
    engine.following = engine.ledger.follow(engine.manager)
    engine.ledger.resolve([0, 0, 0])
    engine.go_on([0, 0, 0])
    engine.step([1, 0, 0], [1, 0, 0])
    assert engine.ledger.violations() == []


def test_a_window_of_states_alone_ends_no_step():
    """It has no rows, so it says nothing of a step's: one with drafts still needs its outcome."""
    engine = Engine(kinds=("paged",))
    windows = engine.manager.captured_windows(
        torch.full((1, 8), -1, dtype=torch.int64), states=ToyStates()
    )
    engine.write([1, 0, 0])
    windows.begin_states().commit_sampled(torch.ones(3, dtype=torch.int32))
    windows.begin_states().abort()
    with pytest.raises(WindowStateError, match="the step before this one is still open"):
        engine.write([0, 0, 0])
    engine.ledger.resolve([1, 0, 0])
    engine.go_on([1, 0, 0])
    engine.step([0, 0, 0], [0, 0, 0])
    assert engine.found() == set()
    assert engine.manager.snapshot()["kvtxn_hook_errors_total"] == 0
