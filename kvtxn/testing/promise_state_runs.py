"""Promises 1 and 4 over many windows: a run with drafts is the run of its kept rows.

Each window's rows are computed from the states by the recurrence's own ``outputs``, as a layer
computes them, so that a wrong state shows in later rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from ..config import TxnConfig
from ..layers import LayerRef
from ..manager import TransactionManager
from ..recurrent import GatedDelta, Mamba2, ShortConv
from .caches import noise
from .kit import Kit, KitBase
from .mixed_layers import need_kinds
from .promise_states import GROUPS, state_rig

_HEADS, _KEY_HEADS, _VALUES, _KEYS, _WIDTH, _STATES = 4, 2, 3, 6, 4, 6


class StateRuns(KitBase):
    """Histories of windows: requests that come and go, and the same run without rejected rows."""

    def test_requests_that_come_and_go(self, kit: Kit) -> None:
        """States are exact over sixteen windows in which requests begin, end and change places.

        A free state holds noise, NaN included; some windows are aborted.
        """
        rig = state_rig(kit)
        rng = random.Random(7)
        running: list[dict[str, int]] = []
        for step in range(16):
            running = [request for request in running if rng.random() < 0.8]
            for group in GROUPS:
                rig.end_requests(group, sorted(rig.held[group] - {r[group] for r in running}))
            while len(running) < 3 and rng.random() < 0.7:
                fresh = {}
                for group in GROUPS:
                    fresh[group] = rng.choice(sorted({*range(9)} - rig.held[group]))
                    rig.begin_requests(group, [fresh[group]])
                running.append(fresh)
            rng.shuffle(running)
            shape = [rng.randint(0, 2) for _ in running], [rng.randint(0, 3) for _ in running]
            states = {g: [request[g] for request in running] for g in GROUPS}
            counts = [rng.randint(0, most) for most in shape[1]]
            batch = rig.batch(shape, counts=counts, states=states)
            with rig.open(batch) as window:
                rig.stage(window, batch)
                if rng.random() < 0.2:
                    window.abort()
                    rig.expect_aborted(batch)
                else:
                    window.commit(rig.accepted(counts))
                    rig.expect_committed(batch, batch.kept(counts))
            rig.check(f"window {step}")

    @pytest.mark.parametrize("fmt", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("family", ["gated_delta", "kda", "mamba2", "short_conv"])
    def test_a_run_of_the_kept_rows_alone(self, kit: Kit, family: str, fmt: torch.dtype) -> None:
        """States and kept rows' outputs agree bit for bit with a run of only the kept rows."""
        need_kinds(kit, "recurrent", "replayed")
        with_drafts, kept_only = (_Model(kit, family, fmt) for _ in range(2))
        rng = random.Random(3)
        slots = [4, 1, 2]
        for step in range(8):
            settled = [rng.randint(0, 1) for _ in slots]
            counts = [rng.randint(0, 3) for _ in slots]
            extra = [rng.randint(0, 2) for _ in slots]
            drafts = [count + more for count, more in zip(counts, extra, strict=True)]
            lengths = [a + b for a, b in zip(settled, drafts, strict=True)]
            taken = [a + b for a, b in zip(settled, counts, strict=True)]
            rows = with_drafts.rows(sum(lengths), random.Random(step))
            kept = [
                start + i
                for start, count in zip(_starts(lengths), taken, strict=True)
                for i in range(count)
            ]
            full = with_drafts.window(slots, settled, drafts, rows, counts)
            alone = kept_only.window(slots, settled, counts, [r[kept] for r in rows], counts)
            assert torch.equal(full[kept], alone)
            assert with_drafts.memory.tolist() == kept_only.memory.tolist()

    @pytest.mark.parametrize("family", ["gated_delta", "kda", "mamba2", "short_conv"])
    def test_one_window_or_many(self, kit: Kit, family: str) -> None:
        """A float32 state is the same, bit by bit, after one window or one window per row.

        So are the outputs.
        """
        need_kinds(kit, "recurrent", "replayed")
        together, apart = (_Model(kit, family, torch.float32) for _ in range(2))
        rows = together.rows(5, random.Random(1))
        whole = together.window([3], [1], [4], rows, [4])
        each = [apart.window([3], [1], [0], [r[i : i + 1] for r in rows], [0]) for i in range(5)]
        assert torch.equal(whole, torch.cat(each))
        assert together.memory.tolist() == apart.memory.tolist()


