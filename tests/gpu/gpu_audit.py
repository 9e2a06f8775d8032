"""The audit in real engines on GPUs: ``python tests/gpu/gpu_audit.py --out FOLDER``.

Each engine has a process of its own, and runs scenarios without the audit and with it: the ledger
reads rows, finds nothing, and changes no token. Then faults are planted in some engines, and each
is found: the request, the position and the slot. Engines run side by side on all GPUs; FOLDER gets
a log and a report of each. Exit code 0: all is well; 1: something is not; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
FOLDERS: Final = ("serving", "vllm_plugin/grid", "vllm_plugin/audit", "vllm_plugin/serve")
sys.path[:0] = [str(HERE.parent), *(str(HERE.parent / folder) for folder in FOLDERS)]

import gpu_jobs  # noqa: E402
import gpu_planted  # noqa: E402
import planted_states  # noqa: E402
from connected_jobs import EXAMPLE, OFFLOAD, SIMPLE, WHOLE  # noqa: E402
from engine_pool import EngineFailed, EnginePool  # noqa: E402
from folders import python_path  # noqa: E402
from gpu_jobs import TIMED, V1, drafter  # noqa: E402

LEDGER: Final = {"audit": "ledger"}
BYTES: Final = {"audit": "bytes"}
UNDO: Final = {"policy": "undo", "on_error": "raise"}
DEFERRED: Final = {"policy": "deferred", "on_error": "raise"}

FULL: Final = ["eight", "chunked", "prefix", "preempted", "same_step"]
MORE: Final = [*FULL, "reused", "aborted", "sampled", "n2"]
#: Here tokens are drawn by lot.
DRAWN: Final = ("sampled", "n2")
STEADY: Final = {"async_scheduling": False}
FULL_GRAPHS: Final = {"compilation_config": {"cudagraph_mode": "FULL"}}
DRAFT: Final = {"method": "draft_model", "num_speculative_tokens": 3}
GEMMA: Final = {"prefix_cache_retention_interval": None}
SHARE: Final = 0.1
NO_LIMIT: Final = {"max_model_len": 288, "num_gpu_blocks_override": None}
#: Fewer blocks than the requests of a round fill.
LARGE: Final = {
    "max_model_len": 1024,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 8192,
    "num_gpu_blocks_override": 8000,
    "kv_cache_memory_bytes": 1 << 30,
}
LONG: Final = {
    **{"rows": 10**9, "seconds": 150.0},
    **{"requests": 768, "longest": 900, "outputs": 100},
}


def names(faults: Any) -> list[str]:
    """The names of faults."""
    return [fault.__name__ for fault in faults]


def engine(model: str, attention: str | None, asked: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One engine; see ``gpu_audit_child``."""
    return {"model": model, "attention": attention, "asked": asked, "scenarios": FULL, **more}


FA: Final = "FLASH_ATTN"
COME_BACK: Final = ["come_back", "preempted"]


#: Pages of recurrent layers are large, and vLLM chooses the size of blocks.
RECURRENT: Final = {
    "block_size": None,
    "num_gpu_blocks_override": None,
    "kv_cache_memory_bytes": 512 << 20,
    "enable_prefix_caching": False,
    "mamba_ssm_cache_dtype": "float32",
    "gdn_prefill_backend": "triton",
}


def recurrent(model: str, **more: Any) -> dict[str, Any]:
    """One engine of a small hybrid with random weights."""
    given = {"scenarios": ["eight", "chunked"], "options": RECURRENT, "states": True, **more}
    return engine(model, None, LEDGER, random=True, **given)


def connected(*connectors: Any, **more: Any) -> dict[str, Any]:
    """One engine with connectors."""
    given = {"asked": LEDGER, "scenarios": COME_BACK, **more}
    return engine("llama", FA, connectors=[*connectors], **given)


EAGLE: Final = drafter("eagle", "eagle")
MTP: Final = drafter("mtp")

TRANSFERS: Final = ["loaded_into_another_block", "another_block_stored", "stored_too_early"]

#: By what an engine's log says: the reason why vLLM itself, without the audit, cannot run it here.
LACKING: Final = {
    "'_moe_C' object has no attribute": "this vLLM was built without its kernels for experts",
}

