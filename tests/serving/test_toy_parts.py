"""A toy engine drives the parts that vLLM's runner on a CPU has: the windows and the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from types import SimpleNamespace

import attrs
import numpy
import pytest
import torch
from kvtxn.integrations.serving.eager_steps import EagerSteps
from kvtxn.integrations.serving.ledger.watch import Watch
from kvtxn.integrations.serving.parts import Parts
from kvtxn.integrations.serving.step import Arrival, Changes, PlannedStep, Room, Rows, known
from kvtxn.integrations.vllm_plugin.audit.ledger_v1 import LedgerV1
from kvtxn.integrations.vllm_plugin.cpu.windows import Windows
from test_toy_engine import check_caches, check_texts, serve
from torch import Tensor
from toy_engine import BLOCK, BLOCKS, RUNNING, Part, ToyEngine, ids_of
from toy_model import DIM, LONGEST, VOCABULARY, ToyModel

from kvtxn import KVTxnError, attention
from kvtxn.audit import RowGroup
from kvtxn.executor import AttentionArgs

MODEL, GROUP = ToyModel(("full",)), "group.0"


@attrs.define(eq=False)
class Noted:
    """Takes the place of a ledger in the engine: notes what the next step changes."""

    come: list[str] = attrs.field(factory=list)
    gone: list[str] = attrs.field(factory=list)
    given: list[int] = attrs.field(factory=list)

    def admit(self, name, tokens) -> None:
        self.come.append(name)

    def release(self, name) -> None:
        (self.come.remove if name in self.come else self.gone.append)(name)

    def hand_out(self, group, blocks) -> None:
        self.given += blocks

    def publish(self, *rows) -> None:
        """The watch finds the blocks that a step fills by itself."""


@attrs.define(eq=False)
class Planned:
    """A step; see ``PlannedStep``."""

    parts: list[Part]
    read: Rows

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


class EngineOfParts(ToyEngine):
    """A toy engine that tells parts of its steps, and knows none of them."""

    def __init__(self, policy: str, seed: int, fails: float = 0.05) -> None:
        super().__init__(MODEL, policy, seed, fails)
        self.following.remove()
        self.ledger = Noted()
        self.steps = EagerSteps(self.manager, VOCABULARY)
        self.runner = SimpleNamespace(
            kvtxn=self.steps, kvtxn_audit=None, kvtxn_config=self.manager.config
        )
        self.runner.kvtxn_tell = lambda tell: self.runner.kvtxn_audit.hear(tell)
        self.parts = Parts([Windows(self.runner, self), LedgerV1(self.runner, self)])
        self.runner.kvtxn_audit = self.open()
        self.planned: Planned | None = None

    # -- readers of the parts ----------------------------------------------------------------

    def slots_of_step(self) -> Mapping[str, Tensor]:
        return {"full": self.planned.read.slots[GROUP]}

    def open(self) -> Watch:
        group = RowGroup(GROUP, BLOCK, BLOCKS["full"], pool="blocks")
        return Watch({GROUP: group}, Room(RUNNING, LONGEST, True), 0, "log")

    def begin(self) -> None:
        """No state moves on the host's word."""

    def tell_forward(self, step: PlannedStep, inputs, watch: Watch) -> None:
        watch.forward(step.read, pytest.fail)

    def tell_sampled(self, ids: Tensor, watch: Watch) -> None:
        watch.sampled((ids >= 0).sum(1), ids)

    def changes(self) -> Changes:
        noted, self.ledger = self.ledger, Noted()
        come = [each for each in self.running if each.name in noted.come]
        theirs = {block for request in come for block in request.blocks["full"]}
        arrivals = [
            Arrival(each.name, list(each.tokens), [], {}, each.computed, [each.blocks["full"]])
            for each in come
        ]
        return Changes(noted.gone, arrivals, [[b for b in noted.given if b not in theirs]], ())

    # -- a step ------------------------------------------------------------------------------

    def step(self) -> None:
        tell = self.parts
        tell.step_begins()
        parts = self.plan()
        tell.requests_changed(self.changes)
        if not parts:
            return
        self.planned = Planned(parts, self.read(parts))
        tell.planned(self.planned)
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
        tell.sampled(ids_of(new), None)
        for part, tokens in zip(parts, new, strict=True):
            self.keep(part, tokens)
        tell.step_ended(None)

    def read(self, parts: list[Part]) -> Rows:
        """Describe the rows of a step."""
        lengths, drafts = zip(*((len(part.tokens), part.drafts) for part in parts), strict=True)
        first = torch.tensor([part.first for part in parts])
        return Rows(
            names=[part.request.name for part in parts],
            starts=torch.tensor([0, *accumulate(lengths)]),
            first=first,
            tokens=torch.tensor([token for part in parts for token in part.tokens]),
            drafts=torch.tensor(drafts) if any(drafts) else None,
            slots={GROUP: self.slots("full", parts)},
            tables={GROUP: self.tables("full", parts)},
            positions=torch.cat(
                [torch.arange(f, f + n) for f, n in zip(first.tolist(), lengths, strict=True)]
            ),
        )

    def slots(self, first, parts=None):
        """Find the slots of a window, for its part; or, as the toy engine has it, of rows."""
        return self.slots_of_step() if parts is None else super().slots(first, parts)

    def forward_of(self, step: Planned) -> Tensor:
        """Run the model; settled rows are written, and drafts as the window wants it."""
        rows, ref = step.read, self.manager.layers["full"]
        x = self.model.embed(rows.tokens, rows.positions)
        query, key, value = self.model.query_key_value("full", x)
        slots, fresh = rows.slots[GROUP], None
        if self.steps.deferring:
            slots, fresh = self.steps.without_drafts("full", slots), (key, value)
            self.steps.stage(ref, key, value)
        written = slots >= 0
        for cache, new in zip(self.caches["full"], (key, value), strict=True):
            cache.view(-1, 1, DIM)[slots[written]] = new[written]
        if self.random.random() < self.fails:
            raise ArithmeticError("the forward failed")
        lengths = rows.first + rows.starts.diff()
        args = AttentionArgs(block_table=rows.tables[GROUP], seq_lens=lengths, scale=DIM**-0.5)
        layout = self.steps.batch_layout(rows.starts)
        return self.model.logits(x + attention.attend(layout, ref.planes, fresh, query, args)[:, 0])


