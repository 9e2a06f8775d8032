"""Wrong arguments of ``Ledger``, ``Scrub`` and ``compare_ranks`` meet kvtxn's own errors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kvtxn import CapacityError, ConfigError, KVTxnError, LayerError, LayerRef
from kvtxn.audit import (
    Key,
    Ledger,
    RowGroup,
    Scrub,
    StateGroup,
    Window,
    compare_ranks,
)

GROUPS = (RowGroup("full", 4, 6), StateGroup("mamba", 5))
PRINTS = {1: {"full": 5, "mamba": 6}}
OTHER = {1: {"full": 7, "mamba": 6}}


def ledger(groups=GROUPS, **named):
    return Ledger(groups, **{"max_requests": 2, "max_length": 24, **named})


def layer(name="l", blocks=6, size=4, group="full", device="cpu"):
    cache = torch.zeros(blocks, size, 2, 8, device=device)
    return LayerRef(name, cache, cache.clone(), group=group)


def two_scrubs():
    one = ledger()
    Scrub(one, [layer()])
    Scrub(one, [layer("other")])


WRONG = {
    "a device beyond numbers": (lambda: ledger(device=2**64), ConfigError),
    "a device that is none": (lambda: ledger(device="nope"), ConfigError),
    "a device that is no name": (lambda: ledger(device=3.5), ConfigError),
    "no device": (lambda: ledger(device=None), ConfigError),
    "a key that is text": (lambda: ledger(key="secret"), ConfigError),
    "a key that is 0": (lambda: ledger(key=0), ConfigError),
    "a secret that is no text": (lambda: Key.derived(b"secret"), ConfigError),
    "no groups": (lambda: ledger(None), ConfigError),
    "a group alone": (lambda: ledger(GROUPS[0]), ConfigError),
    "groups by name": (lambda: ledger({"full": GROUPS[0]}), ConfigError),
    "books without end": (lambda: ledger([RowGroup("a", 2**20, 2**30)]), CapacityError),
    "a scrub of no ledger": (lambda: Scrub("ledger", [layer()]), ConfigError),
    "two scrubs": (two_scrubs, ConfigError),
    "layers that are none": (lambda: Scrub(ledger(), None), ConfigError),
    "a layer alone": (lambda: Scrub(ledger(), layer()), ConfigError),
    "a layer that is a number": (lambda: Scrub(ledger(), [1]), LayerError),
    "no layers": (lambda: Scrub(ledger(), []), LayerError),
    "a layer twice": (lambda: Scrub(ledger(), [layer(), layer()]), LayerError),
    "a layer elsewhere": (lambda: Scrub(ledger(device="meta", backend="torch"), [layer()]),
                          LayerError),
    "blocks of 3 rows": (lambda: Scrub(ledger(), [layer(blocks=8, size=3)]), LayerError),
    "blocks of 8 rows": (lambda: Scrub(ledger(), [layer(blocks=3, size=8)]), LayerError),
    "rows for states": (lambda: Scrub(ledger(), [layer(size=1, group="mamba")]), LayerError),
    "states for rows": (
        lambda: Scrub(ledger(), [LayerRef.recurrent("s", torch.zeros(24, 3), group="full")]),
        LayerError,
    ),
    "none in so many": (lambda: Scrub(ledger(), [layer()], every=0), ConfigError),
    "one in True": (lambda: Scrub(ledger(), [layer()], every=True), ConfigError),
    "poison that is a name": (lambda: Scrub(ledger(), [layer()], poison="full"), ConfigError),
    "poison that is a number": (lambda: Scrub(ledger(), [layer()], poison=5), ConfigError),
    "poison in lists": (lambda: Scrub(ledger(), [layer()], poison=[["full"]]), ConfigError),
    "windows in a list": (lambda: Scrub(ledger(), [layer()], windows=[1]), ConfigError),
    "a window of text": (lambda: Window("x", 3), ConfigError),
    "bytes of no group": (lambda: Scrub.num_bytes(GROUPS, {"zz": 1}, 3), ConfigError),
    "bytes of text": (lambda: Scrub.num_bytes(GROUPS, {"full": "x"}, 3), ConfigError),
    "bytes of nobody": (lambda: Scrub.num_bytes(GROUPS, {"full": 1}, None), ConfigError),
    "extras that are a number": (lambda: ledger().admit("a", [1], extras=3), ConfigError),
    "extras without order": (lambda: ledger().admit("a", [1], extras={1, 2}), ConfigError),
    "extras of text": (lambda: ledger().admit("a", [1], extras=["x"]), ConfigError),
    "extras of halves": (lambda: ledger().admit("a", [1], extras=[0.5]), ConfigError),
    "extras beyond 64 bits": (lambda: ledger().admit("a", [1], extras=[2**64]), ConfigError),
    "embedded in a list": (lambda: ledger().admit("a", [1], embedded=[1]), ConfigError),
    "tokens without values": (
        lambda: ledger().admit("a", torch.zeros(2, dtype=torch.int64, device="meta")), ConfigError,
    ),
    "a list released": (lambda: ledger().release(["a"]), ConfigError),
    "the line of a list": (lambda: ledger().line(["a"]), ConfigError),
    "a group that is a list": (lambda: ledger().hand_out(["full"], [1]), ConfigError),
    "ranks that are none": (lambda: compare_ranks(None), ConfigError),
    "one rank's prints": (lambda: compare_ranks(PRINTS), ConfigError),
    "ledgers": (lambda: compare_ranks([ledger()]), ConfigError),
    "a rank of None": (lambda: compare_ranks([None, PRINTS]), ConfigError),
    "prints without groups": (lambda: compare_ranks([{1: 5}, {1: 6}]), ConfigError),
    "prints of text": (lambda: compare_ranks([{1: {"full": "5"}}]), ConfigError),
    "steps of text": (lambda: compare_ranks([{"one": {"full": 5}}]), ConfigError),
    "a ledger and None": (lambda: ledger().compare_ranks(None), ConfigError),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_in_a_sentence(name):
    """The operation, what was expected and got, and a next step."""
    call, error = WRONG[name]
    with pytest.raises(error) as raised:
        call()
    told = raised.value
    assert isinstance(told, KVTxnError)
    assert told.operation
    assert told.problem
    assert told.hint
    assert told.got is not None or "not admitted" in str(told)
    assert "TxnConfig" not in str(told)


def test_fingerprints_may_go_through_json():
    """JSON makes text of steps; a rank may send its own as they are."""
    sent = json.loads(json.dumps(OTHER))
    for ranks in ([PRINTS, sent], [json.loads(json.dumps(PRINTS)), sent], [PRINTS, OTHER]):
        right, (wrong,) = compare_ranks(ranks)
        assert (right, wrong.step, wrong.group) == ([], 1, "full")


def test_extras_may_be_arrays():
    made = ledger()
    lines = [
        made.admit(name, [1], extras=extras) for name, extras in (("a", [7]), ("b", np.array([7])))
    ]
    assert len({int(made.books.own[line, 0]) for line in lines}) == 1


def test_blocks_of_a_kernel_may_be_parts_of_the_scheduler_s():
    assert Scrub(ledger(), [layer(blocks=12, size=2)]).compared == 0
