"""Every promise again for rings and states, where a write evicts a row that no counter restores.

The replay oracle writes row after row, so a slot of the oracle holds its last kept row
by itself; laps of a ring and states that replace each other need no rule of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import attrs
import pytest
import torch

from ..errors import BackendUnavailableError, CapacityError, IncompleteWindowError
from ..states import WindowState
from .batches import Batch, random_counts
from .caches import LayerSpec
from .faults import MOMENTS, InjectedFault
from .honesty import commit_two, that_claims, works
from .kit import TRANSACTIONAL, Kit, KitBase
from .number_formats import FORMATS
from .promise_device import replayed_commit, window_without_sync
from .rig import Rig, registered

_ROWS: Final = LayerSpec(group="rows", num_blocks=12)
_RING: Final = LayerSpec(
    "hnd", kind="ring", ring_size=4, block_size=3, num_blocks=14, group="ring", value_size=3
)
_LATENT_RING: Final = LayerSpec(
    "latent-gapped", kind="ring", ring_size=4, block_size=3, num_blocks=13, group="ring", size=7
)
_STATE: Final = LayerSpec(
    "gapped", kind="recurrent", block_size=1, num_blocks=7, group="state", size=6, value_size=5
)
_PERMUTED: Final = LayerSpec(
    "permuted", FORMATS["fp32"], kind="recurrent", block_size=1, num_blocks=6, group="state"
)

#: Paged rows, rings that are lapped, and states, in one transaction.
MIXED: Final = (_ROWS, _RING, _STATE, _LATENT_RING, _PERMUTED)

#: Layers that ``undo`` can take back: rings with a slot for every row of a request.
UNDONE: Final = (
    _ROWS,
    attrs.evolve(_RING, ring_size=9, num_blocks=12),
    attrs.evolve(_LATENT_RING, ring_size=9, num_blocks=12),
)

#: Settled and draft rows per request; requests without drafts, without rows, of many laps.
SHAPES: Final[dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "one": ((1,), (3,)),
    "no-drafts": ((1, 2, 1), (0, 0, 0)),
    "none-settled": ((0, 0), (5, 2)),
    "laps": ((1, 1), (8, 4)),
    "settled-laps": ((6, 4, 1), (2, 0, 5)),
    "an-empty-request": ((0, 1, 0), (0, 6, 1)),
    "nothing": ((), ()),
}


#: All faults: policy, method, moment and call at which an executor fails.
_FAULTS: Final = [
    (policy, at, when, nth)
    for policy, at, calls in (
        ("deferred", "stage", (1, 2, 4, 5)),  # the last two are of states, at the commit
        ("deferred", "commit", (1,)),
        ("undo", "save", (1, 2)),
        ("undo", "stage", (1, 2, 3)),
        ("undo", "commit", (1,)),
        ("undo", "restore", (1,)),
    )
    for when in MOMENTS
    for nth in calls
]

_failing = pytest.mark.parametrize(
    ("policy", "at", "when", "nth"), _FAULTS, ids=["-".join(map(str, fault)) for fault in _FAULTS]
)


def specs_for(policy: str) -> Sequence[LayerSpec]:
    """Return layers that a policy can hold."""
    return UNDONE if policy == "undo" else MIXED


class Overwriting(KitBase):
    """Exactness, isolation, all or nothing, fallbacks and counts for rings and states."""

    @pytest.mark.parametrize("accepting", ["none", "some", "all", "mask"])
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
    def test_rings_and_states(self, kit: Kit, policy: str, shape: str, accepting: str) -> None:
        """After staging and after commit, a slot holds its last kept row."""
        rig = _rig(kit, policy)
        for padding in (0.0, 0.3):
            batch = rig.batch(SHAPES[shape], padding=padding)
            counts = {"none": [0] * len(batch.draft_len), "all": list(batch.draft_len)}.get(
                accepting, random_counts(batch, rig.rng)
            )
            kept, given = batch.kept(counts), rig.accepted(counts)
            if accepting == "mask":
                kept = [draft and rig.rng.random() < 0.5 for draft in batch.drafts]
                given = torch.tensor(kept, dtype=torch.bool).to(rig.device)
            with rig.open(batch) as window:
                rig.stage(window, batch)
                rig.expect_staged(batch)
                rig.check("staged")
                window.commit(given)
            rig.expect_committed(batch, kept)
            rig.check(f"{shape}, {accepting} accepted")

    @pytest.mark.parametrize("ring_size", range(1, 6))
    def test_wrap_around(self, kit: Kit, ring_size: int) -> None:
        """Every number of rows around one and two laps, every number of them accepted."""
        most = 2 * ring_size + 1
        ring = attrs.evolve(_RING, ring_size=ring_size, num_blocks=2 * (most + 1))
        state = attrs.evolve(_STATE, num_blocks=most + 1)
        rig = _rig(kit, "deferred", [ring, state], max_rows=256)
        for settled, drafts in itertools.product((0, 1, ring_size), range(most + 1)):
            counts = range(drafts + 1)  # one request for each number that can be accepted
            batch = rig.batch(([settled] * len(counts), [drafts] * len(counts)), padding=0.0)
            rig.run(batch, counts)
            rig.expect_committed(batch, batch.kept(counts))
            rig.check(f"{settled} settled, {drafts} drafts")

    @pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp8_e4m3-head", "int8-tensor", "int8-row"])
    @pytest.mark.parametrize("layout", ["plain", "packed", "transposed", "interleaved", "latent"])
    def test_layouts(self, kit: Kit, layout: str, fmt: str) -> None:
        """Any strides and formats in rings; any strides, merged or not, in states."""
        state = fmt if not FORMATS[fmt].quantised else "bf16"
        rig = _rig(
            kit,
            "deferred",
            [
                attrs.evolve(_RING, layout=layout, fmt=FORMATS[fmt]),
                attrs.evolve(_STATE, layout=layout, fmt=FORMATS[state], heads=3),
                attrs.evolve(_PERMUTED, fmt=FORMATS[state], heads=3, size=4),
            ],
        )
        for payload in ("native", "cast"):
            batch = rig.batch(((1, 2), (6, 1)), payload=payload)
            rig.run(batch, counts := random_counts(batch, rig.rng))
            rig.expect_committed(batch, batch.kept(counts))
            rig.check(payload)

    @pytest.mark.parametrize("missing", range(len(MIXED)))
    def test_one_transaction(self, kit: Kit, missing: int) -> None:
        """If a layer of any kind is missing, no layer is committed."""
        rig = _rig(kit, "deferred")
        batch = rig.batch(SHAPES["settled-laps"])
        others = [index for index in range(len(rig.refs)) if index != missing]
        with rig.open(batch) as window:
            rig.stage(window, batch, others)
            rig.expect_staged(batch, others)
            with pytest.raises(IncompleteWindowError):
                window.commit(0)
            rig.check("after the refused commit")
            rig.stage(window, batch, [missing])
            window.commit(rig.accepted(batch.draft_len))
        rig.expect_committed(batch, batch.kept(batch.draft_len))
        rig.check("after the commit that was allowed")

    @pytest.mark.parametrize("staged", range(len(MIXED) + 1))
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_abort_evicts_nothing(self, kit: Kit, policy: str, staged: int) -> None:
        """An abort leaves states and live rows, apart from settled rows; the step is repeated."""
        rig = _rig(kit, policy)
        staged = min(staged, len(rig.refs))
        for shape in SHAPES.values():
            batch = rig.batch(shape)
            with rig.open(batch) as window:
                rig.stage(window, batch, range(staged))
                window.abort()
            rig.expect_settled(batch, range(staged))
            rig.check(f"aborted after {staged} layers")
            rig.run(batch, counts := random_counts(batch, rig.rng))
            rig.expect_committed(batch, batch.kept(counts))
            rig.check("repeated")

    @_failing
    def test_a_fallback_evicts_nothing(
        self, kit: Kit, policy: str, at: str, when: str, nth: int
    ) -> None:
        """Rings and states are exact even after a fallback, committed or aborted."""
        for committed in (True, False):
            rig, faults = _faulty(kit, policy, "fallback")
            batch = rig.batch(SHAPES["laps"])
            counts = random_counts(batch, rig.rng)
            faults.arm(at, when, nth)
            with rig.open(batch) as window:
                rig.stage(window, batch)
                if committed:
                    window.commit(rig.accepted(counts))
                else:
                    window.abort()
            expected = WindowState.COMMITTED if committed else WindowState.ABORTED
            assert window.state is (WindowState.FELL_BACK if faults.fired else expected)
            kept = batch.kept(counts if committed else [0] * len(counts))
            if committed:
                rig.expect_committed(batch, kept)
            else:
                rig.expect_settled(batch)
            if faults.fired:
                _adopt_paged(rig, batch)
            rig.check(f"{at} failed, committed: {committed}")
            staged, rows = batch.count(kept, list(batch.slots))
            assert rig.rows() == (staged, rows, staged - rows)

    @_failing
    def test_an_error_leaves_whole_states(
        self, kit: Kit, policy: str, at: str, when: str, nth: int
    ) -> None:
        """on_error="raise": no draft in any cache, and no state or live row half written."""
        rig, faults = _faulty(kit, policy, "raise")
        batch = rig.batch(SHAPES["laps"], padding=0.0)
        faults.arm(at, when, nth)
        staged = 0
        try:
            with rig.open(batch) as window:
                for staged in range(len(rig.refs)):
                    rig.stage(window, batch, [staged])
                staged = len(rig.refs)
                if at == "restore":
                    window.abort()
                window.commit(1)
        except InjectedFault:
            assert faults.fired
        else:
            raise AssertionError(f"{at} was not called {nth} times under {policy}")
        if at != "save":  # else the window never began
            reached = range(min(staged + (at == "stage"), len(rig.refs)))
            rig.expect_settled(batch, reached)
        if at == "stage" and staged == 0:
            rig.truth = rig.truth_now()  # the row of a plain slot may be half written
        rig.check(f"{at} failed")

    @pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
    def test_counts_of_rings_and_states(self, kit: Kit, policy: str) -> None:
        """A row counts once per window; bytes count per slot, and a state's once per request."""
        rig = _rig(kit, policy)
        batch = rig.batch(SHAPES["laps"], padding=0.3)
        counts = random_counts(batch, rig.rng)
        rig.run(batch, counts)
        kept = batch.kept(counts)
        staged, committed = batch.count(kept, list(batch.slots))
        assert rig.rows() == (staged, committed, staged - committed)
        written = avoided = 0
        for cache in rig.caches:
            slots = batch.slots[cache.spec.group]
            touched = {slot for slot, draft in zip(slots, batch.drafts, strict=True) if draft}
            filled = {slot for slot, keep in zip(slots, kept, strict=True) if keep}
            size = sum(plane.heads * plane.size for plane in cache.planes)
            size *= cache.spec.fmt.word.itemsize
            most, some = len(touched - {-1}), len(filled - {-1})
            times = {"deferred": some, "undo": some + 2 * (most - some), "direct": most}
            written += size * times[policy]
            avoided += size * (most - some) if policy == "deferred" else 0
        flat = rig.manager.snapshot()
        assert flat["kvtxn_bytes_written_total"] == written
        assert flat["kvtxn_bytes_avoided_total"] == avoided

    @pytest.mark.parametrize("staging", ["auto", "copy"])
    @pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
    def test_the_librarys_own_check(self, kit: Kit, policy: str, staging: str) -> None:
        """Debug mode finds no difference, in growing windows, by reference or by copy."""
        rig = _rig(kit, policy, debug=True, staging=staging)
        for shape in ("one", "laps", "settled-laps"):
            batch = rig.batch(SHAPES[shape])
            with torch.inference_mode():
                rig.run(batch, counts := random_counts(batch, rig.rng))
            rig.expect_committed(batch, batch.kept(counts))
            rig.check(shape)

    @pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
    def test_no_waiting_for_rings_and_states(self, kit: Kit, policy: str) -> None:
        """States' slots are spread over rows, and laps found, without waiting for the device."""
        kit.need_cuda()
        if not kit.capabilities.no_host_sync:
            pytest.skip(f"{kit.name} declares that it waits for the device")
        window_without_sync(_rig(kit, policy), attend=False)

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_rings_and_states_in_a_graph(self, kit: Kit, policy: str) -> None:
        """A captured commit selects rows and states by the counts of its replay."""
        kit.need_cuda()
        if not kit.capabilities.capturable:
            pytest.skip(f"{kit.name} declares that commit cannot be captured")
        replayed_commit(_rig(kit, policy))

    @pytest.mark.parametrize("group", ["ring", "state"])
    def test_device_slots_of_rings_and_states(self, kit: Kit, group: str) -> None:
        """If a slot on the device is outside its cache, no layer of any kind is written."""
        kit.need_cuda()
        for bad in (-2, 10**6, 2**33):
            rig = _rig(kit, "deferred")
            batch = rig.batch(SHAPES["laps"], padding=0.0)
            batch.slots[group][0] = bad
            rig.run(batch, [1, 1])
            rig.check(f"slot {bad}")

    def test_undo_refuses_what_it_cannot_take_back(self, kit: Kit) -> None:
        """A lapped ring and a recurrent state are refused by undo, at once and with a reason."""
        need_kinds(kit, "ring")
        rig = kit.rig("undo", UNDONE)
        with pytest.raises(CapacityError, match="more rows than its ring"):
            rig.open(rig.batch(((1,), (9,)), padding=0.0))
        assert rig.manager.current is None
        with pytest.raises(BackendUnavailableError, match="recurrent state"):
            kit.rig("undo", MIXED)

    @pytest.mark.parametrize("kind", ["ring", "recurrent"])
    def test_denied_kinds(self, kit: Kit, kind: str) -> None:
        """A layer of a kind that is not declared is refused by name, and does not work either."""
        if kind in kit.capabilities.kinds:
            pytest.skip(f"{kind} layers are declared; they are tested by themselves")
        specs = [_ROWS, _RING if kind == "ring" else _STATE]
        with pytest.raises(BackendUnavailableError, match=kind):
            kit.rig("deferred", specs)
        claiming = that_claims(kit.executor, kinds=kit.capabilities.kinds | {kind})
        with registered(claiming) as name:
            worked = works(lambda: _lap_and_replace(name, kit, specs))
        assert not worked, f"{kit.name} declares that it cannot hold {kind} layers, and can"


