"""The scrub's passes of Triton and of numba: the bytes, checksums and reports of those in torch."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels_here import ON_GPU, importing_kernels
from ledger_kit.bytes import BYTE_MUTANTS, ByteEngine, ReadsARowTooMany
from ledger_kit.life import GROUPS, MAX_LENGTH, live, new_ledger

from kvtxn import LayerRef
from kvtxn.audit import Ledger, RowGroup, Scrub, StateGroup, Step, Window
from kvtxn.audit.checksum import checksum
from kvtxn.audit.torch_passes import TorchPasses

with importing_kernels():
    from kvtxn.backends.audit import TritonPasses
    from kvtxn.backends.audit.byte_passes import TritonBytePasses

from kvtxn.backends.audit_numba import NumbaPasses

DEVICE = "cuda" if ON_GPU else "cpu"


class FewBytePrograms(TritonBytePasses):
    """The same with fewer programs, which are interpreted one after the other."""

    splits = 8 if ON_GPU else 1
    programs = 64 if ON_GPU else 2


class BytesInTriton(TorchPasses):
    """A ledger in torch, whose own kernels are tested elsewhere, with a scrub in Triton."""

    def byte_passes(self, books):
        kernels = TritonPasses(self.books)
        return FewBytePrograms(
            books, kernels._groups, kernels._key, kernels._table, kernels._as_they_are
        )


BACKENDS = [BytesInTriton] if ON_GPU else [BytesInTriton, NumbaPasses]


def in_torch(name, backend, engine=ByteEngine, **named):
    """An engine with torch's passes, for one to follow with those of ``backend``.

    What is poisoned is done in torch by numba's passes, too.
    """
    ledger = new_ledger(name, device=DEVICE, backend="torch")
    named = {"max_length": MAX_LENGTH, "poison": backend is not NumbaPasses, **named}
    return engine(GROUPS[name], ledger, device=DEVICE, **named)


def twin(one, name, backend, engine=ByteEngine, **named):
    """An engine that does the same as one in torch, with the passes of ``backend``."""
    key = one.ledgers[0].books.key
    ledger = new_ledger(name, device=DEVICE, backend=backend, key=key)
    named = {"max_length": MAX_LENGTH, "poison": backend is not NumbaPasses, **named}
    return engine(GROUPS[name], ledger, device=DEVICE, **named)


def assert_equal_bytes(one, other):
    """Caches, seals, the checksums of sealed slots, and counts."""
    for name in one.layers:
        for mine, theirs in zip(one.layers[name], other.layers[name], strict=True):
            for plane, other_plane in zip(mine.planes, theirs.planes, strict=True):
                assert torch.equal(plane.cells, other_plane.cells)
    assert one.scrub.compared == other.scrub.compared
    mine, theirs = one.scrub.books, other.scrub.books
    assert torch.equal(mine.seals, theirs.seals)
    assert torch.equal(mine.nans, theirs.nans)
    for place, layers in mine.layers.items():
        sealed = place.pool_of(mine.seals)[:, : place.group.block_size].flatten() != 0
        for layer, twin in zip(layers, theirs.layers[place], strict=True):
            assert torch.equal(layer.sums[sealed], twin.sums[sealed])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GROUPS)
def test_a_healthy_life(name, backend):
    one = in_torch(name, backend, seed=4, every=2)
    other = twin(one, name, backend, seed=4, every=2)
    for engine in (one, other):
        live(engine, 40 if ON_GPU else 6)
        assert engine.ledgers[0].violations() == []
    assert_equal_bytes(one, other)
    assert one.scrub.compared > 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mutant", BYTE_MUTANTS)
def test_the_same_is_found(mutant, backend):
    """In the shortest life in which the torch passes find the fault."""
    if backend is NumbaPasses and mutant is ReadsARowTooMany:
        pytest.skip("only poison shows it")
    name = "plain" if mutant.needs else "states"
    for steps, seed in itertools.product((40,) if ON_GPU else (5, 8, 11), range(40)):
        one = in_torch(name, backend, mutant, seed=seed)
        live(one, steps)
        found = one.ledgers[0].violations()
        if found:
            break
    other = twin(one, name, backend, mutant, seed=seed)
    live(other, steps)
    again = other.ledgers[0].violations()
    assert found
    if ON_GPU:  # which layer of a slot is named is open there
        assert {(v.kind, v.step, v.slot) for v in found} == {
            (v.kind, v.step, v.slot) for v in again
        }
    else:
        assert [*map(str, found)] == [*map(str, again)]
        assert_equal_bytes(one, other)


LAYOUTS = {
    "plain": lambda dtype: torch.randn(6, 4, 2, 5).to(dtype),
    "odd row": lambda dtype: torch.randn(6, 4, 1, 7).to(dtype),
    "permuted": lambda dtype: torch.randn(6, 2, 4, 5).to(dtype).transpose(1, 2),
    "apart": lambda dtype: torch.randn(6, 4, 2, 10).to(dtype)[..., ::2],
    "long": lambda dtype: torch.randn(6, 4, 3, 401).to(dtype),
}


@pytest.mark.parametrize("compiled", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64])
def test_checksums_of_any_layout(layout, dtype, compiled):
    """Every element size, stride and length; and rows at offsets of a table, as of a state."""
    key_cache, value_cache = (LAYOUTS[layout](dtype).to(DEVICE) for _ in range(2))
    state = LAYOUTS[layout](dtype).to(DEVICE).permute(0, 3, 1, 2)[:, 1:]
    groups = (RowGroup("full", 4, 6), StateGroup("mamba", 6))
    scrubs = []
    for backend in ("torch", compiled):
        ledger = Ledger(
            groups, max_requests=1, max_length=20, device=DEVICE, backend=backend,
            key=scrubs[0].books.books.key if scrubs else None,
        )  # fmt: skip
        ref = LayerRef("rows", key_cache, value_cache, group="full")
        states = LayerRef.recurrent("states", state, group="mamba")
        scrub = Scrub(ledger, [ref, states], every=1)
        ledger.admit("a", [1, 2, 3])
        step = step_of([4, 9, 23], [-1, 2, 5])
        ledger.write(step)
        ledger.resolve([1, 0])
        scrub.seal(step, [1, 0])
        scrubs.append(scrub)
    one, other = ([t.sums for each in s.books.layers.values() for t in each] for s in scrubs)
    assert all(torch.equal(*sums) for sums in zip(one, other, strict=True))
    assert [int((sums != 0).sum()) for sums in one] == [3, 1]
    rows = torch.stack([key_cache.flatten(0, 1)[slot] for slot in (4, 9, 23)])
    assert len(checksum(scrubs[0].books.books.key, rows, 0).unique()) == 3


def step_of(slots, states):
    def numbers(*values):
        return torch.tensor(values, device=DEVICE)

    return Step(
        lines=numbers(0, -1),
        starts=numbers(0, 3, 3),
        first=numbers(0, 10**6),
        tokens=numbers(1, 2, 3),
        slots={"full": numbers(*slots), "mamba": numbers(*states)},
        tables={"full": numbers((1, 2), (7, 7)).to(torch.int32)},
        sources={"mamba": numbers(-1, 10**9)},
        drafts=numbers(1, 9),
    )


@pytest.mark.parametrize("backend", ["torch", *BACKENDS])
def test_a_step_that_comes_again_with_positions_and_counts_of_tokens(backend):
    """A byte that changes between two steps of the same buffers is found by the second one."""
    cache = [torch.randn(6, 4, 1, 8, device=DEVICE) for _ in range(2)]
    group = RowGroup("full", 4, 6)
    ledger = Ledger([group], max_requests=2, max_length=20, device=DEVICE, backend=backend)
    scrub = Scrub(ledger, [LayerRef("rows", *cache, group="full")], every=1)
    ledger.admit("a", [1, 2, 3, 4, 5])

    def numbers(*values):
        return torch.tensor(values, device=DEVICE)

    step = Step(
        lines=numbers(ledger.line("a")), starts=numbers(0, 3), first=None,
        tokens=numbers(1, 2, 3), slots={"full": numbers(4, 5, 6)},
        tables={"full": numbers([1, 2]).to(torch.int32)}, positions=numbers(0, 1, 2),
        drafts=numbers(1),
    )  # fmt: skip
    for row, count in ((0, 2), (3, 1)):
        step.positions.copy_(torch.arange(row, row + 3))
        step.slots["full"].copy_(torch.arange(row + 4, row + 7))
        step.tokens.copy_(numbers(1, 2, 3, 4, 5, 6)[row : row + 3])
        scrub.compare(step)
        ledger.write(step)
        ledger.check(step)
        ledger.resolve(numbers(count), besides=1)
        scrub.seal(step, numbers(count), besides=1)
        cache[1][1, 1] += 1
    assert scrub.compared == 3
    (violation,) = ledger.violations()
    assert (violation.kind, violation.slot, violation.position) == ("changed", 5, 1)
    assert (scrub.books.seals != 0).sum() == 4  # rows 0, 2, 3 and 4; row 1 was reported


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [1, 2])
def test_windows_and_nans(dtype, dim):
    """The same parts of a buffer are filled, and the same request is reported."""
    said, buffers = [], []
    shape = (6, 5, 3) if dim == 1 else (6, 3, 5)
    for backend in ("torch", BytesInTriton):
        buffer, scan = torch.zeros(shape, dtype=dtype), torch.zeros(6, 9, dtype=dtype)
        buffer, scan = buffer.to(DEVICE), scan.to(DEVICE)
        ledger = Ledger(
            (RowGroup("full", 4, 6), StateGroup("mamba", 6)), max_requests=1, max_length=20,
            device=DEVICE, backend=backend,
        )  # fmt: skip
        ref = LayerRef.recurrent("states", buffer, scan, group="mamba")
        scrub = Scrub(ledger, [ref], poison=True, windows={"states": Window(0, 3, dim)})
        ledger.admit("a", [1, 2, 3])
        step = step_of([4, 9, 23], [-1, 2, 5])
        ledger.write(step)
        outputs = torch.zeros(3, 2000, device=DEVICE, dtype=dtype)
        outputs[[0, 2], 1999] = float("nan")
        scrub.trace(step, outputs, torch.tensor([-1, 0, 2]))
        ledger.resolve([1, 0])
        scrub.seal(step, [1, 0])
        said.append([str(v) for v in ledger.violations()])
        buffers.append((buffer.isnan().cpu(), scan.isnan().cpu()))
    assert said[0] == said[1]
    assert len(said[0]) == 1
    assert all(torch.equal(*each) for each in zip(*buffers, strict=True))
    filled = buffers[0][0].transpose(1, dim)[2].all(1)
    assert filled.tolist() == [True, False, False, False, True]
    assert buffers[0][1].all(1).nonzero().flatten().tolist() == [2]


def apart(tensor):
    """The same numbers, every second one of a larger buffer."""
    return torch.stack([tensor, torch.full_like(tensor, -9)], 1)[:, 0]


COUNT_COMPILED = """
import os
import sys
from kvtxn.backends.audit_numba import NumbaPasses, byte_rows
from ledger_kit.bytes import ByteEngine
from ledger_kit.life import GROUPS, MAX_LENGTH, live, new_ledger
def counts():
    names = "add_checksums", "due_rows", "due_states", "slots_left"
    return [len(getattr(byte_rows, name).signatures) for name in names]
