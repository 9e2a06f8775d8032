"""Wheels and source distributions of this tree, and environments that hold chosen packages only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PathDistribution, distribution
from pathlib import Path
from zipfile import Path as ZipPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kvtxn", "backends", "benchmarks", "integrations")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "mkdocs.yml")
#: Nothing is fetched: the build tool is the one that is installed here.
OFFLINE = ("--quiet", "--no-index", "--no-build-isolation")


def sources() -> list[Path]:
    """List every source file of the package."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def copy_sources(tree: Path, *more: str) -> None:
    """Copy the folders and files that a build needs, and ``more`` folders.

    A build in the repository itself would leave a build folder there, and take stale files from it.
    """
    for name in (*FOLDERS, *more):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    for name in ("backends/audit_numba", *more):  # as processes leave it there
        (tree / name / "__pycache__").mkdir()
        (tree / name / "__pycache__" / "code.nbc").write_text("machine code")


def build_wheel(folder: Path) -> Path:
    """Build a wheel into ``folder``; returns its path."""
    tree = folder / "tree"
    copy_sources(tree)
    command = [sys.executable, "-m", "pip", "wheel", *OFFLINE, "--no-deps", "-w", str(folder), "."]
    subprocess.run(command, cwd=tree, check=True, stdin=subprocess.DEVNULL)
    (wheel,) = folder.glob("kvtxn-*.whl")
    return wheel


def build_sdist(folder: Path) -> Path:
    """Build a source distribution into ``folder``; returns its path."""
    tree = folder / "tree"
    copy_sources(tree, "tests", "docs")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (sdist,) = folder.glob("kvtxn-*.tar.gz")
    return sdist


def needed(wheel: Path, extra: str) -> set[str]:
    """Names of all distributions that the wheel requires with this extra, directly or not.

    Raises:
        PackageNotFoundError: one of them is not installed here.
    """
    own = next(path for path in ZipPath(wheel).iterdir() if path.name.endswith(".dist-info"))
    found, waiting = set[tuple[str, str]](), [Requirement(f"kvtxn[{extra}]" if extra else "kvtxn")]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for wanted in {"", *requirement.extras} - {e for n, e in found if n == name}:
            found.add((name, wanted))
            holder = PathDistribution(own) if name == "kvtxn" else distribution(name)
            needs = map(Requirement, holder.requires or ())
            waiting += [r for r in needs if not r.marker or r.marker.evaluate({"extra": wanted})]
    return {name for name, _ in found} - {"kvtxn"}


def environment(folder: Path, names: Iterable[str]) -> Path:
    """Make an environment with links to installed distributions; returns its interpreter.

    Args:
        folder: is made, for the environment.
        names: of distributions. Their dependencies are not added.
    """
    packages = folder / "packages"
    packages.mkdir(parents=True)
    for name in names:
        found = distribution(name)
        tops = {Path(file).parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (packages / top).exists():  # two distributions may share a namespace's folder
                (packages / top).symlink_to(found.locate_file(top))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    return folder / "venv" / "bin" / "python"


def install(python: Path, *what: str) -> None:
    """Let pip install from files on this machine; fails if a dependency is not there already."""
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    command = [*pip, "install", *OFFLINE, *what]
    bare = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=bare)
    assert done.returncode == 0, done.stderr
