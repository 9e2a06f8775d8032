"""The process of one engine: builds it, puts it through scenarios, and reports."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import ray_cluster
import torch._dynamo
from engine_jobs import FORKING
from kvtxn.integrations.vllm_plugin.policy import supported
from model_files import write, write_tokenizer
from scenarios import NGRAM, SCENARIOS, Engine, Tokens

COUNTERS = {
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "preemptions": "vllm:num_preemptions",
}


def build(job: dict[str, Any], kvtxn: dict[str, Any] | None, folder: Path) -> Any:
    """The engine of a job, with or without kvtxn."""
    from vllm import LLM

    speculation = NGRAM
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
        dtype=job.get("dtype", "float32"),
        seed=0,
        disable_log_stats=False,
        speculative_config=speculation,
        additional_config={} if kvtxn is None else {"kvtxn": kvtxn},
        worker_extension_cls="step_faults.Probe",
        **(options | job.get("options", {}) | extras(job, folder)),
    )


def extras(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Options that are made anew for each engine."""
    if job.get("ray"):
        return ray_cluster.start()
    if job.get("connector"):
        path = {"shared_storage_path": tempfile.mkdtemp(dir=folder)}
        return {
            "kv_transfer_config": {
                "kv_connector": job["connector"],
                "kv_connector_module_path": job["module"],
                "kv_role": "kv_both",
                "kv_connector_extra_config": path,
            }
        }
    return {}


def counters(llm: Any) -> dict[str, float]:
    """vLLM's own numbers."""
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {name: found.get(metric, 0) for name, metric in COUNTERS.items()}


def played(
    llm: Any,
    name: str,
    scenarios: Mapping[str, Callable[[Engine], Tokens]],
    seen: Callable[[], Any],
    scores: int | None = None,
) -> dict[str, Any]:
    """Run one scenario; returns what came of it, or its error, after which the engine is done for.

    ``scenario@fault`` runs it with a fault at random steps. ``seen`` returns the oracle's findings;
    counters are those of the scenario alone.
    """
    from kvtxn.integrations.vllm_plugin import snapshots

    engine, stats, snaps = Engine(llm, scores), counters(llm), snapshots(llm)
    scenario, _, fault = name.partition("@")
    if fault:
        llm.collective_rpc("fault_install", args=(fault,))
    try:
        tokens = scenarios[scenario](engine)
    except Exception as error:
        return {"error": repr(error)}
    if fault:
        llm.collective_rpc("fault_remove")
    return {
        "tokens": tokens,
        "cached": engine.cached,
        "hits": engine.hits,
        "logprobs": engine.logprobs,
        "stats": {key: value - stats[key] for key, value in counters(llm).items()},
        "oracle": seen(),
        "kvtxn": [
            {key: value - old.get(key, 0) for key, value in new.items()}
            for new, old in zip(snapshots(llm), snaps, strict=True)
        ],
    }


def run(llm: Any, names: list[str]) -> dict[str, Any]:
    """Run every scenario, up to the first that ends in an error."""
    from kvtxn.integrations.vllm_plugin import snapshots

    results = {"idle": snapshots(llm)} | llm.collective_rpc("describe")[0]
    llm.collective_rpc("oracle_install")
    if llm.llm_engine.vllm_config.kv_transfer_config is not None:
        llm.collective_rpc("store_install")
    for name in names:
        llm.reset_prefix_cache()
        results[name] = played(llm, name, SCENARIOS, lambda: llm.collective_rpc("oracle_take"))
        if "error" in results[name]:
            break
    return results


def take_amx_mla() -> None:
    """Let vLLM choose its attention as on a CPU with AMX, in this process.

    Nothing else is told so, since other kernels would then use instructions that may be missing.
    """
    import torch
    from vllm.platforms import current_platform

    platform = type(current_platform)

    def with_amx(method: Any) -> Any:
        def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=True):
                return method(cls, *args, **kwargs)

        return classmethod(call)

    for name in ("get_attn_backend_cls", "check_and_update_config"):
        setattr(platform, name, with_amx(getattr(platform, name).__func__))


def fork_workers() -> None:
    """Let vLLM fork the processes of an engine from this one, as it does on a GPU.

    On a CPU it spawns them, and each imports everything again: that takes longer than what most
    tests do with the engine. This process has computed nothing yet, so there are no threads of
    OpenMP's that a fork would lose. While they wait for each other they sleep for moments: vLLM
    lets them spin, and on few cores that is time which the others lack.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.utils import system_utils

    def fork() -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    system_utils._maybe_force_spawn = fork
    shm_broadcast.sched_yield = partial(time.sleep, 0.0005)


def carry_out(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build the engine of a job that is named, and run it; returns its report."""
    if folder.name.rpartition(".")[0] in FORKING:
        fork_workers()
    if "work" in job:
        module, _, function = job["work"].partition(":")
        report: dict[str, Any] = getattr(import_module(module), function)(folder)
        return report
    os.environ.update(job.get("environment", {}))
    torch._dynamo.config.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    kvtxn, scenarios = job["engines"][job["name"]]
    known = dict(supported.CONNECTORS_CHECKED)
    if "module" in job and job["name"] != "unknown":  # as if it had been checked: these tests do
        known["cpu"] = (*known["cpu"], job["connector"])
    if job.get("attention") == "AMX_MLA":
        take_amx_mla()
    with mock.patch.object(supported, "CONNECTORS_CHECKED", known):
        try:
            return run(build(job, kvtxn, folder), scenarios)
        finally:
            if job.get("ray"):
                ray_cluster.stop()
