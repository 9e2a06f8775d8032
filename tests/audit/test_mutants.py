"""Each kind can be found: engines with a planted fault; the ledger says what the model says."""

from __future__ import annotations

import attrs
import pytest
from ledger_kit.life import GROUPS, live, new_engine, new_ledger, new_model, said
from ledger_kit.mutants import MUTANTS


def fits(mutant, name):
    """Tell whether the fault can show in an engine of these groups."""
    states, ring = name == "states", name == "rings"
    if mutant.needs == "states":
        return states
    if mutant.needs == "whole":
        return name in ("plain", "shared")
    return not ((states or ring) and mutant.__name__ in NEEDS_CACHING)


def without_writer(finding):
    return attrs.evolve(finding, writer=None, written_step=None)


NEEDS_CACHING = ("HashesTooFewTokens", "PublishesDrafts", "CountsABlockAsLoaded")
CASES = [(m, name) for m in MUTANTS for name in GROUPS if fits(m, name)]


@pytest.mark.parametrize(("mutant", "name"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_a_fault_is_found_and_named(mutant, name):
    kinds = set()
    for seed in range(20):
        ledger, model = new_ledger(name), new_model(name)
        engine = new_engine(mutant, name, [ledger, model], seed=seed)
        for _ in range(6):
            live(engine, 10)
            found, expected = said(ledger), model.findings
            kinds |= {finding.kind for finding in found}
            if mutant.contested:
                found, expected = [without_writer(f) for f in found], map(without_writer, expected)
            assert found == [*expected]
            model.findings.clear()
        if kinds & mutant.kinds and engine.faults:
            return
    pytest.fail(f"not found: {kinds}, {engine.faults} faults")