def _starts(lengths: Sequence[int]) -> list[int]:
    """Return the first row of each request, by their lengths."""
    return [sum(lengths[:i]) for i in range(len(lengths))]


#: Shapes of a row's query, key, value and strength of its write.
_WRITTEN: Final = ((_KEY_HEADS, _KEYS), (_KEY_HEADS, _KEYS), (_HEADS, _VALUES), (_HEADS,))

#: Shapes of one row's inputs, from which a layer computes key, value and decay; by family.
_ROWS: Final[dict[str, tuple[tuple[int, ...], ...]]] = {
    "gated_delta": (*_WRITTEN, (_HEADS,)),
    "kda": (*_WRITTEN, (_HEADS, _KEYS)),
    "mamba2": ((_HEADS, _VALUES), (_HEADS,), (_KEY_HEADS, _KEYS), (_KEY_HEADS, _KEYS)),
    "short_conv": ((_KEYS,),),
}


class _Model:
    """A replayed layer that computes its own rows, over a state memory of noise, with a manager.

    The states in slots 1 to 4 are ordinary numbers, the same for every model of a family and dtype.
    """

    def __init__(self, kit: Kit, family: str, dtype: torch.dtype) -> None:
        device, rng = kit.device, random.Random(11)
        self.family = family
        shape = (_WIDTH - 1, _KEYS) if family == "short_conv" else (_HEADS, _VALUES, _KEYS)
        size = torch.Size(shape).numel()
        word = torch.int32 if dtype is torch.float32 else torch.int16
        self.memory = noise(_STATES * size, word, rng).to(device).clone()
        state = self.memory.view(dtype).view(_STATES, *shape)
        for slot in (1, 2, 3, 4):  # the slots of requests; the other slots hold noise
            numbers = torch.tensor([rng.gauss(0, 1) for _ in range(size)])
            state[slot] = numbers.view(shape).to(dtype).to(device)
        self.recurrence: Any = {
            "gated_delta": GatedDelta(_KEY_HEADS),
            "kda": GatedDelta(_KEY_HEADS, decay="channel"),
            "mamba2": Mamba2(-torch.linspace(0.5, 2, _HEADS, device=device), _KEY_HEADS),
            "short_conv": ShortConv(_WIDTH),
        }[family]
        self.ref = LayerRef.recurrent("layer", state, replay=self.recurrence)
        config = TxnConfig(policy="deferred", backend=kit.name, on_error="raise")
        self.manager = TransactionManager([self.ref], config)
        self.device = device

    def rows(self, count: int, rng: random.Random) -> list[Tensor]:
        """Draw the inputs of ``count`` random rows, one tensor per part; gates are positive."""
        parts = []
        for number, shape in enumerate(_ROWS[self.family]):
            size = count * torch.Size(shape).numel()
            positive = (len(shape) == 1 and self.family != "short_conv") or number == 4
            draw = rng.random if positive else lambda: rng.gauss(0, 1)
            values = torch.tensor([draw() for _ in range(size)])
            parts.append(values.view(count, *shape).to(self.device))
        return parts

    def window(
        self,
        slots: Sequence[int],
        settled: Sequence[int],
        drafts: Sequence[int],
        rows: Sequence[Tensor],
        counts: Sequence[int],
    ) -> Tensor:
        """Run one window over these rows, commit ``counts``, and return the outputs of all rows."""
        lengths = [a + b for a, b in zip(settled, drafts, strict=True)]
        more: list[Tensor] = []
        if self.family == "short_conv":
            more = [torch.linspace(-1, 1, _KEYS * _WIDTH, device=self.device).view(_KEYS, _WIDTH)]
        outputs: Tensor
        with self.manager.window(list(drafts), list(slots), list(settled)) as window:
            outputs, staged = self.recurrence.outputs(
                self.ref.states[0], slots, lengths, *rows, *more
            )
            window.stage(self.ref, staged)
            window.commit(list(counts))
        return outputs
