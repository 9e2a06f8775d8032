"""An engine with windows under mixed requests for a long time: nothing lost, nothing left.

Workloads of `kvtxn audit` run at the same time: conversations with aborts, streaming sessions,
common beginnings, more requests than blocks, and rows that leave through a connector and return. A
soak comes in pieces, each with a fresh engine: `--save NAME` adds them to one file, as long as the
settings are the same. Several pieces can run at once. `--policy stock` is the control.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ...cli import natural
from ...errors import ConfigError
from ...integrations.audit_command.command import PLAIN
from ...integrations.audit_command.shown_arguments import shown
from ...integrations.audit_command.vllm_engine import offloading
from ...integrations.audit_command.workloads import WORKLOADS
from ...integrations.serving.engine_process import EngineProcess, ending_with
from ..common import machine
from . import piece as pieces
from .drafter import fit
from .engine import Piece
from .verdict import judge

#: Bytes of the connector's store: a few times the cache, so that it has to forget.
_STORE: Final = 8 << 20
#: Blocks of the cache: more than one request needs, fewer than all of them.
_BLOCKS: Final = 30
_SETTINGS: Final = {"max_num_seqs": 16, "num_gpu_blocks_override": _BLOCKS}
#: A small cache whose size is not measured: other processes may take and give back memory.
_ON_GPU: Final = {"gpu_memory_utilization": 0.03, "kv_cache_memory_bytes": 64 << 20}
_DRAFTS: Final = 4
#: Seconds between two writes of the file, which is written as a whole.
_BETWEEN_WRITES: Final = 5.0
DRAFTERS: Final = ("ngram", "eagle")
POLICIES: Final = ("auto", "deferred", "undo", "stock")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the suite's arguments to its parser."""
    parser.description = __doc__
    parser.add_argument("--seconds", type=natural, default=60, help="of each piece (60)")
    parser.add_argument("--pieces", type=natural, default=1, help="pieces to play (1)")
    parser.add_argument("--at-once", type=natural, default=1, help="pieces beside each other (1)")
    parser.add_argument("--policy", choices=POLICIES, default="auto")
    parser.add_argument("--drafter", choices=DRAFTERS, default="ngram")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--requests", type=natural, default=8, help="of each workload a round (8)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples (10)")
    parser.add_argument(
        "--patience", type=float, default=120.0, help="seconds until a request is lost (120)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first piece (0)")
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, metavar="JSON",
        help="arguments of the engine that differ from those of the small model's engine",
    )  # fmt: skip
    parser.add_argument("--no-texts", action="store_true", help="compare no text with stock's")
    parser.add_argument("--json", action="store_true", help="print the sums as JSON")
    machine.add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Play the pieces, save each as it goes on, and judge all pieces of the file.

    Returns:
        The exit code: 0 if nothing was lost or left, 1 if something was.
    """
    path = None if args.save is None else machine.results_folder() / f"{args.save}.json"
    with tempfile.TemporaryDirectory(prefix="kvtxn-soak-") as folder:
        engine_args, about = engine_of(args, Path(folder))
        kept = _before(path, settings(args, about))
        _play(args, engine_args, _Kept(kept, path))
    verdict = judge(kept["pieces"], windows=args.policy != "stock")
    if args.json:
        print(json.dumps({**verdict.sums, "seconds": verdict.seconds, "wrong": verdict.wrong}))
    else:
        print(verdict)
    return 1 if verdict.wrong else 0


def engine_of(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], str]:
    """Return the arguments of the engine, and the engine in a few words.

    An EAGLE drafter is fitted into ``folder`` first. ``--engine-args`` win; None takes one away.
    """
    on_gpu = torch.cuda.is_available()
    found: dict[str, Any] = {**PLAIN, **_SETTINGS, "skip_tokenizer_init": True}
    found["kv_transfer_config"] = offloading("cuda" if on_gpu else "cpu", _STORE)
    if on_gpu:
        found |= {"dtype": "bfloat16", "enforce_eager": False, **_ON_GPU}
    if args.drafter == "eagle":
        found["speculative_config"] = {
            "method": "eagle",
            "model": fit(Path(PLAIN["model"]), folder / "eagle"),
            "num_speculative_tokens": _DRAFTS,
        }
    if args.policy != "stock":
        found["additional_config"] = {"kvtxn": {"policy": args.policy, "required": True}}
    found |= args.engine_args
    found = {name: value for name, value in found.items() if value is not None}
    transfer = found.get("kv_transfer_config", {}).get("kv_connector", "no connector")
    return found, f"{args.drafter}, {transfer}"


def settings(args: argparse.Namespace, about: str) -> dict[str, Any]:
    """Return what pieces of one file have in common; seeds and lengths may differ.

    Secrets in engine arguments are not shown.
    """
    return {
        "about": about,
        "policy": args.policy,
        "drafter": args.drafter,
        "workloads": list(args.workloads),
        "requests": args.requests,
        "engine_args": shown(args.engine_args),
    }


def _before(path: Path | None, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Read the content of a soak's file with its pieces; a new content if there is no file.

    Raises:
        ConfigError: the pieces are of other settings.
    """
    if path is None or not path.exists():
        return {"machine": {}, "suite": "soak", "settings": dict(wanted), "pieces": []}
    found: dict[str, Any] = json.loads(path.read_text())
    if found.get("settings") != wanted:
        raise ConfigError(
            "bench soak",
            f"{path.name} has pieces of other settings",
            expected=json.dumps(found.get("settings")),
            got=json.dumps(wanted),
            hint="name another file with --save",
        )
    return found


