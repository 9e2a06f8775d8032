"""The ranks of a tensor-parallel group, as far as the audit compares them."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def _group() -> Any:
    from vllm.distributed import get_tp_group

    return get_tp_group()


def number_of_ranks() -> int:
    """Return the number of ranks that share each layer."""
    return int(_group().world_size)


def from_first(value: T) -> T:
    """Return the first rank's ``value``; every rank of the group must call this."""
    found: T = _group().broadcast_object(value if _group().rank_in_group == 0 else None, src=0)
    return found


def of_all(value: T) -> list[T]:
    """Return the ``value`` of each rank; every rank of the group must call this."""
    from torch.distributed import all_gather_object

    group = _group()
    found: list[Any] = [None] * group.world_size
    all_gather_object(found, value, group=group.cpu_group)
    return found


def any_of_all(value: bool) -> bool:
    """Tell whether ``value`` is true on any rank; every rank of the group must call this."""
    import torch
    from torch.distributed import ReduceOp, all_reduce

    flag = torch.tensor([int(value)], dtype=torch.int32)
    all_reduce(flag, op=ReduceOp.MAX, group=_group().cpu_group)
    return bool(flag[0])


def own_number() -> int:
    """Return this rank's number in its group."""
    return int(_group().rank_in_group)
