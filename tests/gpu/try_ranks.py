"""What one of two ranks meets, and what is contained beside connectors, in engines on real GPUs.

    python tests/gpu/try_ranks.py --out FOLDER [--only NAME ...]

Two GPUs. Each engine has a process of its own, and its report is a file. Exit code 1: an engine
waited, left a process behind, or ended a request that nobody harmed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
FOLDERS: Final = ("", "vllm_plugin/grid", "vllm_plugin/audit")
sys.path[:0] = [str(HERE), *(str(HERE.parent / part) for part in FOLDERS)]

from ranks_apart import Planting  # noqa: E402

RANKS: Final = {
    "raise": {"audit": "bytes", "audit_every": 1, "on_violation": "raise"},
    "fail": {"audit": "ledger", "policy": "undo", "on_error": "raise"},
}
CONNECTORS: Final = ("offloading", "example", "several")
#: Seconds that an engine may take to stop; one that waits for a rank takes minutes.
SOON: Final = 30


class GpuPlanting(Planting):
    """An extension of vLLM's worker on a GPU."""

    def fail_audit(self, rank: int) -> None:
        """Let the audit's own code raise in each step of one rank."""
        if self.rank == rank:
            parts = self.model_runner.kvtxn_parts._parts
            [ledger] = [part for part in parts if hasattr(part, "reader")]
            ledger.reader.read = _fail

    def fail_commits(self, rank: int) -> None:
        """Let the commits of one rank's windows raise."""
        if self.rank == rank:
            self.model_runner.kvtxn.commit = _fail


def _fail(*args: Any, **kwargs: Any) -> None:
    raise MemoryError("planted")


def child(name: str, folder: Path) -> dict[str, Any]:
    """Run one engine; returns its report."""
    import planted_engines
    import ranks_apart
    from engine_options import connector, options
    from kvtxn.integrations.demo.engine import MODEL
    from vllm import LLM

    more: dict[str, Any] = {
        "attention_config": {"backend": "TRITON_ATTN"},
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 256 << 20,  # other engines on the GPU may end while it is measured
        "num_gpu_blocks_override": 90,
        "max_num_batched_tokens": 2400,
    }
    if name in RANKS:
        ranks = {"tensor_parallel_size": 2, "worker_extension_cls": "try_ranks.GpuPlanting"}
        llm = LLM(**options(str(MODEL), RANKS[name], **more, **ranks))
        return getattr(ranks_apart, f"{name}s")(llm, {}, folder)
    more["kv_transfer_config"] = connector(folder, name)
    contain = {"audit": "ledger", "on_violation": "contain"}
    llm = LLM(**options(str(MODEL), contain, **more))
    return planted_engines.contain_while_clients_leave(llm, {}, folder)


def wrong(name: str, report: dict[str, Any]) -> list[str]:
    """Say what is not as it should be."""
    if name in RANKS:
        found = [] if report["error"] else ["the engine did not stop"]
        found += [f"{report['seconds']:.0f} s"] if report["seconds"] > SOON else []
        found += [f"processes {report['left']} are left"] if report["left"] else []
        if name == "fail" and (report["before"], report["after"]) != ([1, 1], [0, 0]):
            found.append(f"active before {report['before']}, after {report['after']}")
        return found
    return [
        f"{case}: {key} {found[key]}"
        for case, found in report.items()
        for key in ("ended", "wrong")
        if found[key]
    ] + [f"{case}: nothing was found" for case, found in report.items() if not found["violations"]]


def main() -> int:
    """Run the engines, one after the other."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--only", nargs="*", default=[*RANKS, *CONNECTORS])
    made.add_argument("--child")
    given = made.parse_args()
    if given.child:
        folder = given.out / f"{given.child}-files"
        folder.mkdir(parents=True, exist_ok=True)
        report = child(given.child, folder)
        (given.out / f"{given.child}.json").write_text(json.dumps(report))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in given.only:
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(name in RANKS)),
            "PYTHONPATH": os.pathsep.join(
                [*sys.path[: 1 + len(FOLDERS)], os.environ["PYTHONPATH"]]
            ),
        }
        command = [sys.executable, __file__, "--out", str(given.out), "--child", name]
        with (given.out / f"{name}.log").open("w") as log:
            running = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | variables, start_new_session=True
            )
            try:
                code = running.wait(timeout=150)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                code = running.wait()
        path = given.out / f"{name}.json"
        report = json.loads(path.read_text()) if path.exists() else None
        found = [f"rc {code}"] if report is None else wrong(name, report)
        failed |= bool(found)
        print(name, found or "well", json.dumps(report)[:600], flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
