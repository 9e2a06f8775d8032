"""Dead rows become NaN, others stay; a NaN that comes out is traced to its request."""

from __future__ import annotations

import attrs
import pytest
import torch

from kvtxn import AcceptanceError, ConfigError, LayerError, LayerRef
from kvtxn.audit import Ledger, RowGroup, Scrub, StateGroup, Step, Window

GROUPS = (RowGroup("full", 4, 8), StateGroup("mamba", 6))
WINDOW = Window(0, 3)


class Engine:
    """One request "a" with rows, a scan's states, and a convolution's buffer in two layouts.

    Attributes:
        rows: K and V of one layer.
        conv: ``[num_states, 3 + 2 drafts, channels]``.
        across: the same with the inputs along the last dimension.
        scan: ``[num_states, 4]``.
    """

    def __init__(self, windows=None, **named):
        self.rows = [torch.randn(8, 4, 2, 3) for _ in range(2)]
        self.conv, self.across = torch.randn(6, 5, 2), torch.randn(6, 2, 5)
        self.scan = torch.randn(6, 4)
        refs = [
            LayerRef("rows", *self.rows, group="full"),
            LayerRef.recurrent("down", self.conv, self.scan, group="mamba"),
            LayerRef.recurrent("across", self.across, group="mamba"),
        ]
        windows = {"down": WINDOW, "across": Window(0, 3, 2)} if windows is None else windows
        self.ledger = Ledger(GROUPS, max_requests=2, max_length=24)
        self.scrub = Scrub(self.ledger, refs, every=1, windows=windows, **named)
        self.ledger.admit("a", [1, 2, 3, 4, 5, 6])

    def step(self, first, tokens, states, source, *, drafts=0, accepted=None, outputs=None,
             trace="trace"):  # fmt: skip
        """Run a step over blocks 1 to 3; ``outputs``: of its rows, before it is resolved."""
        slots = torch.arange(first + 4, first + 4 + len(tokens))
        step = Step(
            lines=torch.tensor([self.ledger.line("a"), -1]),
            starts=torch.tensor([0, len(tokens), len(tokens)]),
            first=torch.tensor([first, 0]),
            tokens=torch.tensor(tokens),
            drafts=torch.tensor([drafts, 0]),
            slots={"full": slots, "mamba": torch.tensor(states)},
            tables={"full": torch.tensor([[1, 2, 3], [0, 0, 0]])},
            sources={"mamba": torch.tensor([source, -1])},
        )
        self.scrub.compare(step)
        self.ledger.write(step)
        self.ledger.check(step)
        if outputs is not None:
            getattr(self.scrub, trace)(step, *outputs)
        if accepted is not None:
            self.ledger.resolve([accepted, 0])
            self.scrub.seal(step, [accepted, 0])
        return step

    def prompt(self):
        self.step(0, [1, 2, 3, 4, 5, 6], [-1] * 5 + [1], -1, accepted=0)

    def drafted(self, accepted, **named):
        return self.step(
            6, [7, 8, 9], [1, 2, 3], 1, drafts=2, accepted=accepted, **named
        )  # fmt: skip

    def dead(self):
        """Return the dead rows, the dead states of the scan, and the dead inputs of block 1."""
        for either in (self.conv, self.across):
            assert not either[[0, 2, 3, 4, 5]].isnan().any()
        down, across = self.conv[1].isnan().all(1), self.across[1].isnan().all(0)
        assert torch.equal(down, across)
        for cache in self.rows[1:]:
            assert torch.equal(
                cache.isnan().flatten(0, 1).all(2), self.rows[0].isnan().flatten(0, 1).all(2)
            )
        rows = self.rows[0].flatten(0, 1).isnan().flatten(1).all(1).nonzero().flatten()
        return rows.tolist(), self.scan.isnan().all(1).nonzero().flatten().tolist(), down.tolist()


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_what_the_next_step_does_not_read_is_dead(accepted):
    """Rejected rows, the other columns, and the inputs before and behind the next step's."""
    engine = Engine(poison=True)
    engine.prompt()
    rows, states, inputs = engine.dead()
    assert (rows, states, inputs) == ([], [], [False] * 3 + [True] * 2)
    engine.conv[1] = engine.across[1] = 0.0
    engine.drafted(accepted)
    rows, states, inputs = engine.dead()
    assert rows == [*range(11 + accepted, 13)]
    assert states == [block for block in (1, 2, 3) if block != 1 + accepted]
    assert inputs == [not accepted <= at < accepted + 3 for at in range(5)]
    engine.step(7 + accepted, [8], [1], 1 + accepted, accepted=0)
    assert engine.ledger.violations() == []


