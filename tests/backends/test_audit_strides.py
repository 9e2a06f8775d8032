"""The passes read tensors of a step of any stride."""

from __future__ import annotations

import torch
from kernels_here import importing_kernels
from ledger_pairs import DEVICE, assert_equal_books, pair, step_of

from kvtxn.audit import Step, Stretch

with importing_kernels():
    pass


__all__ = ["pair"]


def apart(tensor):
    """The same numbers, every second one of a larger buffer along each dimension."""
    buffer = torch.full([2 * size for size in tensor.shape], -9, dtype=tensor.dtype, device=DEVICE)
    found = buffer[tuple(slice(None, None, 2) for _ in tensor.shape)]
    found.copy_(tensor)
    return found


def strided(step):
    """The same step, whose tensors are not contiguous."""
    by_group = lambda tensors: {name: apart(each) for name, each in tensors.items()}  # noqa: E731
    return Step(
        *map(apart, (step.lines, step.starts, step.first, step.tokens)),
        by_group(step.slots), by_group(step.tables), drafts=apart(step.drafts),
        sources=by_group(step.sources), told=apart(step.told),
    )  # fmt: skip


def test_steps_of_any_stride(pair):
    """Each call reads tensors that are columns of larger ones as what they are."""
    ledgers = pair("states")
    for ledger in ledgers:
        ledger.admit("a", [11, 12, 13, 14, 15, 16])
        ledger.admit("b", [11, 12, 13, 14, 15, 17])
        fill = ("a", 0, [11, 12, 13, 14, 15, 16], range(4, 10), [1, 2, 3], [-1] * 5 + [20], -1)
        later = ("a", 6, [17, 18, 19], range(10, 13), [1, 2, 3], [21, 22, 23], 20)
        step = strided(step_of(ledger, *fill))
        ledger.write(step)
        ledger.check(step)
        step = strided(step_of(ledger, *later, drafts=2, told=0))
        for stale in (9, 18):  # the buffers stay, and what is in them changes
            step.tokens[1] = stale
            ledger.write(step)
            ledger.check(step)
            ledger.resolve(apart(torch.tensor([2, 0])), apart(torch.tensor([[18, 19, 30]] * 2)))
        step = strided(step_of(ledger, "a", 9, [30], [13], [1, 2, 3], [21], 22, told=1))
        ledger.write(step)  # it goes on from the state after one draft, and two were accepted
        ledger.check(step)
        lines = torch.tensor([ledger.line("a"), ledger.line("b"), -1])
        first, end = torch.tensor([0, 4, 0]), torch.tensor([6, 6, 6])
        tables = {"full": apart(torch.tensor([[1, 2]] * 3))}
        ledger.inspect(Stretch(*map(apart, (lines, first, end)), tables, "published"))
    one, other = ([str(v) for v in ledger.violations()] for ledger in ledgers)
    assert one == other
    assert [text.partition(":")[0] for text in one] == ["state", "state", "published"]
    assert_equal_books(*ledgers)
    assert torch.equal(ledgers[0].books.own, ledgers[1].books.own)
