"""How often a step waits for the device because a connector moves blocks."""

from __future__ import annotations

import torch
from kvtxn.integrations.serving.ledger.transfers import Handed
from transfer_rig import ROWS, TOKENS, come, kinds, load, rig

__all__ = ["rig"]


def test_a_step_waits_for_the_device_once_however_much_a_connector_moves(rig, monkeypatch):
    """For the bytes of a group's blocks, and for the rows of each request that it loads for."""
    waits = []

    def counted(self, *more, own=torch.Tensor.cpu):
        waits.append(self.shape)
        return own(self, *more)

    hashes = rig.watch._checksums
    monkeypatch.setattr(
        rig.watch, "_checksums", lambda *more: (waits.append(more), hashes(*more))[1]
    )
    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    rig.ledger.admit("b", TOKENS[:9])
    one, other = Handed("group.0", [1], 0, "a"), Handed("group.0", [1, 2], 0, "b")
    rig.watch._export([one, other])
    assert len(waits) == 2  # the bytes, and whose they are
    waits.clear()
    come(rig, "c", [5, 6], TOKENS[:9], load(rig, 5, 6))
    rig.cache[5], rig.cache[6] = rig.cache[1], rig.cache[2]
    rig.watch.forward(ROWS)
    assert len(waits) == 3  # the bytes, the request's rows, and their writer's
    assert kinds(rig) == []
