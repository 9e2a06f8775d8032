"""A toy engine drives the windows and the ledger as parts of one list, which joins the two."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import accumulate, pairwise

import attrs
import numpy
import pytest
import torch
from kvtxn.integrations.serving.eager_steps import EagerSteps
from kvtxn.integrations.serving.ledger.part import LedgerPart
from kvtxn.integrations.serving.ledger.watch import Watch
from kvtxn.integrations.serving.parts import Parts
from kvtxn.integrations.serving.step import Arrival, Changes, Room, Rows, States, known
from kvtxn.integrations.serving.windows_part import WindowsPart
from test_toy_engine import (
    Faulty,
    HandsABlockOutTwice,
    KeepsAStaleRow,
    LosesAWrite,
    StateOfAnother,
    TableOffByOne,
    check_caches,
    check_fault,
    check_texts,
    serve,
)
from torch import Tensor
from toy_engine import BLOCK, BLOCKS, RUNNING, Part, ToyEngine, ids_of
from toy_model import DIM, LONGEST, VOCABULARY, WIDTH, ToyModel

from kvtxn import KVTxnError, TransactionManager, attention
from kvtxn.audit import RowGroup, StateGroup
from kvtxn.executor import AttentionArgs
from kvtxn.layout import RowLayout

ROWS, HYBRID = ToyModel(("full",)), ToyModel(("full", "state"))


@attrs.define(eq=False)
class Noted:
    """Takes the place of a ledger in the engine: notes what the next step changes."""

    come: list[str] = attrs.field(factory=list)
    gone: list[str] = attrs.field(factory=list)
    given: list[tuple[str, int]] = attrs.field(factory=list)

    def admit(self, name, tokens) -> None:
        self.come.append(name)

    def release(self, name) -> None:
        (self.come.remove if name in self.come else self.gone.append)(name)

    def hand_out(self, group, blocks) -> None:
        self.given += [(group, block) for block in blocks]

    def publish(self, *rows) -> None:
        """The watch finds the blocks that a step fills by itself."""


@attrs.define(eq=False)
class Planned:
    """A step; see ``PlannedStep``."""

    parts: list[Part]
    read: Rows
    states: States | None
    inputs: list[Tensor] = attrs.field(factory=list)

    def rows(self):
        drafts = numpy.array([part.drafts for part in self.parts])
        lengths = numpy.array([len(part.tokens) for part in self.parts])
        return drafts if drafts.any() else None, lengths, drafts < 0

    def alike(self, rows) -> int:
        return 0

    def name(self) -> object:
        return None

    def outputs(self) -> Tensor:
        return torch.arange(len(self.read.tokens))


class Rowed:
    """What the engine brings for its windows; see ``WindowsReader``."""

    steps: EagerSteps | None = None

    def __init__(self, engine: EngineOfParts) -> None:
        self.engine = engine

    def open(self) -> EagerSteps:
        ref = attrs.evolve(self.engine.manager.layers["full"], group="group.0")
        manager = TransactionManager([ref], self.engine.manager.config)
        return self.engine.steps_of(manager, VOCABULARY)

    def slots(self, steps, inputs) -> Mapping[str, Tensor]:
        return self.engine.planned.read.slots


class Readers:
    """What the engine brings for its ledger; see ``LedgerReader``."""

    watch: Watch | None = None

    def __init__(self, engine: EngineOfParts, ready: str) -> None:
        self.engine, self.ready = engine, ready

    def open(self, is_ready) -> Watch:
        self.is_ready = is_ready
        rows = RowGroup("group.0", BLOCK, BLOCKS["full"], pool="blocks")
        states = {"group.1": StateGroup("group.1", BLOCKS["state"])}
        if "state" not in self.engine.free:
            states = {}
        room = Room(RUNNING, LONGEST, caches_prefixes=not states)
        return Watch({"group.0": rows}, room, 0, "log", states=states)

    def begin(self) -> None:
        """No state moves on the host's word."""

    def read(self, step: Planned, inputs) -> tuple[Rows, States | None]:
        return step.read, step.states

    def returning(self, name: str) -> Arrival:
        pytest.fail(f"the ledger has forgotten {name}")

    def sampled(self, ids: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        return (ids >= 0).sum(1), ids

    def mark(self, output, wrong) -> None:
        """Its scheduler contains nothing."""


class EngineOfParts(ToyEngine):
    """A toy engine that tells parts of its steps, and knows none of them.

    Its windows are over rows. A state is written once it is known which drafts stay; the prefix
    cache keeps none, so that a model with states has no hits.

    Args:
        model: as for ``ToyEngine``; so are ``policy``, ``seed`` and ``fails``.
        ready: see ``LedgerReader``.
    """

    steps_of = EagerSteps

    def __init__(self, model, policy, seed, fails=0.05, ready="forward") -> None:
        super().__init__(model, policy, seed, fails)
        self.following.remove()
        self.ledger = Noted()
        self.rowed, self.readers = Rowed(self), Readers(self, ready)
        self.parts = Parts([WindowsPart(self.rowed), LedgerPart(self.readers)])
        self.parts.caches_made()
        self.planned: Planned | None = None

    @property
    def steps(self) -> EagerSteps:
        return self.rowed.steps

    def changes(self) -> Changes:
        noted, self.ledger = self.ledger, Noted()
        come = [each for each in self.running if each.name in noted.come]
        names = self.model.layers
        theirs = {(name, block) for each in come for name in names for block in each.blocks[name]}
        given = [each for each in noted.given if each not in theirs]
        arrivals = [
            Arrival(
                *(each.name, list(each.tokens), [], {}, each.computed),
                [list(each.blocks[name]) for name in names],
            )
            for each in come
        ]
        grown = [[block for group, block in given if group == name] for name in names]
        return Changes(noted.gone, arrivals, grown, ())

    def offer(self, request) -> None:
        if "state" not in self.free:
            super().offer(request)

    # -- a step ------------------------------------------------------------------------------

    def step(self) -> None:
        tell = self.parts
        tell.step_begins()
        parts = self.plan()
        tell.requests_changed(self.changes)
        if not parts:
            return
        rows = self.rows_of(parts)
        self.planned = Planned(parts, rows, self.states_of(parts, rows))
        tell.planned(self.planned)
        self.readers.is_ready()
        try:
            tell.forward_begins(self.planned, {})
            logits = self.forward_of(self.planned)
            tell.forward_ended()
        except ArithmeticError as error:
            self.events["aborts"] += 1
            tell.failed(error)
            tell.raised(error)
            tell.step_failed()
            return
        tell.sampling_begins(lambda: (logits, None))
        new = self.verified(parts, logits.argmax(-1).tolist())
        ids = ids_of(new)
        tell.sampled(ids, None)
        tell.outcome_kept(ids, (ids >= 0).sum(1))
        for part, tokens in zip(parts, new, strict=True):
            self.keep(part, tokens)
        tell.step_ended(None)

    def rows_of(self, parts: list[Part]) -> Rows:
        """Describe the rows of a step."""
        lengths, drafts = zip(*((len(part.tokens), part.drafts) for part in parts), strict=True)
        first = torch.tensor([part.first for part in parts])
        return Rows(
            names=[part.request.name for part in parts],
            starts=torch.tensor([0, *accumulate(lengths)]),
            first=first,
            tokens=torch.tensor([token for part in parts for token in part.tokens]),
            drafts=torch.tensor(drafts) if any(drafts) else None,
            slots={"group.0": self.slots("full", parts)},
            tables={"group.0": self.tables("full", parts)},
            positions=torch.cat(
                [torch.arange(f, f + n) for f, n in zip(first.tolist(), lengths, strict=True)]
            ),
        )

    def states_of(self, parts: list[Part], rows: Rows) -> States | None:
        """Describe the states of a step; all are written once it is known which drafts stay."""
        if "state" not in self.free:
            return None
        blocks = self.states(parts)
        return States(
            slots={"group.1": torch.full_like(rows.tokens, -1)},
            sources={"group.1": torch.where(rows.first > 0, blocks, -1)},
            told=None,
            leaves={"group.1": blocks},
        )

    def forward_of(self, step: Planned) -> Tensor:
        """Run the model; settled rows are written, and drafts as the window wants it."""
        rows, ref = step.read, self.steps.manager.layers["full"]
        x = self.model.embed(rows.tokens, rows.positions)
        query, key, value = self.model.query_key_value("full", x)
        slots, fresh = rows.slots["group.0"], None
        if self.steps.deferring:
            slots, fresh = self.steps.without_drafts("group.0", slots), (key, value)
            self.steps.stage(ref, key, value)
        written = slots >= 0
        for cache, new in zip(self.caches["full"], (key, value), strict=True):
            cache.view(-1, 1, DIM)[slots[written]] = new[written]
        if self.random.random() < self.fails:
            raise ArithmeticError("the forward failed")
        lengths = rows.first + rows.starts.diff()
        args = AttentionArgs(block_table=rows.tables["group.0"], seq_lens=lengths, scale=DIM**-0.5)
        counts = rows.starts.diff().tolist()
        layout = RowLayout.build([0] * len(counts), counts, rows.starts.device)
        x = x + attention.attend(layout, ref.planes, fresh, query, args)[:, 0]
        return self.model.logits(x if step.states is None else self.convolved(step, x))

    def convolved(self, step: Planned, x: Tensor) -> Tensor:
        """Return the rows after the convolution; ``keep`` writes the states."""
        pasts = self.caches["state"][step.states.leaves["group.1"]]
        spans = [*pairwise(step.read.starts.tolist())]
        step.inputs = [torch.cat([past, x[i:j]]) for past, (i, j) in zip(pasts, spans, strict=True)]
        rows = [
            self.model.convolve(past, x[i:j]) for past, (i, j) in zip(pasts, spans, strict=True)
        ]
        return torch.cat(rows)

    def keep(self, part: Part, tokens: list[int]) -> None:
        if self.planned.states is not None:
            number = self.planned.parts.index(part)
            kept = len(part.tokens) - part.drafts + max(len(tokens) - 1, 0)
            block = self.planned.states.leaves["group.1"][number]
            self.caches["state"][block] = self.planned.inputs[number][kept : kept + WIDTH - 1]
        super().keep(part, tokens)


MODELS = [("deferred", ROWS), ("undo", ROWS), ("deferred", HYBRID)]


@pytest.mark.parametrize(("policy", "model"), MODELS)
@pytest.mark.parametrize("seed", [1, 2])
def test_drafts_change_nothing_and_no_alarm_is_false(policy, model, seed):
    """Texts and caches are those of decoding without drafts, as in an engine without parts."""
    engine = EngineOfParts(model, policy, seed)
    requests = []
    for _ in range(5):
        requests += serve(engine, 20)
        check_caches(engine)
    check_texts(engine, requests)
    watch = engine.readers.watch
    assert not watch.stopped
    assert watch.report() == []
    assert watch.ledger.counters()["kvtxn_audit_rows_checked_total"] > 1000
    if model is HYBRID:
        assert watch.ledger.counters()["kvtxn_audit_states_checked_total"] > 100
    assert min(engine.events[e] for e in ("aborts", "done")) > 0
    assert bool(engine.events["hits"]) == (model is ROWS)
    counted = engine.steps.manager.snapshot()
    assert counted["kvtxn_rows_committed_total"] > 50
    assert counted["kvtxn_rows_rejected_total"] > 50
    assert counted["kvtxn_fallbacks_total"] == 0


@pytest.mark.parametrize("ready", ["planned", "later"])
def test_a_step_may_be_read_before_its_forward_begins(ready):
    """Where an engine does not tell when it begins; nothing is counted otherwise."""
    engines = [EngineOfParts(ROWS, "deferred", 1, ready=each) for each in ("forward", ready)]
    for engine in engines:
        serve(engine, 40)
        assert engine.events["aborts"]
    one, other = (engine.readers.watch.counters() for engine in engines)
    assert one == other
    assert one["kvtxn_audit_rows_checked_total"] > 200


class OneDraftTooFew(EagerSteps):
    """Commits one draft less than was accepted, once it is told to."""

    plants = None

    def commit(self, sampled):
        super().commit(lambda: self.shortened(sampled()))

    def shortened(self, ids: Tensor) -> Tensor:
        can = (ids >= 0).sum(1) > 1  # a draft, and the next token
        if self.window is None or not self.plants(can.any()):
            return ids
        ids, request = ids.clone(), int(can.nonzero()[0])
        ids[request, 1:] = -1
        return ids


class CommitsTooFewThroughParts(Faulty):
    """The windows keep one draft less than the engine goes on with."""

    named = frozenset({("rejected", "full")})
    besides = frozenset({("state", "state"), ("state", "")})
    steps_of = OneDraftTooFew

    def step(self):
        self.steps.plants = self.plants
        super().step()


#: Where a draft too many is kept, its row is written again before it is read.
FAULTS = [
    pytest.param(fault, policy, model, id=f"{fault.__name__}-{policy}-{'-'.join(model.layers)}")
    for fault in (
        LosesAWrite,
        CommitsTooFewThroughParts,
        HandsABlockOutTwice,
        TableOffByOne,
        StateOfAnother,
        KeepsAStaleRow,
    )
    for policy, model in MODELS
    if model is HYBRID or fault is not StateOfAnother
]


@pytest.mark.parametrize(("fault", "policy", "model"), FAULTS)
def test_a_planted_fault_is_found_through_the_parts(fault, policy, model):
    """By the kind and in the group by which a ledger that follows windows finds it."""
    engine = type(fault.__name__, (fault, EngineOfParts), {})(model, policy, 4, fails=0)
    known, names = 0, {f"group.{number}": name for number, name in enumerate(model.layers)}

    def violations():
        nonlocal known
        report = engine.readers.watch.report()
        new, known = report[known:], len(report)
        return [(each["kind"], names[each["group"]]) for each in new]

    check_fault(engine, violations)


def test_an_outcome_that_an_engine_does_not_say_is_refused():
    """A window or a state that waited for it would lose its rows in silence."""
    counts = torch.tensor([2])
    assert known(counts) is counts
    with pytest.raises(KVTxnError, match="does not say what was sampled"):
        known(None)


# -- windows and ledger as one list joins them -------------------------------------------------


def too_few(model=ROWS):
    """An engine whose windows keep one draft too few once it is planted."""
    fault = (CommitsTooFewThroughParts, EngineOfParts)
    return type("TooFew", fault, {})(model, "deferred", 4, fails=0)


def kinds(engine):
    """The kind and the group of each violation so far; the audit has not ended."""
    watch = engine.readers.watch
    assert not watch.stopped
    return [(each["kind"], each["group"]) for each in watch.report()]


def run_until_planted(engine):
    """Serve until the fault is there, and some steps more."""
    for _ in range(100):
        serve(engine, 1)
        if engine.planted:
            return serve(engine, 3)
    pytest.fail("no fault was planted")


def test_new_caches_are_joined_anew():
    """The ledger follows the manager that there is: windows over old caches have gone."""
    engine = too_few()
    engine.named, engine.events["steps"] = frozenset(), -10
    serve(engine, 10)
    old = engine.steps.manager
    engine.parts.caches_dropped()
    for request in [*engine.running]:
        engine.leave(request)
    engine.snapshots.clear()
    engine.free["full"], engine.ledger = list(range(BLOCKS["full"])), Noted()
    engine.used.clear()
    engine.parts.caches_made()
    assert engine.steps.manager is not old
    assert kinds(engine) == []
    run_until_planted(engine)
    assert ("rejected", "group.0") in kinds(engine)


def test_windows_of_steps_that_nobody_watches_are_left_alone():
    """As while a watch has not begun, or while it is taken away for steps of no request."""
    engine = too_few()
    engine.events["steps"] = -1000
    serve(engine, 10)
    watch = engine.readers.watch
    engine.readers.watch = None
    before = engine.steps.manager.snapshot()
    serve(engine, 10)
    after = engine.steps.manager.snapshot()
    assert after["kvtxn_windows_total"] > before["kvtxn_windows_total"]
    assert after["kvtxn_hook_errors_total"] == 0
    assert not watch.stopped
    assert watch.report() == []


def test_a_ledger_without_windows_hears_what_was_sampled():
    """The list has nothing to join, as where another process has the windows."""
    engine = EngineOfParts(ROWS, "deferred", 1)
    ledger = LedgerPart(engine.readers)
    engine.parts = Parts([WindowsPart(engine.rowed), Parts([]), ledger])
    ledger.follow_windows(lambda: None)
    ledger.caches_made()
    check_texts(engine, serve(engine, 30))
    assert kinds(engine) == []
    assert engine.readers.watch.counters()["kvtxn_audit_rows_checked_total"] > 200


def test_windows_over_groups_that_the_ledger_lacks_end_the_audit_alone(caplog):
    """The log names the groups and what to do; texts are as before."""
    engine = EngineOfParts(ROWS, "deferred", 1)
    refs = [attrs.evolve(ref, group="pages") for ref in engine.steps.manager.layers.values()]
    engine.rowed.steps = EagerSteps(TransactionManager(refs, engine.manager.config), VOCABULARY)
    engine.rowed.slots = lambda steps, inputs: {"pages": engine.planned.read.slots["group.0"]}
    with caplog.at_level(logging.ERROR, logger="kvtxn"):
        check_texts(engine, serve(engine, 20))
    assert engine.readers.watch.stopped
    (line,) = [line for line in caplog.messages if "audit_inactive" in line]
    for word in ("pages", "group.0", "LayerRef.group"):
        assert word in line
