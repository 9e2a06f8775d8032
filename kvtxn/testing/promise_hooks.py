"""No row leaves before commit: the view of an offload connector through the hooks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ..hooks import EndedWindow
from ..row_io import read
from ..states import WindowState
from .batches import SHAPES, Batch, random_counts
from .faults import OPERATIONS
from .kit import POLICIES, Kit, KitBase
from .oracle import Row
from .promise_device import window_without_sync
from .rig import Rig


class Offloader:
    """A connector that copies every durable row on the stream, as soon as a hook names it.

    Args:
        rig: the manager with which it registers its hooks.

    Attributes:
        committed: numbers of the windows for which ``on_commit`` was called.
        aborted: numbers of the windows for which ``on_abort`` was called.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.committed: list[int] = []
        self.aborted: list[int] = []
        self._copies: list[tuple[str, list[int], list[list[list[int]]]]] = []
        rig.manager.on_commit(self.store)
        rig.manager.on_abort(self.store)

    def store(self, window: EndedWindow) -> None:
        """Copy the durable rows from the caches; after an abort these are only settled rows."""
        aborted = window.state is WindowState.ABORTED
        (self.aborted if aborted else self.committed).append(window.number)
        for ref in self._rig.refs:
            slots = window.stored(ref.group)
            parts = [read(plane, slots).flatten(1) for plane in ref.planes]
            words = [
                (
                    part.view(torch.uint8) if plane.is_scale else part
                ).tolist()  # as integers, like the oracle's words
                for plane, part in zip(ref.planes, parts, strict=True)
            ]
            self._copies.append((ref.name, slots.tolist(), words))

    def seen(self) -> dict[tuple[str, int], Row]:
        """Return, by layer and slot, the row that was copied last; then empty the store."""
        store = {
            (layer, slot): [plane[row] for plane in planes]
            for layer, slots, planes in self._copies
            for row, slot in enumerate(slots)
            if slot != -1
        }
        self._copies.clear()
        return store


def durable(rig: Rig, batch: Batch, kept: Sequence[bool]) -> dict[tuple[str, int], Row]:
    """Return the rows that an offloader must have copied of a window that ended.

    Args:
        rig: the window's rig.
        batch: the window's rows; every layer was staged.
        kept: bool per row, True for accepted drafts; all False after an abort.
    """
    return {
        (cache.name, slot): batch.rows[cache.name][row]
        for cache in rig.caches
        for row, slot in enumerate(batch.slots[cache.spec.group])
        if slot != -1 and (kept[row] or not batch.drafts[row])
    }


class Hooks(KitBase):
    """A connector that copies rows in hooks copies accepted rows only, failures included."""

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("policy", POLICIES)
    def test_an_offloader_sees_accepted_rows_only(self, kit: Kit, policy: str, shape: str) -> None:
        """The offloader copies exactly the settled and accepted rows, with the staged bytes."""
        rig = kit.rig(policy)
        offloader = Offloader(rig)
        for _ in range(3):
            batch = rig.batch(SHAPES[shape])
            counts = random_counts(batch, rig.rng)
            rig.run(batch, counts)
            assert offloader.seen() == durable(rig, batch, batch.kept(counts))
        assert offloader.committed == [0, 1, 2]
        assert offloader.aborted == []

    @pytest.mark.parametrize("policy", POLICIES)
    def test_it_is_told_of_nothing_before_commit(self, kit: Kit, policy: str) -> None:
        """No hook is called at begin or staging; ``on_abort`` gets only settled rows' slots."""
        rig = kit.rig(policy)
        offloader = Offloader(rig)
        for end in ("commit", "abort"):
            batch = rig.batch()
            with rig.open(batch) as window:
                for index in range(len(rig.refs)):
                    rig.stage(window, batch, [index])
                    assert offloader.seen() == {}
                if end == "commit":
                    window.commit(rig.accepted([2, 1]))
                else:
                    window.abort()
            counts = [2, 1] if end == "commit" else [0, 0]
            assert offloader.seen() == durable(rig, batch, batch.kept(counts))
        assert (offloader.committed, offloader.aborted) == ([0], [1])

    @pytest.mark.parametrize("policy", POLICIES)
    def test_an_abort_between_layers(self, kit: Kit, policy: str) -> None:
        """If a layer is missing, no row is in every layer, and ``on_abort`` gets no slots."""
        rig = kit.rig(policy)
        offloader = Offloader(rig)
        batch = rig.batch()
        with rig.open(batch) as window:
            rig.stage(window, batch, range(len(rig.refs) - 1))
            window.abort()
        assert offloader.seen() == {}
        assert offloader.aborted == [0]

    @pytest.mark.parametrize("at", OPERATIONS)
    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_fallback_tells_of_accepted_rows_only(self, kit: Kit, policy: str, at: str) -> None:
        """The hook names accepted rows only, though rejected rows may be in the cache."""
        rig, faults = kit.faulty_rig(policy, on_error="fallback")
        offloader = Offloader(rig)
        for when in ("before", "middle", "after"):
            batch = rig.batch(((1, 2, 0), (3, 0, 4)))
            faults.arm(at, when)
            with rig.open(batch) as window:
                rig.stage(window, batch)
                window.commit(rig.accepted([2, 0, 1]))
            fell_back = (at, when) in faults.fired
            assert (window.state is WindowState.FELL_BACK) == fell_back
            assert offloader.seen() == durable(rig, batch, batch.kept([2, 0, 1]))
            faults.disarm()
        assert offloader.committed == [0, 1, 2]

    @pytest.mark.parametrize("policy", POLICIES)
    def test_hooks_of_a_commit_that_the_device_refuses(self, kit: Kit, policy: str) -> None:
        """If the device refuses a commit, the hook's tensors say so, on the device."""
        kit.need_cuda()
        rig = kit.rig(policy)
        offloader = Offloader(rig)
        batch = rig.batch()
        batch.slots["sliding"][1] = 10**6
        rig.run(batch, [2, 1])
        assert offloader.seen() == {}

    @pytest.mark.parametrize("policy", POLICIES)
    def test_hooks_do_not_wait(self, kit: Kit, policy: str) -> None:
        """Calling a hook costs no host sync."""
        kit.need_cuda()
        if not kit.capabilities.no_host_sync:
            pytest.skip(f"{kit.name} declares that it waits for the device")
        rig = kit.rig(policy)
        stored = []
        rig.manager.on_commit(lambda window: stored.append(window.stored()))
        window_without_sync(rig, attend=False)
        assert len(stored) == 3