#: By name.
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "llama-ledger": engine("llama", FA, LEDGER, scenarios=MORE, time="eight"),
    "llama-bytes": engine("llama", FA, BYTES, scenarios=MORE, time="eight"),
    "llama-plain": engine("llama", FA, LEDGER, scenarios=MORE, speculation=None, time="eight"),
    "llama-ngram-gpu": engine("llama", FA, BYTES, scenarios=MORE, speculation=gpu_jobs.ON_GPU),
    "llama-full": engine("llama", FA, BYTES, options=FULL_GRAPHS),
    "llama-eager": engine("llama", FA, LEDGER, options={"enforce_eager": True}),
    "llama-undo": engine("llama", FA, BYTES | UNDO, scenarios=MORE),
    "llama-undo-ledger": engine("llama", FA, LEDGER | UNDO),
    "llama-deferred": engine("llama", FA, BYTES | DEFERRED, scenarios=MORE),
    "llama-deferred-full": engine("llama", FA, BYTES | DEFERRED, options=FULL_GRAPHS),
    "llama-triton": engine("llama", "TRITON_ATTN", BYTES),
    "llama-fp8": engine("llama", FA, BYTES | DEFERRED, options=gpu_jobs.FP8),
    "llama-blocks-16": engine("llama", FA, BYTES, options={"block_size": 16}),
    "gemma3": engine("gemma3", FA, BYTES, scenarios=MORE, options=GEMMA),
    "gemma3-deferred": engine("gemma3", FA, BYTES | DEFERRED, options=GEMMA),
    "mla": engine("deepseek", "TRITON_MLA", BYTES, scenarios=MORE),
    "mla-undo": engine("deepseek", "TRITON_MLA", BYTES | UNDO),
    "mla-fp8": engine("deepseek", "TRITON_MLA", BYTES, options=gpu_jobs.FP8),
    "eagle": engine("llama", FA, BYTES, **EAGLE, time="eight"),
    "eagle-ledger": engine("llama", FA, LEDGER, scenarios=MORE, **EAGLE, time="eight"),
    "eagle-deferred": engine("llama", FA, BYTES | DEFERRED, **EAGLE),
    "eagle3": engine("llama", FA, BYTES, **drafter("eagle3", "eagle3")),
    "mtp": engine("deepseek_mtp", "TRITON_MLA", BYTES, **MTP),
    "draft": engine("llama", FA, BYTES, draft="draft", speculation=DRAFT),
    "draft-deferred": engine("llama", FA, BYTES | DEFERRED, draft="draft", speculation=DRAFT),
    "qwen3next": engine(
        *("qwen3next", None, LEDGER),
        scenarios=["eight", "chunked"],
        options={"block_size": None, "num_gpu_blocks_override": None},
        states=True,
    ),
    "mamba2": engine(
        *("mamba2", None, LEDGER),
        scenarios=["eight"],
        speculation=None,
        options={"block_size": None, "num_gpu_blocks_override": None},
        no_rows=True,
        states=True,
    ),
    "qwen35": recurrent("qwen3_5"),
    "qwen35-eager": recurrent("qwen3_5", options=RECURRENT | {"enforce_eager": True}),
    "qwen35-plain": recurrent("qwen3_5", speculation=None),
    "nemotron": recurrent("nemotron_h"),
    "v1-qwen35": recurrent("qwen3_5", environment=V1),
    "v1-nemotron": recurrent("nemotron_h", environment=V1),
    "v1-llama": engine("llama", FA, BYTES, scenarios=MORE, environment=V1, time="eight"),
    "v1-llama-ledger": engine("llama", FA, LEDGER, environment=V1, time="eight"),
    "v1-llama-undo": engine("llama", FA, BYTES | UNDO, environment=V1),
    "v1-llama-deferred": engine("llama", FA, BYTES | DEFERRED, environment=V1),
    "v1-gemma3": engine("gemma3", FA, BYTES, environment=V1, options=GEMMA),
    "v1-mla": engine("deepseek", "TRITON_MLA", BYTES, environment=V1),
    "v1-eagle": engine("llama", FA, BYTES, environment=V1, **EAGLE),
    "v1-draft": engine("llama", FA, BYTES, environment=V1, draft="draft", speculation=DRAFT),
    "v1-mtp": engine("deepseek_mtp", "TRITON_MLA", BYTES, environment=V1, **MTP),
    "v1-qwen3next": engine(
        *("qwen3next", None, LEDGER),
        scenarios=["eight", "chunked"],
        environment=V1,
        options={"block_size": None, "num_gpu_blocks_override": None},
        states=True,
    ),
    "apart": engine(
        *("llama", FA, BYTES), scenarios=MORE, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    ),
    "tp2": engine(
        *("demo", FA, BYTES),
        scenarios=["eight", "prefix"],
        options={"tensor_parallel_size": 2, "disable_custom_all_reduce": True} | NO_LIMIT,
        gpus=2,
    ),
    "pp2": engine(
        *("llama", FA, LEDGER),
        scenarios=["eight", "prefix"],
        speculation=gpu_jobs.ON_GPU,
        options={"pipeline_parallel_size": 2},
        gpus=2,
        unwatched_ranks=[0],
    ),
    "pp2-plain": engine(
        *("llama", FA, BYTES),
        scenarios=["eight", "prefix"],
        speculation=None,
        options={"pipeline_parallel_size": 2},
        gpus=2,
    ),
    # Rows leave through a connector, and come back.
    "offload": connected(OFFLOAD, scenarios=[*COME_BACK, "full_blocks"]),
    "offload-undo": connected(OFFLOAD, asked=LEDGER | UNDO),
    "offload-bytes": connected(OFFLOAD, asked=BYTES, scenarios=["come_back"]),
    "simple": connected(SIMPLE),
    "example": connected(EXAMPLE, scenarios=["come_back"], options=WHOLE),
    "example-deferred": connected(
        EXAMPLE, asked=LEDGER | DEFERRED, scenarios=["come_back"], options=WHOLE
    ),
    "several": connected(SIMPLE, EXAMPLE, scenarios=["come_back"], options=WHOLE),
    "v1-offload": connected(OFFLOAD, scenarios=[*COME_BACK, "full_blocks"], environment=V1),
    "v1-simple": connected(SIMPLE, environment=V1),
    "planted-offload": connected(
        OFFLOAD, scenarios=["come_back"], options=STEADY, faults=TRANSFERS
    ),
    # As much as these engines hold, for minutes; nothing is planted.
    "long": engine("llama", FA, LEDGER, scenarios=["eight"], options=LARGE, long=LONG),
    "long-bytes": engine("llama", FA, BYTES, scenarios=["eight"], options=LARGE, long=LONG),
    "long-v1": engine(
        *("llama", FA, LEDGER), scenarios=["eight"], options=LARGE, long=LONG, environment=V1
    ),
    # vLLM sizes the cache by what is free, beside the ledger.
    "memory": engine(
        *("llama", FA, BYTES),
        scenarios=["eight"],
        options=NO_LIMIT | {"kv_cache_memory_bytes": None, "gpu_memory_utilization": SHARE},
        alone=True,
    ),
    # Faults: nothing is scheduled ahead, so that it is known which step reads what.
    "planted": engine("llama", FA, LEDGER, options=STEADY, faults=names(gpu_planted.V2)),
    "planted-bytes": engine("llama", FA, BYTES, options=STEADY, faults=names(gpu_planted.BYTES)),
    "planted-mla": engine(
        *("deepseek", "TRITON_MLA", BYTES),
        options=STEADY,
        faults=[*names(gpu_planted.BYTES), "lost_write", "anothers_table"],
    ),
    "planted-deferred": engine(
        *("llama", FA, BYTES | DEFERRED),
        options=STEADY,
        faults=[*names(gpu_planted.BYTES), "accepted_one_too_many", "anothers_table"],
    ),
    "planted-eagle": engine(
        *("llama", FA, BYTES),
        **EAGLE,
        options=STEADY,
        faults=[*names(gpu_planted.DRAFTERS), "flipped_bit", "accepted_one_too_many"],
    ),
    "planted-v1": engine(
        *("llama", FA, LEDGER), options=STEADY, environment=V1, faults=names(gpu_planted.V1)
    ),
    "planted-states": recurrent(
        "qwen3_5", options=RECURRENT | STEADY, environment=V1, faults=names(planted_states.FAULTS)
    ),
    "planted-v1-bytes": engine(
        *("llama", FA, BYTES), options=STEADY, environment=V1, faults=names(gpu_planted.BYTES)
    ),
}


