"""Promise 1 if a request crosses a boundary: it leaves two states, each after its own rows.

The slot beyond the boundary is full of NaN, and stays so unless the request crosses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import pytest

from .batches import Batch
from .faults import MOMENTS, InjectedFault
from .kit import Kit, KitBase
from .mixed_layers import need_kinds
from .promise_states import EVERY, GROUPS, state_rig
from .rig import Rig

_ROWS: Final = ("kvtxn_rows_staged_total", "kvtxn_rows_committed_total")


class StateBoundaries(KitBase):
    """States at the boundaries of blocks, and the states with which requests continue."""

    @pytest.mark.parametrize("settled", [0, 1, 2])
    @pytest.mark.parametrize("boundary", [0, 1, 2, 5])
    def test_every_way_across(self, kit: Kit, boundary: int, settled: int) -> None:
        """States are exact before, at and beyond the boundary, for every number of drafts kept."""
        for padding in (0.0, 0.4):
            rig = state_rig(kit)
            batch = rig.batch(([settled] * 4, [3] * 4), counts=[0, 1, 2, 3], padding=padding)
            batch = _crossing(rig, batch, [boundary] * 4)
            rig.commit(batch, [0, 1, 2, 3], f"boundary after {boundary} rows, {settled} settled")

    def test_requests_that_begin_from_one_state(self, kit: Kit) -> None:
        """Requests that only read a state may share it; each continues in a slot of its own.

        Rows count once per request all the same.
        """
        rig = state_rig(kit)
        for group in GROUPS:
            rig.begin_requests(group, [2, 5])
        states = {group: [2, 2, 5, 2] for group in GROUPS}
        batch = rig.batch(([1, 1, 1, 0], [3, 2, 2, 2]), counts=[3, 0, 1, 0], states=states)
        batch = _crossing(rig, batch, [0, 0, 2, 0], without=[2])
        rig.commit(batch, [3, 0, 1, 0], "begun from one state")
        staged, committed = (rig.manager.metrics.snapshot()[name] for name in _ROWS)
        assert (staged, committed) == (9, 4)

    def test_some_requests_have_no_boundary(self, kit: Kit) -> None:
        """Requests may have different boundaries or none.

        The next window continues from their states.
        """
        rig = state_rig(kit)
        batch = rig.batch(((1, 1, 2), (3, 2, 0)), counts=[3, 2, 0], padding=0.0)
        batch = _crossing(rig, batch, [2, 1, 1], without=[1])
        rig.commit(batch, [3, 2, 0], "the window that crosses")
        here, beyond = batch.states, batch.crossings
        states = {g: [beyond[g][1][0], here[g][1], beyond[g][1][2]] for g in GROUPS}
        after = rig.batch(((1, 0, 1), (2, 2, 1)), counts=[1, 2, 0], states=states)
        rig.commit(after, [1, 2, 0], "the window after it")

    def test_an_abort_crosses_nothing(self, kit: Kit) -> None:
        """An aborted window leaves both states, though its settled rows reach the boundary."""
        rig = state_rig(kit)
        batch = _crossing(rig, rig.batch(((2, 1), (3, 3)), padding=0.0), [1, 1])
        rig.abort(batch, when="aborted")

    def test_boundaries_and_the_librarys_own_check(self, kit: Kit) -> None:
        """Debug mode, which compares both states of a request, finds no difference."""
        rig = state_rig(kit, debug=True)
        batch = rig.batch(((1, 1), (3, 3)), counts=[3, 0], padding=0.0)
        rig.commit(_crossing(rig, batch, [2, 1]), [3, 0], "debug")

    @pytest.mark.parametrize("on_error", ["fallback", "raise"])
    @pytest.mark.parametrize("when", MOMENTS)
    @pytest.mark.parametrize("at", ["advance", "commit"])
    def test_a_fault_at_a_boundary(self, kit: Kit, at: str, when: str, on_error: str) -> None:
        """After a fault both states of a request are exact (fallback), or unchanged (raise)."""
        need_kinds(kit, "recurrent", "replayed")
        rig, faults = kit.faulty_rig("deferred", EVERY, on_error=on_error)
        batch = rig.batch(((1, 1), (3, 3)), counts=[3, 1], padding=0.0)
        batch = _crossing(rig, batch, [2, 2])
        faults.arm(at, when)
        try:
            rig.run(batch, [3, 1])
        except InjectedFault:
            rig.expect_aborted(batch)
        else:
            rig.expect_committed(batch, batch.kept([3, 1]))
        assert faults.fired
        rig.check(f"{at} failed")

    def test_device_slots_beyond(self, kit: Kit) -> None:
        """If a slot beyond is outside its cache, known only on the device, nothing is written."""
        kit.need_cuda()
        for bad in (-2, 10**6, 2**33):
            rig = state_rig(kit)
            batch = rig.batch(((0, 0), (2, 3)), counts=[1, 2], padding=0.0)
            batch = _crossing(rig, batch, [1, 1])
            batch.crossings["state"][1][1] = bad
            rig.run(batch, [1, 2])
            rig.check(f"beyond {bad}")


def _crossing(
    rig: Rig, batch: Batch, boundary: Sequence[int], without: Sequence[int] = ()
) -> Batch:
    """Return the batch with boundaries and free slots beyond, for all replayed groups.

    Requests without a state, and those in ``without``, have no slot beyond.
    """
    crossings = {}
    for group in GROUPS:
        free = sorted(set(range(EVERY[0].num_states)) - {*batch.states[group]})
        beyond = rig.rng.sample(free, len(boundary))
        padding = {request for request, slot in enumerate(batch.states[group]) if slot == -1}
        none = padding.union(without)
        beyond = [-1 if request in none else slot for request, slot in enumerate(beyond)]
        crossings[group] = (list(boundary), beyond)
    return attrs.evolve(batch, crossings=crossings)
