"""compute-sanitizer over the kernels, on the kit's own cases: ``python tests/gpu/sanitize.py``.

Each job is one part of the kit, on one executor, under one tool, in a process of its own; jobs run
side by side, on all GPUs in turn. They run without the tool first: that compiles the kernels, and
shows which cases pass. Only this project's kernels are checked (torch's own are many and slow to
check), except by initcheck, which has to see who wrote what. A job is clean if its tests passed and
the tool said so itself: "ERROR SUMMARY: 0 errors", or racecheck's "0 hazards". A job that is over
its time leaves out the cases that are left, and still gets its summary.

Allocations of the Triton executor come straight from CUDA, so that memcheck knows where each
tensor ends; a graph's memory has to come from torch's pools.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, product
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from kvtxn.benchmarks.common.machine import describe

#: Every kernel family, and the tests of the kit that run it, as pytest's ``-k`` takes them.
FAMILIES: Final = {
    "commit": "test_every_shape or test_forms_of_acceptance or test_masks_that_are_no_prefix",
    "layouts": "test_every_layout_and_format and (bf16 or fp8) or test_sizes_from_one_to_odd",
    "padding": "test_padding_anywhere or test_padding_beside or test_nothing_but_padding",
    "range": "test_device_slots_out_of_range or test_device_counts_out_of_range",
    "undo": "test_abort_at_any_point or test_rows_written_by_the_caller",
    "settled": "test_each_call_writes or test_ways_to_stage or test_a_latent",
    "attention": "test_lengths_and_settings and (plain or all)",
    "formats": "test_layouts_and_formats and deferred or test_half_precision_queries",
    "trees": "test_forests or test_places_without_slots or test_chains_take_counts",
    "tree-attention": "test_tree_mask or test_a_wide_tree or test_tree_attention_over_a_ring",
    "rings": "test_wrap_around or test_a_layer_is_missing or test_no_host_sync",
    "evicting": "test_attention_to_a_ring or test_a_tree_is_aborted",
    "captured": "test_each_replay_commits or test_fewer_rows or test_ids_beyond",
    "steps": "test_steps_are_exact or test_steps_of_changing_shape or test_an_abort_takes_every",
    "ids": "test_sampled_ids_say_the_same or test_refusals_are_counted or test_per_window",
    "graphs": "test_commit_in_a_graph or test_a_tree_commit_in_a_graph",
    "static-window": "test_commit_keeps_exactly or test_a_long_state",
    "slot-tables": "test_rows_are_read_and_written or test_a_table_is_no_larger",
    "slices": "test_slices_of_the_cache or test_a_request_with_many_drafts",
    # Whole lives with mutants take a tool minutes each, so these have one life and single calls.
    "ledger": "any_stride or test_malformed or test_every_call or columns or _life and states",
    "bytes": "any_stride or test_checksums_of_any_layout or test_windows or _life and plain",
    # Verifies have many cases, of which few are taken: what follows them has a family of its own.
    "gated-delta": "test_verify_is_as_specified and delta",
    "gated-delta-steps": "test_a_commit_advances or are_the_references or are_the_re and delta",
    "mamba2": "test_verify_is_as_specified and mamba2",
    "mamba2-steps": "are_the_recurrence and mamba2 or test_steps_follow_each_other",
    "named-commits": "test_lines_are_the_references or test_all_requests",
}

#: Families without a class of the kit: tests of files of their own, on the Triton executor.
_OWN_FILES: Final = {
    "static-window": ("backends/test_static_window.py", "backends/test_plane_table.py"),
    "slot-tables": ("backends/test_slot_tables.py",),
    "slices": ("backends/test_attention_launch.py",),
    "ledger": ("backends/test_audit_passes.py", "backends/test_audit_strides.py"),
    "bytes": ("backends/test_audit_bytes.py",),
    "gated-delta": ("recurrent/test_verify_kernels.py",),
    "gated-delta-steps": (
        "recurrent/test_verify_kernels.py",
        "recurrent/test_recurring_advance.py",
    ),
    "mamba2": ("recurrent/test_verify_kernels.py",),
    "mamba2-steps": ("recurrent/test_verify_kernels.py",),
    "named-commits": ("recurrent/test_commit_table.py",),
}

TOOLS: Final = ("memcheck", "racecheck", "initcheck", "synccheck")

#: What a tool's own summary says; the number of complaints comes first.
_VERDICT: Final = re.compile(
    r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", re.IGNORECASE
)

#: This project's kernels, by name.
_KERNELS: Final = "regex=move_rows|paged_|combine|_attention|fill_tables|" + "|".join(
    (
        *("write_rows", "resolve_rows", "compare_", "list_", "do_work", "find_nan"),
        *("verify_rows", "advance_rows", "names_of"),
    )
)

_KIT: Final = """
import pytest
from kvtxn.testing import ExecutorConformance

