"""Promises 1, 2, 3 and 8 for replayed layers: a state takes in exactly the rows that are kept.

Rejected rows are full of NaN, and so is the memory between and around the states.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import pytest
import torch

from ..errors import BackendUnavailableError, IncompleteWindowError, LayerError
from ..states import WindowState
from .caches import LayerSpec
from .honesty import that_claims, works
from .kit import Kit, KitBase
from .number_formats import FORMATS
from .replay_rig import ReplayBatch, ReplayRig
from .replay_states import FAMILIES, ReplayedSpec, StateSpec
from .rig import registered

_CONV: Final = StateSpec("short_conv", FORMATS["bf16"], "gapped", key_size=7)

#: Layers of every family: three with a convolution window beside them, and a convolution by itself.
EVERY: Final = (
    ReplayedSpec((_CONV, StateSpec("gated_delta", layout="gapped"))),
    ReplayedSpec((StateSpec("kda", FORMATS["bf16"], "permuted"), _CONV), group="kda"),
    ReplayedSpec((_CONV, StateSpec("mamba2", FORMATS["fp16"], key_heads=1))),
    ReplayedSpec((StateSpec("short_conv", FORMATS["fp32"], "permuted", width=3),), group="kda"),
)

#: Settled and draft rows per request.
SHAPES: Final[dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "one": ((1,), (3,)),
    "uneven": ((1, 1, 1), (3, 0, 5)),
    "no-drafts": ((1, 2, 1), (0, 0, 0)),
    "none-settled": ((0, 0), (5, 2)),
    "many-settled": ((5, 1), (2, 0)),
    "an-empty-request": ((0, 1, 0), (0, 3, 1)),
    "empty-at-the-end": ((1, 0), (2, 0)),
    "nothing": ((), ()),
    "no-rows": ((0, 0), (0, 0)),
}


def replay_rig(kit: Kit, specs: Any = EVERY, **config: Any) -> ReplayRig:
    """Make a rig; skips the test where the executor declares no replayed layers."""
    if "replayed" not in kit.capabilities.kinds:
        pytest.skip(f"{kit.name} declares no replayed layers")
    return ReplayRig(kit.name, kit.device, specs, **config)


class Replays(KitBase):
    """Exactness, isolation, all or nothing and counts where commit replays rows."""

    @pytest.mark.parametrize("accepting", ["none", "some", "all"])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_replayed_states(self, kit: Kit, shape: str, accepting: str) -> None:
        """No state changes before the commit, which takes in the settled and accepted rows."""
        for padding in (0.0, 0.4):
            rig = replay_rig(kit)
            drafts = SHAPES[shape][1]
            counts = {"none": [0] * len(drafts), "all": list(drafts)}.get(accepting)
            batch = rig.batch(SHAPES[shape], counts, padding=padding)
            with rig.open(batch) as window:
                rig.stage(window, batch)
                rig.expect_staged(batch)
                rig.check("staged")
                window.commit(rig.accepted(batch.counts))
            rig.expect_ended(batch)
            rig.check(f"{shape}, {accepting} accepted")

    @pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_accepted_count(self, kit: Kit, family: str, fmt: str) -> None:
        """States are exact for every number of accepted drafts, with and without settled rows."""
        for layout, keys in (("plain", torch.float32), ("gapped", torch.bfloat16)):
            state = StateSpec(family, FORMATS[fmt], layout, key_dtype=keys)
            rig = replay_rig(kit, [ReplayedSpec((state,))])
            for settled, drafts in itertools.product((0, 1, 3), (0, 1, 4)):
                requests = range(drafts + 1)
                shape = ([settled] * len(requests), [drafts] * len(requests))
                batch = rig.batch(shape, list(requests))
                rig.run(batch)
                rig.expect_ended(batch)
                rig.check(f"{settled} settled, {drafts} drafts")

    @pytest.mark.parametrize(
        "sizes", [(1, 1, 1, 1), (6, 3, 17, 33), (3, 1, 64, 20), (2, 2, 5, 130)]
    )
    @pytest.mark.parametrize("family", FAMILIES)
    def test_sizes_of_states(self, kit: Kit, family: str, sizes: tuple[int, int, int, int]) -> None:
        """States are exact at sizes that do not fill a tile, and that need several tiles."""
        heads, key_heads, values, keys = sizes
        state = StateSpec(family, FORMATS["bf16"], "plain", heads, key_heads, values, keys)
        rig = replay_rig(kit, [ReplayedSpec((state,), num_states=3)])
        batch = rig.batch(((1, 0), (2, 1)), [1, 1])
        rig.run(batch)
        rig.expect_ended(batch)
        rig.check(family)

    @pytest.mark.parametrize("form", ["list", "int32", "mask"])
    def test_forms_of_acceptance(self, kit: Kit, form: str) -> None:
        """Counts and masks, on the host or on the device, keep the same rows."""
        rig = replay_rig(kit)
        batch = rig.batch(((1, 2, 0), (3, 0, 4)))
        given: Any = list(batch.counts)
        if form == "int32":
            given = rig.accepted(batch.counts).int()
        elif form == "mask":
            given = torch.tensor(batch.kept).to(rig.device)
        with rig.open(batch) as window:
            rig.stage(window, batch)
            window.commit(given)
        rig.expect_ended(batch)
        rig.check(form)

    @pytest.mark.parametrize("staged", range(len(EVERY) + 2))
    def test_an_abort_keeps_the_states(self, kit: Kit, staged: int) -> None:
        """An abort changes no state, whichever layers were staged; the step can be repeated."""
        for shape in SHAPES.values():
            rig = replay_rig(kit)
            batch = rig.batch(shape, padding=0.2)
            with rig.open(batch) as window:
                rig.stage(window, batch, range(staged))
                window.abort()
            rig.expect_staged(batch, range(staged))
            rig.check(f"aborted after {staged} layers")
            rig.run(batch)
            rig.expect_ended(batch)
            rig.check("repeated")

    @pytest.mark.parametrize("missing", range(len(EVERY) + 1))
    def test_states_and_rows_are_one_transaction(self, kit: Kit, missing: int) -> None:
        """If any layer is missing nothing is committed; layers may be staged in any order."""
        rig = replay_rig(kit)
        batch = rig.batch(SHAPES["uneven"])
        others = [index for index in reversed(range(len(rig.refs))) if index != missing]
        with rig.open(batch) as window:
            rig.stage(window, batch, others)
            rig.expect_staged(batch, others)
            with pytest.raises(IncompleteWindowError):
                window.commit(0)
            rig.check("after the refused commit")
            rig.stage(window, batch, [missing])
            window.commit(rig.accepted(batch.counts))
        rig.expect_ended(batch)
        rig.check("after the commit that was allowed")

    @pytest.mark.parametrize("paged", [True, False])
    def test_counts_of_replayed_rows(self, kit: Kit, paged: bool) -> None:
        """A row counts once per window; the bytes of a state count once per request."""
        rig = replay_rig(kit, paged=(LayerSpec(num_blocks=12),) if paged else ())
        batch = rig.batch(((1, 1, 1), (3, 4, 2)), [2, 0, 2])
        rig.run(batch)
        flat = rig.manager.snapshot()
        assert flat["kvtxn_rows_staged_total"] == 9
        assert flat["kvtxn_rows_committed_total"] == 4
        assert flat["kvtxn_rows_rejected_total"] == 5
        states = sum(ref.row_bytes for ref in rig.refs if ref.replay)
        rows = [ref for ref in rig.refs if not ref.replay]
        written = sum(ref.row_bytes * _real(batch, ref.group, batch.kept) for ref in rows)
        assert flat["kvtxn_bytes_written_total"] == 2 * states + written
        rejected = [
            not keep and draft for keep, draft in zip(batch.kept, batch.rows.drafts, strict=True)
        ]
        avoided = sum(ref.row_bytes * _real(batch, ref.group, rejected) for ref in rows)
        assert flat["kvtxn_bytes_avoided_total"] == states + avoided

    @pytest.mark.parametrize("staging", ["auto", "copy", "reference"])
    def test_the_librarys_own_check_of_states(self, kit: Kit, staging: str) -> None:
        """Debug mode finds nothing wrong; rows may be copies."""
        rig = replay_rig(kit, debug=True, staging=staging)
        for shape in ("one", "uneven", "none-settled"):
            batch = rig.batch(SHAPES[shape])
            with torch.inference_mode():
                rig.run(batch)
            rig.expect_ended(batch)
            rig.check(shape)

    def test_the_same_rows_again(self, kit: Kit) -> None:
        """Each window over the same tensors takes their rows in once more."""
        rig = replay_rig(kit, paged=())
        batch = rig.batch(SHAPES["uneven"])
        for _ in range(3):
            rig.run(batch)
            rig.expect_ended(batch)
            rig.check("taken in again")

    @pytest.mark.parametrize("accepted", [[[], []], [[1], [0, 2]], [[0, 2], [1]]])
    def test_states_along_a_path(self, kit: Kit, accepted: list[list[int]]) -> None:
        """A state takes in the accepted path of a draft tree, in its order."""
        kit.need_trees()
        rig = replay_rig(kit, paged=())
        kept = [draft in accepted[owner] for owner, draft in _drafts(((1, 1), (4, 3)))]
        batch = rig.batch(((1, 1), (4, 3)), [4, 3])
        with rig.open(batch, [(-1, -1, 0, 1), (-1, -1, 0)]) as window:
            rig.stage(window, batch)
            longest = max(map(len, accepted))
            padded = [path + [-1] * (longest - len(path)) for path in accepted]
            window.commit(torch.tensor(padded, dtype=torch.int64).view(2, longest).to(rig.device))
        rig.expect_paths(batch, [batch.of_request(request, kept) for request in range(2)])
        rig.check(f"path {accepted}")

    def test_denied_replay(self, kit: Kit) -> None:
        """An executor that does not declare replayed layers is refused, and replays none."""
        if "replayed" in kit.capabilities.kinds:
            pytest.skip("replayed layers are declared; they are tested by themselves")
        with pytest.raises(BackendUnavailableError, match="replayed"):
            ReplayRig(kit.name, kit.device, EVERY)
        kinds = kit.capabilities.kinds | {"recurrent", "replayed"}
        with registered(that_claims(kit.executor, kinds=kinds)) as name:
            worked = works(lambda: _two_windows(name, kit))
        assert not worked, f"{kit.name} declares that it cannot hold replayed layers, and can"

    def test_parts_that_do_not_fit(self, kit: Kit) -> None:
        """Parts of a wrong shape or number are refused by name, and the window stays open."""
        rig = replay_rig(kit, paged=())
        batch = rig.batch(SHAPES["one"])
        ref = rig.refs[0]
        parts = batch.parts[ref.name]
        with rig.open(batch) as window:
            with pytest.raises(LayerError, match="one tensor per part of a row"):
                window.stage(ref, parts[:-1])
            with pytest.raises(LayerError, match=r"decay of 'state.0' has the wrong shape"):
                window.stage(ref, [*parts[:-1], parts[-1][:, :1]])
            rig.stage(window, batch)
            window.commit(rig.accepted(batch.counts))
        assert window.state is WindowState.COMMITTED
        rig.expect_ended(batch)
        rig.check()


def _two_windows(name: str, kit: Kit) -> None:
    """Run two windows; raise if the states are wrong."""
    rig = ReplayRig(name, kit.device, EVERY)
    for counts in ([2, 0], [1, 2]):
        batch = rig.batch(((1, 1), (3, 2)), counts)
        rig.run(batch)
        rig.expect_ended(batch)
        rig.check()


def _drafts(shape: tuple[tuple[int, ...], tuple[int, ...]]) -> list[tuple[int, int | None]]:
    """Return each row's request and its number among the request's drafts (None: settled)."""
    owners: list[tuple[int, int | None]] = []
    for request, (settled, drafts) in enumerate(zip(*shape, strict=True)):
        owners += [(request, None)] * settled + [(request, draft) for draft in range(drafts)]
    return owners


def _real(batch: ReplayBatch, group: str, mask: list[bool]) -> int:
    """Count the masked rows that have a slot in a paged group."""
    slots = batch.rows.slots[group]
    return sum(slot != -1 and wanted for slot, wanted in zip(slots, mask, strict=True))
