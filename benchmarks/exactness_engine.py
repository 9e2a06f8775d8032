"""One engine in a process of its own, observed: tokens, caches, faults, memory, compilations."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import attrs

from .exactness_watch import STAGES, CacheWatch, fault

#: Calls of a stage that go well before it fails; the attention is not called in graphs.
_BEFORE: Final = {"attend": 2}


@attrs.frozen(kw_only=True)
class Task:
    """What to observe.

    Attributes:
        name: of the engine, in the result.
        policy: a kvtxn policy, or ``"stock"``.
        attention: vLLM's name of the attention backend.
        prompts: how many of the demo's.
        tokens: to generate for each.
        drafts: per request.
        max_num_seqs: requests at once.
        ranks: GPUs, by tensor parallelism.
        in_process: whether the engine's core runs in this process, so that its schedule does not
            depend on time; what looks inside needs it.
        windows: look at the caches around at least so many windows.
        faults: whether to inject some afterwards.
    """

    name: str
    policy: str
    attention: str
    prompts: int
    tokens: int
    drafts: int
    max_num_seqs: int
    ranks: int = 1
    in_process: bool = True
    windows: int = 0
    faults: bool = False


def observe(task: Task, log: str) -> dict[str, Any]:
    """Start the engine and do the task; runs in a process that does nothing else.

    Returns:
        ``tokens``: per prompt, ``[id, best log-probability, second]`` per token; ``drafted``,
        ``accepted``; ``again``: ids of a second pass, with the watch of ``windows``; and for
        engines in this process what was looked at inside.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not task.in_process))
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    llm, seconds = _engine(task)
    compiled = _count_compilations()
    found: dict[str, Any] = {"task": attrs.asdict(task), "start_seconds": seconds}
    found["tokens"] = _generate(llm, task.prompts, task, logprobs=True)
    found |= _counts(llm)
    if task.in_process and task.ranks == 1:
        found |= _inside(llm, task)
        found["compiled_after_start"] = sorted(compiled)
    elif task.policy != "stock":
        from ..integrations.vllm_plugin import snapshots

        found["counters_of_ranks"] = snapshots(llm)
    if not task.in_process:
        llm.llm_engine.engine_core.shutdown()
    return found


def _engine(task: Task) -> tuple[Any, float]:
    from vllm import LLM

    from ..integrations.demo.engine import MODEL

    ours = {} if task.policy == "stock" else {"kvtxn": {"policy": task.policy}}
    start = time.perf_counter()
    llm = LLM(
        model=str(MODEL),
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=task.max_num_seqs,
        tensor_parallel_size=task.ranks,
        disable_custom_all_reduce=True,  # GPUs may be unable to reach each other's memory
        gpu_memory_utilization=0.02,
        kv_cache_memory_bytes=256 << 20,
        attention_config={"backend": task.attention},
        disable_log_stats=False,
        additional_config=ours,
        seed=0,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": task.drafts,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        },
    )
    return llm, round(time.perf_counter() - start, 1)


def _count_compilations() -> list[str]:
    """Names of kernels that Triton compiles from now on, filled as it does."""
    from triton import knobs

    names: list[str] = []
    before = knobs.runtime.jit_post_compile_hook

    def hook(**facts: Any) -> Any:
        function = facts.get("fn")
        names.append(f"{getattr(function, 'module', '?')}.{getattr(function, 'name', '?')}")
        return before(**facts) if before is not None else None

    knobs.runtime.jit_post_compile_hook = hook
    return names


def _generate(llm: Any, prompts: int, task: Task, *, logprobs: bool) -> list[Any]:
    """Greedy continuations, with an empty prefix cache at the start."""
    from vllm import SamplingParams

    from ..integrations.demo.engine import MODEL

    texts = json.loads((MODEL.parent / "prompts.json").read_text())[:prompts]
    assert llm.reset_prefix_cache()
    settings = SamplingParams(
        temperature=0, max_tokens=task.tokens, ignore_eos=True, logprobs=2 if logprobs else None
    )
    outputs = [each.outputs[0] for each in llm.generate(texts, settings, use_tqdm=False)]
    if not logprobs:
        return [list(output.token_ids) for output in outputs]
    return [
        [
            [token, *sorted((each.logprob for each in best.values()), reverse=True)[:2]]
            for token, best in zip(output.token_ids, output.logprobs, strict=True)
        ]
        for output in outputs
    ]


def _counts(llm: Any) -> dict[str, int]:
    metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {
        "drafted": int(metrics["vllm:spec_decode_num_draft_tokens"]),
        "accepted": int(metrics["vllm:spec_decode_num_accepted_tokens"]),
    }


def _inside(llm: Any, task: Task) -> dict[str, Any]:
    """What can be seen where the runner is in this process."""
    import torch

    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    memory = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_allocated(),
    }
    captured = int(runner.compilation_config.max_cudagraph_capture_size or 0)
    found: dict[str, Any] = {"memory": memory, "captured_rows": captured}
    steps = getattr(runner, "kvtxn", None)
    if steps is not None:
        rows = steps.manager.config.max_rows
        memory |= {"buffers": steps.window.nbytes, "max_rows": rows}
        memory["row_bytes"] = sum(p.row_bytes for ref in steps.layers for p in ref.planes)
    watch = None if steps is None else CacheWatch(steps, runner.block_tables.slot_mappings[0])
    if watch is not None and task.windows:
        with watch.watching():
            while watch.seen.windows < task.windows:
                found["again"] = _generate(llm, task.prompts, task, logprobs=False)
        found["watched"] = attrs.asdict(watch.seen)
    if steps is not None:
        found["counters"] = {k: v for k, v in steps.manager.snapshot().items() if v}
    few = min(task.prompts, 2 * task.max_num_seqs)
    found["few"] = _generate(llm, few, task, logprobs=True)
    if steps is not None and task.faults:
        found["faults"] = [
            _with_fault(llm, steps, task, few, stage)
            for stage, policies in STAGES.items()
            if task.policy in policies
        ]
    return found


def _with_fault(llm: Any, steps: Any, task: Task, prompts: int, stage: str) -> dict[str, Any]:
    """Generate while one stage fails once; then again, to see windows once more."""
    before = steps.manager.snapshot()
    with fault(steps, stage, _BEFORE.get(stage, 20)) as calls:
        tokens = _generate(llm, prompts, task, logprobs=True)
    between = steps.manager.snapshot()
    _generate(llm, prompts, task, logprobs=False)
    after = steps.manager.snapshot()

    def grown(name: str, old: dict[str, float], new: dict[str, float]) -> int:
        return int(new.get(name, 0) - old.get(name, 0))

    windows = "kvtxn_windows_total_committed"
    resting = "kvtxn_bypassed_windows_total_resting"
    return {
        "stage": stage,
        "calls": calls[0],
        "fallbacks": grown("kvtxn_fallbacks_total", before, between),
        "resting": grown(resting, before, between),
        "windows_while_failing": grown(windows, before, between),
        "windows_afterwards": grown(windows, between, after),
        "fallbacks_afterwards": grown("kvtxn_fallbacks_total", between, after),
        "resting_afterwards": grown(resting, between, after),
        "tokens": tokens,
    }


def main() -> None:
    """``python -m kvtxn.benchmarks.exactness_engine TASK RESULT LOG``: JSON in, JSON out."""
    task, result, log = sys.argv[1:]
    Path(result).write_text(json.dumps(observe(Task(**json.loads(task)), log)))
    os._exit(0)  # engines in this process leave threads behind that never end


if __name__ == "__main__":
    main()
