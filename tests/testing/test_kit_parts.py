"""The kit's own parts: its number formats, its oracle, its faults."""

import random

import pytest
import torch
from kvtxn.backends.torch_executor import TorchExecutor

from kvtxn import ConfigError, registry
from kvtxn.testing import (
    FORMATS,
    LAYOUTS,
    ExecutorConformance,
    InjectedFault,
    LayerSpec,
    Rig,
    faulty,
    registered,
)
from kvtxn.testing.caches import GUARD, build_cache
from kvtxn.testing.oracle import Replay
from kvtxn.testing.promise_claims import Claims
from kvtxn.testing.promise_counts import Counts

CPU = torch.device("cpu")


def every_bfloat16() -> torch.Tensor:
    """All 65,536 of them, as float32; NaN with its sign cleared, which no format promises."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
    return torch.where(values.isnan(), torch.nan, values)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2-tensor"])
def test_fp8_codes_agree_with_torch(name):
    """The kit's table search and torch's cast find the same code for every bfloat16."""
    fmt, values = FORMATS[name], every_bfloat16()
    limit = torch.finfo(fmt.dtype).max
    expected = values.clamp(-limit, limit).to(fmt.dtype).view(torch.uint8)
    (codes,) = fmt.encode(values.view(1, 1, -1), [1.0])
    assert codes == expected.tolist()


@pytest.mark.parametrize("name", [name for name in FORMATS if name.endswith(("tensor", "head"))])
def test_decoding_agrees_with_torch(name):
    """Every code of an 8-bit format means what torch says, times the scale of its head."""
    fmt, codes = FORMATS[name], list(range(256))
    first, second = fmt.decode(codes + codes, [0.5, 2.0])
    meant = torch.tensor(codes, dtype=torch.uint8).view(fmt.dtype).double()
    torch.testing.assert_close(torch.tensor(first).double(), meant / 2, equal_nan=True)
    torch.testing.assert_close(torch.tensor(second).double(), meant * 2, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_share_no_word(layout):
    """The places of all slots are distinct, and none is in a guard page."""
    cache = build_cache("layer", LayerSpec(layout, value_size=3), CPU, random.Random(0))
    for index, memory in enumerate(cache.memories):
        planes = [plane for plane in cache.planes if plane.memory == index]
        places = [
            w for plane in planes for slot in range(cache.num_slots) for w in plane.words(slot)
        ]
        assert len(places) == len(set(places))
        assert min(places) >= GUARD
        assert max(places) < memory.numel() - GUARD


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_oracle_sees_every_word(layout):
    """One bit anywhere, guard pages and gaps included, is a difference."""
    cache = build_cache("layer", LayerSpec(layout, num_blocks=1), CPU, random.Random(0))
    truth = Replay([cache])
    for memory in cache.memories:
        for place in range(memory.numel()):
            memory[place] ^= 1
            (found,) = truth.differences()
            assert "1 words differ" in found
            memory[place] ^= 1
    assert truth.differences() == []


def test_adopting_takes_old_or_new_and_nothing_else():
    """Word by word; a third value is a failure."""
    cache = build_cache("layer", LayerSpec(heads=1, size=2), CPU, random.Random(0))
    truth = Replay([cache])
    row = [[11, 12], [13, 14]]
    cache.memories[0][cache.planes[0].words(4)[1]] = 12
    truth.adopt("layer", 4, row)
    assert truth.differences() == []
    cache.memories[1][cache.planes[1].words(4)[0]] += 1
    with pytest.raises(AssertionError, match="neither its old nor its staged row"):
        truth.adopt("layer", 4, row)


@pytest.mark.parametrize("when", ["before", "middle", "after"])
def test_a_fault_goes_off_once_where_it_was_armed(when):
    """At the nth call, and then no more."""
    executor = faulty(TorchExecutor)
    executor.faults.arm("stage", when, nth=2)
    with registered(executor) as name:
        rig = Rig(name, "undo", CPU)
        batch = rig.batch(padding=0.0)
        window = rig.open(batch)
        rig.stage(window, batch, [0])
        with pytest.raises(InjectedFault):
            rig.stage(window, batch, [1])
        rig.run(rig.batch(), [1, 1])
    assert executor.faults.fired == [("stage", when)]
    assert executor.faults.calls["stage"] == 2 + len(rig.refs)
    assert not executor.capabilities.atomic


def test_a_fault_that_does_not_exist_is_refused():
    """Not armed silently, to never go off."""
    executor = faulty(TorchExecutor)
    for wrong in (("begin", "before", 1), ("stage", "soon", 1), ("stage", "before", 0)):
        with pytest.raises(ValueError, match="is not a fault"):
            executor.faults.arm(*wrong)


def test_a_class_is_registered_for_a_while():
    """Under a name of its own, gone afterwards; a name is taken as it is."""
    with registered(TorchExecutor) as name, registered(TorchExecutor) as other:
        assert registry.load(name) is registry.load(other) is TorchExecutor
        assert name != other
    assert not {name, other} & set(registry.names())
    with registered("torch") as name:
        assert name == "torch"


def test_a_class_without_a_name_is_refused_in_words():
    """The kit names the class while it registers it; the registry says what is missing."""
    nobody = type("Nobody", (TorchExecutor,), {"name": None})
    with pytest.raises(ConfigError, match="has no name"), registered(nobody):
        pass


def test_the_quick_tests_of_the_kit_come_first(request, tmp_path):
    """Honest capabilities, then counts: `pytest -x` ends soon for an executor that lacks one."""
    module = pytest.Module.from_parent(request.session, path=tmp_path / "test_mine.py")
    mine = type("TestMine", (ExecutorConformance,), {})
    module.obj = type("namespace", (), {"TestMine": mine})
    names = [each.originalname for each in collected(module)]
    quick = [name for part in (Claims, Counts) for name in vars(part) if name.startswith("test_")]
    assert list(dict.fromkeys(names))[: len(quick)] == quick


def collected(module):
    """The tests of the one class of a module, in pytest's own order."""
    (found,) = module.collect()
    return list(found.collect())


class ForgetsToCount(TorchExecutor):
    """Leaves the counters alone."""

    def commit(self, txn, accepted):
        counters, txn.counters = txn.counters, txn.counters.clone()
        super().commit(txn, accepted)
        txn.counters = counters


def test_an_executor_that_never_counts_is_told_who_counts():
    """The message names the three counts, and the call that makes them."""
    with registered(ForgetsToCount) as name:
        rig = Rig(name, "undo", CPU)
        rig.run(rig.batch(padding=0.0), [1, 1])
        words = r"under 'undo'.*\(staged, committed, rejected\) = \(0, 0, 0\).*txn.count\(kept\)"
        with pytest.raises(AssertionError, match=words):
            rig.check_rows((5, 2, 3))


def test_bytes_that_differ_are_told_with_the_policy():
    """One test runs under several policies."""
    rig = Rig("torch", "undo", CPU)
    rig.caches[0].memories[0][0] ^= 1
    with pytest.raises(AssertionError, match=r"under 'undo', after a look: layer\.0"):
        rig.check("after a look")
