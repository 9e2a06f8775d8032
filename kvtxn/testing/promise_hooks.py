"""No row leaves before commit: the view of an offload connector through the hooks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ..hooks import EndedWindow
from ..row_io import read
from ..window_transitions import WindowState
from .batches import SHAPES, Batch, random_counts
from .faults import OPERATIONS
from .kit import Kit
from .mixed_layers import Layers, MixedKit
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
        """Note the ended window, and copy its durable rows from the caches.

        After an abort these are only settled rows.
        """
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
        batch: the window's rows; every layer was staged. The rig expects them committed: a state
            is copied as it is expected now.
        kept: bool per row, True for accepted drafts.
    """
    stays = [keep or not draft for keep, draft in zip(kept, batch.drafts, strict=True)]
    found: dict[tuple[str, int], Row] = {}
    for ref in rig.refs:
        for row, slot in enumerate(batch.slots[ref.group]):
            if slot != -1 and stays[row]:
                held = rig.states_in(ref.name, slot) if ref.states else batch.rows[ref.name][row]
                found[ref.name, slot] = held
    return found


def after_abort(rig: Rig, batch: Batch) -> dict[tuple[str, int], Row]:
    """Return the rows that an offloader must have copied of a whole forward's aborted window.

    The settled ones; none if a layer has states, since no state took a settled row in.
    """
    if any(ref.states for ref in rig.refs):
        return {}  # no state took a settled row in, so none is in every layer
    return durable(rig, batch, [False] * batch.num_rows)


class Hooks(MixedKit):
    """A connector that copies rows in hooks copies accepted rows only, failures included."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_an_offloader_sees_accepted_rows_only(self, mixed: Rig, shape: str) -> None:
        """``on_commit`` names exactly the settled and accepted rows.

        Their staged bytes lie there.
        """
        offloader = Offloader(mixed)
        for _ in range(3):
            batch = mixed.batch(SHAPES[shape])
            counts = random_counts(batch, mixed.rng)
            mixed.run(batch, counts)
            mixed.expect_committed(batch, batch.kept(counts))
            assert offloader.seen() == durable(mixed, batch, batch.kept(counts))
        assert offloader.committed == [0, 1, 2]
        assert offloader.aborted == []

    def test_it_is_told_of_nothing_before_commit(self, mixed: Rig) -> None:
        """No hook is called at begin or staging; ``on_abort`` gets only settled rows' slots.

        ``on_commit`` gets the slots of settled and accepted rows.
        """
        offloader = Offloader(mixed)
        for end in ("commit", "abort"):
            batch = mixed.batch()
            with mixed.open(batch) as window:
                for index in range(len(mixed.refs)):
                    mixed.stage(window, batch, [index])
                    assert offloader.seen() == {}
                if end == "commit":
                    window.commit(mixed.accepted([2, 1]))
                else:
                    window.abort()
            if end == "commit":
                mixed.expect_committed(batch, kept := batch.kept([2, 1]))
                assert offloader.seen() == durable(mixed, batch, kept)
            else:
                assert offloader.seen() == after_abort(mixed, batch)
        assert (offloader.committed, offloader.aborted) == ([0], [1])

    def test_an_abort_between_layers(self, mixed: Rig) -> None:
        """If a layer is missing at an abort, ``on_abort`` is called with no slots."""
        offloader = Offloader(mixed)
        batch = mixed.batch()
        with mixed.open(batch) as window:
            mixed.stage(window, batch, range(len(mixed.refs) - 1))
            window.abort()
        assert offloader.seen() == {}
        assert offloader.aborted == [0]

    @pytest.mark.parametrize("at", OPERATIONS)
    def test_a_fallback_tells_of_accepted_rows_only(
        self, kit: Kit, layers: Layers, policy: str, at: str
    ) -> None:
        """``on_commit`` names settled and accepted rows only, whatever operation failed.

        Rejected rows may be in the cache all the same.
        """
        rig, faults = kit.faulty_rig(policy, layers(policy), on_error="fallback")
        offloader = Offloader(rig)
        for when in ("before", "middle", "after"):
            batch = rig.batch(((1, 2, 0), (3, 0, 4)))
            faults.arm(at, when)
            with rig.open(batch) as window:
                rig.stage(window, batch)
                window.commit(rig.accepted([2, 0, 1]))
            fell_back = (at, when) in faults.fired
            assert (window.state is WindowState.FELL_BACK) == fell_back
            rig.expect_committed(batch, batch.kept([2, 0, 1]))
            assert offloader.seen() == durable(rig, batch, batch.kept([2, 0, 1]))
            faults.disarm()
        assert offloader.committed == [0, 1, 2]

    def test_hooks_of_a_commit_that_the_device_refuses(self, kit: Kit, rig: Rig) -> None:
        """If the device refuses a commit, ``on_commit`` is called with slots that are all -1."""
        kit.need_cuda()
        offloader = Offloader(rig)
        batch = rig.batch()
        batch.slots["sliding"][1] = 10**6
        rig.run(batch, [2, 1])
        assert offloader.seen() == {}

    def test_hooks_do_not_wait(self, kit: Kit, mixed: Rig) -> None:
        """Calling an ``on_commit`` hook, and reading ``stored``, costs no host sync."""
        kit.need("no_host_sync")
        stored = []
        mixed.manager.on_commit(lambda ended: stored.append(list(map(ended.stored, ended.slots))))
        window_without_sync(mixed, attend=False)
        assert len(stored) == 3
