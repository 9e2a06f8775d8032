"""``kvtxn completion``: a script by which a shell completes the words of ``kvtxn``.

The script has all words in it, so that a press of the key starts no process.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Final

from .cli import Command, commands, require, summary, with_options

help: Final = 'a script for a shell, as in: eval "$(kvtxn completion bash)"'
NEEDS: Final = ("shtab",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    shells = ("bash", "zsh", "tcsh", "fish", "powershell")
    parser.add_argument("shell", choices=shells, help="the shell that is to read the script")


def run(args: argparse.Namespace) -> int:
    """Print the shell's completion script; returns the exit code 0.

    Of a command whose packages are missing only the name is completed.

    Raises:
        MissingModules: shtab is not installed.
    """
    require(*NEEDS)
    import shtab

    front = with_options(argparse.ArgumentParser(prog="kvtxn"))
    subparsers = front.add_subparsers()
    for name, entry in commands().items():
        parser = subparsers.add_parser(name, help=summary(entry))
        with suppress(Exception):  # its packages are not here: its name alone is completed
            command: Command = entry.load()
            command.add_arguments(parser)
        for action in parser._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(front, shell=args.shell))
    return 0
