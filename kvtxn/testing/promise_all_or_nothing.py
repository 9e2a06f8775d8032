"""Promises 2 and 3: all or nothing, and no draft in the cache before commit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import attrs
import pytest
import torch

from ..errors import AcceptanceError, IncompleteWindowError, UnresolvedWindowError, WindowStateError
from ..window import Window
from ..window_transitions import WindowState
from .batches import SHAPES, Batch, random_counts
from .caches import LayerSpec
from .kit import TRANSACTIONAL, Kit
from .mixed_layers import MIXED, MixedKit
from .rig import SIMPLE, VARIED, Rig

#: Acceptances that commit must refuse for two requests with 3 and 2 drafts, 7 rows in all.
REFUSED: Final[dict[str, Callable[[], Any]]] = {
    "too-many": lambda: [4, 0],
    "too-many-for-all": lambda: 3,
    "negative": lambda: [0, -1],
    "negative-for-all": lambda: -1,
    "too-few-requests": lambda: [1],
    "too-many-requests": lambda: torch.tensor([1, 1, 1]),
    "floats": lambda: torch.tensor([1.0, 1.0]),
    "a-float": lambda: 1.0,
    "a-bool": lambda: True,
    "two-dimensions": lambda: torch.tensor([[1, 1]]),
    "short-mask": lambda: torch.tensor([True] * 6),
    "none": lambda: None,
    "text": lambda: "all",
}


class AllOrNothing(MixedKit):
    """A refused commit writes nothing; an abort leaves the caches as before the window."""

    @pytest.mark.parametrize("missing", range(len(MIXED)))
    def test_a_layer_is_missing(self, lapping: Rig, missing: int) -> None:
        """Commit is refused and writes nothing; once the layer is staged, commit passes."""
        rig, missing = lapping, min(missing, len(lapping.refs) - 1)
        batch = rig.batch(SHAPES["settled-laps"])
        others = [index for index in reversed(range(len(rig.refs))) if index != missing]
        with rig.open(batch) as window:
            rig.stage(window, batch, others)
            rig.expect_staged(batch, others)
            with pytest.raises(IncompleteWindowError):
                window.commit(1)
            assert window.state is WindowState.OPEN
            assert window.missing == (rig.refs[missing].name,)
            rig.check("after the refused commit")
            rig.stage(window, batch, [missing])
            window.commit(rig.accepted(batch.draft_len))
        rig.expect_committed(batch, batch.kept(batch.draft_len))
        rig.check("after the commit that was allowed")

    @pytest.mark.parametrize("wrong", REFUSED)
    def test_acceptance_that_does_not_fit(self, kit: Kit, policy: str, wrong: str) -> None:
        """A wrong acceptance is refused and changes nothing; the right one passes afterwards.

        The window stays STAGED in between.
        """
        rig = kit.rig(policy, SIMPLE)
        batch = rig.batch(((1, 1), (3, 2)))
        with rig.open(batch) as window:
            rig.stage(window, batch)
            rig.expect_staged(batch)
            with pytest.raises(AcceptanceError):
                window.commit(REFUSED[wrong]())
            assert window.state is WindowState.STAGED
            rig.check("after the refused commit")
            window.commit([3, 0])
        rig.expect_committed(batch, batch.kept([3, 0]))
        rig.check("after the commit that was allowed")

    @pytest.mark.parametrize("staged", range(len(MIXED) + 1))
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_abort_at_any_point(self, lapping: Rig, staged: int) -> None:
        """After any number of layers an abort leaves states and all rows, apart from settled rows.

        The step can be repeated.
        """
        staged = min(staged, len(lapping.refs))
        for shape in SHAPES.values():
            batch = lapping.batch(shape)
            lapping.abort(batch, range(staged), f"aborted after {staged} layers")
            lapping.commit(batch, when="repeated")

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_abort_before_all_slots_are_known(self, kit: Kit, policy: str) -> None:
        """An abort before all groups have slots does not touch groups without slots.

        In the others drafts are taken back, and settled rows stay.
        """
        more = [attrs.evolve(SIMPLE[0], group=group) for group in ("third", "fourth")]
        specs = [SIMPLE[0], VARIED[2], *more]
        rig = kit.rig(policy, specs)
        for known in range(len(specs) + 1):
            batch = rig.batch()
            slots = rig.slots(batch)
            with rig.manager.window(batch.draft_len, settled=batch.settled) as window:
                for index, ref in enumerate(rig.refs[:known]):
                    rig.hand_in(window, batch, index, slots[ref.group])
                window.abort()
            rig.expect_settled(batch, range(known))
            rig.check(f"aborted with {known} groups mapped")

    @pytest.mark.parametrize("staged", [0, 2, 4, len(MIXED)])
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_the_exception_of_the_body_wins(self, lapping: Rig, staged: int) -> None:
        """Leaving the block by an exception aborts, and the same exception surfaces."""
        rig, staged = lapping, min(staged, len(lapping.refs))
        batch = rig.batch(SHAPES["settled-laps"])
        ours, window = KeyError("from the body"), rig.open(batch)
        with pytest.raises(KeyError) as caught:
            leave_by(ours, rig, window, batch, staged)
        assert caught.value is ours
        assert window.state is WindowState.ABORTED
        rig.expect_settled(batch, range(staged))
        rig.check("left by an exception")
        rig.commit(batch, when="repeated")

    @pytest.mark.parametrize("staged", [0, len(VARIED)])
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_a_block_without_a_verdict(self, rig: Rig, staged: int) -> None:
        """Leaving the block without commit or abort aborts, and raises UnresolvedWindowError.

        Settled rows stay, no draft does, and the manager is free.
        """
        batch = rig.batch()
        with pytest.raises(UnresolvedWindowError), rig.open(batch) as window:
            rig.stage(window, batch, range(staged))
        assert window.state is WindowState.ABORTED
        assert rig.manager.current is None
        rig.expect_settled(batch, range(staged))
        rig.check("left without a verdict")

    @pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
    def test_a_staged_tensor_was_modified(self, kit: Kit, part: int) -> None:
        """A write to a tensor held by reference is noticed, and the commit is refused.

        Nothing is written; the window stays STAGED, and can be aborted.
        """
        rig = kit.rig("deferred", SIMPLE, staging="auto")
        batch = rig.batch()
        with rig.open(batch) as window:
            rig.stage(window, batch)
            rig.expect_staged(batch)
            batch.tensors[rig.refs[1].name][part].zero_()
            with pytest.raises(WindowStateError):
                window.commit(1)
            assert window.state is WindowState.STAGED
            rig.check("after the refused commit")
            window.abort()
        rig.check("aborted afterwards")

    def test_a_staged_view_of_the_cache(self, kit: Kit) -> None:
        """The caller stages a view of a cache, and the settled row is written into that view.

        That write changes a staged draft, so the window refuses to commit. It notices the write by
        torch's version counter alone: an executor that writes without torch has to call
        ``torch.autograd.graph.increment_version`` after each write.
        """
        rig = kit.rig("deferred", [LayerSpec(block_size=4)], staging="auto")
        ref = rig.refs[0]
        assert ref.value_cache is not None
        slots = rig.accepted([5, 6, 7])  # the first is written at staging: over the second row
        for part in (0, 1, 0, 1):  # a repeated window may take another code path than a new one
            rows = [ref.key_cache[1, :3], ref.value_cache[1, :3]]
            rows[1 - part] = rows[1 - part].clone()
            with rig.manager.window(2, slots) as window:
                window.stage(ref, *rows)
                with pytest.raises(WindowStateError):
                    window.commit(2)
                window.abort()

    def test_a_copied_tensor_may_be_modified(self, kit: Kit) -> None:
        """With staging='copy' the caller may overwrite its buffers at once.

        The commit has the old content.
        """
        rig = kit.rig("deferred", SIMPLE, staging="copy")
        batch = rig.batch()
        with rig.open(batch) as window:
            for ref in rig.refs:
                rig.stage(window, batch, [rig.refs.index(ref)])
                for tensor in batch.tensors[ref.name]:
                    tensor.zero_()
            window.commit([1, 2])
        rig.expect_committed(batch, batch.kept([1, 2]))
        rig.check("buffers overwritten before commit")


class Isolation(MixedKit):
    """Under deferred, no draft is in a cache before commit; settled rows are, at once."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_each_call_writes_its_own_rows(self, lapping: Rig, shape: str) -> None:
        """After every single call, the caches hold settled rows; drafts only where none wait."""
        rig, batch = lapping, lapping.batch(SHAPES[shape])
        with rig.open(batch) as window:
            rig.check("after begin")
            for index in range(len(rig.refs)):
                rig.stage(window, batch, [index])
                rig.expect_staged(batch, [index])
                rig.check(f"after staging layer {index}")
            window.commit(rig.accepted(counts := random_counts(batch, rig.rng)))
        rig.expect_committed(batch, batch.kept(counts))
        rig.check("after commit")

    @pytest.mark.parametrize("end", ["commit", "abort"])
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_settled_rows_are_outside_commit(self, kit: Kit, policy: str, end: str) -> None:
        """Commit and abort do not touch the slots of settled rows, even if others wrote them."""
        rig, shape = kit.rig(policy), SHAPES["many-settled"]
        batch = rig.batch(shape)
        later = attrs.evolve(rig.batch(shape), slots=batch.slots)
        settled = [not draft for draft in batch.drafts]
        counts = batch.draft_len if end == "commit" else [0] * len(batch.draft_len)
        with rig.open(batch) as window:
            rig.stage(window, batch)
            rig.expect_staged(batch)
            rig.write(later, settled)
            rig.truth.impose()
            window.commit(rig.accepted(counts)) if end == "commit" else window.abort()
        rig.expect_committed(batch, batch.kept(counts))
        rig.write(later, settled)
        rig.check(f"after {end}")

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_two_managers(self, kit: Kit, policy: str) -> None:
        """Windows of two managers may be open at once, and do not affect each other."""
        rigs = [kit.rig(policy, seed=seed) for seed in (1, 2)]
        for ends in itertools.product(["commit", "abort"], repeat=2):
            batches = [rig.batch() for rig in rigs]
            windows = [rig.open(batch) for rig, batch in zip(rigs, batches, strict=True)]
            for index, which in itertools.product(range(len(VARIED)), (0, 1)):
                rigs[which].stage(windows[which], batches[which], [index])
            for rig, batch, window, end in zip(rigs, batches, windows, ends, strict=True):
                counts = [2, 1] if end == "commit" else [0, 0]
                window.commit(rig.accepted(counts)) if end == "commit" else window.abort()
                rig.expect_committed(batch, batch.kept(counts))
            for rig in rigs:
                rig.check(f"windows that ended in {' and '.join(ends)}")


def leave_by(error: Exception, rig: Rig, window: Window, batch: Batch, staged: int) -> None:
    """Stage the first ``staged`` layers in the window's ``with`` block; leave it by ``error``."""
    with window:
        rig.stage(window, batch, range(staged))
        raise error
