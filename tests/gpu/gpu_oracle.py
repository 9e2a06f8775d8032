"""Reads the KV cache on the device around every verify step of a GPU's model runner.

The V1 runner is watched as on the CPU (``cache_oracle``); here are the V2 runner, whose forward
may be a replayed graph, and what else these tests do inside a worker.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy
import torch
from cache_oracle import (
    CacheOracle,
    Step,
    caches_of,
    drafted,
    groups_of,
    mark,
    once_slots_are_known,
)
from failing_stage import failing_stage
from kvtxn.integrations.vllm_plugin.policy import rules as vllm_policy
from kvtxn.integrations.vllm_plugin.seam import layers as attention_layers

from kvtxn.config import POLICIES


class Watch(CacheOracle):
    """The worker extension of these tests: methods that vLLM calls in each worker."""

    def oracle_install(self) -> None:
        """Watch every step from now on."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if hasattr(runner, "prepare_attn"):
            self._watch_v2(runner)
            return
        super().oracle_install()
        forward, counts = runner._model_forward, self.oracle_counts

        def forwarded(*args: Any, **kwargs: Any) -> Any:
            from vllm.forward_context import get_forward_context

            counts["graphs"] += get_forward_context().cudagraph_runtime_mode.name == "FULL"
            return forward(*args, **kwargs)

        runner._model_forward = forwarded

    def _watch_v2(self, runner: Any) -> None:
        groups = groups_of(runner)
        self.oracle_counts = Counter[str]()
        counts, step = self.oracle_counts, []
        prepare, sampled_by = runner.prepare_attn, runner.postprocess_sampled
        graphs = runner.cudagraph_manager
        replay = graphs.run_fullgraph
        waiting = once_slots_are_known(runner.block_tables, "compute_slot_mappings")

        def prepared(batch: Any) -> Any:
            step.clear()
            counts["steps"] += 1
            slots = runner.block_tables.slot_mappings
            by_name = {name: slots[number] for name, number in groups.items()}
            caches = caches_of(runner, groups)
            if batch.num_draft_tokens:
                drafts = batch.num_draft_tokens_per_req.tolist()
                ends = batch.query_start_loc_np[1 : len(drafts) + 1].tolist()
                waiting.append(partial(mark, caches, by_name, drafted(drafts, ends)))
            result = prepare(batch)
            if batch.num_draft_tokens:
                lengths = batch.num_scheduled_tokens.tolist()
                mixed = any(n > d + 1 for n, d in zip(lengths, drafts, strict=True))
                counts["mixed"] += mixed
                step.append(Step(caches, by_name, drafts, ends))
            return result

        def sampled(
            idx_mapping: Any,
            sampled_tokens: Any,
            num_sampled: Any,
            num_rejected: Any,
            *others: Any,
            **named: Any,
        ) -> None:
            """Before the drafter runs; ranks that do not sample are told of an earlier step."""
            judged = step[0] if step and runner.is_last_pp_rank else None
            if judged is not None:
                counts["early"] += judged.changed(judged.drafted())
            sampled_by(*(idx_mapping, sampled_tokens, num_sampled, num_rejected, *others), **named)
            if judged is not None:
                accepted = [max(0, count - 1) for count in num_sampled.tolist()]
                self.judge(judged, accepted[: len(judged.drafts)])
                step.clear()

        def replayed(*args: Any, **kwargs: Any) -> Any:
            counts["graphs"] += 1
            return replay(*args, **kwargs)

        runner.prepare_attn, runner.postprocess_sampled = prepared, sampled
        graphs.run_fullgraph = replayed

    def randomise(self, spread: float) -> None:
        """New weights, the same in every engine, in the places that graphs read them from."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
        models = [runner.get_model(), getattr(drafter, "model", None)]
        torch.manual_seed(0)
        done = set()
        for model in models:
            for name, weight in () if model is None else model.named_parameters():
                if weight.data_ptr() in done or not weight.is_floating_point():
                    continue
                done.add(weight.data_ptr())
                if "norm" in name:
                    weight.data.fill_(1.0)
                else:
                    weight.data.normal_(0.0, spread * (8 if "lm_head" in name else 1))

    def describe(self) -> dict[str, Any]:
        """Describe the engine, and the outcome of each policy in it."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        layers, facts = attention_layers.target_layers(runner)
        return {
            "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__.split('+')[0]}"
            f", vLLM {facts.version}",
            "decisions": {asked: list(vllm_policy.decide(asked, facts)) for asked in POLICIES},
            "attention": facts.attention,
            "runner": facts.runner,
            "release": facts.version,
            "graphs": runner.compilation_config.cudagraph_mode.name,
            "ahead": bool(runner.scheduler_config.async_scheduling),
            "cache": sorted({f"{x.cache.dtype}{list(x.cache.stride()[1:])}" for x in layers}),
            "groups": len({x.group for x in layers}),
        }

    def memory(self) -> dict[str, int]:
        """Bytes that torch holds on the device, and the sizes that kvtxn's share depends on."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        found = {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "peak": torch.cuda.max_memory_allocated(),
            "captured_rows": runner.compilation_config.max_cudagraph_capture_size or 0,
        }
        steps = getattr(runner, "kvtxn", None)
        if steps is not None and hasattr(steps, "windows"):
            found["buffers"] = steps.windows.nbytes
            found["max_rows"] = steps.manager.config.max_rows
            found["row_bytes"] = sum(p.row_bytes for ref in steps.layers for p in ref.planes)
        return found

    def compilations_install(self) -> None:
        """Note the name of each kernel that Triton compiles from now on."""
        from triton import knobs

        names: list[str] = []
        before = knobs.runtime.jit_post_compile_hook

        def hook(**facts: Any) -> Any:
            function = facts.get("fn")
            names.append(f"{getattr(function, 'module', '?')}.{getattr(function, 'name', '?')}")
            return before(**facts) if before is not None else None

        knobs.runtime.jit_post_compile_hook = hook
        self.compiled = names

    def compilations_take(self) -> list[str]:
        """The names so far."""
        return sorted(self.compiled)

    def fault_install(self, stage: str, after: int) -> None:
        """Let a stage of the steps fail once, after so many calls that go well."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self.fault = ExitStack()
        self.fault_calls = self.fault.enter_context(failing_stage(runner.kvtxn, stage, after))

    def fault_remove(self) -> int:
        """Everything works again; returns how often the stage was called."""
        self.fault.close()
        return self.fault_calls[0]

    def oracle_seed(self, seed: int) -> None:
        """Seed what the worker draws from; drafts that are accepted by lot are among that."""
        numpy.random.seed(seed)
        torch.manual_seed(seed)

    def switch(self, on: bool) -> None:
        """Let the steps have windows or be stock's; what is drawn by lot begins anew."""
        self.oracle_seed(0)
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        steps = self.__dict__.setdefault("kvtxn_steps", runner.kvtxn)
        if steps is not None:
            steps.abandon()
        if getattr(steps, "deferred", False):
            steps.windows.mark(None)  # captured graphs read this buffer
        runner.kvtxn = steps if on else None
