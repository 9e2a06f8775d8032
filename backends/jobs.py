"""Planned launches."""

from __future__ import annotations

import attrs
from torch import Tensor

from .pointer_table import Plan


@attrs.frozen(eq=False)
class Job:
    """One launch, planned: which rows go where.

    Attributes:
        plan: the planes; None where the launch only counts.
        table: int64 ``[num_planes]``, addresses of the staged rows; unused if ``direct``.
        select: which rows, as ``triton_select`` numbers them.
        to_cache: the direction.
        direct: the addresses themselves, for at most two planes.
    """

    plan: Plan | None
    table: Tensor
    select: int
    to_cache: bool = True
    direct: tuple[int, int] | None = None
