"""The ``kvtxn`` command: a thin front to commands found by entry point.

A command is an object with ``help``, ``add_arguments(parser)`` and
``run(args) -> int`` in the entry-point group ``kvtxn.commands``, so that the
library itself needs neither an engine nor a benchmark to be installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Final, Protocol

from . import __version__, log
from .errors import KVTxnError

GROUP: Final = "kvtxn.commands"
LEVELS: Final = ("debug", "info", "warning", "error")


class Command(Protocol):
    """One subcommand; a module with these names will do."""

    help: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the return value is the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, 2 for errors of use."""
    parser = argparse.ArgumentParser(
        prog="kvtxn", description="Transactions for the KV cache of LLM inference."
    )
    parser.add_argument("--version", action="version", version=f"kvtxn {__version__}")
    parser.add_argument(
        "--log-level", choices=LEVELS, default="warning", help="what kvtxn reports on stderr"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    found: dict[str, Command] = {}
    broken: dict[str, str] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        try:
            command: Command = entry.load()
        except Exception as error:  # one package's trouble must not take the others along
            broken[entry.name] = repr(error)
            commands.add_parser(entry.name, help=f"(cannot be used: {error})")
            continue
        found[entry.name] = command
        command.add_arguments(commands.add_parser(entry.name, help=command.help))
    args = parser.parse_args(argv)
    if args.command in broken:
        parser.error(
            f"{args.command} cannot be used: {broken[args.command]}; install what it needs"
        )
    log.configure(args.log_level)
    try:
        return found[args.command].run(args)
    except KVTxnError as error:
        print(f"kvtxn {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def natural(text: str) -> int:
    """An argument that counts something; for the ``type`` of a command's arguments."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
