"""Weights that change: rows of earlier epochs are counted by age, and alarm only if asked to."""

from __future__ import annotations

import pytest
import torch
from ledger_kit.engine import SmallEngine
from ledger_kit.life import (
    GROUPS,
    ages_of,
    live,
    new_engine,
    new_ledger,
    new_model,
    said,
)
from ledger_kit.mutants import MUTANTS

from kvtxn import ConfigError
from kvtxn.audit import Ledger, ReadAges, RowGroup, StateGroup, Step
from kvtxn.audit.books import AGES
from kvtxn.audit.identity_table import IdentityTable

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
ROWS = "kvtxn_audit_rows_read_by_age"


def ledger_of(**named):
    return Ledger([RowGroup("full", 4, 10)], max_requests=4, max_length=32, **named)


def run(ledger, request, first, tokens, table):
    """Compute a request's rows from ``first`` on; returns nothing, the ledger says the rest."""
    numbers = torch.tensor
    slots = [table[p // 4] * 4 + p % 4 for p in range(first, first + len(tokens))]
    step = Step(
        numbers([ledger.line(request)]), numbers([0, len(tokens)]), numbers([first]),
        numbers(tokens), {"full": numbers(slots)}, {"full": numbers([table])},
    )  # fmt: skip
    ledger.write_and_check(step)


def computed(**named):
    """Return a ledger in which blocks 1 and 2 have the rows of ``PROMPT``."""
    ledger = ledger_of(**named)
    ledger.admit("a", PROMPT)
    run(ledger, "a", 0, PROMPT, [1, 2, 3])
    return ledger


@pytest.mark.parametrize("stale", ["count", "alarm"])
def test_rows_of_what_earlier_weights_made_are_old(stale):
    """Rows that are computed now, of an output that an encoder made two epochs before."""
    ledger = computed(stale=stale)
    for _ in range(2):
        ledger.new_epoch()
    ledger.admit("b", PROMPT)
    run(ledger, "b", 0, PROMPT, [4, 5, 6])
    ledger.age({"full": torch.tensor([17, -1, 18, 400])}, 2)
    assert f"{ROWS}_2" not in ledger.counters()
    run(ledger, "b", 8, [19], [4, 5, 6])
    assert ledger.counters()[f"{ROWS}_2"] == 2
    found = [(each.kind, each.position, each.age) for each in ledger.violations()]
    assert found == ([("stale", 1, 2)] if stale == "alarm" else [])


@pytest.mark.parametrize("stale", ["count", "alarm"])
@pytest.mark.parametrize("name", GROUPS)
def test_the_model_counts_and_finds_the_same(name, stale):
    ages = 0
    for seed in range(2):
        ledger, model = new_ledger(name, stale=stale), new_model(name, stale)
        live(new_engine(SmallEngine, name, [ledger, model], seed=seed), 30, updates=0.2)
        assert said(ledger) == model.findings
        assert ages_of(ledger) == dict(model.ages)
        kinds = {finding.kind for finding in model.findings}
        assert kinds == ({"stale"} if stale == "alarm" and model.ages else set())
        ages += len(model.ages)
    assert ages


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if not m.contested])
def test_faults_are_found_beside_stale_rows(mutant):
    name = "states" if mutant.needs == "states" else "plain"
    ledger, model = new_ledger(name, stale="alarm"), new_model(name, "alarm")
    engine = new_engine(mutant, name, [ledger, model], seed=5)
    for _ in range(2):
        live(engine, 10, updates=0.2)
        assert said(ledger) == model.findings
        model.findings.clear()


def test_a_hit_on_rows_of_old_weights_is_counted_and_no_violation():
    ledger = computed()
    assert ROWS not in ledger.counters()  # no weights have changed
    ledger.new_epoch()
    ledger.admit("b", [*PROMPT, 19])
    run(ledger, "b", 8, [19], [1, 2, 4])
    assert ledger.violations() == []
    assert ledger.read_ages() == [ReadAges("b", {1: 8}, {}, {})]
    counters = ledger.counters()
    assert counters[f"{ROWS}_1"] == 8
    assert counters[f"{ROWS}_0"] == 9  # the first prompt's rows, and the new row
    assert counters[ROWS] == counters["kvtxn_audit_rows_checked_total"] == 17
    assert counters["kvtxn_audit_violations_total_stale"] == 0
    assert "kvtxn_audit_draft_rows_read_by_age_1" not in counters


def test_an_alarm_says_the_age_and_the_writer():
    ledger = computed(stale="alarm")
    ledger.new_epoch()
    ledger.new_epoch()
    ledger.admit("b", [*PROMPT, 19])
    run(ledger, "b", 8, [19], [1, 2, 4])
    first, second = ledger.violations()
    assert (first.kind, first.found, first.age, first.weights) == ("stale", "stale", 2, "target")
    assert (first.position, second.position, first.layer) == (0, 4, None)
    assert (first.written_request, first.written_step, first.request) == ("a", 1, "b")
    assert first.expected == first.written_for == (11,)
    assert "found stale, of target weights 2 epochs before, written in step 1" in str(first)
    run(ledger, "b", 9, [20], [1, 2, 4])
    assert ledger.violations() == []  # b was told


