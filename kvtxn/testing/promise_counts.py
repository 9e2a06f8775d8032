"""Promise 8: counts add up, per window and in total."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..executor import Executor, Txn
from ..layers import LayerRef
from .batches import SHAPES, random_counts
from .caches import LayerSpec
from .kit import TRANSACTIONAL, Kit
from .mixed_layers import MixedKit
from .rig import SIMPLE, Rig


class _UntilCounted(TorchDispatchMode):
    """A mode that copies the caches as soon as the counters have changed.

    Attributes:
        copies: the caches at that moment; None before it.
    """

    def __init__(self, layers: Sequence[LayerRef], counters: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cells = [plane.cells for ref in layers for plane in ref.planes]
        self._counters, self._before = counters, counters.clone()
        self.copies: list[Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.copies is None and not torch.equal(self._counters, self._before):
            self.copies = [cells.clone() for cells in self._cells]
        return result

    def check(self) -> None:
        """Raise an AssertionError if a cache was written after the counters."""
        pairs = zip(self._cells, self.copies or self._cells, strict=True)
        assert all(torch.equal(now, then) for now, then in pairs), (
            "commit counted before its last write; txn.count comes last"
        )


def _watched(executor: type[Executor]) -> type[Executor]:
    """Make a subclass of an executor whose commits fail if they count before they have written."""

    def commit(self: Executor, txn: Txn, accepted: Tensor) -> None:
        """Commit, and raise an AssertionError if a cache was written after the counters."""
        with _UntilCounted(self.layers, txn.counters) as watch:
            executor.commit(self, txn, accepted)
        watch.check()

    return type(f"Watched{executor.__name__}", (executor,), {"commit": commit})


class Counts(MixedKit):
    """staged = committed + rejected; a row counts once, however many layers it has."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_per_window(self, lapping: Rig, shape: str) -> None:
        """A window's counters count each draft row that has a slot in at least one KV-cache group.

        Padding and settled rows are not counted.
        """
        rig = lapping
        total: tuple[int, ...] = (0, 0, 0)
        for padding in (0.0, 0.6):
            batch = rig.batch(SHAPES[shape], padding=padding)
            counts = random_counts(batch, rig.rng)
            rig.run(batch, counts)
            total = rig.check_rows(batch.count(batch.kept(counts)), total)
        assert rig.manager.snapshot()["kvtxn_windows_total_committed"] == 2

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_a_commit_counts_last(self, kit: Kit, policy: str) -> None:
        """No cache is written once the window is counted: a write that fails is not counted."""
        rig = kit.rig(policy, SIMPLE, executor=_watched(kit.executor))
        for _ in range(2):  # a repeated window may take another code path than a new one
            rig.run(rig.batch(padding=0.0), [2, 1])

    def test_aborted_rows_are_rejected(self, rig: Rig) -> None:
        """An abort rejects every draft that had a slot, whether or not it was staged."""
        batch = rig.batch(padding=0.3)
        with rig.open(batch) as window:
            rig.stage(window, batch, [0])
            window.abort()
        rig.check_rows(batch.count())
        assert rig.manager.snapshot()["kvtxn_windows_total_aborted"] == 1

    @pytest.mark.parametrize("known", range(5))
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
        rig.check_rows(batch.count(groups=[specs[index].group for index in order]))

    def test_bytes_follow_from_rows(self, lapping: Rig, policy: str) -> None:
        """Bytes count per slot, and a state's once per request, in any order of groups."""
        rig = lapping
        batch = rig.batch(((1, 1), (8, 4)), padding=0.4)
        slots = dict(reversed(rig.slots(batch).items()))
        with rig.manager.window(batch.draft_len, slots, batch.settled) as window:
            rig.stage(window, batch)
            window.commit([5, 0])
        kept = batch.kept([5, 0])
        written = avoided = 0
        sizes = {ref.name: ref.row_bytes for ref in rig.refs if ref.replay}
        for cache in rig.caches:
            size = sum(plane.heads * plane.size for plane in cache.planes)
            sizes[cache.name] = size * cache.spec.fmt.word.itemsize
        for ref in rig.refs:
            rows, size = batch.slots[ref.group], sizes[ref.name]
            touched = {slot for slot, draft in zip(rows, batch.drafts, strict=True) if draft}
            filled = {slot for slot, keep in zip(rows, kept, strict=True) if keep}
            most, some = len(touched - {-1}), len(filled - {-1})
            times = {"deferred": some, "undo": some + 2 * (most - some), "direct": most}
            written += size * times[policy]
            avoided += size * (most - some) if policy == "deferred" else 0
        flat = rig.manager.snapshot()
        assert flat["kvtxn_bytes_written_total"] == written
        assert flat["kvtxn_bytes_avoided_total"] == avoided

    def test_stage_operations_are_apart(self, kit: Kit, policy: str) -> None:
        """Rows x layers have a counter of their own, padding included."""
        rig = kit.rig(policy, SIMPLE)
        batch = rig.batch()
        rig.run(batch, [1, 1])
        flat = rig.manager.snapshot()
        assert flat["kvtxn_stage_operations_total"] == batch.num_rows * len(SIMPLE)
