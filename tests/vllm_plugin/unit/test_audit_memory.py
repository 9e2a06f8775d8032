"""The memory that the page of the ledger says an audit takes is what it takes, to the byte."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from kvtxn.integrations.serving.ledger.watch import Watch
from kvtxn.integrations.serving.step import Room

from kvtxn import LayerRef
from kvtxn.audit import Ledger, RowGroup, Scrub, StateGroup
from kvtxn.audit.books import Sizes

GUIDE = (Path(__file__).parents[3] / "docs" / "ledger.md").read_text()
DEFAULTS = Ledger.__init__.__kwdefaults__


def by_the_guide(**sizes):
    """Compute the guide's formulas; returns the bytes of the ledger, and of the scrub."""
    (formulas,) = re.findall(r"```text\n( *ledger = .*?)```", GUIDE, re.DOTALL)
    ledger, scrub = (" ".join(part.split()) for part in formulas.split("scrub = "))
    return tuple(
        eval(part.removeprefix("ledger = "), {"__builtins__": {}}, sizes)
        for part in (ledger, scrub)
    )


def rows(number, size, blocks=12):
    return RowGroup(f"group.{number}", size, blocks, pool="blocks")


def states(number, blocks=12):
    return StateGroup(f"group.{number}", blocks, pool="blocks")


@pytest.mark.parametrize(
    ("groups", "slots", "number"),
    [
        ([rows(0, 4)], 48, 0),
        ([rows(0, 4), rows(1, 8)], 96, 0),
        ([rows(0, 4), states(1), states(2)], 48, 24),
        ([states(0)], 12, 12),
    ],
)
@pytest.mark.parametrize(("lines", "requests"), [(None, 2 * 5 + 9), (5 + 1, 5 + 2)])
def test_the_formula_is_that_of_a_watch(groups, slots, number, lines, requests):
    """Of groups of rows and of states, with the lines of either runner."""
    drafts, length, seqs = 3, 40, 5
    room = Room(seqs, length + drafts + 1, caches_prefixes=True)
    by_kind = [{g.name: g for g in groups if g.is_state is kind} for kind in (False, True)]
    watch = Watch(by_kind[0], room, 0, "log", states=by_kind[1], lines=lines)
    layers = [layer for group in groups for layer in layers_of(group)]
    scrub = Scrub(watch.ledger, layers)
    layer_slots = sum(2 * group.num_blocks * group.block_size for group in groups)
    said = by_the_guide(
        slots=slots, states=number, requests=requests, max_model_len=length, drafts=drafts,
        groups=len(groups), layer_slots=layer_slots,
    )  # fmt: skip
    books = scrub.books
    sums = sum(layer.sums.nbytes for each in books.layers.values() for layer in each)
    taken = sums + books.seals.nbytes + books.nans.nbytes + books.compared.nbytes
    assert said == (watch.ledger.books.num_bytes, taken)


def layers_of(group):
    """Two layers of a group."""
    for part in "ab":
        name = f"{group.name}.{part}"
        if group.is_state:
            yield LayerRef.recurrent(name, torch.zeros(group.num_blocks, 3), group=group.name)
        else:
            cache = torch.zeros(group.num_blocks, group.block_size, 1, 4)
            yield LayerRef(name, cache, cache.clone(), group=group.name)


def test_the_example_is_right():
    """Its sizes, as the guide has them, give its bytes."""
    text = " ".join(GUIDE.split())
    (numbers,) = re.findall(
        r"take ([\d,]+) blocks of (\d+) rows, `max_num_seqs` (\d+), `max_model_len` ([\d,]+), "
        r"(\d+) drafts, one group and a connector. The ledger takes ([\d,]+) bytes, (\d+) MB of "
        r"them for the requests' tokens. With (\d+) layers the scrub takes ([\d,]+) more",
        text,
    )
    blocks, size, seqs, length, drafts, ledger, tokens, layers, scrub = (
        int(number.replace(",", "")) for number in numbers
    )
    groups, lines = [rows(0, size, blocks)], 2 * seqs + 9
    sizes = Sizes(lines, length + drafts + 1, DEFAULTS["journal"], DEFAULTS["capacity"])
    assert sizes.num_bytes(groups) == ledger
    assert round(8 * lines * (length + drafts + 2) / 1e6) == tokens
    assert Scrub.num_bytes(groups, {"group.0": layers}, lines) == scrub
    journal = sizes.num_bytes(groups) - Sizes(lines, length + drafts + 1, 1).num_bytes(groups)
    assert "Of a ledger 3.7 MB are the latest writers" in text
    assert round(journal / 1e6, 1) == 3.7
