"""Bytes written by commit and undo, by the hardware's own counters: runs itself under ``ncu``."""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from typing import Any, Final

import torch

from ...cli import natural
from ..common import machine
from ..common.model_shapes import Case

#: Counter of ncu -> the name in the results.
_METRICS: Final = {
    "lts__t_sectors_op_write.sum": "l2_write_sectors",
    "dram__bytes_write.sum": "dram_bytes_written",
}

_ACCEPTED: Final = (0.0, 0.1, 0.3, 0.7, 1.0)

#: The launches of one window, in the order in which ``child`` makes them.
_LAUNCHES: Final = ("deferred commit", "undo save", "undo restore")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the suite's arguments."""
    parser.add_argument("--requests", type=natural, default=64)
    machine.add_save(parser)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Count every launch and print a table."""
    if not torch.cuda.is_available():
        print("the counters need a CUDA device")
        return 2
    if args.child:
        return child(args.requests)
    if shutil.which("ncu") is None:
        print("the counters need ncu on the PATH; it comes with the CUDA toolkit")
        return 2
    own = "from kvtxn.cli import main; raise SystemExit(main())"
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "-k", "regex:move_rows"]
    command += ["--metrics", ",".join(_METRICS), sys.executable, "-c", own]
    command += ["bench", "counters", "--child", "--requests", str(args.requests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout[-2000:] + done.stderr[-2000:])
        return 2
    rows = _rows(_counted(done.stdout), args.requests)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if args.save:
        print(machine.write(args.save, {"suite": "counters", "rows": rows}))
    return 0


def child(requests: int) -> int:
    """Launch one window per share of acceptance: a commit, then a save and a restore."""
    from .workload import Workload

    for accepted in _ACCEPTED:
        load = Workload(Case("llama3-8b", requests, 4, accepted), windows=1)
        window = load.windows[0]
        load.executor.commit(load.txn(window), window.accepted)
        txn = load.txn(window, "undo")
        txn.saved.update(load.executor.save(txn, "default"))
        load.executor.commit(txn, window.accepted)
        torch.cuda.synchronize()
    return 0


def _counted(output: str) -> list[dict[str, str]]:
    """Read ncu's table, one line per launch, behind the program's own output."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    found = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    return [line for line in found if line["ID"]]  # the line after the header has the units


def _rows(counted: list[dict[str, str]], requests: int) -> list[dict[str, Any]]:
    """Put the bytes that moved beside the sectors that ncu counted."""
    if len(counted) != len(_ACCEPTED) * len(_LAUNCHES):
        raise SystemExit(f"ncu saw {len(counted)} launches of {len(_ACCEPTED) * len(_LAUNCHES)}")
    case = Case("llama3-8b", requests, 4, 1.0)
    drafts, model = requests * case.drafts, case.shape
    row_bytes = model.layers * model.kv_heads * model.head_size * 2 * 2
    rows = []
    for number, line in enumerate(counted):
        accepted, launch = _ACCEPTED[number // 3], _LAUNCHES[number % 3]
        kept = round(accepted * drafts)
        moved = {"deferred commit": kept, "undo save": drafts, "undo restore": drafts - kept}[
            launch
        ]
        row = {"accepted": accepted, "launch": launch, "rows": moved, "bytes": moved * row_bytes}
        row |= {name: float(line[metric].replace(",", "")) for metric, name in _METRICS.items()}
        rows.append(row)
    return rows
