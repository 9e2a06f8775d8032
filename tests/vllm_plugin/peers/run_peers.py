"""Runs vLLM's own tests around speculation with kvtxn active, and in stock beside it.

    python tests/vllm_plugin/peers/run_peers.py SOURCE [--raw RUNS.json] [FILE ...]
    python tests/vllm_plugin/peers/run_peers.py --merge RUNS.json ...

SOURCE is vLLM's unpacked source distribution, of the release that is installed; its tests want
``tblib``. Without files all in the lists below run, else these alone. Every
file runs under ``undo`` and in stock, and what builds engines under ``deferred``, too. On a CPU
files with engines also run under ``pytest --kvtxn-audit``; those of ``AUDITED`` only so, and in
stock. The results go into peers.json and PEERS.md, or else into RUNS.json, which may come from
another machine and is merged later. What ran before and is not run again keeps what it showed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from folders import python_path  # noqa: E402
from peers_models import fake_hub  # noqa: E402
from peers_page import RECORD, merge  # noqa: E402

#: Tests that build engines: each runs in a process of its own, under every policy.
CPU_ENGINES = ("v1/e2e/test_cpu_spec_decode.py",)
GPU_ENGINES = (
    "v1/spec_decode/test_max_len.py::test_eagle_max_len",
    "v1/e2e/general/test_async_scheduling.py::test_with_ngram_gpu_spec_decoding",
    "v1/spec_decode/test_max_len.py::test_ngram_gpu_max_len",
    "v1/spec_decode/test_max_len.py::test_ngram_max_len",
    "v1/spec_decode/test_max_len.py::test_mtp_speculative_config_max_model_len",
    "v1/e2e/spec_decode/draft_model/test_async.py",
)
#: Tests that build engines on a CPU, around requests, prefix caching, sessions and connectors.
AUDITED = (
    "v1/core/test_reset_prefix_cache_e2e.py",
    "v1/e2e/general/test_async_scheduling.py",
    "v1/e2e/general/test_async_scheduling_accuracy.py",
    "v1/e2e/general/test_context_length.py",
    "v1/e2e/general/test_min_tokens.py",
    "v1/engine/test_llm_engine.py",
    "v1/executor/test_executor.py",
    "v1/kv_connector/unit/test_multi_connector.py",
    "v1/logits_processors/test_custom_offline.py",
    "v1/sample/test_logprobs.py",
    "v1/sample/test_sampling_params_e2e.py",
    "entrypoints/llm/test_chat.py",
    "entrypoints/llm/test_generate.py",
)
#: Read when vLLM is imported, which that test sets it too late for.
VARIABLES = {
    "v1/e2e/spec_decode/draft_model/test_async.py": {"VLLM_GPU_SYNC_CHECK": "error"},
    # Their engines serve several tests, and vLLM's tests clean their own process after each.
    **{name: {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} for name in AUDITED},
}
#: What is about speculation, rejection, or the cache that drafts are written to.
UNITS = (
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
#: Of the model runner, and of graphs.
GPU_UNITS = (
    "v1/worker/test_gpu_model_runner_v2.py",
    "v1/worker/test_gpu_model_runner.py",
    "v1/worker/test_gpu_rejection_sampler_chunking.py",
    "v1/worker/test_gpu_rejection_sampler_i64.py",
    "v1/worker/test_gpu_block_table.py",
    "v1/worker/test_gpu_input_batch_v2.py",
    "v1/worker/test_gpu_warmup_blocks.py",
    "v1/worker/test_gpu_target_dependent_ar_speculator.py",
    "v1/worker/test_pp_utils.py",
    "v1/cudagraph/test_cudagraph_dispatch.py",
    "v1/cudagraph/test_cudagraph_manager.py",
)

STOPPED = "stopped: out of time"

Task = tuple[str, list[str]]  # a policy, and files or tests


def plan(tests: Path, asked: list[str], per_process: int) -> list[Task]:
    """Split the tests into tasks, one process each, the longest first.

    Args:
        tests: the folder that all names are relative to.
        asked: files, folders or tests; none: all in the lists.
        per_process: files without engines that share a process, whose start takes a while.
    """
    on_gpu = torch.cuda.is_available()

    def chosen(names: Sequence[str]) -> list[str]:
        return [n for n in names if not asked or any(n.startswith(wanted) for wanted in asked)]

    engines = chosen(GPU_ENGINES if on_gpu else CPU_ENGINES)
    audited = [] if on_gpu else chosen(AUDITED)
    files = [
        name if "::" in name else file.relative_to(tests).as_posix()
        for name in asked or (*UNITS, *(GPU_UNITS if on_gpu else ()))
        for file in (sorted((tests / name).glob("test_*.py")) or [tests / name])
    ]
    alone = {name.partition("::")[0] for name in (*engines, *audited)}
    units = [name for name in files if name.partition("::")[0] not in alone]
    groups = [units[at : at + per_process] for at in range(0, len(units), per_process)]
    policies = ("undo", "deferred", *(() if on_gpu else ("audit",)), "stock")
    return [
        *((policy, [name]) for name in engines for policy in policies),
        *((policy, [name]) for name in audited for policy in ("audit", "stock")),
        *((policy, group) for group in groups for policy in ("undo", "stock")),
    ]


class Runner:
    """Runs tasks in processes.

    Args:
        folder: vLLM's tests, in ``tests``, and a ``hub``.
        timeout: seconds for one test.
        ends: when everything has to end, a ``time.monotonic``.
        silence: a process that says nothing for so many seconds more has hung.
        start: seconds until its first test; only then the other limits hold.
    """

    def __init__(
        self, folder: Path, timeout: float, ends: float, silence: float = 60, start: float = 600
    ) -> None:
        self.folder, self.timeout, self.ends = folder, timeout, ends
        self.silence, self.start = timeout + silence, start

    def __call__(self, task: Task) -> list[dict[str, Any]]:
        """Run a task; a test that hangs or ends its process has failed."""
        policy, names = task
        said: list[dict[str, Any]] = []
        while time.monotonic() < self.ends:
            done = [line["test"] for line in said if "test" in line]
            found, how = self._process(policy, names, done)
            said += found
            tests = {line["test"] for line in found if "test" in line}
            started = [line["start"] for line in found if "start" in line]
            hung = [test for test in started if test not in tests]
            said += [_end(test, how) for test in hung if how is not None]
            if not hung:
                break
        else:
            how = STOPPED
        seen = {line["test"] for line in said if "test" in line}
        # One that came to no test never will; the others of a file that hung had another process.
        for name in names if how is not None else ():
            if not any(test.startswith(f"tests/{name}") for test in seen):
                said.append(_end(f"tests/{name}", how))
        ends = Counter(line["outcome"] for line in said if "test" in line)
        print(policy, *names, dict(ends), f"at {time.strftime('%X')}", flush=True)
        return said

    def _process(
        self, policy: str, names: list[str], done: list[str]
    ) -> tuple[list[dict[str, Any]], str | None]:
        """One process: what its tests said, and how it ended if not by itself."""
        descriptor, name = tempfile.mkstemp(suffix=".jsonl", dir=self.folder)
        os.close(descriptor)
        report = Path(name)
        options = ["-q", "-p", "no:cacheprovider", f"--timeout={self.timeout:.0f}", "-W", "ignore"]
        options += ["--continue-on-collection-errors", "-p", "peers_report"]
        options += ["--kvtxn-report", str(report), *self.options(policy)]
        skipped = [option for test in done for option in ("--deselect", test)]
        log = report.with_suffix(".log")
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *skipped]
                + [f"tests/{name}" for name in names],
                cwd=self.folder,
                env=self._environment() | VARIABLES.get(names[0], {}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            how = self._wait(process, report)
        found = [json.loads(line) for line in report.read_text().splitlines()]
        if how is None and not any("end" in line for line in found):
            how = f"the process ended with {process.returncode}"
            print(f"{policy} {names}: {how}\n{log.read_text()[-3000:]}", flush=True)
        return found, how

    def options(self, policy: str) -> list[str]:
        """Options of pytest, beside those for the report."""
        how = "--kvtxn-audit=ledger" if policy == "audit" else f"--kvtxn-policy={policy}"
        return ["-p", "peers_plugin", how]

    def _wait(self, process: subprocess.Popen[bytes], report: Path) -> str | None:
        """Until the process ends, or is ended: why."""
        why = None
        while process.poll() is None and why is None:
            time.sleep(0.2)
            said = report.stat()
            limit = self.silence if said.st_size else self.start
            if time.time() - said.st_mtime > limit:
                why = f"said nothing for {limit:.0f} s"
            elif time.monotonic() > self.ends:
                why = STOPPED
        if why is not None:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return why

    def _environment(self) -> dict[str, str]:
        """Variables of the tests' processes."""
        return os.environ | {
            "PYTHONPATH": python_path(HERE),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_CACHE": str(self.folder / "hub"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "ENFORCE_EAGER": "1",  # a switch of test_async_scheduling's own
        }


