"""How much a step does, and how often it waits for the device, because a connector moves blocks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from kvtxn.integrations.serving.ledger.handed_blocks import Handed
from transfer_rig import ROWS, TOKENS, come, kinds, load, rig

__all__ = ["rig"]


@pytest.fixture
def calls(rig, monkeypatch):
    """Counts calls that launch work, and copies to the host that wait, from now on."""
    counted = Counter()

    def count(owner, name):
        call = getattr(owner, name)

        def counting(*given, **named):
            counted[name] += 1
            return call(*given, **named)

        monkeypatch.setattr(owner, name, counting)

    for name in ("inspect", "identities", "own_words", "import_rows"):
        count(rig.ledger, name)
    count(rig.watch._blocks, "_checksums")
    for name in ("cpu", "tolist", "item", "nonzero"):
        count(torch.Tensor, name)
    return counted


@pytest.mark.parametrize("requests", [1, 3])
def test_blocks_that_leave_are_looked_at_together(rig, calls, requests):
    """However many requests they are of."""
    names = ["b", "c", "d"][:requests]
    for name in names:
        rig.ledger.admit(name, TOKENS[:9])
    calls.clear()
    rig.watch._export([Handed("group.0", [1, 2], 0, name) for name in names])
    assert calls["inspect"] == 1  # before the step goes on; their bytes are read later
    rig.watch.before_change(True, [])
    launched = {name: calls[name] for name in ("inspect", "identities", "_checksums", "own_words")}
    assert launched == {"inspect": 1, "identities": 1, "_checksums": 1, "own_words": 0}
    assert kinds(rig) == []


def test_blocks_that_come_are_waited_for_and_recorded_together(rig, calls):
    """For the bytes of a group's blocks, for the request's rows, and for their writer's."""
    rig.watch._export([Handed("group.0", [1, 2], 0, "a")])
    arrival = load(rig, 5, 6)
    come(rig, "c", [5, 6], TOKENS[:9], arrival)
    rig.cache[5], rig.cache[6] = rig.cache[1], rig.cache[2]
    calls.clear()
    rig.watch.forward(ROWS)
    assert (calls["_checksums"], calls["cpu"], calls["import_rows"]) == (1, 2, 1)
    assert kinds(rig) == []
