"""The state table: its shape, its rules, and its picture."""

from __future__ import annotations

import pytest

from kvtxn.window_transitions import FINAL, TRANSITIONS, Event, WindowState, allowed, as_markdown


def test_names_are_the_contracts():
    """The seven states of the contract, no more."""
    assert {state.name for state in WindowState} == {
        "OPEN", "STAGED", "COMMITTED", "ABORTED", "DIRECT", "FELL_BACK", "FAILED",
    }  # fmt: skip


@pytest.mark.parametrize("state", sorted(FINAL, key=lambda s: s.name))
def test_final_states_allow_nothing(state):
    """A window is single-use."""
    assert state.is_final
    assert not any(allowed(state, event) for event in Event)


def test_commit_needs_every_layer():
    """COMMITTED is reached from STAGED alone."""
    sources = [pair for pair, target in TRANSITIONS.items() if target is WindowState.COMMITTED]
    assert sources == [(WindowState.STAGED, Event.COMMIT)]


def test_direct_never_claims_more_than_falling_back():
    """Once rows go straight through, neither COMMITTED nor ABORTED can be claimed."""
    ends = {t for (s, _), t in TRANSITIONS.items() if s is WindowState.DIRECT}
    assert ends == {WindowState.DIRECT, WindowState.FELL_BACK, WindowState.FAILED}


def test_every_state_can_be_reached():
    """No state is a dead letter."""
    reached = {WindowState.OPEN}
    for _ in WindowState:
        reached |= {target for (source, _), target in TRANSITIONS.items() if source in reached}
    assert reached == set(WindowState)


def test_markdown_has_a_cell_for_every_pair():
    """The page's table is generated from the data."""
    lines = as_markdown().splitlines()
    assert len(lines) == len(WindowState) + 2
    assert all(line.count("|") == len(Event) + 2 for line in lines)
    assert "| STAGED | - | - | COMMITTED | ABORTED | DIRECT | FAILED |" in lines
