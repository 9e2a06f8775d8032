"""Promise 1 for replayed layers at any size: many requests, many rows, gaps, and every bit pattern.

Where a kernel has a limit, of programs, of rows at a time, or of numbers that survive a detour
through arithmetic, states are wrong beyond it and right in small windows.
"""

from __future__ import annotations

from typing import Final

import attrs
import pytest
import torch

from .caches import noise
from .kit import Kit, KitBase
from .number_formats import FORMATS
from .promise_replay import replay_rig
from .replay_rig import ReplayBatch, ReplayRig
from .replay_states import FAMILIES, ReplayedSpec, StateSpec

#: Families whose rows do not depend on the rows before them, so that any of them may be kept.
INDEPENDENT: Final = ("mamba2", "short_conv")


class ReplaySizes(KitBase):
    """Exactness where windows are large, masks have gaps, and numbers are no usual ones."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_states_of_many_requests(self, kit: Kit, family: str) -> None:
        """The state of each request takes its rows in, the last one's as the first one's."""
        count = 70
        rig = _small(kit, family, "fp32", num_states=count + 3, max_rows=2 * count)
        batch = rig.batch(([1] * count, [1] * count))
        rig.run(batch)
        rig.expect_ended(batch)
        rig.check(f"{count} requests")

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_request_with_many_rows(self, kit: Kit, family: str) -> None:
        """All kept rows are taken in, however many a request has."""
        rig = _small(kit, family, "bf16", max_rows=96)
        batch = rig.batch(((1, 35), (40, 3)), [37, 1])
        rig.run(batch)
        rig.expect_ended(batch)
        rig.check("37 accepted drafts, and 35 settled rows")

    @pytest.mark.parametrize("family", INDEPENDENT)
    def test_masks_with_gaps(self, kit: Kit, family: str) -> None:
        """A state takes in the rows that a mask keeps, also behind one that it leaves out."""
        rig = _small(kit, family, "fp32")
        for keeps in ([1, 0, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0, 1]):
            batch = rig.batch(((1, 0), (4, 3)), [4, 3])
            drafts = iter(keeps)
            kept = [draft and bool(next(drafts)) for draft in batch.rows.drafts]
            with rig.open(batch) as window:
                rig.stage(window, batch)
                window.commit(torch.tensor(kept).to(rig.device))
            rig.expect_paths(batch, [batch.of_request(request, kept) for request in range(2)])
            rig.check(f"drafts {keeps}")

    @pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_state_that_takes_nothing_in(self, kit: Kit, family: str, fmt: str) -> None:
        """Each of its bits stays, including a zero's sign and a NaN's payload."""
        rig = _small(kit, family, fmt)
        batch = rig.batch(((0, 0, 0), (2, 0, 1)), [0, 0, 0])
        _fill(rig, batch)
        rig.run(batch)
        rig.check("nothing was kept")

    @pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
    def test_inputs_of_every_bit_pattern(self, kit: Kit, fmt: str) -> None:
        """A convolution's inputs are moved bit by bit, whatever number they are, or none."""
        rig = _small(kit, "short_conv", fmt)
        batch = rig.batch(((1, 0, 2), (3, 2, 0)), [2, 1, 0])
        _fill(rig, batch)
        [(name, (row,))] = batch.parts.items()
        words = _odd(rig, fmt, row.numel()).view(row.dtype).view(row.shape)
        batch = attrs.evolve(batch, parts={name: (words.to(rig.device),)})
        rig.run(batch)
        rig.expect_ended(batch)
        rig.check("bit patterns")


def _small(kit: Kit, family: str, fmt: str, num_states: int = 9, max_rows: int = 64) -> ReplayRig:
    """Make a rig over one layer with small states."""
    state = StateSpec(family, FORMATS[fmt], "gapped", 1, 1, value_size=2, key_size=3)
    specs = [ReplayedSpec((state,), num_states=num_states)]
    return replay_rig(kit, specs, paged=(), max_rows=max_rows)


def _odd(rig: ReplayRig, fmt: str, count: int) -> torch.Tensor:
    """Return words of noise, among them a zero with a sign, infinities, and NaNs with a payload."""
    word = FORMATS[fmt].word
    words = noise(count, word, rig.rng).clone()
    sign = torch.iinfo(word).min
    exponent = int(torch.tensor(float("inf"), dtype=FORMATS[fmt].dtype).view(word))
    odd = torch.tensor([sign, exponent, exponent + 1, exponent | sign, -1], dtype=word)
    words[: len(odd)] = odd[:count]
    return words


def _fill(rig: ReplayRig, batch: ReplayBatch) -> None:
    """Fill the states of a window's requests with words that are no usual numbers."""
    [memories] = rig.states.values()
    for memory in memories:
        for slot in batch.states["state"]:
            size = torch.Size(memory.spec.shape).numel()
            memory.write(slot, _odd(rig, memory.spec.fmt.name, size).tolist())
        memory.impose()