@pytest.mark.parametrize("poison", [["full"], ["mamba"], []])
def test_poison_for_some_groups(poison):
    engine = Engine(poison=poison)
    engine.prompt()
    engine.drafted(0)
    rows, states, inputs = engine.dead()
    assert bool(rows) == ("full" in poison)
    assert bool(states) == any(inputs) == ("mamba" in poison)


def test_states_at_a_boundary_within_the_settled_rows_are_not_dead():
    engine = Engine(poison=True)
    engine.step(0, [1, 2, 3, 4, 5, 6], [-1, -1, -1, 4, -1, 1], -1, accepted=0)
    assert engine.dead()[1] == []
    engine.ledger.publish_state("a", "mamba", 4, 4)
    engine.ledger.release("a")
    engine.ledger.admit("a", [1, 2, 3, 4, 9])
    engine.scan[4, 0] += 1
    engine.step(4, [9], [2], 4)
    (violation,) = engine.ledger.violations()
    assert (violation.kind, violation.layer, violation.slot) == ("changed", "down", 4)


def test_a_buffer_is_not_compared():
    """Its engine moves what it holds."""
    engine = Engine()
    engine.prompt()
    engine.conv[1] += 1
    engine.drafted(1)
    assert engine.ledger.violations() == []


NAN = torch.tensor([[0.0, float("nan")], [0.0, 1.0], [2.0, float("inf")]])


def test_a_nan_is_traced_to_its_request():
    """With its position, its tokens, and the dead row that its tables lead to; once."""
    engine = Engine(poison=True)
    engine.prompt()
    engine.drafted(0)
    engine.step(7, [8], [1], 1, outputs=(NAN[:2], torch.tensor([0, -1])), accepted=0)
    (violation,) = engine.ledger.violations()
    assert (violation.kind, violation.found, violation.request) == ("changed", "nan", "a")
    assert (violation.step, violation.position, violation.expected) == (3, 7, (6, 7, 8))
    assert (violation.group, violation.slot) == ("full", 12)
    assert (violation.written_step, violation.written_request) == (2, "a")
    engine.step(8, [9], [1], 1, outputs=(NAN[:1], torch.tensor([0])), accepted=0)
    assert engine.ledger.violations() == []
    engine.ledger.release("a")
    engine.ledger.admit("a", [1, 2, 3])
    engine.step(2, [3], [1], 1, outputs=(NAN[:1], torch.tensor([0])), accepted=0)
    found = [v for v in engine.ledger.violations() if v.found == "nan"]
    assert [v.slot for v in found] == [None]  # no rejected row is left


def test_a_nan_of_a_cause_that_was_reported_is_not_reported_again():
    engine = Engine(poison=True)
    engine.prompt()
    engine.drafted(0)
    engine.step(8, [9], [1], 1, outputs=(NAN[:1], torch.tensor([0])), accepted=0)
    assert {v.kind for v in engine.ledger.violations()} == {"rejected", "state"}


def test_infinities_and_outputs_of_padding_are_no_nan():
    engine = Engine(poison=True)
    engine.prompt()
    engine.step(6, [7], [1], 1, outputs=(NAN[1:], torch.tensor([0, 0])), accepted=0)
    engine.step(7, [8], [1], 1, outputs=(NAN, torch.tensor([-1, 0, 99])), accepted=0)
    assert engine.ledger.violations() == []