@pytest.mark.parametrize("policy", ["deferred", "undo"])
@pytest.mark.parametrize("seed", [1, 2])
def test_drafts_change_nothing_and_no_alarm_is_false(policy, seed):
    """Texts and caches are those of decoding without drafts, as in an engine without parts."""
    engine = EngineOfParts(policy, seed)
    requests = []
    for _ in range(5):
        requests += serve(engine, 20)
        check_caches(engine)
    check_texts(engine, requests)
    watch = engine.runner.kvtxn_audit
    assert not watch.stopped
    assert watch.report() == []
    assert watch.ledger.counters()["kvtxn_audit_rows_checked_total"] > 1000
    assert min(engine.events[e] for e in ("hits", "aborts", "done")) > 0
    counted = engine.manager.snapshot()
    assert counted["kvtxn_rows_committed_total"] > 50
    assert counted["kvtxn_rows_rejected_total"] > 50
    assert counted["kvtxn_fallbacks_total"] == 0


def test_a_fault_of_the_engine_is_found_through_the_parts():
    """It takes the row of a rejected draft for that of the token in its place."""
    engine = EngineOfParts("deferred", 3, fails=0)
    keep = engine.keep

    def wrong(part, tokens):
        keep(part, tokens)
        request = part.request
        if engine.planted is False and request in engine.running and 0 < len(tokens) <= part.drafts:
            engine.planted = True
            request.tokens.append(MODEL.text(request.prompt, 40)[len(request.tokens)])
            request.computed += 1

    serve(engine, 20)
    engine.planted, engine.keep = False, wrong
    serve(engine, 10)
    found = engine.runner.kvtxn_audit.report()
    assert engine.planted
    assert {each["kind"] for each in found} >= {"rejected"}
    assert {each["kind"] for each in found} <= {"rejected", "published"}


def test_an_outcome_that_an_engine_does_not_say_is_refused():
    """A window or a state that waited for it would lose its rows in silence."""
    counts = torch.tensor([2])
    assert known(counts) is counts
    with pytest.raises(KVTxnError, match="does not say what was sampled"):
        known(None)
