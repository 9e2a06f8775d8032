"""Promise 6: the host never waits for the device, and commit can be captured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch

from ..cuda_graphs import capture
from .batches import SHAPES
from .kit import TRANSACTIONAL, Kit
from .mixed_layers import MixedKit
from .rig import Rig


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Make torch raise at any operation that waits for the device, in the block.

    Waits for the device once, before; afterwards torch's sync debug mode is as it was. Without a
    GPU there is nothing to wait for, and the block runs as it is.
    """
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def window_without_sync(rig: Rig, attend: bool) -> None:
    """Run a warm-up window, then others under sync debug mode, one without rows; compare all.

    ``attend``: each of them attends to its layers, too.
    """
    _whole_window(rig, ((1, 1), (3, 2)), attend, nullcontext())
    for shape in (((1, 1, 1), (4, 2, 1)), ((0,), (0,))):
        _whole_window(rig, shape, attend, no_host_sync())


def _whole_window(
    rig: Rig,
    shape: tuple[Sequence[int], Sequence[int]],
    attend: bool,
    watch: AbstractContextManager[None],
) -> None:
    """Begin, stage, attend and commit inside ``watch``; compare the caches after it.

    All tensors are made before; ``attend`` False leaves the attention out.
    """
    batch = rig.batch(shape)
    requests = len(batch.settled)
    kept = [max(0, drafts - 1) for drafts in batch.draft_len]
    slots, counts = rig.slots(batch), rig.accepted(kept)
    query = torch.zeros(batch.num_rows, 2, 5, device=rig.device)
    table = torch.zeros(requests, 2, dtype=torch.int64, device=rig.device)
    seq_lens = rig.accepted([5] * requests)  # all rows of the longest, at least
    with watch:
        window = rig.manager.window(batch.draft_len, slots, batch.settled)
        for index, ref in enumerate(rig.refs):
            rig.stage(window, batch, [index])
            if attend and ref.planes[0].row_shape == (2, 5):
                window.attend(ref, query, table, seq_lens)
        window.commit(counts)
    rig.expect_committed(batch, batch.kept(kept))
    rig.check("a window that never waited")


def replayed_commit(rig: Rig) -> None:
    """Capture a commit, which changes nothing yet; change its counts in place; replay it twice.

    The caches are compared with the oracle after the capture and after each replay.
    """
    rig.commit(rig.batch(), [1, 1], "the warm-up")
    batch = rig.batch()
    counts = rig.accepted([0, 0])
    window = rig.open(batch)
    rig.stage(window, batch)
    rig.expect_staged(batch)
    torch.cuda.synchronize()
    graph = capture(lambda: window.commit(counts))
    rig.check("captured, not run")
    counts.copy_(rig.accepted([3, 1]))
    for _ in range(2):  # a state takes its rows in at each replay
        graph.replay()
        torch.cuda.synchronize()
        rig.expect_committed(batch, batch.kept([3, 1]))
        rig.check("replayed with other counts")


class Device(MixedKit):
    """The host never waits for the device from begin to the end of commit."""

    def test_no_host_sync(self, kit: Kit, policy: str, lapping: Rig) -> None:
        """A window with a new layout passes torch's sync debug mode; so does an abort."""
        kit.need("no_host_sync")
        of_rows = all(cache.spec.kind == "paged" for cache in lapping.caches)
        window_without_sync(lapping, kit.capabilities.attention and of_rows)
        if policy != "deferred":
            return
        batch = lapping.batch(SHAPES["settled-laps"])
        slots = lapping.slots(batch)
        with no_host_sync():
            window = lapping.manager.window(batch.draft_len, slots, batch.settled)
            lapping.stage(window, batch)
            window.abort()
        lapping.expect_aborted(batch)
        lapping.check("an abort that never waited")

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_commit_in_a_graph(self, kit: Kit, lapping: Rig) -> None:
        """A captured commit selects rows and states by the counts of its replay."""
        kit.need("capturable")
        replayed_commit(lapping)
