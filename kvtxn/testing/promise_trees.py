"""Draft trees: after a commit along a path, the caches hold the path as a plain sequence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from .. import window as window_module
from ..cuda_graphs import capture
from ..errors import AcceptanceError, TreeError
from ..layout import RowLayout
from ..window_transitions import WindowState
from .batches import Batch
from .caches import LAYOUTS, LayerSpec
from .faults import InjectedFault
from .kit import TRANSACTIONAL, Kit
from .mixed_layers import MIXED, MixedKit, specs_for
from .number_formats import FORMATS
from .promise_device import no_host_sync
from .promise_fallback import either, every_fault, skip_stock
from .promise_hooks import Offloader
from .rig import SIMPLE, AnySpec, Rig
from .trees import (
    FORESTS,
    Paths,
    cut,
    expect_moved,
    lengths,
    moved,
    padded,
    random_path,
    run_tree,
    write_moved,
)

CPU: Final = torch.device("cpu")

#: Two layers in two groups: enough for a row to be moved differently in each.
PAIR: Final = (LayerSpec(), LayerSpec("hnd", group="other", block_size=2, num_blocks=14))

Forest = Sequence[Sequence[int]]

_kinds = list(zip(LAYOUTS, itertools.cycle(FORMATS), strict=False))
_kinds += [("plain", fmt) for fmt in FORMATS]


class Trees(MixedKit):
    """Accepted nodes lie where a plain sequence of accepted tokens would lie."""

    @pytest.mark.parametrize("name", FORESTS)
    def test_forests(self, kit: Kit, rig: Rig, name: str) -> None:
        """Any node of any tree may end the path: the caches hold the path as a plain sequence.

        Six random paths of each forest, over layers of different kinds; and one of other trees
        with as many nodes.
        """
        kit.need("trees")
        settled, forest = FORESTS[name]
        chains = [tuple(range(-1, len(tree) - 1)) for tree in forest]
        for trees in (forest, chains, *[forest] * 5):
            batch = rig.batch(lengths(settled, trees), padding=0.1)
            run_tree(rig, batch, trees, [random_path(tree, rig.rng) for tree in trees])

    @pytest.mark.parametrize(("layout", "fmt"), _kinds)
    def test_tree_layouts_and_formats(self, kit: Kit, policy: str, layout: str, fmt: str) -> None:
        """Commits along paths are exact for any strides and any number format.

        For rows that the library encodes, too.
        """
        kit.need("trees")
        rig = kit.rig(policy, [LayerSpec(layout, FORMATS[fmt], size=6), LayerSpec(layout)])
        forest = [(-1, -1, 0, 1, 3), (-1, 0, 0)]
        for payload, paths in (("native", [[1, 3, 4], [0, 2]]), ("cast", [[0, 2], []])):
            batch = rig.batch(lengths((1, 1), forest), payload=payload)
            run_tree(rig, batch, forest, paths)

    @pytest.mark.parametrize("every_kind", [False, True], ids=["rows", "every-kind"])
    def test_random_trees(
        self,
        kit: Kit,
        tree_settings: settings,
        monkeypatch: pytest.MonkeyPatch,
        every_kind: bool,
    ) -> None:
        """Random trees, slots and numbers as paths, unread as from a device, are exact.

        In a ring a node's position follows from its row, not from its depth; a state has one slot.
        """
        kit.need("trees")
        monkeypatch.setattr(window_module, "as_accepted", unread)
        policies = sorted(kit.capabilities.policies)
        layers = {each: specs_for(kit, each) if every_kind else PAIR for each in policies}
        examples = tree_settings.max_examples // (2 if every_kind else 1)

        @settings(tree_settings, max_examples=examples)
        @given(st.data())
        def try_one(data: st.DataObject) -> None:
            policy = data.draw(st.sampled_from(policies), "policy")
            seed = data.draw(st.integers(0, 2**32), "seed")
            rig = kit.rig(policy, layers[policy], seed=seed)
            for _ in range(data.draw(st.integers(1, 2), "windows")):
                _one_random_window(rig, data)

        try_one()

    @pytest.mark.parametrize("staged", [0, 1, 2, 5, len(MIXED)])
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_a_tree_is_aborted(self, kit: Kit, lapping: Rig, staged: int) -> None:
        """An aborted tree changes no byte, apart from settled rows."""
        kit.need("trees")
        rig, staged = lapping, min(staged, len(lapping.refs))
        for settled, forest in FORESTS.values():
            batch = rig.batch(lengths(settled, forest))
            rig.abort(batch, range(staged), f"aborted after {staged} layers", forest)

    def test_a_tree_waits(self, kit: Kit) -> None:
        """Under deferred no node is in the cache before commit, and no rejected node after."""
        kit.need("trees")
        rig = kit.rig("deferred")
        settled, forest = FORESTS["uneven"]
        batch = rig.batch(lengths(settled, forest))
        with rig.open(batch, forest) as window:
            for index in range(len(rig.refs)):
                rig.stage(window, batch, [index])
                rig.expect_settled(batch, [index])
                rig.check(f"after staging layer {index}")
            window.commit([[0, 2], [1], []])
        expect_moved(rig, batch, [[0, 2], [1], []])
        rig.check("after commit")

    def test_places_without_slots(self, kit: Kit, rig: Rig) -> None:
        """A wide tree needs slots for its depth only: rows without slots wait in the window."""
        kit.need("trees")
        forest = [(-1, -1, -1, 2, 2, 4)]
        batch = rig.batch(lengths((1,), forest), padding=0.0)
        for slots in batch.slots.values():
            slots[4:] = [-1] * 3
        run_tree(rig, batch, forest, [[2, 4, 5]])

    def test_chains_take_counts(self, kit: Kit, rig: Rig) -> None:
        """A tree that is a plain sequence takes counts, masks and paths, all with one meaning.

        However deep it is.
        """
        kit.need("trees")
        mask = [False, *[True] * 9, False, False, True]
        paths = [list(range(9)), [0]]
        ways: tuple[Any, ...] = ([9, 1], torch.tensor([9, 1]), mask, paths, padded(paths, CPU))
        for accepted in ways:
            batch = rig.batch(((1, 1), (10, 1)))
            with rig.open(batch, [range(-1, 9), (-1,)]) as window:
                rig.stage(window, batch)
                rig.expect_staged(batch)
                window.commit(accepted)
            rig.expect_committed(batch, mask)
            rig.check(repr(accepted))

    @pytest.mark.parametrize("accepted", [0, 1, 3])
    def test_chains_that_lap_a_ring(self, kit: Kit, lapping: Rig, accepted: int) -> None:
        """Kept rows are written under every policy, also where a rejected row lies in their slot.

        Counts, masks and paths have one meaning.
        """
        kit.need("trees")
        chain, path = [range(-1, 5)], [[*range(accepted)]]
        mask = torch.tensor([False, *(node < accepted for node in range(6))])
        for form in (torch.tensor([accepted]), mask, padded(path, CPU)):
            batch = lapping.batch(lengths((1,), chain))
            run_tree(lapping, batch, chain, path, form.to(lapping.device))

    def test_what_trees_refuse(self, kit: Kit, policy: str) -> None:
        """Counts, masks and host paths that leave the tree raise AcceptanceError.

        A path passes then. The window stays STAGED in between. Malformed trees raise TreeError, and
        open no window.
        """
        kit.need("trees")
        rig = kit.rig(policy, SIMPLE)
        forest = [(-1, -1, 0, 1), (-1, 0)]
        batch = rig.batch(lengths((1, 1), forest))
        with rig.open(batch, forest) as window:
            rig.stage(window, batch)
            rig.expect_staged(batch)
            for wrong in _no_paths():
                with pytest.raises(AcceptanceError):
                    window.commit(wrong)
                assert window.state is WindowState.STAGED
                rig.check(f"refused {wrong!r}")
            window.commit(torch.tensor([[1, 3, -1], [0, -1, -1]]))
        expect_moved(rig, batch, [[1, 3], [0]])
        rig.check("the right one")
        wrong_trees: tuple[Any, ...] = (
            [(-1, 1), ()],
            [(-1, -2)],
            [0, -1],
            3,
            "ab",
            [(-1,), (-1.0,)],
            [(-1,)],
        )
        for tree in wrong_trees:
            with pytest.raises(TreeError):
                rig.manager.window([2, 0], [1, 2, 3, 4], tree=tree)
            assert rig.manager.current is None

    @every_fault
    def test_a_tree_survives_a_fallback(
        self, kit: Kit, policy: str, specs: Sequence[AnySpec], at: str, when: str, nth: int
    ) -> None:
        """After any failure the accepted path is in its row positions, and is counted once.

        Rings and states hold the path exactly; pages may have rejected rows, too.
        """
        kit.need("trees")
        skip_stock(policy, specs)
        rig, faults = kit.faulty_rig(policy, specs, on_error="fallback")
        offloader = Offloader(rig)
        settled, forest = FORESTS["uneven"]
        batch, paths = rig.batch(lengths(settled, forest)), [[0, 2], [1], [0, 1, 2, 4]]
        faults.arm(at, when, nth)
        window = _drive(rig, batch, forest, paths)
        if not faults.fired:
            assert window.state is WindowState.COMMITTED
            pytest.skip(f"{policy} does not call {at} so often")
        assert window.state is WindowState.FELL_BACK
        rig.write(batch, [not draft for draft in batch.drafts])
        places = [row is not None for row in moved(batch, paths)]
        either(rig, batch, [not filled for filled in places])
        write_moved(rig, batch, paths)
        rig.check(f"{at} failed")
        rig.check_rows(batch.count(places))
        assert offloader.seen() == _stored(rig, batch, paths)

    @pytest.mark.parametrize("at", ["stage", "commit"])
    @pytest.mark.parametrize("when", ["before", "middle", "after"])
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_a_tree_is_restored(self, kit: Kit, policy: str, at: str, when: str) -> None:
        """on_error="raise": the executor's error surfaces, and no node is in the caches.

        A settled row may be old or new.
        """
        kit.need("trees")
        rig, faults = kit.faulty_rig(policy, on_error="raise")
        settled, forest = FORESTS["uneven"]
        batch = rig.batch(lengths(settled, forest))
        faults.arm(at, when)
        with pytest.raises(InjectedFault):
            _drive(rig, batch, forest, [[0, 2], [1], [0, 1, 2, 4]])
        either(rig, batch, [not draft for draft in batch.drafts])
        rig.check(f"{at} failed")

    def test_an_offloader_sees_the_path_only(self, kit: Kit, rig: Rig) -> None:
        """``on_commit`` names settled slots and the path's slots after the move alone."""
        kit.need("trees")
        offloader = Offloader(rig)
        for settled, forest in FORESTS.values():
            batch = rig.batch(lengths(settled, forest))
            paths = [random_path(tree, rig.rng) for tree in forest]
            run_tree(rig, batch, forest, paths)
            assert offloader.seen() == _stored(rig, batch, paths)

    def test_debug_checks_trees(self, kit: Kit, policy: str) -> None:
        """Debug mode, the library's own check of each commit, finds no difference in trees."""
        kit.need("trees")
        rig = kit.rig(policy, debug=True)
        settled, forest = FORESTS["late-branch"]
        batch = rig.batch(lengths(settled, forest))
        run_tree(rig, batch, forest, [[0, 1, 2, 4, 5], [1, 2]])

    def test_trees_do_not_wait(self, kit: Kit, rig: Rig) -> None:
        """A window with trees never waits for the device, nor does the host read its path there.

        A path is cut where it leaves the tree.
        """
        kit.need("trees")
        kit.need_cuda()
        settled, forest = FORESTS["uneven"]
        for paths in ([[0, 2], [1], [0, 1, 2, 4]], [[0, 3], [3], [0, 1, 2**40]]):
            batch = rig.batch(lengths(settled, forest))
            slots, path = rig.slots(batch), padded(paths, kit.device)
            with no_host_sync():
                window = rig.manager.window(batch.draft_len, slots, settled, tree=forest)
                rig.stage(window, batch)
                window.commit(path)
            rig.expect_staged(batch)
            expect_moved(rig, batch, [cut(t, p) for t, p in zip(forest, paths, strict=True)])
            rig.check("never waited")

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_a_tree_commit_in_a_graph(self, kit: Kit, rig: Rig) -> None:
        """A captured commit changes nothing yet, and reads its path when it is replayed."""
        kit.need("trees", "capturable")
        settled, forest = FORESTS["uneven"]
        warm = rig.batch(lengths(settled, forest))
        run_tree(rig, warm, forest, [[0, 1, 3], [0], []])
        batch = rig.batch(lengths(settled, forest))
        path = padded([[], [], []], kit.device, columns=4)
        window = rig.open(batch, forest)
        rig.stage(window, batch)
        rig.expect_staged(batch)
        torch.cuda.synchronize()
        graph = capture(lambda: window.commit(path))
        rig.check("captured, not run")
        path.copy_(padded([[0, 2], [1], [0, 1, 2, 4]], kit.device))
        graph.replay()
        torch.cuda.synchronize()
        expect_moved(rig, batch, [[0, 2], [1], [0, 1, 2, 4]])
        rig.check("replayed with another path")


