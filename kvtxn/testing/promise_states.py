"""Promise 1 for states that replay rows: the arithmetic of each family, to the bit, at any size.

A state takes in exactly its settled and accepted rows, in float32, and is rounded once. Rejected
rows are full of NaN, and so is the memory between and around the states. Where a kernel has a
limit, of programs, of rows at a time, or of numbers that survive a detour through arithmetic,
states are wrong beyond it and right in small windows. What states share with rows and rings is
tested in windows that mix them, see ``mixed_layers``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import attrs
import pytest
import torch

from ..errors import LayerError
from ..window_transitions import WindowState
from .batches import Batch
from .caches import LayerSpec, noise
from .kit import Kit, KitBase
from .mixed_layers import need_kinds
from .number_formats import FORMATS
from .replayed_layers import FAMILIES, ReplayedSpec, StateSpec
from .rig import AnySpec, Rig
from .trees import padded

_CONV: Final = StateSpec("short_conv", FORMATS["bf16"], "gapped", key_size=7)

#: Layers of every family: three with a convolution window beside them, and a convolution by itself.
EVERY: Final = (
    ReplayedSpec((_CONV, StateSpec("gated_delta", layout="gapped"))),
    ReplayedSpec((StateSpec("kda", FORMATS["bf16"], "permuted"), _CONV), group="kda"),
    ReplayedSpec((_CONV, StateSpec("mamba2", FORMATS["fp16"], key_heads=1))),
    ReplayedSpec((StateSpec("short_conv", FORMATS["fp32"], "permuted", width=3),), group="kda"),
)

#: The groups of ``EVERY``.
GROUPS: Final = ("state", "kda")

#: Families whose rows do not depend on the rows before them, so that any of them may be kept.
INDEPENDENT: Final = ("mamba2", "short_conv")

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


def state_rig(kit: Kit, specs: Sequence[AnySpec] = EVERY, **config: Any) -> Rig:
    """Make a rig over replayed layers; skips the test where the executor declares none."""
    need_kinds(kit, "recurrent", "replayed")
    return kit.rig("deferred", specs, **config)


class States(KitBase):
    """Exactness of states, by family, format and size."""

    @pytest.mark.parametrize("accepting", ["none", "some", "all"])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_replayed_states(self, kit: Kit, shape: str, accepting: str) -> None:
        """No state changes before the commit, which takes in the settled and accepted rows.

        Paged rows lie beside them in the window.
        """
        for padding in (0.0, 0.4):
            rig = state_rig(kit, (LayerSpec(num_blocks=12), *EVERY))
            drafts = SHAPES[shape][1]
            some = [rig.rng.randint(0, most) for most in drafts]
            counts = {"none": [0] * len(drafts), "all": list(drafts)}.get(accepting, some)
            batch = rig.batch(SHAPES[shape], counts=counts, padding=padding)
            rig.commit(batch, counts, f"{shape}, {accepting} accepted", check_staged=True)

    @pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_accepted_count(self, kit: Kit, family: str, fmt: str) -> None:
        """States are exact for every number of accepted drafts, with and without settled rows."""
        for layout, keys in (("plain", torch.float32), ("gapped", torch.bfloat16)):
            state = StateSpec(family, FORMATS[fmt], layout, key_dtype=keys)
            rig = state_rig(kit, [ReplayedSpec((state,))])
            for settled, drafts in itertools.product((0, 1, 3), (0, 1, 4)):
                requests = range(drafts + 1)
                shape = ([settled] * len(requests), [drafts] * len(requests))
                counts = list(requests)
                batch = rig.batch(shape, counts=counts, padding=0.0)
                rig.commit(batch, counts, f"{settled} settled, {drafts} drafts")

    @pytest.mark.parametrize(
        "sizes", [(1, 1, 1, 1), (6, 3, 17, 33), (3, 1, 64, 20), (2, 2, 5, 130)]
    )
    @pytest.mark.parametrize("family", FAMILIES)
    def test_sizes_of_states(self, kit: Kit, family: str, sizes: tuple[int, int, int, int]) -> None:
        """States are exact at sizes that do not fill a tile, and that need several tiles."""
        heads, key_heads, values, keys = sizes
        state = StateSpec(family, FORMATS["bf16"], "plain", heads, key_heads, values, keys)
        rig = state_rig(kit, [ReplayedSpec((state,), num_states=3)])
        rig.commit(rig.batch(((1, 0), (2, 1)), counts=[1, 1], padding=0.0), [1, 1], family)

    def test_the_same_rows_again(self, kit: Kit) -> None:
        """Three windows over the same tensors take their rows in three times."""
        rig = state_rig(kit)
        batch = rig.batch(SHAPES["uneven"], counts=[2, 0, 3], padding=0.0)
        for _ in range(3):
            rig.commit(batch, [2, 0, 3], "taken in again")

    @pytest.mark.parametrize("accepted", [[[], []], [[1, 3, 5], [0, 2]], [[0, 2], [1]]])
    def test_states_along_a_path(self, kit: Kit, accepted: list[list[int]]) -> None:
        """A state takes in the accepted path of a draft tree, in its order."""
        kit.need("trees")
        rig = state_rig(kit)
        batch = rig.batch(((1, 1), (6, 3)), padding=0.0)
        with rig.open(batch, [(-1, -1, 0, 1, 3, 3), (-1, -1, 0)]) as window:
            rig.stage(window, batch)
            window.commit(padded(accepted, rig.device))
        kept = [draft in accepted[owner] for owner, draft in batch.owners]
        rig.expect_taken_in(batch, batch.taken_in(kept))
        rig.check(f"path {accepted}")

    def test_parts_that_do_not_fit(self, kit: Kit) -> None:
        """Parts of a wrong shape or number are refused by a LayerError that names them.

        The window stays open, and commits once the right parts are staged.
        """
        rig = state_rig(kit)
        batch = rig.batch(SHAPES["one"])
        ref = rig.refs[0]
        parts = batch.tensors[ref.name]
        with rig.open(batch) as window:
            with pytest.raises(LayerError, match="one tensor per part of a row"):
                window.stage(ref, parts[:-1])
            with pytest.raises(LayerError, match=r"decay of 'state.0' has the wrong shape"):
                window.stage(ref, [*parts[:-1], parts[-1][:, :1]])
            rig.stage(window, batch)
            window.commit(rig.accepted([2]))
        assert window.state is WindowState.COMMITTED
        rig.expect_committed(batch, batch.kept([2]))
        rig.check()

    # -- many requests, many rows, gaps, every bit pattern -----------------------------------

    @pytest.mark.parametrize("family", FAMILIES)
    def test_states_of_many_requests(self, kit: Kit, family: str) -> None:
        """The state of each request takes its rows in, the last one's as the first one's."""
        count = 130
        rig = _small(kit, family, "fp32", num_states=count + 3, max_rows=2 * count)
        counts = [rig.rng.randint(0, 1) for _ in range(count)]
        batch = rig.batch(([1] * count, [1] * count), counts=counts, padding=0.0)
        rig.commit(batch, counts, f"{count} requests")

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_request_with_many_rows(self, kit: Kit, family: str) -> None:
        """All kept rows are taken in, however many a request has."""
        rig = _small(kit, family, "bf16", max_rows=144)
        rig.commit(rig.batch(((1, 67), (70, 3)), counts=[67, 1], padding=0.0), [67, 1])

    @pytest.mark.parametrize("family", INDEPENDENT)
    def test_masks_with_gaps(self, kit: Kit, family: str) -> None:
        """A state takes in the rows that a mask keeps, also behind one that it leaves out."""
        rig = _small(kit, family, "fp32")
        for keeps in ([1, 0, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0, 1]):
            batch = rig.batch(((1, 0), (4, 3)), padding=0.0)
            drafts = iter(keeps)
            kept = [draft and bool(next(drafts)) for draft in batch.drafts]
            rig.commit(batch, given=torch.tensor(kept).to(rig.device), kept=kept)

    @pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_state_that_takes_nothing_in(self, kit: Kit, family: str, fmt: str) -> None:
        """Each bit of a state that takes no row in stays.

        A zero's sign and a NaN's payload, too.
        """
        rig = _small(kit, family, fmt)
        batch = rig.batch(((0, 0, 0), (2, 0, 1)), counts=[0, 0, 0], padding=0.0)
        _fill(rig, batch)
        rig.run(batch, [0, 0, 0])
        rig.check("nothing was kept")

    @pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
    def test_inputs_of_every_bit_pattern(self, kit: Kit, fmt: str) -> None:
        """A convolution's inputs are moved bit by bit, whatever number they are, or none."""
        rig = _small(kit, "short_conv", fmt)
        batch = rig.batch(((1, 0, 2), (3, 2, 0)), padding=0.0)
        _fill(rig, batch)
        [(name, (row,))] = batch.tensors.items()
        words = _odd(rig, fmt, row.numel()).view(row.dtype).view(row.shape)
        batch = attrs.evolve(batch, tensors={name: (words.to(rig.device),)})
        rig.commit(batch, [2, 1, 0], "bit patterns")


