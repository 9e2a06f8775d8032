"""The ranks of an engine, as far as the audit has them act together."""

from __future__ import annotations

import os
import sys
from typing import Any, TypeVar

from .engine_protocols import RankGroup
from .runner_protocols import Runner

T = TypeVar("T")


def _group() -> RankGroup:
    """Return vLLM's group of the ranks that share each layer (tensor parallelism)."""
    from vllm.distributed import get_tp_group

    group: RankGroup = get_tp_group()
    return group


def _stages() -> RankGroup:
    """Return vLLM's group of pipeline stages."""
    from vllm.distributed import get_pp_group

    group: RankGroup = get_pp_group()
    return group


def number_of_ranks() -> int:
    """Return the number of ranks that share each layer."""
    return int(_group().world_size)


def from_first(value: T) -> T:
    """Return the ``value`` of the first of the ranks that share each layer; all must call this."""
    found: T = _group().broadcast_object(value if _group().rank_in_group == 0 else None, src=0)
    return found


def of_all(value: T) -> list[T]:
    """Return the ``value`` of each rank that shares these layers, in order; all must call this."""
    from torch.distributed import all_gather_object

    group = _group()
    found: list[Any] = [None] * group.world_size
    all_gather_object(found, value, group=group.cpu_group)
    return found


def highest(level: int, *, stages: bool) -> int:
    """Return the largest ``level`` of the ranks that share each layer; all must call this.

    With ``stages`` it is that of all pipeline stages' ranks.
    """
    import torch
    from torch.distributed import ReduceOp, all_reduce

    found = torch.tensor([level], dtype=torch.int32)
    for group in (_group(), _stages()) if stages else (_group(),):
        all_reduce(found, op=ReduceOp.MAX, group=group.cpu_group)
    return int(found[0])


def on_all_stages(value: bool) -> bool:
    """Tell whether ``value`` is true on each rank of all pipeline stages, which must call this."""
    return not highest(int(not value), stages=True)


def number_of_stages() -> int:
    """Return the number of pipeline stages."""
    return int(_stages().world_size)


def own_number() -> int:
    """Return this rank's number among those that share each layer, from 0."""
    return int(_group().rank_in_group)


def are_asked_together(runner: Runner) -> bool:
    """Tell whether a call of the engine's workers reaches every rank.

    Where ranks are launched from outside, each rank is an engine's only worker in its own process.
    """
    backend = runner.vllm_config.parallel_config.distributed_executor_backend
    return bool(backend != "external_launcher")


def is_heard(runner: Runner) -> bool:
    """Tell whether vLLM hears of an error of this rank's step.

    An executor of several processes awaits the first rank of the last pipeline stage alone; others
    hear of all.
    """
    if runner.vllm_config.parallel_config.distributed_executor_backend != "mp":
        return True
    return bool(_stages().is_last_rank) and own_number() == 0


def end_process() -> None:
    """Flush the standard streams, and end this process at once with status 1.

    An orderly end would wait for collectives with the other ranks.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
