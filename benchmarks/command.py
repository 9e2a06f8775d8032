"""``kvtxn bench WHAT``: one front for every measurement."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final

from ..cli import Runnable, needed, require, run_command

help: Final = "measure a window's cost, the kernels, or whole vLLM engines"

#: Name of a measurement -> the module that takes it, imported only when asked for; a line of help.
SUITES: Final = {
    "host": ("host.idle_window", "host time of an idle window, by policy and number of requests"),
    "kernels": ("kernels.commit", "GPU time of commits, next to stock writes and a plain copy"),
    "attention": ("kernels.attention", "GPU time of a verify pass's attention with its writes"),
    "backends": (
        "kernels.backends",
        "GPU time of vLLM's attention backends by blocks of one row, and their bits",
    ),
    "recurrent": (
        "kernels.recurrent",
        "GPU time of verify steps over recurrent states: stock, exact, and the replay",
    ),
    "steps": ("host.engine_step", "host time that windows add to a step of an engine on a GPU"),
    "vllm": ("engines.command", "whole vLLM engines: stock against deferred and undo"),
    "capacity": (
        "engines.capacity",
        "requests that a hybrid's cache holds at once: as vLLM reports, and as seen running",
    ),
    "soak": ("soak.command", "an engine with windows for long: what is lost, left, or grows"),
    "report": ("engines.files", "Markdown from the JSON files of `kvtxn bench vllm`"),
}

#: By measurement: the packages without which it does not start; GPUs apart.
NEEDS_OF: Final[Mapping[str, Sequence[str]]] = {
    "vllm": ("numpy", "tabulate", "vllm"),
    "capacity": ("tabulate", "vllm"),
    "soak": ("vllm",),
    "report": ("tabulate",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the choice of a suite to the parser; the rest of the line is for the suite."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(
        [
            "WHAT is one of:",
            *(
                f"  {name:<11}{line}{needed(NEEDS_OF.get(name, ()))}"
                for name, (_, line) in SUITES.items()
            ),
        ]
    )
    parser.add_argument("suite", metavar="WHAT", choices=list(SUITES), help="see below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Run one suite with the rest of the line, and return its exit code.

    Packages that the suite needs and lacks are an error, unless help is asked for.
    """
    name, line = SUITES[args.suite]
    if not {"-h", "--help"} & {*args.rest}:
        require(*NEEDS_OF.get(args.suite, ()))
    suite: Runnable = import_module(f".{name}", __package__)
    words = vars(args).pop("rest")
    return run_command(f"kvtxn bench {args.suite}", suite, line, words, args)
