"""Name the commits that the evidence is of: ``python tests/gpu/evidence_commits.py``.

A release quotes what one commit showed, and ships that commit's product. Between releases a part
may be measured again alone. Surveys of vLLM's own faults (``tests/audit_command/every_engine``) say
nothing of a commit, and are left out.

Exit code 0: all results are of one commit, and no source of the product has changed since; 1: else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]

#: The files that pages are drawn from.
_RECORDS: Final = ("benchmarks/results/*.json", "tests/gpu/seen.json", "tests/gpu/grid*.json")
#: What a release ships, but for its texts and for what follows from results.
_PRODUCT: Final = (
    *("kvtxn", "backends", "integrations", ":!*.md"),
    ":!integrations/vllm_plugin/policy/measured.json",
)


def commits(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the files by the commits that they quote; in each list a file stands once.

    Args:
        root: of a checkout.
    """
    found: dict[str, list[str]] = {}
    for pattern in _RECORDS:
        for path in sorted(root.glob(pattern)):
            name = path.relative_to(root).as_posix()
            for commit in sorted({*_quoted(json.loads(path.read_text()))}):
                found.setdefault(commit, []).append(name)
    return found


def _quoted(value: Any) -> Iterator[str]:
    """Yield the commits that a result names, at any depth."""
    if isinstance(value, dict):
        if isinstance(commit := value.get("commit"), str):
            yield commit
        value = [*value.values()]
    if isinstance(value, list):
        for each in value:
            yield from _quoted(each)


def changed(commit: str, root: Path = ROOT) -> list[str]:
    """Return the sources of the product that differ from a commit's, as paths below the root.

    Raises:
        CalledProcessError: git does not know the commit, as in a clone without its history; git
            itself has printed why.
    """
    command = ["git", "-C", str(root), "diff", "--name-only", commit, "--", *_PRODUCT]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def main(root: Path = ROOT) -> int:
    """Print what is of which commit; returns the exit code."""
    found = commits(root)
    for commit, names in found.items():
        print(f"{commit}: {', '.join(names)}")
    if len(found) != 1:
        print(f"results are of {len(found)} commits, expected one: run `make evidence`")
        return 1
    if differs := changed(*found, root):
        print(f"the product has changed since: {', '.join(differs)}; run `make evidence`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