def unread(accepted: Tensor, layout: RowLayout, device: torch.device) -> Tensor:
    """Pass a path on unread, as from a device, where the library would check it on the host."""
    return accepted


def _one_random_window(rig: Rig, data: st.DataObject) -> None:
    """Run and compare a window of up to four requests with up to seven nodes each.

    Paths are often empty, and often spoilt by other numbers.
    """
    requests = data.draw(st.integers(0, 4), "requests")
    settled = [data.draw(st.integers(0, 2)) for _ in range(requests)]
    room = 26 - sum(settled)
    forest, given = [], []
    for _ in range(requests):
        nodes = data.draw(st.integers(0, min(7, room)), "nodes")
        room -= nodes
        forest.append([data.draw(st.integers(-1, node - 1)) for node in range(nodes)])
        path = random_path(forest[-1], rig.rng)
        if data.draw(st.booleans(), "spoil"):
            odd = st.integers(-3, nodes + 2) | st.sampled_from([-(2**62), 2**40])
            path += [data.draw(odd) for _ in range(data.draw(st.integers(0, 4)))]
            path = data.draw(st.permutations(path))
        given.append(path)
    padding = data.draw(st.sampled_from([0.0, 0.3, 1.0]), "padding")
    batch = rig.batch((settled, list(map(len, forest))), padding=padding)
    paths = [cut(tree, path) for tree, path in zip(forest, given, strict=True)]
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32]), "dtype")
    limited = padded(given, rig.device, data.draw(st.integers(0, 9), "columns"))
    given_paths = limited.clamp(-(2**31), 2**31 - 1).to(dtype).T.contiguous().T  # strided
    run_tree(rig, batch, forest, paths, given_paths, check_staged=True)


