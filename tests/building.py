"""Build the wheel from a copy of the sources, so that no stale build folder leaks into it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("kvtxn", "backends", "benchmarks", "integrations")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


def sources() -> list[Path]:
    """Every source file of the package."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def copy_sources(tree: Path, *more: str) -> None:
    """What a build needs, and ``more`` folders."""
    for name in (*FOLDERS, *more):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tree)


def build_wheel(folder: Path) -> Path:
    """Build into ``folder``; returns the wheel's path."""
    tree = folder / "tree"
    copy_sources(tree)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), "."]
    subprocess.run(command, cwd=tree, check=True, stdin=subprocess.DEVNULL)
    (wheel,) = folder.glob("kvtxn-*.whl")
    return wheel


def build_sdist(folder: Path) -> Path:
    """Build a source distribution into ``folder``; returns its path."""
    tree = folder / "tree"
    copy_sources(tree, "tests")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (sdist,) = folder.glob("kvtxn-*.tar.gz")
    return sdist
