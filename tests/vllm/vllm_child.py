"""One process: builds engines one after another, puts them through scenarios, reports as JSON.

python vllm_child.py job.json result.json
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import vllm_ray
from kvtxn.integrations import vllm_connectors, vllm_internals
from vllm_models import write, write_tokenizer
from vllm_scenarios import SCENARIOS, Engine

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}
COUNTERS = {
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "preemptions": "vllm:num_preemptions",
}


def build(job: dict[str, Any], kvtxn: dict[str, Any] | None, folder: Path) -> Any:
    """The engine of a job, with or without kvtxn."""
    from vllm import LLM

    speculation: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4,
                                   "prompt_lookup_max": 3, "prompt_lookup_min": 1}  # fmt: skip
    if job.get("draft"):
        path = write(job["draft"], folder)
        speculation = {"method": "draft_model", "model": path, "num_speculative_tokens": 3}
    options: dict[str, Any] = {
        "enforce_eager": True,
        "block_size": 32,
        "num_gpu_blocks_override": 26,
        "max_model_len": 288,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    model = write(job["model"], folder)
    if job.get("tokenizer"):
        write_tokenizer(model)
    return LLM(
        model=model,
        skip_tokenizer_init=not job.get("tokenizer"),
        dtype="float32",
        seed=0,
        disable_log_stats=False,
        speculative_config=speculation,
        additional_config={} if kvtxn is None else {"kvtxn": kvtxn},
        worker_extension_cls="vllm_faults.Probe",
        **(options | job.get("options", {}) | extras(job, folder)),
    )


def extras(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Options that are made anew for each engine."""
    if job.get("ray"):
        return vllm_ray.start()
    if job.get("connector"):
        path = {"shared_storage_path": tempfile.mkdtemp(dir=folder)}
        return {
            "kv_transfer_config": {
                "kv_connector": job["connector"],
                **({"kv_connector_module_path": job["module"]} if "module" in job else {}),
                "kv_role": "kv_both",
                "kv_connector_extra_config": path,
            }
        }
    return {}


def counters(llm: Any) -> dict[str, float]:
    """vLLM's own numbers."""
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {name: found.get(metric, 0) for name, metric in COUNTERS.items()}


def run(llm: Any, names: list[str]) -> dict[str, Any]:
    """Every scenario; counters are those of the scenario alone.

    ``scenario@fault`` runs it with a fault at random steps. An error ends the engine.
    """
    from kvtxn.integrations.vllm_plugin import snapshots

    results = {"idle": snapshots(llm)} | llm.collective_rpc("describe")[0]
    llm.collective_rpc("oracle_install")
    if llm.llm_engine.vllm_config.kv_transfer_config is not None:
        llm.collective_rpc("store_install")
    for name in names:
        llm.reset_prefix_cache()
        engine, stats, snaps = Engine(llm), counters(llm), snapshots(llm)
        scenario, _, fault = name.partition("@")
        if fault:
            llm.collective_rpc("fault_install", args=(fault,))
        try:
            tokens = SCENARIOS[scenario](engine)
        except Exception as error:
            results[name] = {"error": repr(error)}
            return results
        if fault:
            llm.collective_rpc("fault_remove")
        results[name] = {
            "tokens": tokens,
            "cached": engine.cached,
            "hits": engine.hits,
            "logprobs": engine.logprobs,
            "stats": {key: value - stats[key] for key, value in counters(llm).items()},
            "oracle": llm.collective_rpc("oracle_take"),
            "kvtxn": [
                {key: value - old.get(key, 0) for key, value in new.items()}
                for new, old in zip(snapshots(llm), snaps, strict=True)
            ],
        }
    return results


def close(llm: Any) -> None:
    """Free an in-process engine, so that the next one can be built."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def replace_kernels_once() -> None:
    """Let vLLM do this for the process's first engine only.

    It scans every module for Triton kernels; the second time, in 0.32, it trips over an object
    of torch's. Older releases do not scan.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if not hasattr(platform, "register_triton_kernel_overrides"):
        return
    replace = cache(platform.register_triton_kernel_overrides)
    platform.register_triton_kernel_overrides = classmethod(lambda _: replace())


def carry_out(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One job: a report per engine."""
    before = dict(os.environ)
    os.environ.update(job.get("environment", {}))
    report = {}
    for name, (kvtxn, scenarios) in job["engines"].items():
        print(f"kvtxn tests: engine {name!r} of {job['model']}", flush=True)
        release = vllm_internals.version()
        seen = "0.99.0" if name == "unsupported" else release
        known = vllm_connectors.KNOWN
        if "module" in job and name != "unknown":  # as if it had been checked, which these tests do
            known = (*known, job["connector"])
        with (
            mock.patch.object(vllm_internals, "version", lambda found=seen: found),
            mock.patch.object(vllm_connectors, "KNOWN", known),
        ):
            llm = build(job, kvtxn, folder)
            report[name] = run(llm, scenarios)
        close(llm)
        del llm
    if job.get("ray"):
        vllm_ray.stop()
    os.environ.clear()
    os.environ.update(before)
    return report


def main() -> None:
    """Carry out the jobs."""
    jobs = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(ENVIRONMENT)
    replace_kernels_once()
    folder = Path(sys.argv[1]).parent
    reports = {name: carry_out(job, folder) for name, job in jobs.items()}
    Path(sys.argv[2]).write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
