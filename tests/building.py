"""Build the wheel from a copy of the sources, so that no stale build folder leaks into it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("kvtxn", "backends", "benchmarks", "integrations")
FILES = ("pyproject.toml", "README.md", "LICENSE")


def sources() -> list[Path]:
    """Every source file of the package."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def build_wheel(folder: Path) -> Path:
    """Build into ``folder``; returns the wheel's path."""
    tree = folder / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), "."]
    subprocess.run(command, cwd=tree, check=True, stdin=subprocess.DEVNULL)
    (wheel,) = folder.glob("kvtxn-*.whl")
    return wheel
