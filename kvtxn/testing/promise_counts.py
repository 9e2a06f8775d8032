"""Promise 8: counts add up, per window and in total."""

from __future__ import annotations

import pytest

from .batches import SHAPES, random_counts
from .caches import LayerSpec
from .kit import POLICIES, TRANSACTIONAL, Kit, KitBase
from .rig import SIMPLE


class Counts(KitBase):
    """staged = committed + rejected; a row counts once, however many layers it has."""

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("policy", POLICIES)
    def test_per_window(self, kit: Kit, policy: str, shape: str) -> None:
        """A window's counters count each draft row that has a slot in at least one KV-cache group.

        Padding and settled rows are not counted.
        """
        rig = kit.rig(policy)
        total = (0, 0, 0)
        for padding in (0.0, 0.6):
            batch = rig.batch(SHAPES[shape], padding=padding)
            counts = random_counts(batch, rig.rng)
            rig.run(batch, counts)
            staged, committed = batch.count(batch.kept(counts), list(batch.slots))
            added = (staged, committed, staged - committed)
            total = tuple(a + b for a, b in zip(total, added, strict=True))  # type: ignore[assignment]
            rig.check_rows(total)
        assert rig.manager.snapshot()["kvtxn_windows_total_committed"] == 2

    @pytest.mark.parametrize("policy", POLICIES)
    def test_aborted_rows_are_rejected(self, kit: Kit, policy: str) -> None:
        """An abort rejects every draft that had a slot, whether or not it was staged."""
        rig = kit.rig(policy)
        batch = rig.batch(padding=0.3)
        with rig.open(batch) as window:
            rig.stage(window, batch, [0])
            window.abort()
        staged, _ = batch.count([False] * batch.num_rows, list(batch.slots))
        rig.check_rows((staged, 0, staged))
        assert rig.manager.snapshot()["kvtxn_windows_total_aborted"] == 1

    @pytest.mark.parametrize("known", range(5))
    @pytest.mark.parametrize("policy", POLICIES)
    def test_groups_that_were_never_mapped(self, kit: Kit, policy: str, known: int) -> None:
        """A window that ends early counts the rows of the groups it had slots for."""
        specs = [LayerSpec(group=name) for name in ("a", "b", "c", "d")]
        rig = kit.rig(policy, specs)
        batch = rig.batch(padding=0.5)
        slots = rig.slots(batch)
        order = [2, 0, 3, 1][:known]
        with rig.manager.window(batch.draft_len, settled=batch.settled) as window:
            for index in order:
                rig.hand_in(window, batch, index, slots[rig.refs[index].group])
            window.abort()
        mapped = [specs[index].group for index in order]
        staged, _ = batch.count([False] * batch.num_rows, mapped)
        rig.check_rows((staged, 0, staged))

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_bytes_follow_from_rows(self, kit: Kit, policy: str) -> None:
        """Bytes written and avoided follow from each group's rows, in any order of groups."""
        specs = [LayerSpec(group="a"), LayerSpec(group="b", heads=3), LayerSpec("latent")]
        rig = kit.rig(policy, specs)
        batch = rig.batch(((1, 1), (4, 3)), padding=0.4)
        slots = dict(reversed(rig.slots(batch).items()))
        with rig.manager.window(batch.draft_len, slots, batch.settled) as window:
            rig.stage(window, batch)
            window.commit([3, 0])
        kept = batch.kept([3, 0])
        written = avoided = 0
        for cache in rig.caches:
            staged, committed = batch.count(kept, [cache.spec.group])
            size = (
                sum(plane.heads * plane.size for plane in cache.planes)
                * cache.spec.fmt.word.itemsize
            )
            rejected = staged - committed
            written += size * (committed if policy == "deferred" else staged + rejected)
            avoided += size * rejected if policy == "deferred" else 0
        flat = rig.manager.snapshot()
        assert flat["kvtxn_bytes_written_total"] == written
        assert flat["kvtxn_bytes_avoided_total"] == avoided

    @pytest.mark.parametrize("policy", POLICIES)
    def test_stage_operations_are_apart(self, kit: Kit, policy: str) -> None:
        """Rows x layers have a counter of their own, padding included."""
        rig = kit.rig(policy, SIMPLE)
        batch = rig.batch()
        rig.run(batch, [1, 1])
        flat = rig.manager.snapshot()
        assert flat["kvtxn_stage_operations_total"] == batch.num_rows * len(SIMPLE)
