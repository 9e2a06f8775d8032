"""An oracle of recurrent layers: each state after a commit, against the recurrence in float64.

It knows nothing of how kvtxn verifies or commits. It copies what a layer's kernel is given in a
verify step, also inside captured graphs, and the state before the step; then it computes the state
after every number of rows. The state in the cache has to be that after the kept rows, and must
not be mistaken for any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from kvtxn.integrations.vllm_plugin.seam.replayed_rows import (
    REPLAYED,
    ReplayedDelta,
    ReplayedMamba2,
)
from torch import Tensor

#: How far a number of a state may be off, as a part of the state's largest number. In float32 a
#: row's key, strength, decay and product over 128 keys are a few roundings of 2**-24 each, and a
#: step has a few rows. A bfloat16 state is rounded once in the end: half of 2**-7.
TOLERANCE: Final = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-8 + 2.0**-18}

#: A state after another count is told apart if it is further off than this many times as much.
APART: Final = 4


#: By layer, what its kernel was given in the last verify step. Captured graphs write there.
GIVEN: Final[dict[int, list[Tensor]]] = {}


def watch_launches() -> None:
    """Copy what the kernels of verify steps are given from now on; before any graph is captured."""
    for kind in REPLAYED.values():
        kind.launch = _copied(kind.launch)  # type: ignore[attr-defined]


def _copied(launch: Any) -> Any:
    """Return a launch that copies its rows; behind them come their starts, and the outputs."""

    def copied(self: Any, *given: Tensor) -> None:
        parts, room = given[:-2], self.rows.num_rows
        if id(self) not in GIVEN:
            with torch.inference_mode(False):
                GIVEN[id(self)] = [part.new_zeros(room, *part.shape[1:]) for part in parts]
        count = min(room, parts[0].shape[0])
        for target, part in zip(GIVEN[id(self)], parts, strict=True):
            target[:count].copy_(part[:count])
        launch(self, *given)

    return copied


def _delta(state: Tensor, module: Any, rows: Sequence[Tensor]) -> Tensor:
    """Take one row of each request, ``(query, key, value, a, b)``, into gated delta states."""
    _, key, value, a, b = rows
    key = key * (key.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    key = key.repeat_interleave(state.shape[1] // key.shape[1], dim=1)
    x = a + module.dt_bias.double()
    decay = torch.exp(-module.A_log.double().exp() * torch.nn.functional.softplus(x))
    state = state * decay[:, :, None, None]
    fresh = (value - (state @ key[..., None])[..., 0]) * torch.sigmoid(b)[..., None]
    return state + fresh[..., None] * key[:, :, None, :]


def _mamba2(state: Tensor, module: Any, rows: Sequence[Tensor]) -> Tensor:
    """Take one row of each request, ``(x, dt, B, C)``, into Mamba-2 states."""
    x, dt, b, _ = rows
    b = b.repeat_interleave(state.shape[1] // b.shape[1], dim=1)
    step = torch.nn.functional.softplus(dt + module.dt_bias.double())
    decay = torch.exp(step * module.A.double())
    return state * decay[:, :, None, None] + (x * step[..., None])[..., None] * b[:, :, None, :]


#: By kind of layer, what takes a row in.
_TAKES: Final = {ReplayedDelta: _delta, ReplayedMamba2: _mamba2}


def states_after(before: Tensor, layer: Any, rows: Tensor) -> Tensor:
    """Compute the states after 0, 1, 2, ... rows of those that the layer's kernel was given.

    Args:
        before: ``[num_requests, heads, value_size, key_size]``.
        layer: the ``ReplayedLayer``.
        rows: int64 ``[num_requests, most_rows]``, the rows of each request.

    Returns:
        float64 ``[1 + most_rows, num_requests, heads, value_size, key_size]``.
    """
    found, takes = [before.double()], _TAKES[type(layer)]
    for row in rows.T:
        given = [part[row].double() for part in GIVEN[id(layer)]]
        found.append(takes(found[-1], layer.module, given))
    return torch.stack(found)


#: What ``compare`` counts.
COUNTS: Final = ("states", "off", "mistaken", "blind")


def compare(
    layer: Any,
    before: Tensor,
    now: Tensor,
    starts: Tensor,
    kept: Tensor,
    most: int,
    among: Tensor | None = None,
) -> Tensor:
    """Compare the states of one layer after a commit, without waiting for the device.

    Args:
        layer: the ``ReplayedLayer``.
        before: ``[num_requests, heads, value_size, key_size]``, before the step.
        now: after the commit, likewise.
        starts: int64 ``[num_requests + 1]``.
        kept: int64 ``[num_requests]``.
        most: rows of the longest request.
        among: bool ``[num_requests]``, the requests that count; None is all.

    Returns:
        float64 ``[5]``: the states that were compared; those that are off; those that are off, and
        right for another count; those for which two counts have states alike; and the largest
        difference of a state that is right.
    """
    lengths = starts.diff()
    turns = torch.arange(most, device=now.device)
    rows = (starts[:-1, None] + turns).minimum(starts[-1] - 1)
    every = states_after(before, layer, rows)
    size = every.abs().amax((2, 3, 4)).clamp(min=1e-9)
    off = (every - now.double()).abs().amax((2, 3, 4)) / size
    right = kept.clamp(min=1).minimum(lengths)[None]
    near = TOLERANCE[now.dtype]
    there = torch.arange(most + 1, device=now.device)[:, None]
    others = (there != right) & (there <= lengths)
    mine = off.gather(0, right)[0]
    kept_state = every.gather(0, right[..., None, None, None].expand_as(every[:1]))
    close = (every - kept_state).abs().amax((2, 3, 4)) / size <= APART * near
    among = torch.ones_like(mine, dtype=torch.bool) if among is None else among
    wrong = (mine > near) & among
    mistaken = wrong & ((off <= near) & others).any(0)
    parts = among, wrong, mistaken, (close & others).any(0) & among
    counts = torch.stack(parts).sum(1).double()
    return torch.cat([counts, mine.where(~wrong & among, 0.0).max()[None]])


def added(sums: Tensor, found: Tensor) -> Tensor:
    """Add up what ``compare`` returned; of differences the largest is kept."""
    return torch.cat([sums[:-1] + found[:-1], sums[-1:].maximum(found[-1:])])


def words_of_blocks(state: Tensor) -> Tensor:
    """A number of the bits of each block, int64 ``[num_blocks]``, without a copy of the cache."""
    words = state.view({2: torch.int16, 4: torch.int32}[state.element_size()])
    return words.flatten(1).sum(1, dtype=torch.int64)
