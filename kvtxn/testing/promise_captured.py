"""Windows over captured rows, and windows committed by sampled ids, keep all promises."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from ..errors import ConfigError, LayerError
from ..executor import SampledIds
from ..layout import RowLayout
from ..window_transitions import WindowState
from .batches import SHAPES, Batch, random_counts
from .captured_forward import HELD, CapturedForward, exact_steps
from .kit import TRANSACTIONAL, Kit
from .mixed_layers import Layers, MixedKit
from .promise_fallback import either
from .rig import SIMPLE, Rig


def sampled(batch: Batch, counts: Sequence[int], device: torch.device) -> Tensor:
    """Make ids that mean ``counts``: per request the accepted drafts, one more, then placeholders.

    int64 ``[num_requests, most drafts + 1]``; the placeholder is -1.
    """
    width = max(batch.draft_len, default=0) + 1
    lines = [[7] * (count + 1) + [-1] * (width - count - 1) for count in counts]
    return torch.tensor(lines, dtype=torch.int64).view(-1, width).to(device)


class CapturedWindows(MixedKit):
    """Windows over the tensors that a forward itself makes: every replay commits exactly."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_each_replay_commits_its_own_rows(self, kit: Kit, layers: Layers, shape: str) -> None:
        """Each replay leaves other bytes in the same tensors; slots and counts change between."""
        rig = kit.rig("deferred", layers("deferred"))
        exact_steps(rig, CapturedForward(rig, HELD), SHAPES[shape])

    def test_fewer_rows_than_captured(self, kit: Kit) -> None:
        """A window may have fewer rows than the forward: it holds back and commits its own alone.

        The forward writes all rows behind them at once.
        """
        rig = kit.rig("deferred", SIMPLE)
        forward = CapturedForward(rig, HELD)
        forward.load(batch := rig.batch(((1, 1, 1), (2, 2, 2))))
        layout = RowLayout.build((2, 2), (1, 1), rig.device)
        window = forward.windows.begin(forward.windows.plan(layout))
        forward.run()
        rig.write(batch, [row >= 6 or not draft for row, draft in enumerate(batch.drafts)])
        rig.check("drafts of two requests of three wait")
        window.commit_sampled(forward.sampled([1, 2]))
        rig.write(batch, [row < 6 and keep for row, keep in enumerate(batch.kept([1, 2, 0]))])
        rig.check("the rows of two requests of three")

    def test_an_abort_over_captured_rows(self, kit: Kit, layers: Layers) -> None:
        """An aborted window writes no draft; the next window finds the rows and commits them."""
        rig = kit.rig("deferred", layers("deferred"))
        forward = CapturedForward(rig, HELD)
        batch = rig.batch()
        window = forward.begin(batch)
        forward.run()
        window.abort()
        rig.expect_aborted(batch)
        rig.check("aborted")
        window = forward.windows.begin(forward.windows.plan(window.layout))
        window.commit(rig.accepted(batch.draft_len))
        rig.expect_committed(batch, batch.kept(batch.draft_len))
        rig.check("committed")
        assert rig.rows()[0] == 2 * rig.rows()[1]

    def test_a_failing_commit_of_captured_rows(self, kit: Kit, layers: Layers) -> None:
        """If the commit fails, the window falls back: the reference writes the accepted rows.

        It finds them where the forward left them.
        """
        rig, faults = kit.faulty_rig("deferred", layers("deferred"), on_error="fallback")
        forward = CapturedForward(rig, HELD)
        window = forward.begin(batch := rig.batch())
        forward.run()
        faults.arm("commit")
        window.commit_sampled(forward.sampled([2, 1]))
        assert window.state is WindowState.FELL_BACK
        rig.expect_committed(batch, batch.kept([2, 1]))
        either(rig, batch)  # rejected rows may be there, as in stock
        rig.check("committed by the reference")

    def test_a_layer_was_not_captured(self, kit: Kit) -> None:
        """Windows over rows that lack a layer are refused with a LayerError that names it.

        Nothing is written.
        """
        rig = kit.rig("deferred", SIMPLE)
        forward = CapturedForward(rig, HELD)
        rows = dict(forward.windows.rows)
        del rows[rig.refs[1].name]
        with pytest.raises(LayerError, match=f"rows of layer '{rig.refs[1].name}' do not fit"):
            rig.manager.captured_windows(forward.slots, rows)
        assert rig.manager.current is None
        rig.check("refused")

    def test_marks_that_do_not_fit(self, kit: Kit) -> None:
        """Marks are int64, one for each row, side by side; others are refused with a LayerError.

        Marks that fit are all set to -1, and used in place.
        """
        rig = kit.rig("deferred", SIMPLE)
        most = rig.manager.config.max_rows
        zeros = partial(torch.zeros, dtype=torch.int64, device=rig.device)
        slots = zeros(1, most)
        for position in (zeros(most - 1), zeros(most).int(), zeros(1, most), zeros(2 * most)[::2]):
            with pytest.raises(LayerError, match="position cannot hold the marks"):
                rig.manager.captured_windows(slots, position=position)
        position = zeros(most + 1)
        windows = rig.manager.captured_windows(slots, position=position)
        assert position.tolist() == [-1] * (most + 1)
        assert windows.position.data_ptr() == position.data_ptr()

    @pytest.mark.parametrize("policy", ["undo", "direct"])
    def test_only_where_rows_wait(self, kit: Kit, policy: str) -> None:
        """Given rows are refused with a ConfigError except under ``deferred``.

        Under other policies the forward writes them to the caches.
        """
        rows = CapturedForward(kit.rig("deferred", SIMPLE), HELD).windows.rows
        rig = kit.rig(policy, SIMPLE)
        slots = torch.full((1, 9), -1, dtype=torch.int64, device=rig.device)
        with pytest.raises(ConfigError, match=f"captured rows do not go with policy '{policy}'"):
            rig.manager.captured_windows(slots, rows)

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_sampled_ids_say_the_same_as_counts(self, mixed: Rig, shape: str) -> None:
        """Sampled ids leave the bytes that counts of accepted drafts ask for, in three windows.

        Those of the second are strided.
        """
        for turn in range(3):
            batch = mixed.batch(SHAPES[shape])
            counts = random_counts(batch, mixed.rng)
            ids = sampled(batch, counts, mixed.device)
            ids = ids.T.contiguous().T if turn == 1 else ids
            mixed.commit(batch, counts, f"ids that mean {counts}", given=SampledIds(ids))

    def test_ids_beyond_the_vocabulary_count_as_nothing(self, kit: Kit) -> None:
        """Ids at or above the vocabulary size, and the placeholder, count as no token.

        A request without any token keeps no draft.
        """
        rig = kit.rig("deferred", SIMPLE)
        batch = rig.batch(((1, 1), (3, 3)))
        ids = torch.tensor([[3, 99, 100, -7], [-7] * 4], dtype=torch.int32).to(rig.device)
        rig.commit(
            batch,
            [1, 0],
            "two real ids: one draft; none: none",
            given=SampledIds(ids, placeholder=-7, vocab_size=100),
        )

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_refusals_are_counted(self, kit: Kit, policy: str) -> None:
        """A commit that the device refuses is COMMITTED for the host, and counted as refused.

        The device refuses it for a slot out of range.
        """
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
