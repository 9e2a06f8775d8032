"""``Scrub``: bytes that change are found, with their layer; dead ones are poisoned."""

from __future__ import annotations

import attrs
import pytest
import torch

from kvtxn import ConfigError, LayerRef
from kvtxn.audit import Ledger, RowGroup, Scrub, StateGroup, Step
from kvtxn.audit.checksum import checksum
from kvtxn.audit.digest import Key

GROUPS = (RowGroup("full", 4, 6), StateGroup("mamba", 5))


class Run:
    """One request, its caches, and what a step does to them.

    Attributes:
        rows: caches of two attention layers, K and V.
        state: the states of a recurrent layer.
    """

    def __init__(self, dtype=torch.float16, **named):
        def noise(*shape):
            return torch.randn(shape).mul(50).to(dtype)

        self.rows = [(noise(6, 4, 2, 8), noise(6, 4, 2, 8)) for _ in range(2)]
        self.state = noise(5, 3, 8)
        refs = [LayerRef(f"layer {i}", k, v, group="full") for i, (k, v) in enumerate(self.rows)]
        refs.append(LayerRef.recurrent("layer 2", self.state, group="mamba"))
        self.ledger = Ledger(GROUPS, max_requests=2, max_length=24)
        self.scrub = Scrub(self.ledger, refs, **named)
        self.ledger.admit("a", [1, 2, 3, 4, 5, 6])

    def step(self, first, tokens, blocks, source, *, drafts=0, accepted=0):
        table = [1, 2, 3]
        positions = range(first, first + len(tokens))
        slots = [table[p // 4] * 4 + p % 4 for p in positions]
        step = Step(
            lines=torch.tensor([self.ledger.line("a")]),
            starts=torch.tensor([0, len(tokens)]),
            first=torch.tensor([first]),
            tokens=torch.tensor(tokens),
            drafts=torch.tensor([drafts]),
            slots={"full": torch.tensor(slots), "mamba": torch.tensor(blocks)},
            tables={"full": torch.tensor([table])},
            sources={"mamba": torch.tensor([source])},
        )
        self.scrub.compare(step)
        self.ledger.write(step)
        self.ledger.check(step)
        for cache in (c for pair in self.rows for c in pair):  # the forward
            cache.view(24, 2, 8)[slots] = torch.randn(len(slots), 2, 8).to(cache.dtype)
        for block in blocks:
            if block >= 0:
                self.state[block] = torch.randn(3, 8).to(self.state.dtype)
        self.ledger.resolve([accepted])
        self.scrub.seal(step, [accepted])

    def prompt(self):
        self.step(0, [1, 2, 3, 4, 5, 6], [-1] * 5 + [1], -1)


def test_what_does_not_change_is_in_order():
    run = Run(every=1)
    run.prompt()
    run.step(6, [7, 8, 9], [1, 2, 3], 1, drafts=2, accepted=1)
    run.step(8, [9], [1], 2)
    assert run.ledger.violations() == []
    assert run.scrub.compared == (6 + 1) + (8 + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_found_with_its_layer_and_its_writer(dtype, bit):
    """Once; and not again before the row is written anew."""
    run = Run(dtype, every=1)
    run.prompt()
    raw = run.rows[1][1].view(torch.uint8).view(24, -1)
    raw[6, 5] ^= 1 << bit  # block 1, the third row: position 2
    run.step(6, [7], [1], 1)
    (violation,) = run.ledger.violations()
    assert (violation.kind, violation.found, violation.layer) == ("changed", "bytes", "layer 1")
    assert (violation.position, violation.slot, violation.request) == (2, 6, "a")
    assert (violation.expected, violation.written_for) == ((1, 2, 3), (1, 2, 3))
    assert (violation.written_step, violation.written_request) == (1, "a")
    run.step(7, [8], [1], 1)
    assert run.ledger.violations() == []
    assert run.ledger.counters()["kvtxn_audit_violations_total_changed"] == 1


def test_a_state_that_changes_between_two_steps():
    run = Run(every=1)
    run.prompt()
    run.state[1, 2, 3] += 1
    run.step(6, [7], [1], 1)
    (violation,) = run.ledger.violations()
    assert (violation.kind, violation.group, violation.layer) == ("changed", "mamba", "layer 2")
    assert (violation.position, violation.slot) == (5, 1)


def test_a_sample_sees_every_slot_in_its_turn():
    """With one slot in four per step, four steps see each once."""
    run = Run(every=4)
    run.prompt()
    run.rows[0][0][1, 2] += 1
    for position in range(6, 10):
        run.step(position, [position], [1], 1)
    assert [v.slot for v in run.ledger.violations()] == [6]
    assert run.scrub.compared < 4 * 8


def test_without_poison_nothing_is_written():
    run = Run(every=1)
    run.prompt()
    run.step(6, [7, 8, 9], [1, 2, 3], 1, drafts=2, accepted=0)
    assert not any(c.isnan().any() for pair in run.rows for c in pair)


@pytest.mark.parametrize("width", [1, 3, 8, 40])
def test_checksums_tell_every_bit_and_place(width):
    key = Key.new()
    row = torch.randint(0, 255, (1, width), dtype=torch.uint8)
    rows = row.repeat(8 * width + 1, 1)
    for bit in range(8 * width):
        rows[bit + 1, bit // 8] ^= 1 << bit % 8
    sums = checksum(key, rows, 0)
    assert len(sums.unique()) == len(rows)
    assert checksum(key, row, 1) != checksum(key, row, 0)


def test_checksums_see_words_exchanged_and_signs_turned_in_pairs():
    key = Key.new()
    row = torch.arange(4)[None] + 1
    turned = row.clone()
    turned[0, :2] ^= -(2**63)
    assert len({int(checksum(key, r, 0)) for r in (row, turned, row.flip(1))}) == 3


def test_memory_is_known_before():
    run = Run()
    books = run.scrub.books
    sums = [layer.sums for layers in books.layers.values() for layer in layers]
    taken = sum(t.numel() * 8 for t in (*sums, books.seals, books.nans, books.compared))
    assert Scrub.num_bytes(GROUPS, {"full": 2, "mamba": 1}, 2) == taken


def test_no_rows_have_no_checksums():
    run = Run(every=1)
    run.prompt()
    assert run.scrub.export("full", [1], 3, 3).shape == (2, 0)
    run.scrub.import_rows("a", "full", [1], 3, 3, torch.zeros(2, 0, dtype=torch.int64))
    assert run.ledger.violations() == []


def test_outputs_may_be_one_number_each():
    run = Run(every=1)
    step = Step(
        lines=torch.tensor([run.ledger.line("a")]), starts=torch.tensor([0, 2]),
        first=torch.tensor([0]), tokens=torch.tensor([1, 2]), slots={"full": torch.tensor([4, 5])},
    )  # fmt: skip
    run.ledger.write(step)
    run.scrub.trace(step, torch.tensor([0.0, float("nan")]), [0, 1])
    assert [(v.kind, v.found, v.position) for v in run.ledger.violations()] == [
        ("changed", "nan", 1)
    ]
    with pytest.raises(ConfigError, match="outputs are not valid"):
        run.scrub.trace(step, torch.zeros(2), torch.zeros(2, dtype=torch.int64, device="meta"))


def test_padding_is_no_row():
    run = Run(every=1)
    run.prompt()
    step = Step(
        lines=torch.tensor([-1]),
        starts=torch.tensor([0, 1]),
        first=torch.tensor([3]),
        tokens=torch.tensor([0]),
        slots={"full": torch.tensor([5]), "mamba": torch.tensor([1])},
        tables={"full": torch.tensor([[1]])},
        sources={"mamba": torch.tensor([1])},
    )
    run.scrub.compare(step)
    run.scrub.seal(attrs.evolve(step))
    assert run.scrub.compared == 0