@pytest.mark.parametrize("again", ["loaded", "loaded and sealed", "copied"])
def test_rows_that_were_given_out_again_are_not_compared_with_the_old_ones(again):
    """A row that is computed or loaded anew may differ in its last bits, and have one digest."""
    engine = Engine()
    engine.prompt()
    engine.ledger.hand_out("full", [1])
    engine.rows[0][1] += 1
    if again == "copied":
        engine.ledger.import_rows("a", "full", [5], 0, 4)
        engine.rows[0][1] = engine.rows[0][5]
        engine.ledger.copy("full", [5], [1])
    else:
        engine.ledger.import_rows("a", "full", [1], 0, 4)
    if again == "loaded and sealed":
        engine.scrub.import_rows("a", "full", [1], 0, 4, engine.scrub.export("full", [1], 0, 4))
    engine.step(6, [7], [1], 1, accepted=0)
    assert engine.ledger.violations() == []


def test_copies_have_the_checksums_of_what_they_are_copies_of():
    engine = Engine()
    engine.prompt()
    engine.rows[0][6] = engine.rows[0][1]
    engine.rows[1][6] = engine.rows[1][1]
    engine.scan[4] = engine.scan[1]
    engine.across[4] = engine.across[1]
    engine.ledger.copy("full", [1], [6])
    engine.ledger.copy("mamba", [1], [4])
    engine.rows[1][6, 2, 1, 1] += 1
    engine.scan[4, 3] += 1
    step = engine.step(6, [7], [4], 4)
    assert engine.ledger.violations()[0].slot == 4
    table = torch.tensor([[6, 2, 3], [0, 0, 0]])
    engine.scrub.compare(attrs.evolve(step, tables={"full": table}))
    (violation,) = engine.ledger.violations()
    assert (violation.layer, violation.position, violation.slot) == ("rows", 2, 26)


def test_rows_that_come_back_with_other_bytes():
    """Compared with what was written, also if the change came before they left."""
    engine = Engine()
    engine.prompt()
    engine.rows[0][1, 3, 0, 0] += 1
    sums = engine.scrub.export("full", [1], 0, 4)
    assert sums.shape == (1, 4)
    engine.ledger.admit("b", [1, 2, 3, 4, 5])
    engine.rows[0][5], engine.rows[1][5] = engine.rows[0][1], engine.rows[1][1]
    engine.ledger.import_rows("b", "full", [5], 0, 4)
    engine.scrub.import_rows("b", "full", [5], 0, 4, sums)
    (violation,) = engine.ledger.violations()
    assert (violation.kind, violation.found, violation.layer) == ("imported", "bytes", "rows")
    assert (violation.request, violation.position, violation.slot) == ("b", 3, 23)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda e: Engine(windows={"none": WINDOW}), LayerError),
        (lambda e: Engine(windows={"down": Window(2, 3)}), LayerError),
        (lambda e: Engine(windows={"down": Window(0, 6)}), LayerError),
        (lambda e: Engine(windows={"down": Window(0, 3, 3)}), LayerError),
        (lambda e: Engine(windows={"down": 3}), LayerError),
        (lambda e: Engine(windows={"rows": WINDOW}), LayerError),
        (lambda e: Window(0, 0), ConfigError),
        (lambda e: Engine(poison=["other"]), ConfigError),
        (lambda e: e.scrub.compare("step"), ConfigError),
        (lambda e: e.scrub.seal(e.drafted(None), ["x"]), AcceptanceError),
        (lambda e: e.scrub.seal(e.drafted(None), [1]), AcceptanceError),
        (lambda e: e.scrub.trace(e.drafted(None), [1.0], [0]), ConfigError),
        (lambda e: e.scrub.trace(e.drafted(None), torch.zeros(2), [0]), ConfigError),
        (lambda e: e.scrub.trace(e.drafted(None), torch.zeros(1).int(), [0]), ConfigError),
        (lambda e: e.scrub.trace(e.drafted(None), torch.zeros(1), [0.5]), ConfigError),
        (lambda e: e.scrub.export("none", [1], 0, 1), ConfigError),
        (lambda e: e.scrub.export("full", [9], 0, 1), ConfigError),
        (lambda e: e.scrub.export("full", [1], 0, 5), ConfigError),
        (lambda e: e.scrub.export("mamba", [9], 0, 1), ConfigError),
        (lambda e: e.scrub.import_rows("b", "full", [1], 0, 4), ConfigError),
        (lambda e: e.scrub.import_rows("a", "full", [1], 0, 4, torch.zeros(1, 4)), ConfigError),
        (lambda e: e.scrub.import_rows("a", "full", [1], 0, 4, [[1, 2]]), ConfigError),
    ],
)  # fmt: skip
def test_misuse_is_refused(call, error):
    engine = Engine()
    engine.prompt()
    with pytest.raises(error, match=r".+: .+; .+"):
        call(engine)


