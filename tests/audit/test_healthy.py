"""Nothing else is reported: engines without a fault, as Hypothesis makes them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from ledger_kit.engine import SmallEngine
from ledger_kit.life import GROUPS, live, new_engine, new_ledger, new_model, said
from ledger_kit.model import LedgerModel

from kvtxn.audit import Ledger, RowGroup, StateGroup


@pytest.mark.parametrize("name", GROUPS)
def test_a_long_life_without_a_fault(name):
    """Rows and states are counted as the model counts them, and nothing is found."""
    ledger, model = new_ledger(name), new_model(name)
    live(new_engine(SmallEngine, name, [ledger, model], seed=1), 150)
    assert said(ledger) == model.findings == []
    counts = ledger.counters()
    assert counts["kvtxn_audit_rows_checked_total"] == model.rows_checked > 1000
    assert counts["kvtxn_audit_states_checked_total"] == model.states_checked
    assert (model.states_checked > 0) == (name == "states")
    assert counts["kvtxn_audit_violations_total"] == 0
    assert counts["kvtxn_audit_steps_total"] == model.step > 100


#: Groups with long blocks, by the kind of engine.
LONG = {
    "plain": (RowGroup("full", 64, 700),),
    "sliding": (
        RowGroup("full", 64, 900, pool="pages"),
        RowGroup("sliding", 32, 900, window=300, pool="pages"),
    ),
    "shared": (RowGroup("full", 64, 700), RowGroup("reader", 64, 700, window=500, reads="full")),
    "rings": (
        RowGroup("ring", 64, 700, ring=1280, window=700),
        RowGroup("chunks", 64, 900, chunk=512),
    ),
    "states": (RowGroup("full", 64, 800, pool="pages"), StateGroup("mamba", 800, pool="pages")),
}


@pytest.mark.parametrize("name", LONG)
def test_long_contexts_without_a_fault(name):
    """A step reads thousands of rows at once, some of common beginnings; nothing is found."""
    ledger = Ledger(LONG[name], max_requests=24, max_length=2008)
    sizes = {"drafts": 4, "budget": 512, "vocabulary": 40, "max_length": 2000}
    engine = SmallEngine(LONG[name], [ledger], seed=1, **sizes)
    beginning = [engine.token() for _ in range(1000)]
    for number in range(12):
        engine.add([*beginning[: 90 * number], *(engine.token() for _ in range(50))])
        engine.step()
    assert said(ledger) == []
    assert ledger.counters()["kvtxn_audit_rows_checked_total"] > 10_000


@st.composite
def groups(draw):
    """One to three groups of rows, some of one pool, and states or none."""
    pool = draw(st.sampled_from([None, "pages"]))
    size = draw(st.integers(1, 5))
    made = []
    for index in range(draw(st.integers(1, 3))):
        sees = draw(st.sampled_from(["all", "window", "chunk", "ring"]))
        window, ring = draw(st.integers(1, 9)), None
        if sees == "ring":  # what the first query sees, and the rows written beside it
            ring = -(-(window + 12) // size) * size
        made.append(
            RowGroup(
                f"g{index}",
                size * draw(st.sampled_from([1, 2])) if sees != "ring" else size,
                80,
                window=window if sees in ("window", "ring") else None,
                chunk=window if sees == "chunk" else None,
                ring=ring,
                pool=pool,
            )
        )
    if draw(st.booleans()):
        made.append(StateGroup("states", 80, pool=pool))
    return made


@given(groups(), st.integers(0, 2**20), st.integers(0, 4), st.integers(1, 12))
@settings(max_examples=25)
def test_no_engine_without_a_fault_is_accused(made, seed, drafts, budget):
    ledger = Ledger(made, max_requests=16, max_length=80, journal=64)
    model = LedgerModel(made)
    engine = SmallEngine(made, [ledger, model], seed=seed, drafts=drafts, budget=budget)
    live(engine, 25)
    assert said(ledger) == model.findings == []
