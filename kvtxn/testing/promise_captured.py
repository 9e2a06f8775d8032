"""Windows over captured rows, and sampled ids in place of counts: both are windows like others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ..captured import CapturedRows
from ..errors import ConfigError, LayerError, WindowStateError
from ..executor import SampledIds
from ..states import WindowState
from .batches import SHAPES, Batch, random_counts
from .kit import TRANSACTIONAL, Kit, KitBase
from .rig import SIMPLE, Rig


def hold(rig: Rig, batch: Batch) -> tuple[CapturedRows, dict[str, tuple[Tensor, ...]]]:
    """The batch's rows as a captured forward leaves them, and the tensors they lie in."""
    rows, places = CapturedRows(check=False), {}
    for ref in rig.refs:
        places[ref.name] = rows.stage(ref, *batch.tensors[ref.name]).rows
    return rows, places


def sampled(batch: Batch, counts: Sequence[int], device: torch.device) -> Tensor:
    """Ids that mean ``counts``: the accepted drafts, one more, then placeholders."""
    width = max(batch.draft_len, default=0) + 1
    lines = [[7] * (count + 1) + [-1] * (width - count - 1) for count in counts]
    return torch.tensor(lines, dtype=torch.int64).view(-1, width).to(device)


class CapturedWindows(KitBase):
    """STAGED at once, committed like any other, and at each replay as exact as at the first."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_each_replay_commits_its_own_rows(self, kit: Kit, shape: str) -> None:
        """Same places, other bytes, other counts; slots on a device may change in between."""
        rig = kit.rig("deferred")
        batch = rig.batch(SHAPES[shape])
        rows, places = hold(rig, batch)
        slots, counts = rig.slots(batch), rig.accepted(batch.draft_len)
        for _ in range(3):
            now = rig.batch(SHAPES[shape])
            accepted = random_counts(now, rig.rng)
            for name, parts in places.items():
                for part, new in zip(parts, now.tensors[name], strict=True):
                    part.copy_(new)
            for group, tensor in slots.items():
                tensor.copy_(torch.tensor(now.slots[group], dtype=torch.int64))
            counts.copy_(torch.tensor(accepted, dtype=torch.int64))
            window = rig.manager.window(now.draft_len, slots, now.settled, captured=rows)
            assert window.state is WindowState.STAGED or not rig.refs
            rig.expect_staged(now)
            rig.check("staged at once")
            window.commit(counts)
            rig.expect_committed(now, now.kept(accepted))
            rig.check("committed from where the forward left it")

    def test_fewer_rows_than_captured(self, kit: Kit) -> None:
        """A graph has room for more requests than the step has."""
        rig = kit.rig("deferred", SIMPLE)
        rows, _ = hold(rig, batch := rig.batch(((1, 1, 1), (2, 2, 2))))
        slots = {group: tensor[:6] for group, tensor in rig.slots(batch).items()}
        rig.manager.window([2, 2], slots, captured=rows).commit([1, 2])
        kept = zip(batch.kept([1, 2, 0]), batch.drafts, strict=True)
        rig.write(batch, [row < 6 and (keep or not d) for row, (keep, d) in enumerate(kept)])
        rig.check("the rows of two requests of three")

    def test_an_abort_over_captured_rows(self, kit: Kit) -> None:
        """And the next window over the same rows commits them."""
        rig = kit.rig("deferred")
        batch = rig.batch()
        rows, _ = hold(rig, batch)
        slots = rig.slots(batch)
        rig.manager.window(batch.draft_len, slots, batch.settled, captured=rows).abort()
        rig.expect_settled(batch)
        rig.check("aborted")
        window = rig.manager.window(batch.draft_len, slots, batch.settled, captured=rows)
        window.commit(rig.accepted(batch.draft_len))
        rig.expect_committed(batch, batch.kept(batch.draft_len))
        rig.check("committed")
        assert rig.rows()[0] == 2 * rig.rows()[1]

    def test_a_layer_was_not_captured(self, kit: Kit) -> None:
        """Refused at begin; nothing is open and nothing was written."""
        rig = kit.rig("deferred", SIMPLE)
        batch = rig.batch()
        rows = CapturedRows(check=False)
        rows.stage(rig.refs[0], *batch.tensors[rig.refs[0].name])
        with pytest.raises(LayerError, match="captured"):
            rig.manager.window(batch.draft_len, rig.slots(batch), batch.settled, captured=rows)
        assert rig.manager.current is None
        rig.check("refused")

    def test_slots_are_not_to_be_written_before_commit(self, kit: Kit) -> None:
        """Where they are read in place, a write in between is noticed, not followed."""
        kit.need_cuda()
        rig = kit.rig("deferred", SIMPLE)
        if not kit.capabilities.checks_range:
            pytest.skip(f"{kit.name} gets a copy of the slots")
        batch = rig.batch()
        rows, _ = hold(rig, batch)
        slots = rig.slots(batch)
        window = rig.manager.window(batch.draft_len, slots, batch.settled, captured=rows)
        slots["default"].add_(1)
        with pytest.raises(WindowStateError, match="modified in place"):
            window.commit(rig.accepted(batch.draft_len))
        window.abort()

    def test_only_where_rows_wait(self, kit: Kit) -> None:
        """Under undo a captured forward has written by itself."""
        rig = kit.rig("undo", SIMPLE)
        batch = rig.batch()
        rows, _ = hold(rig, batch)
        with pytest.raises(ConfigError, match="captured"):
            rig.manager.window(batch.draft_len, rig.slots(batch), batch.settled, captured=rows)

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_sampled_ids_say_the_same_as_counts(self, kit: Kit, policy: str, shape: str) -> None:
        """Whoever counts them: the manager, the kernel, or the graph."""
        rig = kit.rig(policy)
        for _ in range(3):
            batch = rig.batch(SHAPES[shape])
            counts = random_counts(batch, rig.rng)
            ids = SampledIds(sampled(batch, counts, rig.device))
            with rig.open(batch) as window:
                rig.stage(window, batch)
                rig.expect_staged(batch)
                window.commit(ids)
            rig.expect_committed(batch, batch.kept(counts))
            rig.check(f"ids that mean {counts}")

    def test_ids_beyond_the_vocabulary_count_as_nothing(self, kit: Kit) -> None:
        """As samplers mark them."""
        rig = kit.rig("deferred", SIMPLE)
        batch = rig.batch(((1,), (3,)))
        ids = torch.tensor([[3, 99, 100, -7]], dtype=torch.int32).to(rig.device)
        with rig.open(batch) as window:
            rig.stage(window, batch)
            window.commit(SampledIds(ids, placeholder=-7, vocab_size=100))
        rig.expect_committed(batch, batch.kept([1]))
        rig.check("two real ids: one draft")

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_refusals_are_counted(self, kit: Kit, policy: str) -> None:
        """A commit that the device refuses is labelled COMMITTED; the counter says it was not."""
        kit.need_cuda()
        rig = kit.rig(policy, SIMPLE)
        for wild in (0, 10**9, 0):
            batch = rig.batch(padding=0.0)
            slots = rig.slots(batch)
            slots["default"][1] += wild
            with rig.manager.window(batch.draft_len, slots, batch.settled) as window:
                rig.stage(window, batch)
                window.commit(rig.accepted(batch.draft_len))
            assert window.state is WindowState.COMMITTED
        flat = rig.manager.snapshot()
        assert flat["kvtxn_windows_refused_total"] == 1
        assert flat["kvtxn_windows_total_committed"] == 3
