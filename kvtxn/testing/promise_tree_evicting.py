"""Draft trees over rings and states: after commit a state is the one of the path's last node.

A node has the slot of its row position, as in other caches. In a ring the ring position follows
from the node's row, not from its depth; in a state there is only one slot. So the branches differ
only in the rows that commit moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .. import window as window_module
from ..window_transitions import WindowState
from .caches import LayerSpec
from .histories import attend_and_compare
from .kit import TRANSACTIONAL, Kit, KitBase
from .mixed_layers import faulty_mixed_rig, mixed_rig, need_kinds
from .number_formats import FORMATS
from .promise_hooks import Offloader
from .promise_trees import unread
from .rig import Rig
from .trees import FORESTS, cut, lengths, moved, padded, random_path, run_tree, write_moved


def _forest(rig: Rig) -> tuple[list[int], list[list[int]]]:
    """Draw trees for two requests, with at most as many nodes as the rings of ``undo`` hold."""
    settled = [rig.rng.randint(0, 2) for _ in range(2)]
    return settled, [
        [rig.rng.randint(-1, node - 1) for node in range(rig.rng.randint(0, 7))] for _ in range(2)
    ]


class EvictingTrees(KitBase):
    """Rings and states follow the accepted path, and no other branch evicts a row."""

    def test_trees_over_rings_and_states(
        self, kit: Kit, tree_settings: settings, monkeypatch: pytest.MonkeyPatch, policy: str
    ) -> None:
        """Random trees and paths, often empty, are exact after staging and after commit.

        Some paths leave their tree: they are cut there, unread by the host.
        """
        _rig(kit, policy)
        monkeypatch.setattr(window_module, "as_accepted", unread)

        @settings(tree_settings, max_examples=max(2, tree_settings.max_examples // 8))
        @given(st.integers(0, 2**32))
        def try_one(seed: int) -> None:
            """Run two random windows over one rig."""
            rig = _rig(kit, policy, seed=seed)
            for _ in range(2):
                _one_window(rig)

        try_one()

    @pytest.mark.parametrize("staged", [0, 2, 5])
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_an_aborted_tree_evicts_nothing(self, kit: Kit, policy: str, staged: int) -> None:
        """An aborted tree leaves every state, and every live row apart from settled ones."""
        rig = _rig(kit, policy)
        staged = min(staged, len(rig.refs))
        for _ in range(5):
            settled, forest = _forest(rig)
            batch = rig.batch(lengths(settled, forest))
            rig.abort(batch, range(staged), f"aborted after {staged} layers", forest)

    @pytest.mark.parametrize("when", ["before", "middle", "after"])
    @pytest.mark.parametrize("at", ["save", "stage", "commit"])
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_a_fallback_evicts_nothing_either(
        self, kit: Kit, policy: str, at: str, when: str
    ) -> None:
        """After a fallback rings and states hold the path exactly.

        Paged slots may have rejected rows, too. ``on_commit`` is called once.
        """
        kit.need("trees")
        rig, faults = faulty_mixed_rig(kit, policy, on_error="fallback")
        offloader = Offloader(rig)
        forest = [(-1, -1, 0, 1, 1), (-1, 0, 0)]
        paths: Sequence[Sequence[int]] = [[1, 4], [0, 2]]
        batch = rig.batch(lengths((1, 1), forest), padding=0.0)
        faults.arm(at, when)
        with rig.open(batch, forest) as window:
            rig.stage(window, batch)
            window.commit(padded(paths, rig.device))
        if not faults.fired:
            assert window.state is WindowState.COMMITTED
            pytest.skip(f"{policy} does not call {at}")
        assert window.state is WindowState.FELL_BACK
        rig.expect_committed(batch, [False] * batch.num_rows, range(len(rig.caches)))
        places = [row is not None for row in moved(batch, paths)]
        for cache in rig.caches:
            if cache.spec.kind == "paged":
                for place, slot in enumerate(batch.slots[cache.spec.group]):
                    if not places[place]:
                        rig.truth.adopt(cache.name, slot, batch.rows[cache.name][place])
        write_moved(rig, batch, paths)
        rig.check(f"{at} failed")
        assert offloader.committed == [0]

    @pytest.mark.parametrize("name", ["one", "uneven", "late-branch"])
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_tree_attention_over_a_ring(
        self, kit: Kit, attention_tolerance: float, policy: str, name: str
    ) -> None:
        """Each branch attends to a ring as if it were alone: past, settled rows, ancestors."""
        kit.need("attention")
        need_kinds(kit, "ring")
        kit.need("trees")
        settled, forest = FORESTS[name]
        for size in (3, 8):
            most = size + max(map(sum, zip(settled, map(len, forest), strict=True)))
            spec = LayerSpec(
                "hnd",
                FORMATS["fp32"],
                kind="ring",
                ring_size=most,
                window=size,
                block_size=3,
                num_blocks=30,
            )
            for past in (0, size, 3 * most + 1):
                rig = kit.rig(policy, [spec], seed=past)
                before = (past,) * len(forest)
                shape = lengths(settled, forest)
                attend_and_compare(rig, shape, before, attention_tolerance, forest)


def _one_window(rig: Rig) -> None:
    """Run a random tree window, often with padding; compare after staging and after commit.

    Some paths are given with nodes that lead out of the tree.
    """
    settled, forest = _forest(rig)
    batch = rig.batch(lengths(settled, forest), padding=rig.rng.choice([0.0, 0.3]))
    given_paths = [random_path(tree, rig.rng) for tree in forest]
    if rig.rng.random() < 0.3:
        given_paths = [[*path, *path[:1], rig.rng.randint(-2, 8)] for path in given_paths]
    paths = [cut(tree, path) for tree, path in zip(forest, given_paths, strict=True)]
    run_tree(rig, batch, forest, paths, padded(given_paths, rig.device), check_staged=True)


def _rig(kit: Kit, policy: str, **config: Any) -> Rig:
    """Make a rig over layers of every kind; skip the test where no draft trees are declared."""
    kit.need("trees")
    return mixed_rig(kit, policy, **config)