class TestSanitized(ExecutorConformance):
    @pytest.fixture
    def backend(self):
        return {backend!r}

    @pytest.fixture
    def device(self):
        return "cuda"
"""


class Deadline:
    """A pytest plug-in that leaves out the cases that are left once its time is over."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Called before each case."""
        if time.monotonic() > self._end:
            pytest.skip("time is over")


def child(backend: str, family: str, seconds: float, most: int) -> int:
    """Run one family's cases in this process, evenly thinned to ``most``."""
    tests = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        if family in _OWN_FILES:
            paths = [str(tests / name) for name in _OWN_FILES[family]]
        else:
            path = Path(folder) / "test_sanitized.py"
            path.write_text(_KIT.format(backend=backend))
            paths = [str(path)]
        quiet = ["-q", "-p", "no:cacheprovider", "--rootdir", folder]
        return int(
            pytest.main(
                [*quiet, "-k", FAMILIES[family], *paths], plugins=[Deadline(seconds), Thin(most)]
            )
        )


class Thin:
    """A pytest plug-in that keeps ``most`` cases, spread evenly over those selected."""

    def __init__(self, most: int) -> None:
        self._most = most

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Called once ``-k`` has chosen."""
        if len(items) > self._most:
            items[:] = [items[i * len(items) // self._most] for i in range(self._most)]


def gpus() -> list[str]:
    """The GPUs that jobs may take, as ``CUDA_VISIBLE_DEVICES`` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]


def job(
    tool: str | None, backend: str, family: str, gpu: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Run a process on a GPU, with or without a tool; return its verdict."""
    seconds = args.seconds
    own = [sys.executable, __file__, "--child", backend, family]
    own += ["--seconds", str(seconds), "--cases", str(args.cases)]
    command = own
    if tool is not None:
        only = [] if tool == "initcheck" else ["--kernel-name", _KERNELS]
        command = [args.sanitizer, "--tool", tool, *only, "--error-exitcode", "99", *own]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    if backend == "triton" and family not in ("graphs", "captured", "steps"):
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=seconds + 120,
        )
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = str(late.stdout or ""), 124
    passed = re.search(r"(\d+) passed", output)
    found = _VERDICT.search(output)
    result = {
        "tool": tool,
        "executor": backend,
        "family": family,
        "passed": int(passed[1]) if passed else 0,
        "complaints": int(found[1] or found[2]) if found else None,
        "seconds": round(time.monotonic() - start, 1),
    }
    result["clean"] = (
        code == 0 and result["passed"] > 0 and (tool is None or result["complaints"] == 0)
    )
    if not result["clean"]:
        result["output"] = output[-4000:]
    print(json.dumps({k: v for k, v in result.items() if k != "output"}), flush=True)
    return result


def main() -> int:
    """Run every job; exit code 0 means that each is clean."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument("--executors", nargs="+", default=["triton", "cudagraph"])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--cases", type=int, default=12, help="most cases per job")
    parser.add_argument("--seconds", type=float, default=240, help="after which a job stops")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sanitizer", default=shutil.which("compute-sanitizer"))
    parser.add_argument("--output", type=Path, help="where to write the verdicts, as JSON")
    parser.add_argument("--child", nargs=2, metavar=("EXECUTOR", "FAMILY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(*args.child, args.seconds, args.cases)
    if args.sanitizer is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    pairs = [
        (backend, family)
        for backend, family in product(args.executors, args.families)
        if backend == "triton" or family not in _OWN_FILES
    ]
    turn = cycle(gpus() or [""])
    with ThreadPoolExecutor(args.jobs) as pool:
        waits = [pool.submit(job, None, *pair, next(turn), args) for pair in pairs]
        plain = [each.result() for each in waits]
        tasks = product(args.tools, pairs)
        waits = [pool.submit(job, tool, *pair, next(turn), args) for tool, pair in tasks]
        checked = [each.result() for each in waits]
    results = plain + checked
    if args.output:
        rows = [{k: v for k, v in result.items() if k != "output"} for result in checked]
        tools = shlex.join(["python", "tests/gpu/sanitize.py", "--tools", *args.tools])
        written = {"machine": describe() | {"command": tools}, "suite": "sanitizer", "rows": rows}
        args.output.write_text(json.dumps(written, indent=1) + "\n")
    for tool in args.tools:
        mine = [result for result in checked if result["tool"] == tool]
        clean, cases = sum(r["clean"] for r in mine), sum(r["passed"] for r in mine)
        print(f"{tool}: {clean} of {len(mine)} jobs clean, {cases} cases")
    return 0 if all(result["clean"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
