"""Runs vLLM's own tests around speculation with kvtxn active, and writes PEERS.md.

    python tests/vllm/vllm_peers.py SOURCE [FILE ...]

SOURCE is vLLM's unpacked source distribution, of the release that is installed; without files,
all in the list below run, else these, and the others keep what they showed. Every file runs
under ``undo``; files whose engines had windows run under ``deferred``, too; and those, and files
with a failure, in stock. No number in the table is typed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD, TABLE = HERE / "peers.json", HERE / "PEERS.md"

#: What is about speculation, rejection, or the cache that drafts are written to.
FILES = (
    "v1/e2e/test_cpu_spec_decode.py",
    "v1/sample/test_rejection_sampler.py",
    "v1/spec_decode",
    "v1/core/test_scheduler.py",
    "v1/core/test_async_scheduler.py",
    "v1/core/test_prefix_caching.py",
    "v1/core/test_single_type_kv_cache_manager.py",
    "v1/core/test_swa_inflight_window_free.py",
    "v1/worker/test_grammar_invalid_drafts.py",
    "v1/structured_output/test_scheduler_speculative_padding.py",
    "v1/metrics/test_metrics_reader.py",
)

#: Hub models that the demo's stands in for: small, trained, with a tokenizer.
STAND_INS = ("Qwen/Qwen3-0.6B", "facebook/opt-125m", "distilbert/distilgpt2")
DEMO = HERE.parents[1] / "integrations" / "demo" / "model"

#: Why a test does not pass in stock either: the first pattern that is found in its error.
CAUSES = {
    "the hub": r"offline|[Hh]ugging|hf\.co|local directory|couldn't connect|LocalEntry|Repo id",
    "Triton": r"[Tt]riton|kernel parameters",
    "a GPU": r"CUDA|cuda|GPU|gpu|NVIDIA|[Uu]nsupported platform|flash_attn",
}

HEAD = """# vLLM's own tests with kvtxn active

Drawn by `python tests/vllm/vllm_peers.py SOURCE` from what it saw: {engine}, on a CPU and offline.
Each file of vLLM's source distribution ran with
`additional_config={{"kvtxn": {{"policy": "undo", "on_error": "raise"}}}}` in every engine that a
test builds; where such an engine had windows (their number is in the table) it ran under
`deferred`, too; and those files, and all with a failure, ran in stock. {verdict}

Most of these tests build no engine. For a test that was skipped or failed the columns on the right
say what it asks for. The demo's model stands in for {stand_ins}. The files in
`v1/e2e/spec_decode` are left out: each asks for models of the hub or several GPUs.

"""


def fake_hub(folder: Path) -> None:
    """A cache of the hub in which the demo's model has other names."""
    for name in STAND_INS:
        model = folder / f"models--{name.replace('/', '--')}"
        shutil.copytree(DEMO, model / "snapshots" / "one")
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("one")


def run(source: Path, policy: str, files: Iterable[str]) -> dict[str, Any]:
    """Files under one policy: what became of each test, and the windows by file."""
    report = source / f"{policy}.json"
    environment = os.environ | {
        "PYTHONPATH": str(HERE),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(source / "hub"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    options = ["-q", "-p", "no:cacheprovider", "--timeout", "300", "-W", "ignore"]
    ours = ["-p", "vllm_peers_plugin", "--kvtxn-policy", policy, "--kvtxn-report", str(report)]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *options,
            *ours,
            "--continue-on-collection-errors",
            *files,
        ],
        cwd=source,
        env=environment,
        check=False,
    )
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def cause(outcome: str, reason: str) -> str:
    """What a test that does not pass in stock asks for."""
    for name, pattern in CAUSES.items():
        if re.search(pattern, reason):
            return name
    return "something else"


def by_file(runs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the table says of each file."""
    found: dict[str, dict[str, Any]] = {}
    for test, (outcome, reason) in sorted(runs["undo"]["tests"].items()):
        line = found.setdefault(file_of(test), {"passed": 0, "causes": Counter(), "differs": {}})
        if outcome == "passed":
            line["passed"] += 1
        else:
            line["causes"][cause(outcome, reason)] += 1
        for other in ("deferred", "stock"):
            absent = "not run" if (other, outcome) == ("stock", "failed") else outcome
            there, why = runs[other]["tests"].get(test, (absent, ""))
            if there != outcome:
                line["differs"][test] = (
                    f"{outcome} under undo ({reason}), {there} in {other} ({why})"
                )
    for file, line in found.items():
        line["windows"] = {
            policy: runs[policy]["windows"][file]
            for policy in ("undo", "deferred")
            if runs[policy]["windows"].get(file)
        }
    return found


def file_of(test: str) -> str:
    """The file of a test's id."""
    return test.partition("::")[0]


def draw(record: dict[str, Any]) -> str:
    """The page."""
    files = record["files"]
    differing = {test: how for line in files.values() for test, how in line["differs"].items()}
    passed = sum(line["passed"] for line in files.values())
    verdict = f"Passed: {passed}. " + (
        "What does not pass does not pass in stock either."
        if not differing
        else f"{len(differing)} end otherwise elsewhere; they are listed below."
    )
    others = [*CAUSES, "something else"]
    lines = [
        f"| file | passed | windows | {' | '.join(others)} |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for file, line in files.items():
        windows = ", ".join(f"{count} `{policy}`" for policy, count in line["windows"].items())
        counts = " | ".join(str(line["causes"].get(name, "")) for name in others)
        lines.append(f"| {file.removeprefix('tests/')} | {line['passed']} | {windows} | {counts} |")
    notes = [f"- `{test}`: {how}" for test, how in differing.items()]
    names = ", ".join(f"`{name}`" for name in STAND_INS)
    head = HEAD.format(engine=record["engine"], verdict=verdict, stand_ins=names)
    listed = [name for name in FILES if not any(name in file for file in files)]
    notes += [f"- `{name}` was not run." for name in listed]
    return "\n".join([head + "\n".join(lines), *([""] if notes else []), *notes, ""])


def main() -> None:
    """Run, keep, draw."""
    files = [f"tests/{name}" for name in sys.argv[2:] or FILES]
    with tempfile.TemporaryDirectory() as folder:
        # Without the package beside them, or else the tests would import that one.
        shutil.copytree(Path(sys.argv[1]) / "tests", Path(folder) / "tests")
        fake_hub(Path(folder) / "hub")
        runs = {"undo": run(Path(folder), "undo", files)}
        engines = {file for file, count in runs["undo"]["windows"].items() if count}
        failed = {
            file_of(test)
            for test, (outcome, _) in runs["undo"]["tests"].items()
            if outcome == "failed"
        }
        runs["deferred"] = run(Path(folder), "deferred", sorted(engines))
        runs["stock"] = run(Path(folder), "stock", sorted(engines | failed))
    known = json.loads(RECORD.read_text())["files"] if RECORD.exists() else {}
    record = {
        "engine": f"vllm-cpu {version('vllm-cpu')}, V1 model runner",
        "files": dict(sorted((known | by_file(runs)).items())),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    TABLE.write_text(draw(record))


if __name__ == "__main__":
    main()
