"""Verify steps with ``recurrent="fast"``: kvtxn's own kernels, of gated delta nets and Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ...backends.gated_delta import DeltaLayers, DeltaRows, reference
from ...backends.gated_delta.gated_norm import gated_norm
from ...backends.gated_delta.launch import launch_advance, launch_verify
from ...backends.mamba2 import reference as mamba2_reference
from ...backends.mamba2.launch import launch_verify as launch_verify_mamba2
from .state_workload import StateWorkload, Step, Turn

#: How far states may be from the reference's, as a share of the largest number, by dtype of states.
_NEAR: Final = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


class FastStates:
    """Steps of all layers: verify layer after layer, and commit in one launch.

    Args:
        load: the states and steps, of a model with gated delta nets.

    Attributes:
        kept: the staged rows of each layer.
        parts: the parts of a step.
    """

    parts: tuple[str, ...] = ("verify", "norm", "commit")

    def __init__(self, load: StateWorkload) -> None:
        case, shape, self._load = load.case, load.case.shape, load
        self.kept = [self._room() for _ in load.states]
        self._layers = DeltaLayers.build(list(load.states), self.kept)
        self._given = [self._rows() for _ in load.states]
        self._gate = load.random(case.rows, shape.heads, shape.value_size)
        self._weight = torch.ones_like(self._gate[0, 0])
        self._out = torch.zeros_like(self._gate)

    def _room(self) -> DeltaRows:
        """Make room for the staged rows of a layer."""
        load, shape = self._load, self._load.case.shape
        sizes = shape.key_heads, shape.heads, shape.key_size, shape.value_size
        return DeltaRows.build(load.case.rows, *sizes, load.device)

    def _rows(self) -> tuple[Tensor, ...]:
        """Make a layer's random rows.

        Query, key and value in one tensor, as a convolution leaves them. Behind them come a, b,
        ``A_log`` and ``dt_bias``.
        """
        load, shape, rows = self._load, self._load.case.shape, self._load.case.rows
        keys, values = shape.key_heads * shape.key_size, shape.heads * shape.value_size
        mixed = load.random(rows, 2 * keys + values).split([keys, keys, values], dim=1)
        sizes = (shape.key_size, shape.key_size, shape.value_size)
        parts = [part.unflatten(1, (-1, size)) for part, size in zip(mixed, sizes, strict=True)]
        gates = [load.random(rows, shape.heads) for _ in range(2)]
        return (
            *parts,
            *gates,
            torch.zeros(shape.heads, device=load.device),
            load.random(shape.heads),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the staged rows of all layers."""
        parts = [part for rows in self.kept for part in (rows.key, rows.corrected, rows.decay)]
        return sum(part.numel() * part.element_size() for part in parts)

    def verify(self, turn: Turn) -> None:
        """Compute the outputs of all layers, and stage their rows."""
        load = self._load
        for given, state, kept in zip(self._given, load.states, self.kept, strict=True):
            self._launch(given, state, turn.table[:, 0], load.starts, self._out, kept)

    def _launch(self, given: tuple[Tensor, ...], *where: Any) -> None:
        """Verify one layer, whose state, slots, first rows, outputs and room follow its rows."""
        case = self._load.case
        scale, longest = case.shape.key_size**-0.5, case.drafts + 1
        launch_verify(given, *where, scale=scale, normalise=True, longest=longest)

    def _refer(self, given: Any, *where: Any) -> None:
        """Verify one layer in torch; arguments are those of ``_launch``."""
        scale = self._load.case.shape.key_size**-0.5
        reference.verify_gated_delta(*given, *where, scale=scale)

    def norm(self, _: Turn) -> None:
        """Apply the gated norm to the outputs once per layer, as stock's fused kernel does."""
        for _layer in self.kept:
            gated_norm(self._out, self._gate, self._weight, 1e-6, sigmoid=False)

    def commit(self, turn: Turn) -> None:
        """Write one state per request and layer."""
        where = turn.table[:, 0][None], turn.sampled, self._load.starts
        launch_advance(self._layers, *where, None, None, longest=self._load.case.drafts + 1)

    def steps(self) -> dict[str, Sequence[Step]]:
        """Return the steps of each part, one per turn, by the name "fast: PART"."""
        return {
            f"fast: {name}": [
                lambda name=name, turn=turn: getattr(self, name)(turn)  # type: ignore[misc]
                for turn in self._load.turns
            ]
            for name in self.parts
        }

    def check(self) -> None:
        """Compare the first and the last layer after one step with the reference; then undo it.

        Raises:
            AssertionError: numbers are not near enough, or another state changed.
        """
        load, turn = self._load, self._load.turns[0]
        blocks = turn.table.long()
        ends = [0, len(load.states) - 1]
        before = [load.states[end][blocks] for end in ends]
        self.verify(turn)
        self.commit(turn)
        found = [load.states[end][blocks] for end in ends]
        for end, was in zip(ends, before, strict=True):
            load.states[end][blocks] = was
        for end, was, state in zip(ends, before, found, strict=True):
            expected = self._reference(end, turn, was[:, 0])
            off = (state[:, 0] - expected).abs().max() / expected.abs().max()
            if off > _NEAR[state.dtype] or not torch.equal(state[:, 1:], was[:, 1:]):
                raise AssertionError(f"a fast commit differs from the reference: {load.case}")

    def _reference(self, layer: int, turn: Turn, states: Tensor) -> Tensor:
        """Return the states of one layer after a step, from those before it, by the reference."""
        load, kept = self._load, self._room()
        slots = torch.cat([states[:1], states])  # the first one belongs to no request
        sources = torch.arange(1, len(slots), device=load.device, dtype=torch.int32)
        where = slots, sources, load.starts, torch.empty_like(self._out), kept
        self._refer(self._given[layer], *where)
        layers = DeltaLayers.build([slots], [kept])
        reference.advance_gated_delta(layers, sources[None], turn.sampled, load.starts)
        return slots[1:]


class FastMamba2(FastStates):
    """The same for a model with Mamba-2 layers, whose gated norm no vLLM kernel applies."""

    parts = ("verify", "commit")

    def _rows(self) -> tuple[Tensor, ...]:
        """Make a layer's random rows in the kernel's order, with A, D and the bias of dt behind.

        x, B and C lie in one tensor, as a convolution leaves them.
        """
        load, shape, rows = self._load, self._load.case.shape, self._load.case.rows
        widths = [shape.heads * shape.value_size, *[shape.key_heads * shape.key_size] * 2]
        mixed = load.random(rows, sum(widths)).split(widths, dim=1)
        sizes = (shape.value_size, shape.key_size, shape.key_size)
        x, b, c = (part.unflatten(1, (-1, size)) for part, size in zip(mixed, sizes, strict=True))
        rates = -torch.rand(shape.heads, device=load.device)
        dt, (skips, bias) = load.random(rows, shape.heads), load.random(2, shape.heads)
        return x, dt, b, c, rates, skips, bias

    def _launch(self, given: tuple[Tensor, ...], *where: Any) -> None:
        """Verify one layer, whose state, slots, first rows, outputs and room follow its rows."""
        launch_verify_mamba2(given, *where, longest=self._load.case.drafts + 1)

    def _refer(self, given: Any, *where: Any) -> None:
        """Verify one layer in torch; arguments are those of ``_launch``."""
        mamba2_reference.verify_mamba2(*given, *where)
