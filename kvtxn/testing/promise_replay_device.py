"""Promise 6 for replayed layers: nothing waits for the device, which has the counts."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch

from .kit import Kit, KitBase
from .promise_device import no_host_sync
from .promise_replay import SHAPES, replay_rig


class ReplayOnDevice(KitBase):
    """Counts, slots and captured graphs of replayed layers on a device."""

    def test_no_waiting_for_replay(self, kit: Kit) -> None:
        """No window waits from begin to the end of commit or abort, even with a new layout."""
        kit.need_cuda()
        if not kit.capabilities.no_host_sync:
            pytest.skip(f"{kit.name} declares that it waits for the device")
        rig = replay_rig(kit, max_rows=128)
        for number, shape in enumerate(SHAPES.values()):
            for commits in (True, False):
                batch = rig.batch(shape)
                slots, counts = rig.slots(batch), rig.accepted(batch.counts)
                lengths = batch.rows.draft_len, batch.rows.settled
                with no_host_sync() if number else nullcontext():  # the first one compiles
                    window = rig.manager.window(lengths[0], slots, lengths[1])
                    rig.stage(window, batch)
                    if commits:
                        window.commit(counts)
                    else:
                        window.abort()
                if commits:
                    rig.expect_ended(batch)
                else:
                    rig.expect_staged(batch)
                rig.check("a window that never waited")

    @pytest.mark.parametrize("shape", ["one", "uneven"])
    @pytest.mark.parametrize("paged", [True, False])
    def test_replay_in_a_graph(self, kit: Kit, paged: bool, shape: str) -> None:
        """A captured commit takes in the rows of its replay's counts, at each replay."""
        kit.need_cuda()
        if not kit.capabilities.capturable:
            pytest.skip(f"{kit.name} declares that commit cannot be captured")
        rig = replay_rig(kit, **({} if paged else {"paged": ()}))
        rig.run(warm := rig.batch(((1, 1), (3, 2))))
        rig.expect_ended(warm)
        batch = rig.batch(SHAPES[shape])
        counts = rig.accepted([0] * len(batch.counts))
        window = rig.open(batch)
        rig.stage(window, batch)
        rig.expect_staged(batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            window.commit(counts)
        rig.check("captured, not run")
        counts.copy_(rig.accepted(batch.counts))
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            rig.expect_ended(batch)
            rig.check("replayed")
        again = rig.batch(SHAPES[shape])
        rig.run(again)
        rig.expect_ended(again)
        rig.check("a window after the graph")

    def test_counts_out_of_range(self, kit: Kit) -> None:
        """Counts out of range clamp on the device; settled rows are taken in whatever the count."""
        kit.need_cuda()
        for wild, counts in (([-7, -1], [0, 0]), ([99, 4], [3, 2])):
            rig = replay_rig(kit)
            batch = rig.batch(((1, 1), (3, 2)), counts)
            with rig.open(batch) as window:
                rig.stage(window, batch)
                window.commit(rig.accepted(wild))
            rig.expect_ended(batch)
            rig.check(f"counts {wild}")

    def test_device_slots_of_replayed_states(self, kit: Kit) -> None:
        """If a state's slot on the device is outside its cache, nothing is written."""
        kit.need_cuda()
        for group, bad in itertools.product(("state", "kda", "default"), (-2, 10**6, 2**33)):
            rig = replay_rig(kit)
            batch = rig.batch(((0, 0), (2, 3)), [1, 2])
            slots = batch.rows.slots if group == "default" else batch.states
            slots[group][0] = bad
            rig.run(batch)
            rig.check(f"slot {bad} of {group}")
