"""``releases.json``: the releases of vLLM that were checked, and the hook points of each.

Each line of the file is a hook point as its release has it, see ``seam.hook_points``. The
program ``policy.doctor.record_release`` writes the file; it reads hook points from a release's
source files, without importing them. What a release may have is decided by ``rules``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from ...serving.source_files import Found, Sources

#: The things that can be checked with a release: the audit alone, in a release that is too old for
#: windows; windows over rows on a CPU, on one GPU and on
#: several, and there on pipeline stages before the last one; drafts that wait on a GPU under other
#: attention backends than FLASH_ATTN; and windows over recurrent states on a CPU and on a GPU.
CHECKS: Final = (
    *("audit", "cpu", "gpu", "gpus", "gpu-stages", "gpu-backends", "states", "gpu-states"),
)
FILE: Final = Path(__file__).with_name("releases.json")


@attrs.frozen
class Release:
    """A release of vLLM.

    Attributes:
        version: its number.
        checked: which of ``CHECKS`` were made; empty if the release was only recorded.
        hooks: its hook points by dotted name; missing ones are left out.
        left_out: the omissions of the release's checks, and why, a part of a sentence: methods of
            speculation, such as "mtp", none of whose engines was run on a GPU, and attention
            backends in capitals, such as "FLASH_ATTN_MLA", of which something was not measured.
    """

    version: str
    checked: tuple[str, ...]
    hooks: Mapping[str, Found]
    left_out: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Move:
    """A hook point that is not as a checked release has it.

    Attributes:
        name: its dotted name.
        kind: "gone", "parameters changed", or "source changed".
        was: parameters or fields in the checked release.
        now: parameters or fields in the other release; empty if it is gone.
    """

    name: str
    kind: str
    was: tuple[str, ...]
    now: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Describe a change; for parameters or fields, name the added and the removed ones."""
        added = [f"+{each}" for each in self.now if each not in self.was]
        left = [f"-{each}" for each in self.was if each not in self.now]
        changes = " ".join(left + added) or "in another order"
        return f"{self.kind}: {self.name}" + (
            f" ({changes})" if self.kind == "parameters changed" else ""
        )


def load(file: Path = FILE) -> tuple[Release, ...]:
    """Return the releases of a file, in its order: oldest first."""
    return tuple(
        Release(
            each["version"],
            tuple(each["checked"]),
            {
                name: Found(tuple(hook["takes"]), hook["source"])
                for name, hook in each["hooks"].items()
            },
            each.get("left_out", {}),
        )
        for each in json.loads(file.read_text("utf-8"))["releases"]
    )


def save(releases: Iterable[Release], file: Path = FILE) -> None:
    """Write the list of releases to a file, oldest first, one hook point a line."""
    ordered = sorted(releases, key=lambda release: number(release.version))
    file.write_text('{"releases": [\n' + ",\n".join(map(_text, ordered)) + "\n]}\n", "utf-8")


def _text(release: Release) -> str:
    """Return a release as JSON, one hook point a line."""
    hooks = [
        f"  {json.dumps(name)}: {json.dumps({'takes': found.takes, 'source': found.source})}"
        for name, found in release.hooks.items()
    ]
    head = f'{{"version": {json.dumps(release.version)}, "checked": {json.dumps(release.checked)}, '
    if release.left_out:
        head += f'"left_out": {json.dumps(dict(release.left_out))}, '
    head += '"hooks": {'
    return head + "\n" + ",\n".join(hooks) + "\n}}"


def number(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, by which releases are ordered: (0, 33, 0, 0) for "0.33.0".

    The last one is -1 for a version before the release of that number, such as ``0.33.0rc1`` or
    ``0.33.0.dev12``, and 0 for others. A build suffix such as ``+cpu`` does not count.
    """
    public = version.partition("+")[0]
    found = (re.match(r"\d*", part) for part in public.split("."))
    numbers = (int(digits[0]) for digits in found if digits is not None and digits[0])
    return (*numbers, -1 if re.search(r"(a|b|rc|dev)\d*(\.|$)", public) else 0)


def checked_for(check: str, releases: Iterable[Release]) -> tuple[str, ...]:
    """Return the versions that were checked for one of ``CHECKS``, in the order of ``releases``."""
    return tuple(release.version for release in releases if check in release.checked)


def nearest(version: str, check: str, releases: Sequence[Release]) -> Release:
    """Return the newest checked release that is not newer than a version, else the oldest one.

    Args:
        version: the version.
        check: one of ``CHECKS``, for which the release was checked.
        releases: oldest first; one of them at least was checked.
    """
    known = [release for release in releases if check in release.checked]
    older = [release for release in known if number(release.version) <= number(version)]
    return older[-1] if older else known[0]


def read_hooks(sources: Sources, names: Iterable[str]) -> dict[str, Found]:
    """Read hook points from a release's source files; missing ones are left out."""
    found = {name: sources.find(name) for name in names}
    return {name: hook for name, hook in found.items() if hook is not None}


def moves(
    before: Mapping[str, Found], now: Mapping[str, Found], names: Iterable[str]
) -> list[Move]:
    """Return the hook points that are gone or differ between two releases, in order of ``names``.

    Args:
        before: the hook points of the earlier release; one that it lacks counts as no move.
        now: those of the later one.
        names: the hook points to compare.
    """
    found = []
    for name in names:
        was, new = before.get(name), now.get(name)
        if was is None or was == new:
            continue
        if new is None:
            found.append(Move(name, "gone", was.takes))
        elif was.takes != new.takes:
            found.append(Move(name, "parameters changed", was.takes, new.takes))
        else:
            found.append(Move(name, "source changed", was.takes, new.takes))
    return found