# -- judging --------------------------------------------------------------------------------


def wrong(job: dict[str, Any], report: dict[str, Any]) -> Iterator[str]:
    """Say what is not as it should be."""
    left_out = job.get("unwatched_ranks", ())
    for name, cell in report["healthy"].items():
        if "error" in cell:
            yield f"{name}: {cell['error']}"
            continue
        for rank, counts in enumerate(cell["counters"]):
            active = bool(counts.get("kvtxn_audit_active"))
            if rank in left_out:
                if active:
                    yield f"{name}: rank {rank} is watched"
                continue
            if not active:
                yield f"{name}: rank {rank} is not watched"
            if not counts.get("kvtxn_audit_rows_checked_total") and not job.get("no_rows"):
                yield f"{name}: rank {rank} has read no row"
            if job.get("states") and not counts.get("kvtxn_audit_states_checked_total"):
                yield f"{name}: rank {rank} has compared no state"
            if counts.get("kvtxn_audit_unjudged_total"):
                yield f"{name}: rank {rank} could not judge {counts}"
            if counts.get("kvtxn_audit_violations_total"):
                yield f"{name}: rank {rank} found {counts['kvtxn_audit_violations_total']:g}"
        for rank, found in enumerate(cell["violations"]):
            for each in found[:2]:
                yield f"{name}: rank {rank}: {each}"
        if job["asked"].get("audit") == "bytes" and not cell["facts"].get("compared"):
            yield f"{name}: no bytes were compared"
        if job.get("connectors") and name in COME_BACK[:1] and not cell["facts"].get("brought"):
            yield f"{name}: the connector brought no rows"
        timed = cell["facts"]["ahead"] and name in TIMED
        if not cell["exact"] and not timed and name not in DRAWN:
            yield f"{name}: {cell['same']} texts are the same"
    yield from (f"a step waits: {where}" for where in report.get("time", {}).get("waits", ()))
    long = report.get("long", {})
    yield from (
        f"long: {long[name]} {name}" for name in ("violations", "unjudged") if long.get(name)
    )
    yield from unfound(report.get("planted"))
    facts = report["facts"][-1]
    if job.get("alone") and facts["reserved"] > facts["memory"] * SHARE + (300 << 20):
        yield f"memory: {facts['reserved'] >> 20} MiB of {facts['memory'] >> 20} are taken"


