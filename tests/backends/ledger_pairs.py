"""Two ledgers of one key: one by the torch passes, the other by passes that are tested."""

from __future__ import annotations

import pytest
import torch
from kernels_here import ON_GPU, importing_kernels
from ledger_kit.life import new_ledger

from kvtxn.audit import Step

with importing_kernels():
    from kvtxn.backends.audit import TritonPasses

from kvtxn.backends.audit_numba import NumbaPasses

DEVICE = "cuda" if ON_GPU else "cpu"


class FewPrograms(TritonPasses):
    """The same with fewer programs, which are interpreted one after the other."""

    splits = 8 if ON_GPU else 2


#: The passes that are tested beside those in torch.
PASSES = [FewPrograms] if ON_GPU else [FewPrograms, NumbaPasses]


@pytest.fixture(params=PASSES)
def pair(request):
    """Make two ledgers of one key for the groups of a name: one of them in torch."""

    def made(name, **named):
        named = {"device": DEVICE, "journal": 128, **named}
        torch_one = new_ledger(name, backend="torch", **named)
        key = torch_one.books.key
        return torch_one, new_ledger(name, backend=request.param, key=key, **named)

    return made


def assert_equal_books(one, other):
    for field in ("words", "owners", "facts", "counters"):
        assert torch.equal(getattr(one.books, field), getattr(other.books, field)), field


def step_of(ledger, request, first, tokens, slots, table, states, source, **more):
    """One request's step over the groups of ``states``."""

    def numbers(*values):
        return torch.tensor(values, device=DEVICE)

    return Step(
        lines=numbers(ledger.line(request), -1),
        starts=numbers(0, len(tokens), len(tokens)),
        first=numbers(first, 0),
        tokens=numbers(*tokens),
        slots={"full": numbers(*slots), "mamba": numbers(*states)},
        tables={"full": numbers(table, table).to(torch.int32)},
        sources={"mamba": numbers(source, -1)},
        drafts=numbers(more.get("drafts", 0), 0),
        told=numbers(more.get("told", -1), -1),
    )
