"""Audits every kind of engine that starts on this machine, with every workload.

    python tests/audit_command/every_engine/run_every_engine.py [--only TEXT ...] [--jobs N]
    python tests/audit_command/every_engine/run_every_engine.py --merge FOUND.json ...

Each kind of ``engine_kinds`` is one run of ``kvtxn audit`` over unmodified vLLM, without windows.
What was read and what was wrong goes into every_engine.json and EVERY_ENGINE.md, or with ``--raw``
into a file that comes from another machine and is merged later. A kind that is run again replaces
what it showed with the same release on the same kind of device.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "vllm_plugin" / "grid")]

import torch  # noqa: E402
from engine_kinds import CPU, GPU, ON_CPU, ON_GPU, Kind  # noqa: E402
from every_engine_page import RECORD, merge  # noqa: E402
from folders import python_path  # noqa: E402

#: Folders whose modules an engine's process may want.
FOLDERS = [TESTS / folder for folder in ("gpu", "vllm_plugin/audit", "vllm_plugin/states")]
#: The command, wherever its script is installed.
COMMAND = "from kvtxn.cli import main; raise SystemExit(main())"
#: Takes the first configuration of each autotuned kernel, in the engine's process, too.
CUSTOMIZE = "from first_configs import take_first_configs\n\ntake_first_configs()\n"


def write_models(kinds: Mapping[str, Kind], folder: Path) -> dict[str, str]:
    """Write the models of these kinds, here and not in several processes; paths by name."""
    names = {name for kind in kinds.values() for name in (kind.model, kind.draft) if name}
    return {name: write_model(name, folder) for name in sorted(names)}


def write_model(name: str, folder: Path) -> str:
    """Write a model, with random weights or as a configuration alone; returns the path."""
    sys.path[:0] = [str(each) for each in FOLDERS if str(each) not in sys.path]
    if name == "llama4":
        return write_chunked(folder)
    if torch.cuda.is_available():
        import gpu_models

        return gpu_models.write(name, folder)
    if name in ("nemotron_h", "falcon_h1"):
        import mixer_models

        return mixer_models.write(name, folder)
    if name in ("qwen3_next", "lfm2"):
        import recurrent_models

        return recurrent_models.write(name, folder)
    import model_files

    return model_files.write(name, folder)


def write_chunked(folder: Path) -> str:
    """Write a configuration of Llama 4: no experts, layers that attend within chunks."""
    import transformers as hf
    from model_files import COMMON

    config = hf.Llama4TextConfig(
        **COMMON | {"head_dim": 64},
        intermediate_size_mlp=96,
        num_hidden_layers=4,
        attention_chunk_size=64,
        moe_layers=[],
        num_local_experts=1,
    )
    config.architectures = ["Llama4ForCausalLM"]
    config.save_pretrained(folder / "llama4")
    return str(folder / "llama4")


def audit(
    name: str, kind: Kind, models: Mapping[str, str], requests: int, limit: float
) -> dict[str, Any]:
    """Audit one kind of engine in a process of its own, and keep what is said of it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "sitecustomize.py").write_text(CUSTOMIZE)
        command = [sys.executable, "-c", COMMAND, "audit", "--json", "--workload", kind.workloads]
        command += ["--requests", str(requests), "--engine-args", arguments(kind, models, folder)]
        begin = time.monotonic()
        try:
            ended = subprocess.run(
                command,
                env=environment(kind, folder),
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
            found = summary(ended.stdout, ended.stderr)
        except subprocess.TimeoutExpired:
            found = {"verdict": "did not end", "why": f"not within {limit:.0f} s"}
    found["wall"] = round(time.monotonic() - begin, 1)
    print(f"{name}: {found['verdict']} {found.get('kinds') or found.get('why') or ''}", flush=True)
    return found


def arguments(kind: Kind, models: Mapping[str, str], folder: Path) -> str:
    """Return the arguments of an engine as JSON."""
    base = GPU if torch.cuda.is_available() else CPU
    given = {**base, **kind.engine, "model": models[kind.model]}
    if kind.draft is not None:
        given["speculative_config"] = {**given["speculative_config"], "model": models[kind.draft]}
    given = {option: value for option, value in given.items() if value is not None}
    return json.dumps(given).replace("FOLDER", str(folder))


def environment(kind: Kind, folder: Path) -> dict[str, str]:
    """Return the variables of an audit's processes."""
    path = [folder, *FOLDERS] if torch.cuda.is_available() else FOLDERS
    return os.environ | {
        "PYTHONPATH": python_path(*path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **kind.environment,
    }


def summary(out: str, err: str) -> dict[str, Any]:
    """Return what is kept of an audit."""
    try:
        said = json.loads(out)
    except json.JSONDecodeError:
        why = " ".join(err.split()) or "the command said nothing"
        return {"verdict": "not audited", "why": re.sub(r"\(pid=\d+\)|/tmp/\S+", "", why)[-600:]}
    counts = [counters for counters in said["counters"] if counters]
    return {
        "verdict": said["verdict"],
        "kinds": said["kinds"],
        "sentences": said["sentences"][:6],
        "failed": len(said["failed"]),
        "why": said["failed"][0] if said["failed"] else "",
        "requests": said["requests"],
        **{
            word: int(sum(each.get(f"kvtxn_audit_{word}_total", 0) for each in counts))
            for word in ("steps", "rows_checked", "states_checked")
        },
    }


def release() -> str:
    """Return the release of vLLM that is installed."""
    for package in ("vllm-cpu", "vllm"):
        try:
            return version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    raise SystemExit("vLLM is not installed")


def main() -> None:
    """Run, keep, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], help="kinds with one of these in a name")
    parser.add_argument("--but", nargs="+", default=[], help="no kinds with one of these in a name")
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time")
    parser.add_argument("--requests", type=int, default=160, help="requests of each engine")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one engine")
    parser.add_argument("--within", type=float, default=1e9, help="begin no engine after this time")
    parser.add_argument("--commit", default="unknown", help="of the tree that runs, for the record")
    parser.add_argument("--raw", type=Path, help="write here what was seen, and nothing else")
    parser.add_argument("--merge", type=Path, nargs="+", help="results of --raw, to be recorded")
    asked = parser.parse_intermixed_args()
    if asked.merge:
        for path in asked.merge:
            merge(json.loads(path.read_text()))
        return
    on_gpu = torch.cuda.is_available()
    kinds = {
        name: kind
        for name, kind in (ON_GPU if on_gpu else ON_CPU).items()
        if any(text in name for text in asked.only) and not any(text in name for text in asked.but)
    }
    ends, found = time.monotonic() + asked.within, {}
    device = torch.cuda.get_device_name() if on_gpu else "CPU"

    def keep() -> dict[str, Any]:
        said = {"device": device, "release": release(), "commit": asked.commit}
        return said | {"kinds": dict(found)}

    def one(name: str) -> None:
        if time.monotonic() < ends:
            found[name] = audit(name, kinds[name], models, asked.requests, asked.limit)
            if asked.raw:
                asked.raw.write_text(json.dumps(keep(), indent=1))

    with tempfile.TemporaryDirectory() as folder:
        models = write_models(kinds, Path(folder))
        with ThreadPoolExecutor(asked.jobs) as pool:
            list(pool.map(one, kinds))
    if not asked.raw:
        merge(keep())
        print(f"recorded in {RECORD}")


if __name__ == "__main__":
    main()