def unfound(report: dict[str, Any] | None) -> Iterator[str]:
    """Say which planted faults were not found, or not where they struck."""
    if report is None:
        return
    if report["healthy"]:
        yield f"before faults: {report['healthy'][0]}"
    for name, found in report["found"].items():
        if "error" in found:
            yield f"fault {name}: {found['error']}"
        elif found["struck"] is None:
            yield f"fault {name} has not struck"
        elif not found["violations"]:
            yield f"fault {name} was not found: {found['struck']}"
        else:
            struck, violations = found["struck"], found["violations"]
            place = (struck["request"], struck["position"], struck["slot"])
            places = [(v.get("request"), v.get("position"), v.get("slot")) for v in violations]
            late = violations[0].get("step", 0) > struck["step"] + 1
            if place not in places or late:
                yield f"fault {name}: {struck}, found {violations[:3]}"
    if not isinstance(report["again"], list) or report["again"][1]:
        yield f"after faults: {report['again']}"


def summary(report: dict[str, Any]) -> str:
    """One line about an engine in which all is well."""
    counts = [c for cell in report["healthy"].values() for c in cell.get("counters", ())]
    rows = sum(int(c.get("kvtxn_audit_rows_checked_total", 0)) for c in counts)
    rows += report.get("long", {}).get("rows", 0)
    compared = sum(
        cell.get("facts", {}).get("compared", 0) or 0 for cell in report["healthy"].values()
    )
    found = report.get("planted", {}).get("found", {})
    struck = sum(bool(each.get("violations")) for each in found.values())
    same = {name: cell.get("same") for name, cell in report["healthy"].items()}
    facts = report["facts"][-1]
    return (
        f"{rows} rows read, {compared} bytes compared, {struck} of {len(found)} faults found, "
        f"{report['seconds']} s, graphs {facts['graphs']}, ahead {facts['ahead']}, groups "
        f"{facts['groups']}, published {facts.get('published')}, windows {facts['windows']}, "
        f"ledger {facts.get('bytes', 0) >> 10} KiB, same {same}, time {report.get('time')}, "
        f"long {report.get('long')}, "
        f"brought {[c.get('facts', {}).get('brought', 0) for c in report['healthy'].values()]}"
    )


