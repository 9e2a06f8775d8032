"""Recurrent layers of vLLM on a GPU, by kvtxn's own kernels: verify stages rows, a commit replays.

In a verify step a kernel of kvtxn's takes the place of vLLM's: it reads each request's state,
writes none, and keeps per row what the state needs in order to take it in. The commit is one launch
for all layers, which reads and writes each state once. Sums are in float32, as vLLM's are, but in
another order; so outputs differ from those of vLLM's kernels as these differ from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ....backends.gated_delta import DeltaLayers, DeltaRows, advance_gated_delta
from ..policy.engine import GATED_DELTA, MAMBA2
from .replayed_delta import ReplayedDelta
from .replayed_layer import ReplayedLayer
from .replayed_mamba2 import ReplayedMamba2
from .state_layers import StateLayer
from .state_tables import StateTables, VerifyStep

#: By kind of layer, the class of those that kvtxn's kernels verify.
REPLAYED: Final[Mapping[str, type[ReplayedLayer]]] = {
    GATED_DELTA: ReplayedDelta,
    MAMBA2: ReplayedMamba2,
}


def staged_bytes(module: Any, kind: str) -> int:
    """Return the bytes that a row of a layer takes until the commit."""
    return DeltaRows.row_bytes(*REPLAYED[kind].sizes_of(module))


class ReplayedRows:
    """The rows of all layers of a kind in the present step, and one commit for all.

    Args:
        layers: the layers, of one kind that ``REPLAYED`` has.
        tables: the tables of all layers.
        groups: for each layer the number of its group in the tables.
        rows: most rows of a step.
        width: most rows of a request.

    Attributes:
        layers: the layers, each with its own rows.
        may_fuse: False: one kernel verifies all steps, so there is one commit.
    """

    may_fuse = False

    def __init__(
        self,
        layers: Sequence[StateLayer],
        tables: StateTables,
        groups: Sequence[int],
        rows: int,
        width: int,
    ) -> None:
        self._tables = tables
        self._found: DeltaLayers | None = None
        self._recurring: Any = None  # its module asks for Triton
        self.layers: list[ReplayedLayer] = []
        for layer, group in zip(layers, groups, strict=True):
            module: Any = layer.module
            replayed = REPLAYED[layer.kind]
            room = DeltaRows.build(rows, *replayed.sizes_of(module), layer.past.device)
            self.layers.append(replayed(module, tables, group, room, width))

    def was_fused(self, _: VerifyStep) -> bool:
        """Tell that there is one kernel."""
        return False

    def metadata(self, *_: object) -> None:
        """Make none: there is one kernel."""

    def hook(self) -> None:
        """Let the layers verify without writing a state, and keep their rows."""
        for layer in self.layers:
            layer.hook()

    def unhook(self) -> None:
        """Give the layers their own methods back."""
        for layer in self.layers:
            layer.unhook()

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernel that verifies; see ``ReplayedLayer.warm_up``."""
        self.layers[0].warm_up(dtype)

    def forget_caches(self) -> None:
        """Hold no cache; the next commit finds those that the layers have then."""
        self._found, self._recurring = None, None

    def _layers(self) -> DeltaLayers:
        """Return where the states and rows of all layers are."""
        if self._found is None:
            self._found = DeltaLayers.build(
                [layer.module.kv_cache[1] for layer in self.layers],
                [layer.rows for layer in self.layers],
                [layer.group for layer in self.layers],
            )
        return self._found

    def commit_sampled(self, step: VerifyStep, sampled: Tensor) -> None:
        """Write the states after what was sampled, in one launch and nothing beside it.

        Args:
            step: the step.
            sampled: int ``[num_requests]``, the tokens sampled for each; as in vLLM, a request
                without any keeps its first row. Requests of the step beyond these have no rows.

        Raises:
            Exception: the launch's own; it has written nothing.
        """
        if not sampled.is_cuda:
            self._tables.name_commits(sampled[: step.requests], step.starts)
            self.commit(step)
            return
        if self._recurring is None:
            from ....backends.gated_delta.recurring import RecurringAdvance

            tables = self._tables
            self._recurring = RecurringAdvance(
                *(self._layers(), tables.sources[:, :, -1], self.layers[0].longest),
                boundary=tables.boundary,
                snapshots=tables.snapshots,
            )
        requests = min(step.requests, sampled.shape[0])
        self._recurring.run(sampled, step.starts, requests)

    def commit(self, step: VerifyStep) -> None:
        """Write the states of all layers in one launch; a raise has written none."""
        count = step.requests
        tables = self._tables
        boundary, snapshots = tables.boundary, tables.snapshots
        advance_gated_delta(
            self._layers(),
            tables.sources[:, :count, -1],
            tables.counts[:count],
            step.starts[: count + 1],
            longest=self.layers[0].longest,
            boundary=None if boundary is None else boundary[:count],
            snapshots=None if snapshots is None else snapshots[:, :count],
        )
