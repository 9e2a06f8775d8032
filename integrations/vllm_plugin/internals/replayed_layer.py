"""``ReplayedLayer``: what the recurrent layers that kvtxn's own kernels verify have in common."""

from __future__ import annotations

import abc
from typing import Any

import attrs
import torch
from torch import Tensor

from ....backends.gated_delta import DeltaRows
from .state_tables import StateTables


@attrs.frozen(eq=False)
class ReplayedLayer(abc.ABC):
    """A layer whose drafts kvtxn's own kernel verifies.

    Attributes:
        module: vLLM's layer.
        tables: the tables of all layers.
        group: number of the layer's group in the tables.
        rows: room for what a step's rows leave.
        longest: most rows of a request.
    """

    module: Any
    tables: StateTables
    group: int
    rows: DeltaRows
    longest: int

    @staticmethod
    @abc.abstractmethod
    def sizes_of(module: Any) -> tuple[int, int, int, int]:
        """Return a layer's heads of keys, its heads, and the sizes of a key and of a value."""

    @abc.abstractmethod
    def hook(self) -> None:
        """Let the layer verify without writing a state, and keep its rows."""

    @abc.abstractmethod
    def unhook(self) -> None:
        """Give the layer its own methods back."""

    @abc.abstractmethod
    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernel that verifies, for the layouts of rows that vLLM's methods have.

        No request may have a block yet: the kernel reads and writes no state then.

        Args:
            dtype: the model's.
        """

    def name_sources(self, starts: Tensor) -> Tensor:
        """Return the slots of a step's requests; where a forward is captured, name them there.

        Args:
            starts: int32 ``[requests + 1]``, the first row of each request, and the end.
        """
        self.tables.name_in_graph(self.group, self)
        return self.tables.sources[self.group, : starts.shape[0] - 1, -1]
