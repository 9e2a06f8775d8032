"""Engines on one machine's GPUs, each in a process of its own, as many at once as it is told.

python gpu_child.py jobs.json reports.json COUNT SECONDS
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from gpu_jobs import STOCK
from gpu_models import DEMO, write
from gpu_ties import CANDIDATES
from vllm_scenarios import SCENARIOS, Engine, Tokens

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else what a batch holds depends on time
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_DETERMINISTIC": "1",  # else each engine times reductions, and sums its own way
}
COUNTERS = {
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "preemptions": "vllm:num_preemptions",
}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def novels(engine: Engine) -> Tokens:
    """What a trained model makes of the beginnings of sentences."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    texts = json.loads((DEMO / "prompts.json").read_text())[:96]
    return engine.run([tokenizer(text)["input_ids"] for text in texts], 64)


SCENARIOS |= {"novels": novels}


def build(job: dict[str, Any], folder: Path) -> Any:
    """The engine of a job under its policy."""
    from vllm import LLM

    speculation = dict(job.get("speculation", NGRAM))
    if job.get("draft"):
        speculation["model"] = write(job["draft"], folder)
    policy = job["policy"]
    ours = {} if policy in STOCK else {"kvtxn": {"policy": policy, "on_error": "raise"}}
    options: dict[str, Any] = {
        "block_size": 32,
        "num_gpu_blocks_override": 26,
        "max_model_len": 288,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "gpu_memory_utilization": 0.03,
        "kv_cache_memory_bytes": 64 << 20,
        "logprobs_mode": "raw_logits",
    }
    if job["attention"]:
        options["attention_config"] = {"backend": job["attention"]}
    return LLM(
        model=write(job["model"], folder),
        load_format="dummy" if job.get("random") else "auto",
        skip_tokenizer_init=True,
        dtype=job.get("dtype", "bfloat16"),
        seed=0,
        disable_log_stats=False,
        speculative_config=speculation,
        additional_config=ours,
        worker_extension_cls="gpu_oracle.Watch",
        **(options | job.get("options", {})),
    )


def counters(llm: Any) -> dict[str, float]:
    """vLLM's own numbers."""
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {name: found.get(metric, 0) for name, metric in COUNTERS.items()}


def run(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Every scenario; the first one once before anybody watches, who makes the host wait.

    Under a policy all of them come first without windows: then this engine is stock, and sums as
    it does with them, while another engine has compiled kernels of its own.
    """
    from kvtxn.integrations.vllm_plugin import snapshots

    results: dict[str, Any] = {"idle": snapshots(llm)} | llm.collective_rpc("describe")[-1]
    if job.get("random"):
        llm.collective_rpc("randomise", args=(0.08,))
    names, without = job["scenarios"], {}
    if job["policy"] not in STOCK:
        llm.collective_rpc("switch", args=(False,))
        without = {name: {"off": say(llm, name)} for name in names}
        llm.collective_rpc("switch", args=(True,))
    results["unwatched"] = say(llm, names[0]) | without.get(names[0], {})
    llm.collective_rpc("oracle_install")
    for name in names:
        results[name] = say(llm, name) | without.get(name, {})
        results[name]["oracle"] = llm.collective_rpc("oracle_take")
    return results


def say(llm: Any, name: str) -> dict[str, Any]:
    """What an engine makes of one scenario."""
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


def carry_out(name: str, job: dict[str, Any], folder: Path) -> None:
    """One engine in this process; its report, or its error, goes into the folder."""
    folder.mkdir()
    with (folder / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(job.get("environment", {}))
    begin = time.monotonic()
    try:
        llm = build(job, folder)  # held, for its end can take long
        report = run(llm, job)
    except Exception as error:
        report = {"error": repr(error)[-2000:]}
        traceback.print_exc()
    report["seconds"] = round(time.monotonic() - begin)
    (folder / "report.json").write_text(json.dumps(report))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what an engine leaves behind ends with its process


def carry_out_all(
    jobs: dict[str, Any], folder: Path, found_in: Path, count: int, limit: float
) -> None:
    """All engines, ``count`` at a time; each has ``limit`` seconds. Reports as soon as they are."""
    context = multiprocessing.get_context("fork")  # vLLM is imported once for all
    waiting, running, reports = list(jobs), dict[str, Any](), dict[str, Any]()
    while waiting or running:
        while waiting and len(running) < count:
            name = waiting.pop(0)
            process = context.Process(target=carry_out, args=(name, jobs[name], folder / name))
            process.start()
            running[name] = (process, time.monotonic())
        for name, (process, begin) in list(running.items()):
            if process.is_alive() and time.monotonic() - begin < limit:
                continue
            if process.is_alive():
                process.kill()
            process.join()
            del running[name]
            path, log = folder / name / "report.json", folder / name / "log"
            found = {"error": f"ended with {process.exitcode}"}
            reports[name] = json.loads(path.read_text()) if path.exists() else found
            text = log.read_text(errors="replace") if log.exists() else ""
            lines = [line for line in text.splitlines() if "kvtxn" in line]
            reports[name]["log"] = text[-6000:] if "error" in reports[name] else "\n".join(lines)
            found_in.write_text(json.dumps(reports))
            says = reports[name].get("error", "done")
            print(f"{name}: {says[-300:]} ({time.monotonic() - begin:.0f} s)", flush=True)
        time.sleep(0.2)


def main() -> None:
    """Carry out the jobs."""
    jobs, path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    os.environ.update(ENVIRONMENT)
    import torch
    import vllm  # noqa: F401
    from vllm import LLM  # noqa: F401
    from vllm.v1.engine import llm_engine  # noqa: F401

    assert not torch.cuda.is_initialized(), "processes that are forked could not use the GPU"
    folder = Path(sys.argv[1]).parent
    carry_out_all(jobs, folder, path, int(sys.argv[3]), float(sys.argv[4]))


if __name__ == "__main__":
    main()
