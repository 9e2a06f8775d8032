"""Every promise again for windows that mix paged rows with rings and states, see ``mixed_layers``.

In a ring or state a write evicts a row that no counter restores. The replay oracle writes row after
row, so a slot of the oracle holds its last kept row by itself; laps of a ring and states that
replace each other need no rule of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import attrs
import pytest
import torch

from ..errors import BackendUnavailableError, CapacityError, IncompleteWindowError
from ..window_transitions import WindowState
from .batches import random_counts
from .faults import ADVANCE, MOMENTS, InjectedFault
from .honesty import commit_two, that_claims, works
from .kit import TRANSACTIONAL, Kit, KitBase
from .mixed_layers import (
    MIXED,
    PERMUTED,
    REPLAYED,
    RING,
    ROWS,
    STATE,
    faulty_mixed_rig,
    mixed_rig,
    need_kinds,
    specs_for,
)
from .number_formats import FORMATS
from .promise_device import no_host_sync, replayed_commit, window_without_sync
from .promise_fallback import either
from .rig import AnySpec, Rig, registered

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
        ("deferred", ADVANCE, (1,)),
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


class Overwriting(KitBase):
    """Exactness, isolation, all or nothing, fallbacks and counts for rings and states."""

    @pytest.mark.parametrize("accepting", ["none", "some", "all", "mask"])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_rings_and_states(self, kit: Kit, policy: str, shape: str, accepting: str) -> None:
        """After staging and after commit, a slot of a ring or a state holds its last kept row.

        For counts and for masks of any draft rows, with padding and without.
        """
        rig = mixed_rig(kit, policy)
        for padding in (0.0, 0.3):
            batch = rig.batch(SHAPES[shape], padding=padding)
            counts = {"none": [0] * len(batch.draft_len), "all": list(batch.draft_len)}.get(
                accepting, random_counts(batch, rig.rng)
            )
            kept, given = batch.kept(counts), rig.accepted(counts)
            if accepting == "mask":
                kept = [draft and rig.rng.random() < 0.5 for draft in batch.drafts]
                given = torch.tensor(kept, dtype=torch.bool).to(rig.device)
            rig.commit(batch, counts, shape, given=given, kept=kept, check_staged=True)

    @pytest.mark.parametrize("ring_size", range(1, 6))
    def test_wrap_around(self, kit: Kit, ring_size: int) -> None:
        """Commits are exact for every number of rows around one and two laps of a ring.

        Every number of the drafts is accepted, each by a request of its own.
        """
        most = 2 * ring_size + 1
        ring = attrs.evolve(RING, ring_size=ring_size, num_blocks=2 * (most + 1))
        state = attrs.evolve(STATE, num_blocks=most + 1)
        rig = mixed_rig(kit, "deferred", [ring, state], max_rows=256)
        for settled, drafts in itertools.product((0, 1, ring_size), range(most + 1)):
            counts = range(drafts + 1)  # one request for each number that can be accepted
            batch = rig.batch(([settled] * len(counts), [drafts] * len(counts)), padding=0.0)
            rig.commit(batch, counts, f"{settled} settled, {drafts} drafts")

    @pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp8_e4m3-head", "int8-tensor", "int8-row"])
    @pytest.mark.parametrize("layout", ["plain", "packed", "transposed", "interleaved", "latent"])
    def test_layouts(self, kit: Kit, layout: str, fmt: str) -> None:
        """Commits are exact with any strides and formats in rings, and any strides in states."""
        state = fmt if not FORMATS[fmt].quantised else "bf16"
        rig = mixed_rig(
            kit,
            "deferred",
            [
                attrs.evolve(RING, layout=layout, fmt=FORMATS[fmt]),
                attrs.evolve(STATE, layout=layout, fmt=FORMATS[state], heads=3),
                attrs.evolve(PERMUTED, fmt=FORMATS[state], heads=3, size=4),
            ],
        )
        for payload in ("native", "cast"):
            batch = rig.batch(((1, 2), (6, 1)), payload=payload)
            rig.commit(batch, when=payload)

    @pytest.mark.parametrize("missing", range(len(MIXED)))
    def test_one_transaction(self, kit: Kit, missing: int) -> None:
        """If a layer of any kind is missing, commit is refused, and writes none of the others.

        Once the layer is staged, in whatever order, commit passes.
        """
        rig = mixed_rig(kit, "deferred")
        missing = min(missing, len(rig.refs) - 1)
        batch = rig.batch(SHAPES["settled-laps"])
        others = [index for index in reversed(range(len(rig.refs))) if index != missing]
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
        """An abort after any number of layers leaves states and live rows; settled rows stay.

        The same step can be repeated and committed then.
        """
        rig = mixed_rig(kit, policy)
        staged = min(staged, len(rig.refs))
        for shape in SHAPES.values():
            batch = rig.batch(shape)
            rig.abort(batch, range(staged), f"aborted after {staged} layers")
            rig.commit(batch, when="repeated")

    @_failing
    def test_a_fallback_evicts_nothing(
        self, kit: Kit, policy: str, at: str, when: str, nth: int
    ) -> None:
        """Rings and states are exact even after a fallback, committed or aborted.

        Counts are right, too. Paged slots of rejected rows may hold the old or the staged words.
        """
        for committed, shape in itertools.product((True, False), ("laps", "settled-laps")):
            if (policy, shape) == ("undo", "settled-laps"):
                continue
            rig, faults = faulty_mixed_rig(kit, policy, on_error="fallback")
            batch = rig.batch(SHAPES[shape])
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
                either(rig, batch)
            rig.check(f"{at} failed, committed: {committed}")
            rig.check_rows(batch.count(kept))

    @_failing
    def test_an_error_leaves_whole_states(
        self, kit: Kit, policy: str, at: str, when: str, nth: int
    ) -> None:
        """on_error="raise": no draft in any cache, and no state or live row half written.

        The executor's error surfaces. A plain row of the staging that failed may be.
        """
        if at == ADVANCE:
            need_kinds(kit, "replayed")  # nothing else is advanced
        rig, faults = faulty_mixed_rig(kit, policy, on_error="raise")
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

    def test_the_caller_gives_up(self, kit: Kit) -> None:
        """After ``fall_back`` commit still writes the rows, rings and states that were staged."""
        rig = mixed_rig(kit, "deferred", on_error="fallback")
        batch = rig.batch(SHAPES["laps"])
        staged = range(1, len(rig.refs))  # the caller writes the first layer's rows, or none
        with rig.open(batch) as window:
            rig.stage(window, batch, staged)
            window.fall_back("forward", ValueError("no such kernel"))
            window.commit(rig.accepted(counts := random_counts(batch, rig.rng)))
        rig.expect_committed(batch, batch.kept(counts), staged)
        rig.check("the caller gave up")

    def test_the_body_raises(self, kit: Kit) -> None:
        """An exception in the ``with`` block aborts: no state changes, settled rows stay.

        The same step can be repeated and committed then.
        """
        rig = mixed_rig(kit, "deferred", on_error="fallback")
        batch = rig.batch(SHAPES["settled-laps"])
        staged = range(len(rig.refs) - 1)
        with pytest.raises(ZeroDivisionError), rig.open(batch) as window:  # noqa: PT012
            rig.stage(window, batch, staged)
            raise ZeroDivisionError
        rig.expect_aborted(batch, staged)
        rig.check("the body raised")
        rig.commit(batch, when="repeated")

    def test_counts_of_rings_and_states(self, kit: Kit, policy: str) -> None:
        """Drafts count once per window; bytes count per slot, and a state's once per request."""
        rig = mixed_rig(kit, policy)
        batch = rig.batch(SHAPES["laps"], padding=0.3)
        counts = random_counts(batch, rig.rng)
        rig.run(batch, counts)
        kept = batch.kept(counts)
        rig.check_rows(batch.count(kept))
        written = avoided = 0
        sizes = {ref.name: ref.row_bytes for ref in rig.refs if ref.replay}
        for cache in rig.caches:
            size = sum(plane.heads * plane.size for plane in cache.planes)
            sizes[cache.name] = size * cache.spec.fmt.word.itemsize
        for ref in rig.refs:
            slots, size = batch.slots[ref.group], sizes[ref.name]
            touched = {slot for slot, draft in zip(slots, batch.drafts, strict=True) if draft}
            filled = {slot for slot, keep in zip(slots, kept, strict=True) if keep}
            most, some = len(touched - {-1}), len(filled - {-1})
            times = {"deferred": some, "undo": some + 2 * (most - some), "direct": most}
            written += size * times[policy]
            avoided += size * (most - some) if policy == "deferred" else 0
        flat = rig.manager.snapshot()
        assert flat["kvtxn_bytes_written_total"] == written
        assert flat["kvtxn_bytes_avoided_total"] == avoided

    @pytest.mark.parametrize("staging", ["auto", "copy"])
    def test_the_librarys_own_check(self, kit: Kit, policy: str, staging: str) -> None:
        """Debug mode finds no difference, in growing windows, by reference or by copy."""
        rig = mixed_rig(kit, policy, debug=True, staging=staging)
        for shape in ("one", "laps", "settled-laps"):
            batch = rig.batch(SHAPES[shape])
            with torch.inference_mode():
                rig.commit(batch, when=shape)

    def test_no_waiting_for_rings_and_states(self, kit: Kit, policy: str) -> None:
        """Windows over rings and states, committed or aborted, never wait for the device."""
        kit.need("no_host_sync")
        rig = mixed_rig(kit, policy)
        window_without_sync(rig, attend=False)
        if policy != "deferred":
            return
        batch = rig.batch(SHAPES["settled-laps"])
        slots = rig.slots(batch)
        with no_host_sync():
            window = rig.manager.window(batch.draft_len, slots, batch.settled)
            rig.stage(window, batch)
            window.abort()
        rig.expect_aborted(batch)
        rig.check("an abort that never waited")

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_rings_and_states_in_a_graph(self, kit: Kit, policy: str) -> None:
        """A captured commit selects rows and states by the counts of its replay."""
        kit.need("capturable")
        replayed_commit(mixed_rig(kit, policy))

    @pytest.mark.parametrize("group", ["ring", "state", "replayed"])
    def test_device_slots_of_rings_and_states(self, kit: Kit, group: str) -> None:
        """If a slot on the device is outside its cache, no layer of any kind is written."""
        kit.need_cuda()
        if group == "replayed":
            need_kinds(kit, group)
        for bad in (-2, 10**6, 2**33):
            rig = mixed_rig(kit, "deferred")
            batch = rig.batch(SHAPES["laps"], padding=0.0)
            slots = batch.states if group == "replayed" else batch.slots
            slots[group][0] = bad
            rig.run(batch, [1, 1])
            rig.check(f"slot {bad}")

    def test_undo_refuses_what_it_cannot_take_back(self, kit: Kit) -> None:
        """Undo refuses a window that laps a ring (CapacityError), and a manager with a state.

        The latter with BackendUnavailableError; both say the reason.
        """
        rig = mixed_rig(kit, "undo")
        with pytest.raises(CapacityError, match="more rows than its ring"):
            rig.open(rig.batch(((1,), (9,)), padding=0.0))
        assert rig.manager.current is None
        with pytest.raises(BackendUnavailableError, match="recurrent state"):
            kit.rig("undo", specs_for(kit, "deferred"))

    @pytest.mark.parametrize("kind", ["ring", "recurrent", "replayed"])
    def test_denied_kinds(self, kit: Kit, kind: str) -> None:
        """A layer of a kind that is not declared is refused with BackendUnavailableError.

        An executor that is made to claim the kind writes wrong bytes, or raises.
        """
        if kind in kit.capabilities.kinds:
            pytest.skip(f"{kind} layers are declared; they are tested by themselves")
        layers: dict[str, AnySpec] = {"ring": RING, "recurrent": STATE, "replayed": REPLAYED[0]}
        specs = (ROWS, layers[kind])
        with pytest.raises(BackendUnavailableError, match=kind):
            kit.rig("deferred", specs)
        claimed = {kind} | ({"recurrent"} if kind == "replayed" else set())
        claiming = that_claims(kit.executor, kinds=kit.capabilities.kinds | claimed)
        with registered(claiming) as name:
            worked = works(lambda: _lap_and_replace(name, kit, specs))
        assert not worked, f"{kit.name} declares that it cannot hold {kind} layers, and can"


def _lap_and_replace(name: str, kit: Kit, specs: Sequence[AnySpec]) -> None:
    """Run committed windows over these layers, one with laps; raise if any of them is wrong."""
    commit_two(Rig(name, "deferred", kit.device, specs))
    rig = Rig(name, "deferred", kit.device, specs)
    batch = rig.batch(SHAPES["settled-laps"])
    rig.commit(batch, when="committed")