@pytest.mark.parametrize("stale", ["count", "alarm"])
def test_a_state_of_the_prefix_cache_is_as_stale_as_its_rows(stale):
    """It is copied out of the cache's block for the request that hits it, and read there."""
    ledger = Ledger([StateGroup("states", 10)], max_requests=4, max_length=32, stale=stale)

    def go_on(request, first, tokens, source, target):
        slots = torch.full((len(tokens),), -1)
        slots[-1] = target
        ledger.write_and_check(Step(
            torch.tensor([ledger.line(request)]), torch.tensor([0, len(tokens)]),
            torch.tensor([first]), torch.tensor(tokens), {"states": slots}, {},
            sources={"states": torch.tensor([source])},
        ))  # fmt: skip

    for name in ("a", "b"):
        ledger.admit(name, [*PROMPT, 19])
    go_on("a", 0, PROMPT, -1, 1)
    ledger.new_epoch()
    ledger.copy("states", [1], [3])
    go_on("b", 8, [19], 3, 3)
    assert ledger.read_ages() == [ReadAges("b", {}, {}, {1: 1})]
    found = [(each.kind, each.age, each.request, each.position) for each in ledger.violations()]
    assert found == ([("stale", 1, "b", 7)] if stale == "alarm" else [])


def test_rows_that_are_computed_again_and_caches_that_were_reset_are_not_stale():
    ledger = computed()
    ledger.new_epoch()
    ledger.admit("b", PROMPT)
    run(ledger, "b", 0, PROMPT, [1, 2, 4])
    ledger.reset()
    ledger.new_epoch()
    ledger.admit("b", PROMPT)
    run(ledger, "b", 0, PROMPT, [1, 2, 4])
    assert ledger.read_ages() == []
    assert ledger.violations() == []


def test_a_drafter_s_weights_have_epochs_of_their_own():
    ledger = computed(stale="alarm")
    ledger.new_epoch("drafter")
    ledger.new_epoch("drafter")
    ledger.admit("b", [*PROMPT, 19])
    run(ledger, "b", 8, [19], [1, 2, 4])
    assert {(v.age, v.weights) for v in ledger.violations()} == {(2, "drafter")}
    assert ledger.read_ages() == [ReadAges("b", {}, {2: 8}, {})]
    counters = ledger.counters()
    assert counters["kvtxn_audit_draft_rows_read_by_age_2"] == 8
    assert counters[f"{ROWS}_0"] == counters[ROWS]


def test_old_ages_share_the_last_label():
    ledger = computed()
    for _ in range(AGES + 5):
        ledger.new_epoch()
    run(ledger, "a", 8, [19], [1, 2, 3])
    assert ledger.counters()[f"{ROWS}_{AGES}+"] == 8
    assert ledger.read_ages()[0].as_dict()["rows"] == {f"{AGES}+": 8}


def test_rows_keep_their_epoch_outside():
    ledger = computed()
    ledger.new_epoch()
    digests = ledger.export("a", "full", [1, 2], 0, 8)
    table = IdentityTable(8)
    table.remember(torch.tensor([[5, 6]]), ledger.identities("full", ["a"], [0], [1]))
    ((known,),) = table.lookup(torch.tensor([[5, 6]]))
    ledger.new_epoch()
    ledger.admit("b", [*PROMPT, 19])
    ledger.hand_out("full", [5, 6, 7])
    ledger.import_rows("b", "full", [5, 6, 7], 0, 8, digests, known.origin(ledger.books.key))
    run(ledger, "b", 8, [19], [5, 6, 7])
    assert ledger.read_ages() == [ReadAges("b", {2: 8}, {}, {})]
    ledger.admit("c", [*PROMPT, 20])
    ledger.hand_out("full", [7, 8, 9])
    ledger.import_rows("c", "full", [7, 8, 9], 0, 8)  # nobody can tell by which weights
    run(ledger, "c", 8, [20], [7, 8, 9])
    assert [each.request for each in ledger.read_ages()] == ["b"]
    assert ledger.counters()["kvtxn_audit_rows_unverified_total"] == 8


def test_requests_that_ended_are_remembered_and_a_resumed_one_is_the_same():
    ledger = computed(capacity=2)
    ledger.new_epoch()
    for name in "bcd":
        ledger.admit(name, [*PROMPT, 19])
        run(ledger, name, 8, [19], [1, 2, 4])
        ledger.release(name)
    ledger.admit("d", [*PROMPT, 19])
    run(ledger, "d", 8, [19], [1, 2, 4])
    assert [(each.request, each.rows) for each in ledger.read_ages()] == [
        ("c", {1: 8}),
        ("d", {1: 16}),
    ]
    assert ledger.counters()[f"{ROWS}_1"] == 32  # b's, too
    ledger.restart()
    assert ledger.read_ages() == []
    assert ROWS not in ledger.counters()


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match=r"stale is not valid.*did you mean 'alarm'"):
        ledger_of(stale="alarms")
    with pytest.raises(ConfigError, match=r"weights are unknown.*did you mean 'drafter'"):
        ledger_of().new_epoch("draft")
    with pytest.raises(ConfigError, match="weights are unknown"):
        ledger_of().new_epoch(3)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_rows_of_which_it_was_told_that_they_are_stale_are_compared_as_before(backend):
    """A request goes on with stale rows, told once; another one takes its block, which is found."""
    ledger = computed(stale="alarm", backend=backend)
    ledger.new_epoch()
    run(ledger, "a", 8, [19], [1, 2, 3])
    assert {each.kind for each in ledger.violations()} == {"stale"}
    run(ledger, "a", 9, [20], [1, 2, 3])
    assert ledger.violations() == []
    assert ledger.counters()[f"{ROWS}_1"] == len(PROMPT)
    ledger.admit("b", [30, 31])
    ledger.hand_out("full", [1])
    run(ledger, "b", 0, [30, 31], [1])
    run(ledger, "a", 10, [21], [1, 2, 3])
    found = [(each.kind, each.request, each.position) for each in ledger.violations()]
    assert found == [("foreign", "a", 0), ("unwritten", "a", 2)]
    run(ledger, "a", 11, [22], [1, 2, 3])
    assert ledger.violations() == []
