"""Record a release of vLLM: its hook points, and that the core of the grid passed with it.

    python -m kvtxn.integrations.vllm_plugin.policy.doctor.record_release --checked cpu

runs in the environment that has the release, and from the root of the repository; CONTRIBUTING.md
says what comes before and after. ``--source FOLDER`` reads an unpacked wheel instead, imports
nothing of it, and so checks nothing.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from ....serving.source_files import Sources
from ...seam import workers
from ...seam.hook_points import HOOK_POINTS
from .. import release_records
from ..release_records import CHECKS, Release

#: The core of the grid, as ``make core`` runs it.
CORE: Final = (
    *(sys.executable, "-m", "pytest", "tests/vllm_plugin"),
    *("-k", "test_equals_stock and llama- and (one or eight)"),
)

#: Checks that need another check first, since only some engines of a release need them.
_AFTER: Final[Mapping[str, str]] = {
    "states": "cpu",
    **dict.fromkeys(("gpus", "gpu-stages", "gpu-backends", "gpu-states"), "gpu"),
}
#: By check, the files of vLLM that name what can be left out of it, and how they do.
_NAMED_IN: Final[Mapping[str, tuple[str, str]]] = {
    "gpu": ("vllm/config/speculative.py", r'"([a-z][a-z0-9_]+)"'),
    "gpu-backends": ("vllm/v1/attention/backends/registry.py", r"(?m)^    ([A-Z][A-Z0-9_]+) ="),
}


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
    made.add_argument("--list", type=Path, default=release_records.FILE, help="the list to write")
    return made


def _left_out(text: str) -> tuple[str, str]:
    """Divide ``NAME=WHY`` into both.

    Raises:
        argparse.ArgumentTypeError: one of them is empty.
    """
    name, _, why = text.partition("=")
    if not name or not why:
        raise argparse.ArgumentTypeError(f"expected NAME=WHY, such as mtp='it died', got {text!r}")
    return name, why


def _check(name: str) -> str:
    """Return the check that something is left out of, by its name.

    "gpu-backends" for a name in capitals, which is a backend's; else "gpu".
    """
    return "gpu-backends" if name.isupper() else "gpu"


def _unknown(name: str, root: Path) -> str | None:
    """Say in a sentence that vLLM's source has nothing of this name, and what is near it.

    None if it has, or if the file cannot be read.
    """
    path, pattern = _NAMED_IN[_check(name)]
    if not (root / path).is_file():
        return None
    known = sorted({*re.findall(pattern, (root / path).read_text("utf-8"))})
    if name in known:
        return None
    near = difflib.get_close_matches(name, known, n=1)
    return f"--without {name}: {path} names no such thing" + (
        f"; did you mean {near[0]}?" if near else ""
    )


def _run_core() -> tuple[int, str]:
    """Run the core of the grid; return its exit code, and why it shows nothing, if it does not.

    The code is 1 if a test was skipped, or if there is none, for which pytest's may be 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "core.xml")
        code = subprocess.run([*CORE, f"--junitxml={report}"], check=False).returncode
        if code:
            return code, f"the core of the grid failed with exit code {code}"
        cases = ElementTree.parse(report).findall(".//testcase")
    skipped = sum(case.find("skipped") is not None for case in cases)
    if skipped or not cases:
        return 1, f"{skipped} of {len(cases)} tests of the core of the grid were skipped"
    return 0, ""


def _arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Sources]:
    """Parse and check the arguments; return them, and the sources of the release.

    Arguments that do not go together, or name what vLLM lacks, end the program with a message.
    """
    made = parser()
    given = made.parse_args(arguments)
    if given.source is not None and given.checked:
        made.error("--source reads files alone, so nothing can be listed as checked")
    sources = Sources(given.source or workers.source_folder())
    if not sources.version_of("vllm"):
        made.error(f"{sources.root} has no vllm/_version.py that says its version")
    for name, _ in given.without:
        if _check(name) not in given.checked:
            made.error(f"--without {name} goes with --checked {_check(name)}")
        unknown = _unknown(name, sources.root)
        if unknown is not None:
            made.error(unknown)
    return given, sources


def main(arguments: Sequence[str] | None = None) -> int:
    """Record a release in the list; return the exit code: 0 if it is listed as asked for.

    With ``--checked cpu`` the core of the grid runs, and if it fails, the list is as before. Moves
    since the nearest release are printed.
    """
    given, sources = _arguments(arguments)
    known = {release.version: release for release in release_records.load(given.list)}
    names = [name for place in HOOK_POINTS.values() for name in place]
    hooks = release_records.read_hooks(sources, names)
    version = sources.version_of("vllm")
    old = known.get(version, Release(version, (), {}))
    kept = {name: why for name, why in old.left_out.items() if _check(name) not in given.checked}
    checked = tuple(sorted({*old.checked, *given.checked}))
    lacks = [name for name in given.checked if _AFTER.get(name, name) not in checked]
    if lacks:
        parser().error(f"--checked {lacks[0]} goes with --checked {_AFTER[lacks[0]]}")
    new = Release(version, checked, hooks, kept | dict(given.without))
    print(f"vLLM {new.version}: {len(hooks)} of {len(names)} hook points found")
    others = [each for each in known.values() if each.version != new.version]
    if release_records.checked_for("cpu", others):
        before = release_records.nearest(new.version, "cpu", others)
        moved = release_records.moves(before.hooks, hooks, names)
        print(f"since {before.version}, {len(moved)} moved", *moved, sep="\n  ")
    release_records.save((known | {new.version: new}).values(), given.list)
    if "cpu" in given.checked:
        # The grid asks the list which releases it may run with, so the new one is there already.
        code, why = 1, "the core of the grid was interrupted"
        try:
            code, why = _run_core()
        finally:
            if code:
                release_records.save(known.values(), given.list)
                print(f"{why}: {given.list.name} is as before", flush=True)
        if code:
            return code
    said = "".join(f"; without {name}: {why}" for name, why in new.left_out.items())
    print(f"{given.list.name}: {new.version}, checked: {', '.join(new.checked) or 'nothing'}{said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