def _small(kit: Kit, family: str, fmt: str, num_states: int = 9, max_rows: int = 64) -> Rig:
    """Make a rig over one replayed layer of one head, two values and three keys."""
    state = StateSpec(family, FORMATS[fmt], "gapped", 1, 1, value_size=2, key_size=3)
    return state_rig(kit, [ReplayedSpec((state,), num_states=num_states)], max_rows=max_rows)


def _odd(rig: Rig, fmt: str, count: int) -> torch.Tensor:
    """Return words of noise, among them a zero with a sign, infinities, and NaNs with a payload."""
    word = FORMATS[fmt].word
    words = noise(count, word, rig.rng).clone()
    sign = torch.iinfo(word).min
    exponent = int(torch.tensor(float("inf"), dtype=FORMATS[fmt].dtype).view(word))
    odd = torch.tensor([sign, exponent, exponent + 1, exponent | sign, -1], dtype=word)
    words[: len(odd)] = odd[:count]
    return words


def _fill(rig: Rig, batch: Batch) -> None:
    """Fill the states of a window's requests with words that are no usual numbers; expect them."""
    [layer] = rig.replayed
    for memory in layer.memories:
        for slot in batch.states["state"]:
            size = torch.Size(memory.spec.shape).numel()
            memory.make_up(slot, _odd(rig, memory.spec.fmt.name, size).tolist())
