"""Record a release of vLLM: its hook points, and that the core of the grid passed with it.

    python -m kvtxn.integrations.vllm_plugin.policy.record_release --checked cpu

runs in the environment that has the release, and from the root of the repository; CONTRIBUTING.md
says what comes before and after. ``--source FOLDER`` reads an unpacked wheel instead, imports
nothing of it, and so checks nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..internals import workers
from ..internals.hook_points import HOOK_POINTS
from . import releases
from .releases import CHECKS, Release
from .sources import Sources

#: The core of the grid, as ``make core`` runs it.
CORE: Final = (
    *(sys.executable, "-m", "pytest", "tests/vllm_plugin"),
    *("-k", "test_equals_stock and llama- and (one or eight)"),
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program's arguments."""
    made = argparse.ArgumentParser(prog="record_release", description=__doc__)
    made.add_argument("--source", type=Path, help="a folder with the package vllm, not installed")
    made.add_argument(
        "--checked",
        nargs="*",
        choices=CHECKS,
        default=[],
        help="what to list as checked; with cpu, the core of the grid has to pass first",
    )
    made.add_argument(
        "--without",
        nargs="*",
        type=_left_out,
        default=[],
        metavar="NAME=WHY",
        help="with --checked gpu: methods of speculation whose engines were not run; with "
        "--checked gpu-backends: attention backends of which something was not measured; and why, "
        "in place of those that were named before",
    )
    made.add_argument("--list", type=Path, default=releases.FILE, help="the list to write")
    return made


def _left_out(text: str) -> tuple[str, str]:
    """Divide ``NAME=WHY``."""
    name, _, why = text.partition("=")
    if not name or not why:
        raise argparse.ArgumentTypeError(f"expected NAME=WHY, such as mtp='it died', got {text!r}")
    return name, why


def _check(name: str) -> str:
    """Return the check that something is left out of; backends are named in capitals."""
    return "gpu-backends" if name.isupper() else "gpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """Record a release; returns the exit code, that of the grid if the grid fails."""
    given = parser().parse_args(arguments)
    if given.source is not None and given.checked:
        parser().error("--source reads files alone, so nothing can be listed as checked")
    for name, _ in given.without:
        if _check(name) not in given.checked:
            parser().error(f"--without {name} goes with --checked {_check(name)}")
    sources = Sources(given.source or workers.source_folder())
    if not sources.version:
        parser().error(f"{sources.root} has no vllm/_version.py that says its version")
    known = {release.version: release for release in releases.load(given.list)}
    names = [name for place in HOOK_POINTS.values() for name in place]
    hooks = releases.read_hooks(sources, names)
    old = known.get(sources.version, Release(sources.version, (), {}))
    kept = {name: why for name, why in old.left_out.items() if _check(name) not in given.checked}
    checked = tuple(sorted({*old.checked, *given.checked}))
    new = Release(sources.version, checked, hooks, kept | dict(given.without))
    print(f"vLLM {new.version}: {len(hooks)} of {len(names)} hook points found")
    others = [each for each in known.values() if each.version != new.version]
    if releases.checked_for("cpu", others):
        before = releases.nearest(new.version, "cpu", others)
        moved = releases.moves(before.hooks, hooks, names)
        print(f"since {before.version}, {len(moved)} moved", *moved, sep="\n  ")
    releases.save((known | {new.version: new}).values(), given.list)
    if "cpu" in given.checked:
        # The grid asks the list which releases it may run with, so the new one is there already.
        code = subprocess.run(CORE, check=False).returncode
        if code:
            releases.save(known.values(), given.list)
            print(f"the core of the grid failed: {given.list.name} is as before")
            return code
    said = "".join(f"; without {name}: {why}" for name, why in new.left_out.items())
    print(f"{given.list.name}: {new.version}, checked: {', '.join(new.checked) or 'nothing'}{said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