# -- running --------------------------------------------------------------------------------


def jobs(asked: list[str], gpus: int) -> dict[str, dict[str, Any]]:
    """The engines to run, those on two GPUs first, the others on one GPU each in turn."""
    found: dict[str, dict[str, Any]] = {}
    chosen = {name: job for name, job in ENGINES.items() if not asked or name in asked}
    order = sorted(chosen, key=lambda name: (-chosen[name].get("gpus", 1), name))
    order.sort(key=lambda name: not (chosen[name].get("gpus") or chosen[name].get("faults")))
    number = 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = visible if len(visible) == gpus else [str(index) for index in range(gpus)]
    for name in order:
        job = chosen[name]
        if job.get("gpus", 1) > gpus:
            print(f"{name}: left out, it needs {job['gpus']} GPUs", flush=True)
            continue
        if job.get("gpus", 1) == 1 and gpus > 1:
            place = {"CUDA_VISIBLE_DEVICES": visible[number % gpus]}
            job = job | {"environment": job.get("environment", {}) | place}
            number += 1
        found[name] = job
    return found


def main() -> int:
    """Run engines; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="*", help="names of engines; none: all of them")
    parser.add_argument("--out", type=Path, default=Path("audit-engines"))
    parser.add_argument("--per-gpu", type=int, default=12, help="engines at once on one GPU")
    parser.add_argument("--seconds", type=float, default=400.0, help="what one engine may take")
    given = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count()  # asks the driver's library, and starts no context
    if not gpus:
        print("there is no GPU")
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    begin, bad = time.monotonic(), 0
    todo = jobs(given.engines, gpus)
    audit = HERE.parent / "vllm_plugin" / "audit"
    for alone in (False, True):
        if alone and any(job.get("alone") for job in todo.values()):
            wait_for_memory()
        pool = EnginePool(
            "gpu_audit_child:carry_out",
            {name: job for name, job in todo.items() if bool(job.get("alone")) == alone},
            Path(tempfile.mkdtemp(prefix="audit-engines-")),
            count=1 if alone else given.per_gpu * gpus,
            seconds=given.seconds,
            environment=gpu_jobs.ENVIRONMENT | {"PYTHONPATH": python_path(HERE, audit)},
            preload=["vllm", "vllm.v1.engine.llm_engine"],
        )
        for name in pool.as_they_end():
            bad += judge(pool, name, todo[name], given.out)
        pool.stop()
    print(f"{bad} of {len(todo)} engines are not well; {time.monotonic() - begin:.0f} s")
    return int(bad > 0)


def wait_for_memory(seconds: float = 60.0, same: int = 4) -> None:
    """Wait until processes that ended have released their memory: vLLM refuses to profile before.

    The memory in use has to be the same in so many looks, half a second apart.
    """
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    looks: list[str] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (len(looks) < same or len({*looks[-same:]}) > 1):
        try:
            looks.append(subprocess.run(command, capture_output=True, text=True, timeout=20).stdout)
        except (OSError, subprocess.TimeoutExpired):  # without the tool, some seconds have to do
            looks.append("")
            time.sleep(2.0)
        time.sleep(0.5)


def judge(pool: EnginePool, name: str, job: dict[str, Any], out: Path) -> bool:
    """Print what came of an engine, and write its report and its log; tells if it is not well."""
    try:
        report = pool.report(name)
        found = [*wrong(job, report)]
        (out / f"{name}.json").write_text(json.dumps(report, indent=1))
        print(f"{name}: {'WRONG' if found else 'ok'}: {summary(report)}", flush=True)
    except EngineFailed as failed:
        lacking = next((why for sign, why in LACKING.items() if sign in pool.log(name)), None)
        found = [str(failed)] if lacking is None else []
        print(f"{name}: {'FAILED' if found else f'skipped: {lacking}'}", flush=True)
    except Exception as error:  # the others go on
        found = [f"its report cannot be judged: {error!r}"]
        print(f"{name}: FAILED", flush=True)
    log = pool.log(name)
    (out / f"{name}.log").write_text(log)
    for each in found:
        print(f"    {each[:600]}", flush=True)
    noted = [line for line in log.splitlines() if "kvtxn.audit_" in line]
    for line in dict.fromkeys(line.partition("kvtxn.audit_")[2][:300] for line in noted[:40]):
        if not line.startswith(("active", "violation")):
            print(f"    log: {line}", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
