"""Planned launches, and the recognition of rows that are staged again and again."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import ReferenceType, ref

import attrs
from torch import Tensor

from ..executor import StagedLayer
from .pointer_table import Plan


@attrs.frozen(eq=False)
class Job:
    """One launch, planned: which rows go where.

    Attributes:
        plan: the planes; None where the launch only counts.
        table: int64 ``[num_planes]``, addresses of the staged rows; unused if ``direct``.
        select: which rows, as ``triton_kernels`` numbers them.
        to_cache: the direction.
        direct: the addresses themselves, for at most two planes.
    """

    plan: Plan | None
    table: Tensor
    select: int
    to_cache: bool = True
    direct: tuple[int, int] | None = None


class Recurring:
    """The last commit's job, for windows that stage the very same ``StagedLayer`` objects.

    A captured forward leaves its rows at the same places at every replay; then the host has
    nothing to look up. Only weak references are kept, so no window's rows live any longer.
    """

    def __init__(self) -> None:
        self._layers: list[ReferenceType[StagedLayer]] = []
        self._version = -1
        self._job: Job | None = None

    def find(self, staged: Mapping[str, StagedLayer], version: int) -> Job | None:
        """The job of these layers, if the table of addresses is as it was then."""
        if version != self._version or len(self._layers) != len(staged):
            return None
        same = all(was() is now for was, now in zip(self._layers, staged.values(), strict=True))
        return self._job if same else None

    def remember(self, staged: Mapping[str, StagedLayer], version: int, job: Job) -> None:
        """Keep a job; all its layers only once the first of them has come twice."""
        first = next(iter(staged.values()), None)
        if first is None:
            return
        again = bool(self._layers) and self._layers[0]() is first
        self._layers = [ref(layer) for layer in staged.values()] if again else [ref(first)]
        self._version, self._job = version, job