def _drive(rig: Rig, batch: Batch, forest: Forest, paths: Paths) -> Any:
    """Run a tree window with one attention, if there is any; commit the paths.

    Return the window.
    """
    window = rig.open(batch, forest)
    rig.stage(window, batch)
    if rig.manager.executor.capabilities.attention:
        rig.attend(window, batch)
    window.commit(padded(paths, rig.device))
    return window


def _stored(rig: Rig, batch: Batch, paths: Paths) -> dict[tuple[str, int], Any]:
    """Return the rows that an offloader must have copied after a commit along these paths.

    By layer and slot: settled rows, and the paths' rows where they were moved.
    """
    rows = [
        row if row is not None or draft else place
        for place, (row, draft) in enumerate(zip(moved(batch, paths), batch.drafts, strict=True))
    ]
    return {
        (ref.name, slot): (
            rig.states_in(ref.name, slot) if ref.states else batch.rows[ref.name][row]
        )
        for ref in rig.refs
        for slot, row in zip(batch.slots[ref.group], rows, strict=True)
        if slot != -1 and row is not None
    }


def _no_paths() -> list[Any]:
    """List acceptances that commit must refuse for trees (-1, -1, 0, 1) and (-1, 0)."""
    return [
        1,
        [1, 1],
        torch.tensor([1, 1]),
        [True] * 8,
        None,
        "all",
        [[0]],
        [[0], [0], [0]],
        [[0, 1], []],
        [[2], []],
        [[0, -1, 2], []],
        [[0, 2, 4], []],
        [[0.0], [0]],
        [[True], []],
        torch.tensor([[0.0], [0.0]]),
        torch.tensor([[0], [2]]),
        torch.tensor([[[0]], [[0]]]),
    ]
