"""The process of one engine on a GPU: builds it, puts it through scenarios, and reports."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import scenarios
from engine_child import counters
from failing_stage import STAGES
from first_configs import take_first_configs
from gpu_jobs import STOCK
from gpu_models import DEMO, write
from gpu_ties import CANDIDATES
from scenarios import NGRAM, Engine, Tokens

#: Calls of a stage that go well before it fails; outside of graphs alone the attention is called.
BEFORE_FAULT = {"attend": 2}


def novels(engine: Engine) -> Tokens:
    """Let a trained model continue the beginnings of sentences."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    texts = json.loads((DEMO / "prompts.json").read_text())[:96]
    return engine.run([tokenizer(text)["input_ids"] for text in texts], 64)


SCENARIOS = scenarios.SCENARIOS | {"novels": novels}


def build(job: dict[str, Any], folder: Path) -> Any:
    """Build the engine of a job under its policy."""
    on_error = "fallback" if job.get("inside") else "raise"
    asked = {"policy": job["policy"], "on_error": on_error} | job.get("settings", {})
    ours = {} if job["policy"] in STOCK else {"kvtxn": asked}
    watch = job.get("watch", "gpu_oracle.Watch")
    return engine(job, folder, ours, watch, logprobs_mode="raw_logits")


def engine(job: dict[str, Any], folder: Path, ours: dict[str, Any], watch: str, **more: Any) -> Any:
    """Build a small engine with an ``additional_config`` and a worker extension.

    A job's own options come after ``more``.
    """
    from vllm import LLM

    take_first_configs()
    speculation = job.get("speculation", NGRAM)
    if job.get("draft"):
        speculation = {**speculation, "model": write(job["draft"], folder)}
    options: dict[str, Any] = {
        "block_size": 32,
        "num_gpu_blocks_override": 26,
        "max_model_len": 288,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "gpu_memory_utilization": 0.03,
        "kv_cache_memory_bytes": 64 << 20,
    }
    if job.get("attention"):
        options["attention_config"] = {"backend": job["attention"]}
    return LLM(
        model=write(job["model"], folder),
        load_format="dummy" if job.get("random") else "auto",
        skip_tokenizer_init=True,
        dtype=job.get("dtype", "bfloat16"),
        seed=0,
        disable_log_stats=False,
        speculative_config=speculation and dict(speculation),
        additional_config=ours,
        worker_extension_cls=watch,
        **(options | more | job.get("options", {})),
    )


def run(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Every scenario; the first one once before anybody watches, who makes the host wait.

    Under a policy all of them come first without windows: then this engine is stock, and sums as
    it does with them, while another engine has compiled kernels of its own.
    """
    from kvtxn.integrations.vllm_plugin import snapshots

    results: dict[str, Any] = {"idle": snapshots(llm)} | llm.collective_rpc("describe")[-1]
    if job.get("inside"):
        llm.collective_rpc("compilations_install")
    if job.get("random"):
        llm.collective_rpc("randomise", args=(0.08,))
    names, without = job["scenarios"], {}
    if job["policy"] not in STOCK:
        llm.collective_rpc("switch", args=(False,))
        without = {name: {"off": say(llm, name)} for name in names}
        llm.collective_rpc("switch", args=(True,))
    results["unwatched"] = say(llm, names[0]) | without.get(names[0], {})
    if job.get("inside"):
        results["memory"] = llm.collective_rpc("memory")[-1]
    llm.collective_rpc("oracle_install")
    for name in names:
        results[name] = watched(llm, name) | without.get(name, {})
    if job.get("inside"):
        stages = STAGES.get(job["policy"], ())
        results["faults"] = {stage: failing(llm, names[0], stage) for stage in stages}
        results["compiled"] = llm.collective_rpc("compilations_take")[-1]
    return results


def watched(llm: Any, name: str) -> dict[str, Any]:
    """Run one scenario, and say what the oracle saw."""
    return say(llm, name) | {"oracle": llm.collective_rpc("oracle_take")}


def failing(llm: Any, name: str, stage: str) -> dict[str, Any]:
    """Run a scenario in which one stage of a step fails once, and once more without that."""
    llm.collective_rpc("fault_install", args=(stage, BEFORE_FAULT.get(stage, 20)))
    during = watched(llm, name)
    calls = llm.collective_rpc("fault_remove")[-1]
    return {"calls": calls, "during": during, "afterwards": watched(llm, name)}


def say(llm: Any, name: str) -> dict[str, Any]:
    """Run one scenario; returns tokens, logits and counters."""
    from kvtxn.integrations.vllm_plugin import snapshots

    llm.reset_prefix_cache()
    llm.collective_rpc("oracle_seed", args=(0,))
    engine, stats, snaps = Engine(llm, CANDIDATES), counters(llm), snapshots(llm)
    tokens = SCENARIOS[name](engine)
    return {
        "tokens": tokens,
        "prompts": engine.prompts,
        "logits": engine.logprobs,
        "cached": engine.cached,
        "hits": engine.hits,
        "stats": {key: value - stats[key] for key, value in counters(llm).items()},
        "kvtxn": [
            {key: value - old.get(key, 0) for key, value in new.items()}
            for new, old in zip(snapshots(llm), snaps, strict=True)
        ],
    }


def carry_out(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build an engine and run it; returns its report."""
    import torch

    assert not torch.cuda.is_initialized(), "a process that is forked could not use the GPU"
    os.environ.update(job.get("environment", {}))
    begin = time.monotonic()
    llm = build(job, folder)
    built = time.monotonic() - begin
    report = run(llm, job)
    return report | {"seconds": [round(built), round(time.monotonic() - begin - built)]}
