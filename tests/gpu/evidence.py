"""Everything that a page quotes of GPUs, of one commit: ``python tests/gpu/evidence.py FOLDER``.

Each part (``evidence_parts.PARTS``) is a command of minutes. Parts that measure times run alone on
their GPU, of the others two at a time, as the processor keeps them waiting; a GPU's parts have its
share of the processor's cores. FOLDER/PART gets what a part writes, and ``output.log``;
FOLDER/evidence.json says which parts have ended, and how. A later call goes on where this one
stopped: a part that was cut off begins again. Another commit needs another folder.

    python tests/gpu/evidence.py FOLDER --seconds 570    no part begins that would not end in time
    python tests/gpu/evidence.py FOLDER --list           what has ended, and what is left
    python tests/gpu/evidence.py FOLDER --record         take the results over, draw the pages

Exit code 0: all that was asked for has ended well; 1: something has not; 3: parts are left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import attrs

HERE: Final = Path(__file__).resolve().parent
for _folder in (".", "..", "../serving", "../vllm_plugin/grid", "../vllm_plugin/audit"):
    sys.path.insert(0, str(HERE / _folder))

from evidence_parts import PARTS, PLACES, Part  # noqa: E402
from kvtxn.benchmarks.common.machine import commit_of, describe  # noqa: E402

#: Seconds that a part has for its last words once it is told to end.
GRACE: Final = 15.0


@attrs.define
class Running:
    """A part that runs.

    Attributes:
        part: which.
        process: its process, which leads a group of its own.
        begun: when it began, by the monotonic clock.
        told: when it was told to end; None: it was not.
    """

    part: Part
    process: subprocess.Popen[bytes]
    begun: float
    told: float | None = None

    def end(self) -> None:
        """Tell the group to end; kill it if it was told before and the grace is over."""
        now = time.monotonic()
        if self.told is None:
            self.told = now
            os.killpg(self.process.pid, signal.SIGTERM)
        elif now > self.told + GRACE:
            os.killpg(self.process.pid, signal.SIGKILL)


class Evidence:
    """A folder of evidence.

    Args:
        folder: made if it is not there.
        commit: of the sources.

    Attributes:
        ended: by part, how it ended: ``rc``, ``seconds`` and ``command``.

    Raises:
        SystemExit: the folder is of another commit.
    """

    def __init__(self, folder: Path, commit: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.commit = folder, commit
        self._state = folder / "evidence.json"
        known = json.loads(self._state.read_text()) if self._state.exists() else {}
        if known and known["commit"] != commit:
            raise SystemExit(
                f"{folder} has the evidence of {known['commit']}, these sources are {commit}: "
                "take another folder"
            )
        self.ended: dict[str, dict[str, Any]] = known.get("parts", {})

    def left(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that have not ended yet, in their order."""
        return [part for part in parts if part.name not in self.ended]

    def note(self, running: Running, code: int) -> None:
        """Write down how a part has ended; nothing is written of one that was cut off."""
        if running.told is not None:
            return
        took = round(time.monotonic() - running.begun)
        command = " ".join(running.part.command)
        self.ended[running.part.name] = {"rc": code, "seconds": took, "command": command}
        found = {"commit": self.commit, "machine": describe(), "parts": self.ended}
        place = self._state.with_suffix(".part")
        place.write_text(json.dumps(found, indent=1) + "\n")
        place.rename(self._state)


def start(
    part: Part, evidence: Evidence, gpus: Sequence[str], cores: set[int], paths: str
) -> Running:
    """Start a part on these GPUs and cores; ``paths`` go before the path of Python's modules."""
    out = evidence.folder / part.name
    out.mkdir(exist_ok=True)
    words = [word.format(out=out, python=sys.executable, here=HERE) for word in part.command]
    path = os.pathsep.join(each for each in (os.environ.get("PYTHONPATH"), paths) if each)
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONPATH": path, **part.environment}
    with (out / "output.log").open("wb") as log:
        process = subprocess.Popen(
            words,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=HERE.parents[1],
            env=os.environ | environment,
            start_new_session=True,
        )
    os.sched_setaffinity(process.pid, cores)
    return Running(part, process, time.monotonic())