class _Kept:
    """The pieces of a soak, and their file, which is at most seconds behind.

    Pieces that are played at once wait for this: an engine stands still while its output is not
    read. So the machine, which takes a second to describe, is described once.

    Args:
        found: the file's content, with the pieces before these.
        path: of the file; None without one.
    """

    def __init__(self, found: dict[str, Any], path: Path | None) -> None:
        self._found, self._path = found, path
        self._here: Final = machine.describe()
        self._before: Final = list(found["pieces"])
        self._reports: Final[dict[int, dict[str, Any]]] = {}
        self._lock: Final = threading.RLock()
        self._next_write = 0.0
        self.first: Final = len(self._before)

    def keep(self, piece: Piece, number: int, report: Mapping[str, Any]) -> None:
        """Store a piece's report so far, and print a line if it has new samples.

        The file is written, too, if the last time is ``_BETWEEN_WRITES`` seconds ago.
        """
        with self._lock:
            told = len(self._reports.get(number, {"samples": ()})["samples"])
            own = {**report, "samples": list(report["samples"])}  # its thread adds to them
            self._reports[number] = {"machine": self._here, "seed": piece.seed, **own}
            self._found["machine"] = self._here
            self._found["pieces"] = [
                *self._before,
                *(each for _, each in sorted(self._reports.items())),
            ]
            if len(own["samples"]) > told:
                print(line(number, own["samples"][-1]), file=sys.stderr, flush=True)
            if time.monotonic() >= self._next_write:
                self.write()

    def write(self) -> None:
        """Write the whole file now, if there is to be one."""
        if self._path is None:
            return
        with self._lock:
            self._path.write_text(json.dumps(self._found, indent=1) + "\n")
            self._next_write = time.monotonic() + _BETWEEN_WRITES


def _play(args: argparse.Namespace, engine_args: dict[str, Any], kept: _Kept) -> None:
    """Play the pieces, ``--at-once`` of them at a time, and keep their reports.

    If one raises, no other begins, the running engines are ended, and the error surfaces.
    """
    stops: list[EngineProcess] = []
    ends = threading.Event()

    def play(number: int) -> None:
        """Play one piece, unless the command is ending, and keep its report."""
        if ends.is_set():
            return
        piece = Piece(
            engine_args=engine_args,
            workloads=tuple(args.workloads),
            requests=args.requests,
            seconds=args.seconds,
            every=args.every,
            patience=args.patience,
            seed=args.seed + number,
        )
        keep = partial(kept.keep, piece, number)
        report = pieces.run(piece, not args.no_texts, keep, stops)
        if ends.is_set():  # its engine was ended with the command: its results so far count
            report |= {"error": None, "cut": True}
        keep(report)
        kept.write()

    with ThreadPoolExecutor(args.at_once) as threads, ending_with(stops):
        played = [threads.submit(play, kept.first + number) for number in range(args.pieces)]
        try:
            done, _ = wait(played, return_when=FIRST_EXCEPTION)
            for each in done:
                each.result()
        except BaseException:
            ends.set()  # no other piece begins, and the engines of running pieces are ended
            kept.write()
            raise


def line(number: int, sample: Mapping[str, Any]) -> str:
    """Return a line about the progress of a piece."""
    return (
        f"piece {number}, {sample['at']:.0f} s: {sample['steps']} steps, {sample['committed']} "
        f"windows, {sample['asked']} requests, {sample['lost']} lost, {sample['missing']} blocks "
        f"missing, host {sample['host'] >> 20} MiB"
    )
