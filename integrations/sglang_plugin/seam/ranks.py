"""The ranks of an SGLang engine, as far as the audit has them act together.

SGLang has a scheduler per tensor-parallel rank. They receive the same requests and take the same
decisions, so each of them comes to the end of a step at the same point.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from .protocols import Scheduler

T = TypeVar("T")


class TensorRanks:
    """The tensor-parallel ranks of one engine; see ``Ranks``.

    Args:
        group: a group of theirs on the host; None for an engine on one GPU.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group: Final = group

    @classmethod
    def of(cls, scheduler: Scheduler) -> TensorRanks:
        """Return the ranks that a scheduler is one of; one alone without torch.distributed."""
        return cls(getattr(scheduler, "tp_cpu_group", None) if dist.is_initialized() else None)

    @property
    def number(self) -> int:
        """Number of the ranks."""
        return 1 if self._group is None else dist.get_world_size(self._group)

    def of_all(self, value: T) -> list[T]:
        """Return the ``value`` of each rank, in their order; every rank has to call this."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.number
        dist.all_gather_object(found, value, group=self._group)
        return found

    def highest(self, level: int, *, stages: bool) -> int:
        """Return the largest ``level`` of the ranks; every rank has to call this.

        ``stages`` changes nothing: there are no pipeline stages.
        """
        if self._group is None:
            return level
        found = torch.tensor([level], dtype=torch.int32)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return int(found[0])

    def own_number(self) -> int:
        """Return this rank's number among them; 0 for one alone."""
        return 0 if self._group is None else dist.get_rank(self._group)
