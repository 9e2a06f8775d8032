"""Random histories of a connector: described together, blocks tell what they tell when at once."""

from __future__ import annotations

from functools import partial

from kvtxn.integrations.serving.ledger import block_identities
from transfer_toy import Toy

from kvtxn.audit import Key
from kvtxn.audit.identity_table import IdentityTable


def found(seed, key):
    """What the ledger says of a history, and what bytes its table knows; without step numbers."""
    toy = Toy(seed, key)
    for _ in range(40):
        toy.step()
    report = [
        {name: what for name, what in each.items() if name != "written_step"}
        for each in toy.watch.report()
    ]
    entries = toy.transfers._blocks._table._entries
    entries = entries[entries[:, :, 7] != 0].tolist()
    known = sorted((a, b, at % 2**32, *words) for a, b, at, *words in entries)
    return report, toy.watch.counters(), known


def test_it_does_not_matter_when_blocks_are_described(monkeypatch):
    """The violations are the same, the rows that nobody vouches for, and what is remembered."""
    monkeypatch.setattr(block_identities, "IdentityTable", partial(IdentityTable, 4096))
    key, errors = Key.new(), 0
    for seed in range(5):
        together = found(seed, key)
        with monkeypatch.context() as at_once:
            at_once.setattr(block_identities, "_AT_ONCE", 0)
            assert found(seed, key) == together
        errors += len(together[0])
    assert errors