@attrs.frozen
class Machine:
    """What parts run on.

    Attributes:
        gpus: as CUDA_VISIBLE_DEVICES names them; one that is empty if there is none.
        cores: numbers of the processor's cores that parts may take.
        paths: by engine, what goes before the path of Python's modules.
    """

    gpus: Sequence[str]
    cores: Sequence[int]
    paths: Mapping[str, str]

    def share(self, lanes: Sequence[int]) -> set[int]:
        """Return the cores that belong to some of the GPUs."""
        count = max(1, len(self.cores) // max(1, len(self.gpus)))
        return {core for lane in lanes for core in self.cores[lane * count : (lane + 1) * count]}


def conduct(
    evidence: Evidence, parts: Sequence[Part], machine: Machine, seconds: float
) -> list[str]:
    """Run parts until none is left that would end in time; returns the names of those cut off."""
    deadline, waiting = time.monotonic() + seconds, evidence.left(parts)
    running: list[tuple[Running, Sequence[int]]] = []
    cut: list[str] = []
    #: Free places of each GPU.
    places = [PLACES] * len(machine.gpus)
    while waiting or running:
        for one, mine in list(running):
            code = one.process.poll()
            if code is None:
                if time.monotonic() > deadline:
                    one.end()
                continue
            running.remove((one, mine))
            for gpu in mine:
                places[gpu] += one.part.places
            evidence.note(one, code)
            cut += [one.part.name] * (one.told is not None)
            print(said(evidence, one), flush=True)
        for part, mine in fitting(waiting, places, deadline - time.monotonic()):
            waiting.remove(part)
            gpus = [machine.gpus[gpu] for gpu in mine]
            paths = machine.paths.get(part.engine, "")
            running.append((start(part, evidence, gpus, machine.share(mine), paths), mine))
        if not running:
            break
        time.sleep(0.1)
    return cut


def fitting(
    waiting: Sequence[Part], places: list[int], seconds: float
) -> list[tuple[Part, list[int]]]:
    """Choose parts that may begin now, and take their places: GPUs have room, and the time will do.

    A part that needs several GPUs waits for the first of them only while nothing runs, so such
    parts come first.

    Args:
        waiting: parts.
        places: how many parts each GPU has room for; lowered here by what the chosen ones take.
        seconds: that are left.

    Returns:
        Parts, and the numbers of the GPUs that each takes.
    """
    found = []
    for part in sorted(waiting, key=lambda part: -part.gpus):
        room = [gpu for gpu, free in enumerate(places) if free >= part.places]
        room.sort(key=lambda gpu: -places[gpu])
        if part.lanes <= len(room) and part.seconds <= seconds:
            mine = sorted(room[: part.lanes])
            for gpu in mine:
                places[gpu] -= part.places
            found.append((part, mine))
    return found


def said(evidence: Evidence, running: Running) -> str:
    """One line about a part that has ended, and its last words if it did not end well."""
    name, code = running.part.name, running.process.returncode
    took = f"{time.monotonic() - running.begun:.0f} s"
    if running.told is not None:
        return f"{name}: cut off after {took}"
    if code == 0:
        return f"{name}: well, {took}"
    words = (evidence.folder / name / "output.log").read_text(errors="replace")
    return f"{name}: exit code {code}, {took}\n    " + "\n    ".join(words.splitlines()[-8:])


def chosen(asked: Sequence[str], gpus: int, engines: Sequence[str]) -> list[Part]:
    """Return the parts that are asked for by the beginnings of their names, and that can run.

    Parts of a machine without a GPU do not run on one that has any.
    """
    return [
        part
        for part in PARTS
        if part.engine in engines
        and (1 <= part.gpus <= gpus or part.gpus == gpus == 0)
        and (not asked or part.name.startswith(tuple(asked)))
    ]


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=lambda path: Path(path).resolve())
    add("--parts", nargs="+", default=[], metavar="NAME", help="beginnings of names; default: all")
    add("--seconds", type=float, default=36000.0, help="after which what still runs is cut off")
    add("--again", action="store_true", help="once more what has ended, but not well")
    add(
        "--site", nargs=2, action="append", default=[], metavar=("ENGINE", "PATH"),
        help="a folder with an engine's packages; without, what can be imported is there",
    )  # fmt: skip
    add("--list", action="store_true", help="print the parts, and start nothing")
    add("--record", action="store_true", help="take results over, and start nothing")
    return parser.parse_args(words)


def main() -> int:
    """Run the command line; returns the exit code."""
    given = parsed()
    evidence = Evidence(given.folder, commit_of())
    sites = dict(given.site)
    engines = ["", *sites, *filter(find_spec, ("vllm", "sglang"))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    import torch

    gpus = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
    if given.record:
        import evidence_record

        evidence_record.take_over(evidence, PARTS)
        return 0
    parts = chosen(given.parts, len(gpus), engines)
    if given.list:
        for part in PARTS:
            found = evidence.ended.get(part.name)
            ended = f"exit code {found['rc']}, {found['seconds']} s" if found else "left"
            print(f"{part.name:28} {part.gpus} GPU, some {part.seconds} s: {ended}")
        return 0
    if given.again:
        evidence.ended = {name: each for name, each in evidence.ended.items() if not each["rc"]}
    machine = Machine(gpus or [""], sorted(os.sched_getaffinity(0)), sites)
    cut = conduct(evidence, parts, machine, given.seconds)
    left = [part.name for part in evidence.left(parts)]
    bad = [part.name for part in parts if evidence.ended.get(part.name, {}).get("rc")]
    print(f"not well: {', '.join(bad) or 'none'}; cut off: {', '.join(cut) or 'none'}")
    print(f"left: {', '.join(left) or 'none'}")
    return 1 if bad else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
