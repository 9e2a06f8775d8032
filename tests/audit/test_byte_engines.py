"""Engines with caches: what changes bytes is found with slot and layer, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_kit.bytes import BYTE_MUTANTS, ByteEngine
from ledger_kit.life import GROUPS, MAX_LENGTH, live, new_ledger

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8]


def engine_of(engine, name, seed, **named):
    ledger = new_ledger(name)
    return engine(GROUPS[name], ledger, seed=seed, max_length=MAX_LENGTH, **named)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("every", [1, 7])
def test_a_long_life_without_a_fault(name, every):
    engine = engine_of(ByteEngine, name, 5, every=every)
    live(engine, 30)
    assert engine.ledgers[0].violations() == []
    assert engine.scrub.compared > 700 / every


@given(
    st.sampled_from(sorted(GROUPS)), st.sampled_from(DTYPES), st.integers(0, 2**20),
    st.integers(1, 5), st.integers(0, 4), st.booleans(),
)  # fmt: skip
@settings(max_examples=15)
def test_no_engine_without_a_fault_is_accused(name, dtype, seed, every, drafts, poison):
    engine = engine_of(
        ByteEngine, name, seed, every=every, dtype=dtype, drafts=drafts, poison=poison
    )
    live(engine, 20)
    assert engine.ledgers[0].violations() == []


def fits(mutant, name):
    return mutant.needs != "whole" or name in ("plain", "shared", "states")


CASES = [(m, name) for m in BYTE_MUTANTS for name in GROUPS if fits(m, name)]


@pytest.mark.parametrize(("mutant", "name"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_changed_bytes_are_found_and_named(mutant, name):
    """Each report is of a slot and a layer that were harmed; no slot is reported twice for one."""
    for seed in range(30):
        engine = engine_of(mutant, name, seed)
        live(engine, 40)
        found = engine.ledgers[0].violations()
        for violation in found:
            assert violation.kind in mutant.kinds
            assert violation.found == mutant.found
            assert violation.request is not None
            if mutant.found == "bytes":
                assert (violation.group, violation.slot, violation.layer) in engine.harmed
        assert len(found) <= len(engine.harmed)
        if found:
            return
    pytest.fail(f"not found, {len(engine.harmed)} faults")
