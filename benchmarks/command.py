"""``kvtxn bench WHAT``: one front for every measurement."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Final

help: Final = "measure a window's cost, the kernels, or whole vLLM engines"

#: What can be measured -> the module that does it, imported only when asked for.
SUITES: Final = {
    "host": "host",
    "kernels": "kernels",
    "attention": "kernels_attention",
    "counters": "kernel_counters",
    "steps": "steps",
    "readings": "readings",
    "vllm": "vllm_bench",
    "exactness": "vllm_exactness",
    "report": "report",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of every suite."""
    suites = parser.add_subparsers(dest="suite", required=True, metavar="WHAT")
    for name, module in SUITES.items():
        suite = import_module(f".{module}", __package__)
        suite.add_arguments(suites.add_parser(name, help=suite.help))


def run(args: argparse.Namespace) -> int:
    """Run one suite."""
    code: int = import_module(f".{SUITES[args.suite]}", __package__).run(args)
    return code
