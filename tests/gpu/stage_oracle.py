"""Reads the KV cache of a pipeline stage that hears some steps later what was accepted.

Shares nothing with kvtxn: what is heard comes from vLLM's own queue (``PPHandler``), and bytes from
the caches. Numbers are named as in ``cache_oracle``; ``gone`` counts requests that were freed
before their step was heard of, and that are not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import gpu_oracle
import torch
from cache_oracle import Step, caches_of, groups_of, words
from failing_stage import failing_stage


def watch(runner: Any, counts: Counter[str]) -> None:
    """Judge, from now on, each step with drafts when the stage hears of it.

    Args:
        runner: a V2 runner on a stage before the last one.
        counts: what is counted.
    """
    groups = groups_of(runner)
    waiting: dict[int, tuple[Any, Step]] = {}  # the arrays are kept, so that no id comes again
    prepare, update = runner.prepare_attn, runner.update_pp_decode_requests

    def prepared(batch: Any) -> Any:
        result = prepare(batch)
        if batch.num_draft_tokens:
            waiting[id(batch.idx_mapping_np)] = batch.idx_mapping_np, before(runner, groups, batch)
        return result

    def updated() -> None:
        entry = runner.pp_handler.queue[0]
        step = None if entry is None else waiting.pop(id(entry.idx_mapping_np), None)
        if step is None:
            update()
            return
        freed = runner.pp_handler.req_idx_gen_np[entry.idx_mapping_np] != entry.gen_at_receive_np
        judge(step[1], freed.tolist(), entry, counts, update)

    runner.prepare_attn, runner.update_pp_decode_requests = prepared, updated


def before(runner: Any, groups: dict[str, int], batch: Any) -> Step:
    """Copy the caches before the forward of a batch with drafts."""
    slots = runner.block_tables.slot_mappings
    drafts = batch.num_draft_tokens_per_req.tolist()
    ends = batch.query_start_loc_np[1 : len(drafts) + 1].tolist()
    by_name = {name: slots[number] for name, number in groups.items()}
    return Step(caches_of(runner, groups), by_name, drafts, ends)


def judge(
    step: Step, freed: list[bool], entry: Any, counts: Counter[str], update: Callable[[], None]
) -> None:
    """Let the runner hear of a step, and compare the caches with those before that step."""
    step.drafts = [0 if gone else count for gone, count in zip(freed, step.drafts, strict=True)]
    now = Step(step.caches, step.slots, step.drafts, step.ends)
    early = step.changed(step.drafted())
    update()
    accepted = [
        min(max(0, count - 1), drafts)
        for count, drafts in zip(entry.num_sampled.tolist(), step.drafts, strict=True)
    ]
    kept, rejected = step.rows(accepted)
    counts["heard"] += 1
    counts["gone"] += sum(freed)
    counts["early"] += early
    counts["windows"] += any(step.drafts)
    counts["kept"] += len(kept)
    counts["rejected"] += len(rejected)
    counts["rejected_written"] += step.changed(rejected)
    counts["lost"] += len(kept) - step.changed(kept, everywhere=True)
    counts["strays"] += now.strays(rejected)  # by the commit alone: other steps ran in between


def windows_of(runner: Any) -> int:
    """Count the windows that ended on a rank, and the one that is open."""
    steps = getattr(runner, "kvtxn", None)
    if steps is None:
        return 0
    return int(sum(steps.manager.metrics.windows.values())) + (steps.manager.current is not None)


class Watch(gpu_oracle.Watch):
    """The worker extension: the oracle, on every stage."""

    def _watch_v2(self, runner: Any) -> None:
        super()._watch_v2(runner)
        if not runner.is_last_pp_rank:
            watch(runner, self.oracle_counts)

    def stages(self) -> dict[str, Any]:
        """Say which stage this is, and what kvtxn does there."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        steps = getattr(runner, "kvtxn", None)
        return {
            "last": bool(runner.is_last_pp_rank),
            "device": torch.cuda.current_device(),
            "policy": None if steps is None else steps.manager.policy,
            "steps": None if steps is None else type(steps).__name__,
        }

    def idle_steps(self, count: int) -> dict[str, int]:
        """Run steps as an idle data-parallel rank does; returns what they changed.

        Args:
            count: of the steps.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        caches = caches_of(runner, groups_of(runner))
        before = {name: cache.clone() for name, cache in caches.items()}
        windows = windows_of(runner)
        for _ in range(count):
            self.execute_dummy_batch()  # type: ignore[attr-defined]
        changed = sum(
            not torch.equal(words(caches[name]), words(was)) for name, was in before.items()
        )
        return {"layers_changed": changed, "windows": windows_of(runner) - windows}

    def early_fault_install(self, stage: str, after: int) -> None:
        """On a stage before the last one, let a part of its steps fail once."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self.early_fault = ExitStack()
        self.early_calls = [0]
        if not runner.is_last_pp_rank:
            lane = runner.kvtxn.lanes[0]
            self.early_calls = self.early_fault.enter_context(failing_stage(lane, stage, after))

    def early_fault_remove(self) -> int:
        """Everything works again; returns how often that part was called."""
        self.early_fault.close()
        return self.early_calls[0]
