"""``Ledger.take_back``: rows and states of a forward that failed are unwritten for every reader."""

from __future__ import annotations

import pytest
import torch

from kvtxn import ConfigError, LayerRef
from kvtxn.audit import Ledger, RecordingLedger, RowGroup, Scrub, StateGroup, Step

GROUPS = (RowGroup("a", 4, 8), StateGroup("s", 8))


def ledger_of(kind=Ledger, **named):
    made = kind(GROUPS, max_requests=4, max_length=30, **named)
    for name in "rt":
        made.admit(name, [5, 6, 7, 8, 9])
    return made


def step_of(ledger, name, first, count, *, source=-1, target=3, drafts=0):
    """A step of one request over blocks 1 and 2; its last state goes to block ``target``."""
    states = torch.full((count + 1,), -1)
    states[count - 1] = target
    return Step(
        lines=torch.tensor([ledger.line(name), -1]),
        starts=torch.tensor([0, count, count + 1]),
        first=torch.tensor([first, 0]),
        tokens=torch.tensor([*[5, 6, 7, 8, 9, 10][first : first + count], 1]),
        slots={"a": torch.tensor([*range(4 + first, 4 + first + count), 28]), "s": states},
        tables={"a": torch.tensor([[1, 2], [7, 7]])},
        drafts=torch.tensor([drafts, 0]),
        sources={"s": torch.tensor([source, -1])},
    )


def run(ledger, *given, **named):
    step = step_of(ledger, *given, **named)
    ledger.write_and_check(step)
    return step


def found(ledger):
    return [(v.kind, v.request, v.group, v.position) for v in ledger.violations()]


@pytest.mark.parametrize("named", [{"backend": "torch"}, {}, {"kind": RecordingLedger}])
def test_whoever_reads_them_is_told(named):
    """A request with the same tokens, which gets the blocks with what they hold."""
    ledger = ledger_of(**named)
    run(ledger, "r", 0, 3)
    ledger.take_back(run(ledger, "r", 3, 1, source=3))
    ledger.release("r")
    run(ledger, "t", 4, 1, source=3, target=4)
    assert sorted(found(ledger)) == [("state", "t", "s", 3), ("unwritten", "t", "a", 3)]
    assert int(ledger.books.words[28]) == 0  # padding wrote nothing, and took nothing back


def test_rows_that_are_computed_again_are_right():
    ledger = ledger_of()
    ledger.take_back(run(ledger, "r", 0, 4))
    run(ledger, "t", 0, 4)
    run(ledger, "t", 4, 1, source=3, target=4)
    assert found(ledger) == []


@pytest.mark.parametrize("named", [{"backend": "torch"}, {}])
@pytest.mark.parametrize("drafts", [0, 1])
def test_what_was_told_of_a_request_is_not_told_again(named, drafts):
    """A request that begins anew, at an earlier position, has its reads compared once more."""
    ledger = ledger_of(**named)
    run(ledger, "r", 0, 3)
    ledger.hand_out("a", [1])
    run(ledger, "r", 3, 1, source=3)
    assert found(ledger) == [("unwritten", "r", "a", 0)]
    ledger.take_back(run(ledger, "r", 4, 1 + drafts, source=3, target=4, drafts=drafts))
    run(ledger, "r", 4, 1, source=3, target=4)
    assert found(ledger) == []
    run(ledger, "r", 3, 1, source=3)
    assert ("unwritten", "r", "a", 0) in found(ledger)


def test_its_drafts_wait_for_nobody():
    ledger = ledger_of()
    run(ledger, "r", 0, 5)
    ledger.take_back(run(ledger, "r", 5, 1, source=3, target=4, drafts=1))
    run(ledger, "t", 0, 5)
    assert ledger.unresolved == 0
    assert found(ledger) == []


def test_their_checksums_are_gone():
    """The bytes of rows that were there before are compared with nothing."""
    ledger = ledger_of()
    cache = torch.ones(8, 2, 4, 1, 2)
    scrub = Scrub(ledger, [LayerRef("layer", cache[:, 0], cache[:, 1], group="a")], every=1)
    step = run(ledger, "r", 0, 4)
    scrub.seal(step)
    assert bool(scrub.books.seals[4:8].all())
    ledger.take_back(run(ledger, "r", 0, 4))
    assert not bool(scrub.books.seals[4:8].any())


def test_a_recording_has_them_empty():
    ledger = ledger_of(RecordingLedger)
    step = run(ledger, "r", 0, 4)
    ledger.take_back(step)
    recording = ledger.recording()
    runs = recording["runs"]
    last = runs[-14:-7] if runs[-5] else runs[-7:]
    assert recording["happenings"][last[1]] == "handed_out"
    assert last[3:5] == [4, 4]


def test_what_is_no_step_is_refused():
    with pytest.raises(ConfigError, match="take_back"):
        ledger_of().take_back("the last one")
