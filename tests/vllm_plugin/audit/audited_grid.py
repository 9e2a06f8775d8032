"""All engines and scenarios of the grid under audit, those of injected faults included.

python tests/vllm_plugin/audit/audited_grid.py [JOB ...]

Each engine runs without windows and under each policy. Prints the rows that each engine read, and
its violations; fails if there are any but those that ``EXPECTED`` names.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS), *(str(TESTS / "vllm_plugin" / name) for name in ("grid", "audit"))]

from engine_jobs import JOBS, missing, variables  # noqa: E402
from engine_pool import EngineFailed, EnginePool  # noqa: E402
from folders import python_path  # noqa: E402

#: Kinds of violations that stock vLLM has in a job, and nobody planted: ExampleConnector stores a
#: prompt's blocks when the first chunk is scheduled, before the rows of later chunks are computed.
EXPECTED = {"every_row": {"exported", "imported"}}


def audited(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job whose engines are audited: one without windows, and one by policy."""
    _, scenarios = next(iter(job["engines"].values()))
    engines = {"alone": ({"audit": "ledger"}, scenarios)}
    for policy in ("undo", "deferred"):
        if policy in job["engines"]:
            wanted = {"policy": policy, "audit": "ledger"}
            engines[policy] = (wanted, job["engines"][policy][1])
    return job | {"engines": engines}


def main(names: list[str]) -> int:
    """Run these jobs, or all; returns the number of engines with something wrong."""
    jobs = {name: audited(JOBS[name]) for name in names or JOBS if missing(name) is None}
    wrong, rows = 0, 0
    with tempfile.TemporaryDirectory(prefix="kvtxn-grid-") as folder:
        pool = EnginePool(
            "engine_child:carry_out",
            {f"{name}.{engine}": job | {"name": engine}
             for name, job in jobs.items() for engine in job["engines"]},
            Path(folder),
            count=min(2, os.cpu_count() or 1),
            seconds=900,
            environment=variables(folder) | {"PYTHONPATH": python_path(Path(__file__).parent)},
            preload=["engine_preload", "compiled_ledger"],
        )  # fmt: skip
        for name in pool.as_they_end():
            try:
                report = pool.report(name)
            except EngineFailed as failed:
                print(failed, flush=True)
                wrong += 1
                continue
            counts = [each for scenario in report.values()
                      if isinstance(scenario, dict) and "kvtxn" in scenario
                      for each in scenario["kvtxn"]]  # fmt: skip
            read = sum(each["kvtxn_audit_rows_checked_total"] for each in counts)
            prefix = "kvtxn_audit_violations_total_"
            kinds = {key.removeprefix(prefix): sum(each[key] for each in counts)
                     for key in counts[0] if key.startswith(prefix)} if counts else {}  # fmt: skip
            found = {kind: number for kind, number in kinds.items() if number}
            unexpected = set(found) - EXPECTED.get(name.partition(".")[0], set())
            wrong += bool(unexpected) or not read
            rows += read
            print(f"{name:28}{read:12.0f} rows  {found or 'nothing found'}", flush=True)
        pool.stop()
    print(f"{rows:.0f} rows read, {wrong} engines with violations or failures")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
