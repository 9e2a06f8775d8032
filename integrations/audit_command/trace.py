"""``kvtxn trace``: run the demo's model with windows, and draw their effect on the cache."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Final

from ...cli import WIDTH, natural, require
from ...errors import ConfigError
from ..demo.command import first_prompts
from . import svg
from .command import PLAIN, as_text, check_writable, play, watched
from .jobs import Job, Refused
from .prompts import Prompt

help: Final = "run the demo's model with windows, and draw what they do to the cache"
NEEDS: Final = ("rich", "vllm")

#: By policy: the title of the small picture.
TITLES: Final = {
    "off": "Stock: rejected drafts stay in their slots until something overwrites them",
    "undo": "A window under undo: rejected drafts are taken out of their slots",
    "deferred": "A window under deferred: only accepted drafts reach their slots",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "--policy", choices=tuple(TITLES), default="deferred", help="of the windows (deferred)"
    )
    parser.add_argument("--count", type=natural, default=3, help="prompts to continue (3)")
    parser.add_argument("--max-tokens", type=natural, default=48, help="tokens for each (48)")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="PATH",
        default=Path("kvtxn-trace.html"),
        help="the page (kvtxn-trace.html)",
    )
    parser.add_argument("--svg", type=Path, metavar="PATH", help="a small picture of a few steps")


def run(args: argparse.Namespace) -> int:
    """Trace a run of the demo: write the page, print the verdict, draw the picture of ``--svg``.

    Returns:
        The exit code, as of ``kvtxn audit``; 2 if the engine cannot be audited, which is told on
        stderr, and then nothing is written.

    Raises:
        ConfigError: a file cannot be written, or the run is too short for a picture.
    """
    require("vllm")
    from .page import write  # brings torch, for which the command's help must not wait
    from .verdict import judge_found

    check_writable("--html", args.html)
    check_writable("--svg", args.svg)
    job = job_of(args)
    found = play(job, "kvtxn trace")
    if isinstance(found, Refused):
        print(textwrap.fill(f"kvtxn trace: {found.why}", WIDTH), file=sys.stderr)
        return 2
    verdict = judge_found(found)
    write(args.html, title="kvtxn trace", verdict=verdict, found=found, command=_command(args))
    print(as_text(verdict, found, args.html))
    if args.svg is not None:
        recording = found.recordings[0]
        try:
            part = svg.excerpt(recording, restores=recording["policy"] in ("undo", "deferred"))
        except ValueError as error:
            raise ConfigError("trace", str(error), hint="raise --max-tokens") from None
        waits = recording["policy"] == "deferred"
        args.svg.write_text(svg.draw(part, title=TITLES[args.policy], waits=waits), "utf-8")
        print(f"The picture: {args.svg}")
    return verdict.exit_code


def _command(args: argparse.Namespace) -> str:
    """Return the command line that makes this trace again, for the page."""
    settings = f"--policy {args.policy} --count {args.count} --max-tokens {args.max_tokens}"
    return f"kvtxn trace {settings}"


def job_of(args: argparse.Namespace) -> Job:
    """Return the job of a trace: the demo's first prompts, in 32 blocks, under the policy."""
    texts = first_prompts(args.count)
    policy = {} if args.policy == "off" else {"policy": args.policy}
    arguments = {**PLAIN, "num_gpu_blocks_override": 32, "additional_config": {"kvtxn": policy}}
    return Job(
        engine_args=watched(arguments),
        workloads=(),
        prompts=tuple(
            Prompt(line, text, None, args.max_tokens) for line, text in enumerate(texts, 1)
        ),
        log_level="debug" if args.log_level == "debug" else "error",
    )