def _end(test: str, how: str | None) -> dict[str, Any]:
    """The line of a test, or file, that did not come to an end."""
    return {"test": test, "outcome": "not run" if how == STOPPED else "failed", "why": how}


def gather(tasks: list[Task], said: Iterator[list[dict[str, Any]]]) -> dict[str, Any]:
    """By policy: what became of each test; by file the windows, and the rows read under audit."""
    runs: dict[str, Any] = {}
    for (policy, _), lines in zip(tasks, said, strict=True):
        run = runs.setdefault(policy, {"tests": {}, "windows": {}, "rows": {}})
        for line in lines:
            if "test" in line:
                run["tests"][line["test"]] = (line["outcome"], line["why"])
            for count in ("windows", "rows") if "file" in line else ():
                run[count][line["file"]] = run[count].get(line["file"], 0) + line[count]
    return runs


def machine() -> tuple[str, str]:
    """The name of the device, and what runs on it."""
    from vllm import __version__ as release

    if not torch.cuda.is_available():
        return "CPU", f"vLLM {release} (CPU build), torch {torch.__version__}, V1 model runner"
    name = torch.cuda.get_device_name()
    return name, f"vLLM {release}, torch {torch.__version__}, both model runners"


def main() -> None:
    """Run, keep, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", nargs="?", type=Path, help="vLLM's unpacked source distribution")
    parser.add_argument("files", nargs="*", help="relative to its tests; a file, folder or test")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--per-process", type=int, default=8, help="files that share a process")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one test")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all")
    parser.add_argument("--raw", type=Path, help="write here what was seen, and nothing else")
    parser.add_argument("--merge", type=Path, nargs="+", help="results of --raw, to be recorded")
    asked = parser.parse_intermixed_args()
    if asked.merge:
        for path in asked.merge:
            merge(json.loads(path.read_text()))
        return
    if asked.source is None:
        parser.error("SOURCE or --merge")
    ends = time.monotonic() + asked.limit
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Without the package beside them, or else the tests would import that one.
        shutil.copytree(asked.source / "tests", folder / "tests")
        shutil.copy(asked.source / "pyproject.toml", folder)
        fake_hub(folder / "hub")
        tasks = plan(folder / "tests", asked.files, asked.per_process)
        with ThreadPoolExecutor(asked.jobs) as pool:
            runs = gather(tasks, pool.map(Runner(folder, asked.timeout, ends), tasks))
    platform, engine = machine()
    found = {"platform": platform, "engine": engine, "runs": runs}
    if asked.raw:
        asked.raw.write_text(json.dumps(found))
    else:
        merge(found)
        print(f"recorded in {RECORD}")


if __name__ == "__main__":
    main()