def _located(change):
    """Plant NaN before the second step of a request; returns the engine and what was found."""
    engine = Engine()
    engine.prompt()
    change(engine)
    outputs = torch.full((1, 5), torch.nan), torch.tensor([0])
    step = engine.step(6, [7], [1], 1, outputs=outputs, trace="locate")
    engine.scrub.locate(step, *outputs)
    return engine, engine.ledger.violations()


def test_a_nan_is_traced_to_its_row_without_poison():
    """The row of an earlier step, not those that it spoilt in this step; once."""

    def change(engine):
        engine.rows[1][1, 2, 1, 0] = torch.nan  # position 2, block 1
        engine.rows[0][2, 2] = torch.nan  # the step's own row, position 6

    engine, (bytes_, nan) = _located(change)
    assert (bytes_.found, bytes_.slot) == ("bytes", 6)  # every slot is compared here, before
    facts = nan.kind, nan.found, nan.request, nan.layer, nan.position, nan.slot, nan.step
    assert facts == ("changed", "nan", "a", "rows", 2, 6, 2)
    assert nan.expected == (1, 2, 3)
    assert engine.rows[1].isnan().any()


@pytest.mark.parametrize(
    ("plant", "place"),
    [
        (lambda engine: engine.rows[0][2, 2].fill_(torch.nan), ("full", "rows", 6, 10)),
        (lambda engine: engine.rows[1][2, 3].fill_(torch.nan), ("full", "rows", 7, 11)),
        (lambda engine: engine.rows[1][2, 2:].fill_(torch.nan), ("full", "rows", 7, 11)),
        (lambda engine: engine.scan[1, 3].fill_(torch.nan), ("mamba", "down", 5, 1)),
        (lambda engine: engine.rows[1][3].fill_(torch.nan), ("", None, 6, None)),
    ],
    ids=["own row", "masked row", "masked before own", "state", "out of reach"],
)
def test_a_nan_is_traced_to_whatever_the_step_may_have_read(plant, place):
    nan = _located(plant)[1][-1]
    assert (nan.kind, nan.found, nan.request) == ("changed", "nan", "a")
    assert (nan.group, nan.layer, nan.position, nan.slot) == place


def test_rows_with_a_nan_are_cleared_on_demand():
    """No row with a NaN is left in the request's blocks, and none else is touched."""

    def change(engine):
        engine.rows[1][1, 2] = torch.nan
        engine.rows[1][5, 2] = torch.nan  # of nobody

    engine = Engine()
    engine.prompt()
    change(engine)
    kept = engine.rows[0].clone()
    outputs = torch.full((1, 5), torch.nan), torch.tensor([0])
    step = engine.step(6, [7], [1], 1)
    engine.scrub.locate(step, *outputs, clear=True)
    assert not engine.rows[1][[1, 2, 3]].isnan().any()
    assert engine.rows[1][5, 2].isnan().all()
    assert not engine.rows[0][1, 2].any()
    kept[1, 2] = 0.0
    assert torch.equal(engine.rows[0], kept)
