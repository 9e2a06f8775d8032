"""Schedulers with a fault each, which a soak has to find; named by ``scheduler_cls``."""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class LosesBlocks(Scheduler):
    """Takes a block now and then, and never gives it back."""

    taken = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.taken += 1
        if self.taken % 50 == 0:
            self.kv_cache_manager.block_pool.get_new_blocks(1)
        return super().schedule(*args, **kwargs)


class KeepsBytes(Scheduler):
    """Keeps some bytes of each step."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.setdefault("kept", []).append(os.urandom(1 << 17))
        return super().schedule(*args, **kwargs)


class SaysOther(Scheduler):
    """Changes a sampled token now and then."""

    taken = 0

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.taken += 1
        sampled = model_runner_output.sampled_token_ids
        if self.taken % 5 == 0 and sampled and len(sampled[0]):
            sampled[0][0] = 7 if sampled[0][0] != 7 else 8
        return super().update_from_output(scheduler_output, model_runner_output)
