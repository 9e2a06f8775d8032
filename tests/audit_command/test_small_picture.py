"""The small picture: the steps that show most, drawn as they were."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from kvtxn.integrations.audit_command import svg
from ledger_kit.engine import SmallEngine

from kvtxn.audit import RecordingLedger, RowGroup

GROUPS = (RowGroup("group.0", 16, 40),)


@pytest.fixture(scope="module")
def recording():
    """One request of a small engine that speculates, twenty steps long."""
    ledger = RecordingLedger(GROUPS, max_requests=4, max_length=200)
    engine = SmallEngine(GROUPS, [ledger], seed=3, max_length=150, vocabulary=2)
    engine.add([1] * 10)
    for _ in range(20):
        engine.step()
    return ledger.recording()


@pytest.mark.parametrize("restores", [False, True])
def test_an_excerpt_has_drafts_of_both_ends(recording, restores):
    found = svg.excerpt(recording, restores=restores)
    states = list(found.cells.values())
    assert {"durable", "draft", "taken back" if restores else "rejected"} == {*states}
    assert found.slots == sorted(found.slots)
    assert all(found.first <= time // 2 < found.first + 7 for time, _ in found.cells)
    for time, slot in found.fresh:
        assert found.cells[time, slot] == "durable"


@pytest.mark.parametrize("waits", [False, True])
def test_it_is_drawn_as_xml(recording, waits):
    """A cell per slot and time, a cross per rejected draft of a window; a title for all."""
    found = svg.excerpt(recording, restores=waits)
    text = svg.draw(found, title="Drafts & slots", waits=waits)
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") == "Drafts & slots"
    legend = 2 if waits else 3
    rects = [node for node in root.iter() if node.tag.endswith("rect")]
    assert len(rects) == len(found.slots) * 2 * 7 + legend
    crosses = [node for node in root.iter() if node.text == "\u00d7"]
    lost = sum(state == "taken back" for state in found.cells.values())
    assert len(crosses) == (lost + 1 if waits else 0)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_no_drafts_no_picture():
    ledger = RecordingLedger(GROUPS, max_requests=4, max_length=200)
    with pytest.raises(ValueError, match="no request has drafts"):
        svg.excerpt(ledger.recording(), restores=True)