ledgers = {name: new_ledger(name, backend=NumbaPasses) for name in ("plain", "states")}
assert not sum(counts())
for name, ledger in ledgers.items():
    if os.fork():
        assert os.wait()[1] == 0
        continue
    engine = ByteEngine(
        GROUPS[name], ledger, max_length=MAX_LENGTH, device="cpu", poison=False, seed=4, every=2,
    )
    before = counts()
    live(engine, 6)
    assert engine.scrub.compared > 0
    assert before == counts(), (name, before, counts())
    os._exit(0)
"""


def test_nothing_is_compiled_in_a_step():
    """Everything is when the scrub is made; in processes of their own, where nothing is yet."""
    command = [sys.executable, "-c", COUNT_COMPILED]
    where = Path(__file__).parent.parent
    ran = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_steps_of_any_stride():
    """Each call of a scrub reads tensors that are columns of larger ones as what they are."""
    key, books, said = None, [], []
    for backend in ("torch", BytesInTriton):
        groups = (RowGroup("full", 4, 6), StateGroup("mamba", 6))
        ledger = Ledger(
            groups, max_requests=2, max_length=20, device=DEVICE, backend=backend, key=key
        )
        key = ledger.books.key
        cells = [torch.ones(6, 4, 1, 8, device=DEVICE) for _ in range(2)]
        state = torch.ones(6, 9, device=DEVICE)
        ref = LayerRef("rows", *cells, group="full")
        refs = [ref, LayerRef.recurrent("states", state, group="mamba")]
        scrub = Scrub(ledger, refs, every=1, poison=["mamba"])
        ledger.admit("a", [1, 2, 3])
        plain = step_of([4, 9, 23], [-1, 2, 5])
        step = Step(
            *map(apart, (plain.lines, plain.starts, plain.first, plain.tokens)),
            {name: apart(each) for name, each in plain.slots.items()}, plain.tables,
            drafts=apart(plain.drafts), sources=plain.sources,
        )  # fmt: skip
        ledger.write(step)
        scrub.trace(step, cells[0].new_full((3, 2), float("nan")), apart(torch.tensor([-1, 2, -1])))
        ledger.resolve(apart(torch.tensor([0, 0])))
        scrub.seal(step, apart(torch.tensor([0, 0])))
        cells[0][1, 0] = 2  # the first row
        again = step_of([7, 9, 23], [-1, 2, 5])
        lines, starts, first, drafts = map(
            apart, (again.lines, again.starts, again.starts[1:], again.drafts)
        )
        scrub.compare(Step(lines, starts, first, again.tokens, again.slots, again.tables, drafts))
        books.append((scrub.books.seals, state.isnan(), scrub.books.compared))
        said.append([str(violation) for violation in ledger.violations()])
    assert said[0] == said[1]
    assert [text.partition(":")[0] for text in said[0]] == ["changed", "changed"]
    assert all(torch.equal(*each) for each in zip(*books, strict=True))