def _lap_and_replace(name: str, kit: Kit, specs: Sequence[LayerSpec]) -> None:
    """Run windows with laps; raise if any of them is wrong."""
    commit_two(Rig(name, "deferred", kit.device, specs))
    rig = Rig(name, "deferred", kit.device, specs)
    batch = rig.batch(SHAPES["settled-laps"])
    rig.run(batch, counts := random_counts(batch, rig.rng))
    rig.expect_committed(batch, batch.kept(counts))
    rig.check("committed")


def need_kinds(kit: Kit, *kinds: str) -> None:
    """Skip the test for executors that do not declare these kinds of layers."""
    missing = {*kinds} - kit.capabilities.kinds
    if missing:
        pytest.skip(f"{kit.name} declares no {' or '.join(sorted(missing))} layers")


def _rig(kit: Kit, policy: str, specs: Sequence[LayerSpec] | None = None, **config: Any) -> Rig:
    specs = specs_for(policy) if specs is None else specs
    need_kinds(kit, *(spec.kind for spec in specs))
    return kit.rig(policy, specs, **config)


def _faulty(kit: Kit, policy: str, on_error: str) -> tuple[Rig, Any]:
    specs = specs_for(policy)
    need_kinds(kit, *(spec.kind for spec in specs))
    return kit.faulty_rig(policy, specs, on_error=on_error)


def _adopt_paged(rig: Rig, batch: Batch) -> None:
    """Accept old or staged words in paged slots, as after a fallback in stock."""
    for cache in rig.caches:
        if cache.spec.kind == "paged":
            slots = batch.slots[cache.spec.group]
            for slot, row in zip(slots, batch.rows[cache.name], strict=True):
                rig.truth.adopt(cache.name, slot, row)
