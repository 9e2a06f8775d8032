"""Weights that change: told of or not, an epoch begins with the next step; silence is a finding."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from kvtxn import ConfigError
from kvtxn.audit import Key, Ledger, RowGroup, Step, WeightWatch

NONE = torch.zeros(0, dtype=torch.int64)
IDLE = Step(NONE, NONE.new_zeros(1), NONE, NONE, {})


@pytest.fixture
def ledger():
    return Ledger([RowGroup("full", 4, 10)], max_requests=4, max_length=32, backend="torch")


class Model(nn.Module):
    """Parameters of several forms and dtypes."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(300, 20).bfloat16())
        self.packed = nn.Parameter(torch.randn(20, 300).t(), requires_grad=False)
        self.part = nn.Parameter(torch.randn(40, 8)[:, :3])
        self.bytes = nn.Parameter(torch.arange(90, dtype=torch.uint8), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0))
        self.one = nn.Parameter(torch.tensor(2.0))
        self.elsewhere = nn.Parameter(torch.zeros(4, device="meta"))


def steps(ledger, watch, number):
    """Run steps of nobody; return the kinds and steps of what is found."""
    for _ in range(number):
        watch.begin_step()
        ledger.write(IDLE)
    return [(v.kind, v.step, v.weights) for v in ledger.violations()]


def test_a_request_with_hits_has_the_next_sample_taken_sooner(ledger):
    """So the change is seen before the rows are read; but not at each such request."""
    model = Model()
    watch = WeightWatch(ledger, {"target": model.parameters}, every=64)
    assert steps(ledger, watch, 7) == []
    model.one.data.add_(1)
    watch.begin_step(hits=True)  # the eighth
    ledger.write(IDLE)
    assert steps(ledger, watch, 3) == []
    watch.begin_step(hits=True)
    assert [v.step for v in ledger.violations()] == [12]
    assert epoch(ledger) == 1


def test_parameters_that_are_replaced_are_let_go(ledger):
    model = Model()
    watch = WeightWatch(ledger, {"target": model.parameters}, every=1)
    steps(ledger, watch, 1)
    model.matrix.data = model.matrix.data * 2
    assert steps(ledger, watch, 1) == [("weights", 2, "target")]
    gone = weakref.ref(model.matrix)
    model.matrix = nn.Parameter(model.matrix.data * 2)
    watch.changed()
    assert gone() is None
    assert steps(ledger, watch, 2) == []


def epoch(ledger):
    return ledger._state.epoch


@pytest.mark.parametrize("name", ["matrix", "packed", "part", "bytes", "one"])
def test_a_change_in_place_that_nobody_told_of_is_found_and_begins_an_epoch(ledger, name):
    model = Model()
    watch = WeightWatch(ledger, {"target": model.parameters}, every=4)
    assert steps(ledger, watch, 6) == []
    getattr(model, name).data.mul_(3)
    assert epoch(ledger) == 0
    assert steps(ledger, watch, 6) == [("weights", 9, "target")]
    assert epoch(ledger) == 1
    assert steps(ledger, watch, 9) == []
    assert ledger.counters()["kvtxn_audit_violations_total_weights"] == 1


def test_the_sentence_says_whose_weights_and_when(ledger):
    model = Model()
    watch = WeightWatch(ledger, {"target": Model().parameters, "drafter": model.parameters}, 1)
    steps(ledger, watch, 2)
    model.one.data.add_(1)
    watch.begin_step()
    (found,) = ledger.violations()
    assert str(found) == (
        "weights: in step 3 the drafter's weights had changed, and nobody had said so"
    )
    assert epoch(ledger) == 1 << 32


def test_what_is_told_is_one_epoch_with_the_next_step_and_no_finding(ledger):
    model = Model()
    watch = WeightWatch(ledger, {"target": model.parameters}, every=2)
    assert steps(ledger, watch, 3) == []
    for parameter in (model.matrix, model.one):  # one after the other
        parameter.data.add_(1)
        watch.changed()
    assert epoch(ledger) == 0
    assert steps(ledger, watch, 4) == []
    assert epoch(ledger) == 1
    model.matrix = nn.Parameter(model.matrix.data + 1)  # another object, as some loaders do it
    assert steps(ledger, watch, 40) == [("weights", 37, "target")]  # when they are listed anew
    watch.changed("drafter")  # of which it has no parameters
    assert steps(ledger, watch, 1) == []
    assert epoch(ledger) == 2 + (1 << 32)


def test_wrong_arguments_are_refused(ledger):
    for weights, every in (({"draft": list}, 4), ({}, 0), ({}, True), (["target"], 4)):
        with pytest.raises(ConfigError, match="WeightWatch"):
            WeightWatch(ledger, weights, every)
    with pytest.raises(ConfigError, match="unknown"):
        WeightWatch(ledger, {}).changed("adapter")


@pytest.mark.parametrize("told", [False, True])
def test_somebody_may_have_to_know_that_an_epoch_begins(ledger, told):
    """He is called before, and not in a step in which none begins."""
    model, calls = Model(), []
    watch = WeightWatch(ledger, {"target": model.parameters}, 1)

    def step():
        watch.begin_step(before=lambda: calls.append(epoch(ledger)))

    for _ in range(3):
        step()
    assert calls == []
    if told:
        watch.changed()
    else:
        model.one.data.add_(1)
    step()
    step()
    assert (calls, epoch(ledger)) == ([0], 1)


def test_processes_with_one_key_have_one_hash_of_the_same_weights():
    """For a store of identities: what each process has been told of counts for nothing."""
    key, model, other = Key.new(), Model(), Model()
    other.load_state_dict(model.state_dict())
    table = torch.arange(12.0).view(2, 6)

    def content(of, table=table, key=key, told=False):
        ledger = Ledger([RowGroup("full", 4, 10)], max_requests=4, max_length=32, key=key)
        watch = WeightWatch(ledger, {"target": of.parameters})
        if told:
            watch.changed()
            watch.begin_step()
        return watch.content([table])

    known = content(model)
    assert content(other) == content(other, told=True) == known
    assert content(other, table + 1) != known  # as of another RoPE
    assert content(model, key=Key.new()) != known
    other.one.data.add_(1)
    assert content(other) != known


def test_a_drafters_weights_count_where_they_compute_rows():
    key, model = Key.new(), Model()

    def content(drafts_by=None, **kwargs):
        ledger = Ledger([RowGroup("full", 4, 10)], max_requests=4, max_length=32, key=key)
        weights = {"target": model.parameters}
        if drafts_by is not None:
            weights["drafter"] = drafts_by.parameters
        return WeightWatch(ledger, weights).content(**kwargs)

    assert len({content(), content(Model()), content(Model())}) == 3
    assert len({content(each, drafter=False) for each in (Model(), Model())} | {content()}) == 1


def test_weights_that_cannot_be_read_have_no_hash(ledger):
    model = nn.Linear(4, 4, device="meta")
    assert WeightWatch(ledger, {"target": model.parameters}).content() is None
    assert WeightWatch(ledger, {}).content([torch.ones(4)]) is None
