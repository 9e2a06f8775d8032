"""Promises 1 and 9: the caches hold exactly the kept rows, under every executor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import pytest
import torch
from torch import Tensor

from .. import registry
from ..accepted_forms import SIGNED
from ..config import TxnConfig
from ..executor import Executor, Txn
from ..layers import LayerRef
from ..manager import TransactionManager
from ..row_io import LayerRows
from .batches import (
    SHAPES,
    Batch,
    every_other,
    handed_in,
    one_for_all,
    random_counts,
    spread,
    turned,
)
from .caches import LAYOUTS, LayerSpec
from .kit import Kit, KitBase
from .mixed_layers import REPLAYED, MixedKit
from .number_formats import FORMATS, WIDE
from .rig import SIMPLE, VARIED, AnySpec, Rig

#: Forms of acceptance, each made from one count per request.
FORMS: Final[dict[str, Callable[[list[int], Batch], Any]]] = {
    "list": lambda counts, batch: counts,
    "tuple": lambda counts, batch: tuple(counts),
    "int64": lambda counts, batch: torch.tensor(counts),
    "int32": lambda counts, batch: torch.tensor(counts, dtype=torch.int32),
    "mask": lambda counts, batch: torch.tensor(batch.kept(counts)),
    "mask-list": lambda counts, batch: batch.kept(counts),
}

EXTREMES: Final[dict[str, Callable[[Batch, Rig], list[int]]]] = {
    "none": lambda batch, rig: [0] * len(batch.draft_len),
    "some": lambda batch, rig: random_counts(batch, rig.rng),
    "all": lambda batch, rig: list(batch.draft_len),
}


_SMALL: Final = LayerSpec(heads=1, size=2, block_size=4, num_blocks=4)

#: As many layers as deep models have, in nine groups, and not all alike.
_LAYERS: Final = [
    attrs.evolve(_SMALL, group=f"group {index % 9}", size=2 + index % 3) for index in range(70)
]

#: Rows of thousands of elements: of 16 heads, of a width that nothing divides, of one latent.
_WIDE: Final = [
    LayerSpec(heads=16, size=128, block_size=4, num_blocks=3),
    LayerSpec("hnd", FORMATS["fp32"], group="b", heads=9, size=131, block_size=5, num_blocks=2),
    LayerSpec("offsets", group="b", heads=9, size=131, block_size=5, num_blocks=2),
    LayerSpec("latent", size=2305, block_size=4, num_blocks=3),
    LayerSpec("packed", FORMATS["fp8_e4m3-row"], heads=5, size=256, block_size=4, num_blocks=3),
]


class Exactness(MixedKit):
    """After commit, every byte of every cache equals a replay of only the kept rows."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("fmt", [*FORMATS, WIDE.name])
    def test_every_layout_and_format(self, kit: Kit, policy: str, fmt: str, layout: str) -> None:
        """Any strides, any number format: bit patterns survive, and numbers are encoded once."""
        kind = FORMATS.get(fmt, WIDE)
        specs = [LayerSpec(layout, kind), LayerSpec(layout, kind, heads=3, size=4, value_size=6)]
        rig = kit.rig(policy, specs)
        for payload in ("native", "cast"):
            rig.commit(rig.batch(payload=payload), when=f"{payload} payload")

    @pytest.mark.parametrize("accepting", EXTREMES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_every_shape(self, lapping: Rig, shape: str, accepting: str) -> None:
        """After staging and after commit, a slot holds its last kept row, in layers of any kind."""
        for padding in (0.0, 0.3):  # the second window finds buffers that the first one used
            batch = lapping.batch(SHAPES[shape], padding=padding)
            counts = EXTREMES[accepting](batch, lapping)
            lapping.commit(batch, counts, shape, check_staged=True)

    def test_many_rows(self, kit: Kit, policy: str) -> None:
        """A window may have more rows than one block of a kernel, and than the window before."""
        rig = kit.rig(policy, [LayerSpec(num_blocks=120)], max_rows=320)
        for requests in (1, 40):
            rig.commit(rig.batch(((1,) * requests, (7,) * requests)))

    @pytest.mark.parametrize("drafts", [1, 2, 5])
    def test_rows_side_by_side(self, rig: Rig, policy: str, drafts: int) -> None:
        """Slots may follow each other, as engines deal them out; commits and aborts are exact.

        Or some in the middle may come the other way round.
        """
        for settled, start in ((0, 0), (1, 1), (0, 6)):
            batch = rig.batch(((settled,), (drafts,)), padding=0.0)
            slots = list(range(start, start + batch.num_rows))
            if start == 6:
                slots[1:-1] = slots[-2:0:-1]
            batch = attrs.evolve(batch, slots=dict.fromkeys(batch.slots, slots))
            if policy != "direct":
                rig.abort(batch, when="after abort")
            for accepted in (drafts, drafts // 2, 0):  # later ones put rows of earlier ones back
                rig.commit(batch, [accepted], f"{settled} settled from slot {start}")

    def test_sizes_from_one_to_odd(self, kit: Kit, policy: str) -> None:
        """Caches of one block, one head, one element, and of odd widths are exact."""
        specs = [
            LayerSpec(heads=1, size=1, block_size=1, num_blocks=20, group="a"),
            LayerSpec(heads=7, size=33, block_size=20, num_blocks=1, group="b"),
            LayerSpec(heads=1, size=129, block_size=16, num_blocks=3, group="c"),
            LayerSpec("latent", size=577, block_size=5, num_blocks=5, group="d"),
            LayerSpec(heads=2, size=64, value_size=128, block_size=16, num_blocks=2, group="e"),
        ]
        rig = kit.rig(policy, specs)
        for _ in range(3):
            rig.commit(rig.batch())

    def test_a_chain_of_windows(self, kit: Kit, policy: str) -> None:
        """Windows are exact in slots of earlier windows, accepted, rejected or aborted."""
        rig = kit.rig(policy, seed=5)
        shapes = list(SHAPES.values())
        for step in range(12):
            batch = rig.batch(shapes[step % len(shapes)])
            if step % 4 == 3 and policy != "direct":
                rig.abort(batch, when=f"aborted window {step}")
            else:
                rig.commit(batch, when=f"window {step}")

    def test_as_many_rows_without_settled_ones(self, rig: Rig) -> None:
        """Nothing of a window is left for the next one, which may call no ``stage`` at all."""
        settled = ((1, 1), (2, 2))
        for shape in itertools.chain.from_iterable(
            (settled, ((0, 0), drafts)) for drafts in ((3, 3), (2, 4), (0, 0))
        ):
            rig.commit(rig.batch(shape), when=f"settled and draft rows {shape}")
            if rig.policy != "direct":  # what an aborted window leaves behind is as old
                rig.abort(rig.batch(shape), when=f"aborted settled and draft rows {shape}")

    @pytest.mark.parametrize("form", FORMS)
    def test_forms_of_acceptance(self, rig: Rig, form: str) -> None:
        """Counts or masks, as sequences or tensors, all mean the same."""
        batch = rig.batch(((1, 2, 0), (3, 0, 4)))
        counts = [2, 0, 1]
        rig.commit(batch, counts, form, given=FORMS[form](counts, batch))

    def test_one_count_for_all_requests(self, rig: Rig) -> None:
        """An int, or a tensor without dimensions, counts for every request."""
        for accepted in (2, torch.tensor(1), 0):
            batch = rig.batch(((1, 1, 1), (2, 3, 2)))
            rig.commit(batch, [int(accepted)] * 3, repr(accepted), given=accepted)

    @pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
    def test_masks_that_are_no_prefix(self, kit: Kit, lapping: Rig, on_device: bool) -> None:
        """A mask may keep any draft rows; its elements for settled rows are ignored.

        It may be strided, and no commit writes to it.
        """
        rig = lapping
        for shape, padding in itertools.product(SHAPES.values(), (0.0, 0.3)):
            batch = rig.batch(shape, padding=padding)
            mask = [rig.rng.random() < 0.5 for _ in range(batch.num_rows)]
            given = torch.zeros(batch.num_rows, 2, dtype=torch.bool)
            given = given.to(kit.device if on_device else "cpu")[:, 0]
            given.copy_(torch.tensor(mask, dtype=torch.bool))
            kept = [keep and draft for keep, draft in zip(mask, batch.drafts, strict=True)]
            rig.commit(batch, given=given, kept=kept)
            assert given.tolist() == mask, "a commit wrote to its mask"

    def test_device_counts_out_of_range(self, kit: Kit, policy: str) -> None:
        """Counts on the device are clamped to the number of drafts, from 0 on.

        They may be of any signed dtype, and a view of a buffer that is filled again for the next
        window; no commit writes to it.
        """
        host = kit.device.type == "cpu"  # where commit itself refuses them
        executor = _handed(kit.executor)
        replays = policy == "deferred" and {"recurrent", "replayed"} <= kit.capabilities.kinds
        specs: Sequence[AnySpec] = [*SIMPLE, *REPLAYED] if replays else SIMPLE
        rig = kit.rig(policy, specs, executor=executor if host else None)
        for dtype in SIGNED:
            counts = torch.zeros(3, 2, dtype=dtype, device=kit.device)[:, 0]
            executor.given, most = counts, torch.iinfo(dtype).max
            for wild, clamped in (([-1, 99, most], [0, 2, 4]), ([1, 0, 2], [1, 0, 2])):
                counts.copy_(torch.tensor(wild))
                given = rig.accepted(clamped) if host else counts
                batch = rig.batch(((1, 1, 1), (3, 2, 4)), counts=clamped)
                rig.commit(batch, clamped, f"{dtype} counts", given=given)
                assert counts.tolist() == wild, "a commit wrote to its counts"

    def test_device_slots_out_of_range(
        self, kit: Kit, policy: str, specs: Sequence[AnySpec]
    ) -> None:
        """If a slot of any group is outside its cache on the device, no layer is written."""
        kit.need_cuda()
        groups = {spec.group for spec in specs}
        for group, bad in itertools.product(groups, (-2, 10**6, -(2**33), 2**33)):
            rig = kit.rig(policy, specs)
            batch = rig.batch(padding=0.0)
            (batch.states if group in batch.states else batch.slots)[group][0] = bad
            rig.run(batch, [1, 1])
            rig.check(f"slot {bad} in group {group}")

    @pytest.mark.parametrize("bad", [-2, 10**6])
    def test_a_commit_that_the_device_refuses(self, kit: Kit, policy: str, bad: int) -> None:
        """A refused commit writes and restores no row in any layer, and rejects every draft.

        It is counted as refused. The device refuses it for a slot outside a cache.
        """
        rig = kit.rig(policy, executor=_off_range(kit.executor, bad, "commit"))
        batch = rig.batch()
        with rig.open(batch) as window:
            rig.stage(window, batch)
            rig.expect_staged(batch)
            window.commit(rig.accepted([1, 1]))
        rig.check("refused")
        _check_refused(rig)

    @pytest.mark.parametrize("bad", [-2, 10**6])
    def test_staging_that_the_device_refuses(self, kit: Kit, policy: str, bad: int) -> None:
        """Staging writes no row in any layer, settled ones included, nor does the commit.

        A slot lies outside a cache. The window is counted as refused, and every draft as rejected.
        """
        rig = kit.rig(policy, executor=_off_range(kit.executor, bad, "stage", "commit"))
        batch = rig.batch()
        with rig.open(batch) as window:
            for index, ref in enumerate(rig.refs):
                rig.stage(window, batch, [index])
                rig.check(f"{ref.name} was refused: txn.permit has to mask what stage writes")
            window.commit(rig.accepted([1, 1]))
        rig.check("refused")
        _check_refused(rig)

    @pytest.mark.parametrize("bad", [-2, 10**6])
    def test_an_abort_that_the_device_refuses(self, kit: Kit, bad: int) -> None:
        """If a slot lies outside a cache, the abort of an undo window puts no row back.

        To save the rows of such slots raises nothing.
        """
        saves = _saving_off_range(kit.executor, bad)
        rig = kit.rig("undo", executor=_off_range(saves, bad, "restore"))
        batch = rig.batch()
        with rig.open(batch) as window:
            rig.stage(window, batch)
            rig.expect_staged(batch)
            window.abort()
        rig.check("refused: txn.permit has to mask what restore writes")

    @pytest.mark.parametrize("staging", ["auto", "reference", "copy"])
    @pytest.mark.parametrize("fmt", ["bf16", "fp32", "fp8_e4m3-head", "int8-row"])
    def test_ways_to_stage(self, kit: Kit, policy: str, fmt: str, staging: str) -> None:
        """By reference or by copy, from tensors of any strides, the caches get the same bytes.

        Tensors of inference mode, which have no version counter, stand for all.
        """
        specs = [LayerSpec(fmt=FORMATS[fmt]), LayerSpec("hnd", FORMATS[fmt])]
        rig = kit.rig(policy, specs, staging=staging)
        for view in (Tensor.contiguous, spread, every_other, turned):
            batch = rig.batch()
            with torch.inference_mode(), rig.open(batch) as window:
                for ref in rig.refs:
                    parts = tuple(map(view, batch.tensors[ref.name]))
                    window.stage(ref, *handed_in(ref, parts))  # type: ignore[arg-type]
                window.commit([2, 1])
            rig.expect_committed(batch, batch.kept([2, 1]))
            rig.check(f"tensors made by {view.__name__}")
        rig.commit(one_for_all(rig.batch(), rig.caches), when="one tensor for everything")

    def test_a_latent_in_two_halves(self, kit: Kit, policy: str) -> None:
        """A latent may be staged as two tensors, which together are one row."""
        rig = kit.rig(policy, [LayerSpec("latent", size=9), LayerSpec("latent-gapped", size=4)])
        batch = rig.batch()
        with rig.open(batch) as window:
            for ref in rig.refs:
                (latent,) = batch.tensors[ref.name]
                window.stage(ref, latent[:, :3], latent[:, 3:])
            window.commit([1, 2])
        rig.expect_committed(batch, batch.kept([1, 2]))
        rig.check()

    @pytest.mark.parametrize("staging", ["auto", "copy"])
    def test_debug_finds_nothing(
        self, kit: Kit, policy: str, specs: Sequence[AnySpec], staging: str
    ) -> None:
        """Debug mode, the library's own check of each commit, finds no difference.

        Caches and rows are of inference mode, as engines make them; the last window is not.
        """
        with torch.inference_mode():
            rig = kit.rig(policy, specs, debug=True, staging=staging)
        for shape in ("one", "uneven", "settled-laps", "one"):  # windows that grow
            with torch.inference_mode():
                batch = rig.batch(SHAPES[shape])
            with torch.inference_mode(shape != "one"):
                rig.commit(batch, when=shape)

    @pytest.mark.parametrize("policy", ["undo", "direct"])
    def test_rows_written_by_the_caller(self, kit: Kit, policy: str) -> None:
        """If the caller writes rows itself, the window only takes rejected ones back.

        In any number of layers. An abort under ``undo`` takes all drafts back; under ``direct``
        none is taken back.
        """
        rig = kit.rig(policy, [*VARIED, *_LAYERS])
        for end in ("commit", "mask", "abort") if policy == "undo" else ("commit", "mask"):
            batch = rig.batch(((1, 2), (4, 3)))
            slots = rig.slots(batch)
            window = rig.manager.window(batch.draft_len, slots, batch.settled, written_by="caller")
            rig.expect_staged(batch)
            rig.truth.impose()  # all rows, as an engine without the library writes them
            rig.check("the kit's own writes")
            if end == "commit":
                window.commit(rig.accepted([1, 3]))
                rig.expect_committed(batch, batch.kept([1, 3]))
            elif end == "mask":
                kept = [draft and row % 2 == 0 for row, draft in enumerate(batch.drafts)]
                window.commit(torch.tensor(kept).to(kit.device))
                rig.expect_committed(batch, kept)
            else:
                window.abort()
                rig.expect_committed(batch, [False] * batch.num_rows)
            rig.check(f"after {end}")

    def test_the_same_bytes_as_torch(self, kit: Kit, policy: str, specs: Sequence[AnySpec]) -> None:
        """The torch executor, given the same program, leaves the same memory word for word."""
        if "torch" not in registry.names():
            pytest.skip("the torch executor is not installed")
        rigs = [kit.rig(policy, specs, seed=9), Rig("torch", policy, kit.device, specs, seed=9)]
        for shape in SHAPES.values():
            for rig in rigs:
                batch = rig.batch(shape)
                rig.run(batch, random_counts(batch, rig.rng))
        for ours, theirs in zip(rigs[0].caches, rigs[1].caches, strict=True):
            for mine, other in zip(ours.memories, theirs.memories, strict=True):
                assert mine.tolist() == other.tolist(), f"{ours.name} differs from torch"
        assert rigs[0].rows() == rigs[1].rows()

    def test_addresses_beyond_32_bits(self, kit: Kit, policy: str) -> None:
        """A cache of more than 2**31 elements: rows at its end land there, and nowhere else."""
        kit.need_cuda()
        spec = LayerSpec(fmt=FORMATS["fp8_e4m3"], heads=2, size=64, block_size=16)
        blocks = 2**31 // (spec.heads * spec.size * spec.block_size) + 9
        size = 2 * blocks * spec.heads * spec.size * spec.block_size
        if torch.cuda.mem_get_info(kit.device)[0] < 4 * size:
            pytest.skip(f"{4 * size >> 30} GiB of free device memory are needed")
        _commit_far_out(kit, policy, spec, blocks)


class Sizes(KitBase):
    """Exactness has no upper bound but ``max_rows``."""

    def test_many_layers(self, kit: Kit, policy: str) -> None:
        """The last of many layers is committed and restored like the first."""
        # Writing through is a launch per layer, which an interpreter of kernels feels.
        layers = _LAYERS if policy == "deferred" else _LAYERS[:20]
        _commit_and_abort(kit, policy, layers, ((0, 0), (3, 2)))

    def test_many_requests(self, kit: Kit, policy: str) -> None:
        """Commit and abort are exact for 520 requests, which have more than 1 024 rows.

        The count of every one holds, the last included.
        """
        spec = attrs.evolve(_SMALL, num_blocks=270)
        _commit_and_abort(kit, policy, [spec], ((1,) * 520, (1,) * 520), max_rows=1040)

    def test_long_drafts(self, kit: Kit, policy: str) -> None:
        """Commit and abort are exact for a request of 260 drafts, as of prompt lookup.

        And for one of 260 settled rows, as of a prompt beside them.
        """
        spec = attrs.evolve(_SMALL, num_blocks=145)
        _commit_and_abort(kit, policy, [spec], ((1, 260, 1), (260, 40, 3)), max_rows=570)

    def test_many_slots(self, kit: Kit, policy: str) -> None:
        """Rows at the end of more than 2**24 slots, of a byte each, land there and nowhere else."""
        spec = LayerSpec(fmt=FORMATS["fp8_e4m3"], heads=1, size=1, block_size=16)
        _commit_far_out(kit, policy, spec, 2**24 // spec.block_size + 9)

    def test_wide_rows(self, kit: Kit, policy: str) -> None:
        """Every element of a wide row is committed and restored."""
        _commit_and_abort(kit, policy, _WIDE, ((1, 1), (3, 2)))


def _handed(executor: type[Executor]) -> Any:
    """Make a subclass of an executor that commits the attribute ``given``, as from a device.

    Counts on the host are checked and copied before an executor sees them.
    """

    def commit(self: Any, txn: Txn, accepted: Tensor) -> None:
        """Commit ``given`` in place of ``accepted``."""
        executor.commit(self, txn, self.given)

    def advance(self: Any, txn: Txn, accepted: Tensor) -> None:
        """Advance states by ``given`` in place of ``accepted``."""
        executor.advance(self, txn, self.given)

    members = {"commit": commit, "advance": advance}
    return type(f"Handed{executor.__name__}", (executor,), members)


def _off_range(executor: type[Executor], bad: int, *methods: str) -> type[Executor]:
    """Make a subclass of an executor whose methods meet a slot outside its cache, as from a device.

    Where the executor does not check ranges by itself, ``Txn.in_range`` is False instead.
    """

    def off(name: str) -> Any:
        """Make the failing form of the method of this name."""
        inner = getattr(executor, name)

        def call(self: Executor, txn: Txn, *more: Any) -> None:
            """Put ``bad`` in the place of a slot, or mark the window as out of range.

            Then call the method.
            """
            if executor.capabilities.checks_range:
                txn.slots = {group: slots.clone() for group, slots in txn.slots.items()}
                txn.slots["sliding"][-1] = bad
            else:
                device = txn.layout.is_draft.device
                txn.in_range = torch.zeros((), dtype=torch.bool, device=device)
            inner(self, txn, *more)

        return call

    members = {name: off(name) for name in methods}
    return type(f"OffRange{executor.__name__}", (executor,), members)


def _saving_off_range(executor: type[Executor], bad: int) -> type[Executor]:
    """Make a subclass of an executor that saves ``bad`` in the place of a slot of each group."""

    def save(self: Executor, txn: Txn, group: str) -> LayerRows:
        """Save with ``bad`` as the last slot, which is put right afterwards."""
        slots, last = txn.slots[group], int(txn.slots[group][-1])
        slots[-1] = bad
        try:
            return executor.save(self, txn, group)
        finally:
            slots[-1] = last

    return type(f"SavingOffRange{executor.__name__}", (executor,), {"save": save})


def _check_refused(rig: Rig) -> None:
    """Check that the one window so far counts as refused, and all its drafts as rejected."""
    staged, committed, rejected = rig.rows()
    assert (committed, rejected) == (0, staged)
    assert rig.manager.snapshot()["kvtxn_windows_refused_total"] == 1


def _commit_far_out(kit: Kit, policy: str, spec: LayerSpec, blocks: int) -> None:
    """Run one window at the end of a huge cache, and compare the whole cache on the device."""
    if policy not in kit.capabilities.policies:
        pytest.skip(f"{kit.name} does not declare {policy!r}")
    shape = (2, blocks, spec.block_size, spec.heads, spec.size)
    memory = torch.zeros(shape, dtype=torch.uint8, device=kit.device)
    ref = LayerRef("far", memory[0], memory[1], kv_dtype="fp8_e4m3")
    manager = TransactionManager(
        [ref],
        TxnConfig(policy=policy, backend=kit.name, max_rows=8),  # type: ignore[arg-type]
    )
    last = blocks * spec.block_size - 1
    slots = torch.tensor([last - 3, last, -1, last - 40], device=kit.device)
    rows = torch.arange(1, 5, dtype=torch.uint8, device=kit.device).view(4, 1, 1)
    rows = rows.expand(4, spec.heads, spec.size).contiguous().view(torch.float8_e4m3fn)
    with manager.window([3], slots, [1]) as window:
        window.stage(ref, rows, rows)
        window.commit(torch.tensor([2], device=kit.device))
    kept = {last - 3: 1, last: 2} | ({last - 40: 4} if policy == "direct" else {})
    flat = memory.view(2, -1, spec.heads * spec.size)
    for slot, code in kept.items():
        assert flat[:, slot].eq(code).all(), f"slot {slot} does not hold its row"
        flat[:, slot] = 0
    assert not memory.any(), "a row went somewhere else"


def _commit_and_abort(
    kit: Kit,
    policy: str,
    specs: Sequence[LayerSpec],
    shape: tuple[Sequence[int], Sequence[int]],
    **config: Any,
) -> None:
    """Commit a window and abort another, and compare after each; no abort under ``direct``.

    Every second request is accepted whole, the others by chance.
    """
    rig = kit.rig(policy, specs, **config)
    batch = rig.batch(shape)
    counts = random_counts(batch, rig.rng)
    counts[::2] = batch.draft_len[::2]
    rig.commit(batch, counts, f"after commit of {sum(counts)} drafts")
    if policy == "direct":
        return
    batch = rig.batch(shape)
    rig.abort(batch, when="after abort")
