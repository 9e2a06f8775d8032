"""The gate of the GPU benchmarks: a named part of the conformance kit, on this very machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

#: What has to hold before a number may be written: bytes, shapes, refusals, own writes, counts.
TESTS: Final = (
    "test_every_shape",
    "test_masks_that_are_no_prefix",
    "test_device_counts_out_of_range",
    "test_device_slots_out_of_range",
    "test_each_replay_commits_its_own_rows",
    "test_sampled_ids_say_the_same_as_counts",
    "test_no_host_sync",
    "test_commit_in_a_graph",
    "test_per_window",
)

_FILE: Final = """
import pytest
from kvtxn.testing import {conformance}

class TestGate({conformance}):
    @pytest.fixture
    def backend(self):
        return "triton"

    @pytest.fixture
    def device(self):
        return "cuda"
"""


def passed(conformance: str = "ExecutorConformance", tests: Sequence[str] = TESTS) -> str:
    """Run the gate for Triton; return a line on the tests that passed, for the result file.

    Args:
        conformance: the name of a kit in ``kvtxn.testing``.
        tests: names of the kit's tests.

    Raises:
        SystemExit: a test failed, could not run, or is not there; nothing may be measured then.
    """
    from ... import testing  # needs packages that a benchmark without a result does not

    if unknown := [name for name in tests if not hasattr(getattr(testing, conformance), name)]:
        raise SystemExit(f"{conformance} has no test {', '.join(unknown)}; no result is written")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_gate.py"
        path.write_text(_FILE.format(conformance=conformance))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, "-k", " or ".join(tests), str(path)],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    if done.returncode != 0:
        raise SystemExit(f"the conformance kit is red for 'triton'; no result is written: {last}")
    return f"triton: {', '.join(tests)}: {last.strip('= ')}"
