"""The ``kvtxn`` command: a thin front to commands found by entry point.

A command is an object with ``help``, ``add_arguments(parser)`` and
``run(args) -> int`` in the entry-point group ``kvtxn.commands``, so that the
library itself needs neither an engine nor a benchmark to be installed. A module
that is a command may name the modules of other packages that it needs in ``NEEDS``.
``help`` and ``NEEDS`` are read from its source: to list commands imports none.
"""

from __future__ import annotations

import argparse
import ast
import errno
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

from . import __version__, extras
from .errors import KVTxnError

GROUP: Final = "kvtxn.commands"
#: Columns that an error or a page for people takes at most.
WIDTH: Final = 100
LEVELS: Final = ("debug", "info", "warning", "error")


class Runnable(Protocol):
    """An object that declares command-line arguments and runs with them; a module can be one."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command, and return its exit code."""


class Command(Runnable, Protocol):
    """A command of ``kvtxn``, with a line of help."""

    help: str


#: The end of every command's help.
EXIT_CODES: Final = (
    "exit codes: 0 if all is well; 1 if the command found something wrong; 2 for wrong usage, or "
    "if it could not do its work"
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take ``WIDTH`` columns at most."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit with 2."""
        self.print_usage(sys.stderr)
        self.exit(2, textwrap.fill(f"{self.prog}: error: {message}", WIDTH) + "\n")


class _Front(_Parser):
    """The parser of ``kvtxn`` itself, which lists the commands at the end of its help."""

    def format_help(self) -> str:
        """Format the help, with a line for each command and the exit codes at its end."""
        lines = [f"  {name:<12}{summary(entry)}" for name, entry in commands().items()]
        ending = textwrap.wrap(EXIT_CODES, WIDTH)
        return "\n".join([super().format_help(), "commands:", *lines, "", *ending, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and import no other; returns the exit code, as ``EXIT_CODES`` says.

    If a reader such as ``head`` closes the pipe early, the rest of the output is dropped, and the
    exit code is 141, the shell's for a closed pipe. If the output cannot be written, since the disk
    is full, one sentence says so, and the exit code is 2. Wrong usage ends by SystemExit, as in
    argparse.
    """
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _drop_output()
        where = "the output" if error.filename is None else error.filename
        print(f"kvtxn: {where} cannot be written: {error.strerror}", file=sys.stderr)
        return 2


def _drop_output() -> None:
    """Send the rest of the standard output nowhere, so that the flush at the end succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main(argv: Sequence[str] | None) -> int:
    """Parse the command line, load the command, set up the log, and run the command.

    Errors of kvtxn, and packages that the command lacks, are printed, with exit code 2; an
    interrupt is 130. Wrong usage, or a command that cannot be loaded, ends by SystemExit.
    """
    description = "Transactions for the KV cache of LLM inference."
    front = with_options(_Front(prog="kvtxn", description=description))
    front.add_argument("command", metavar="COMMAND", choices=list(commands()), help="see below")
    front.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    args = front.parse_args(argv)
    words = vars(args).pop("words")
    prog = f"kvtxn {args.command}"
    try:
        command: Command = commands()[args.command].load()
    except Exception as error:  # another package's, which may fail in any way
        front.error(f"{args.command} cannot be used: {_reason(error, args.command)}")
    from . import log

    log.configure(args.log_level)
    try:
        return run_command(prog, command, command.help, words, args)
    except ModuleNotFoundError as error:
        remedy = _remedy(error, args.command)
        if remedy is None:
            raise
        print(f"{prog}: {remedy}", file=sys.stderr)
        return 2
    except KVTxnError as error:
        text = str(error)
        if error.operation in commands():  # the command is named once
            text = text.removeprefix(f"{error.operation}: ")
        lines = f"{prog}: {text}".splitlines()  # an engine's last words keep their lines
        print("\n".join(textwrap.fill(line, WIDTH) for line in lines), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def with_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that stand before a command to a parser, and return it."""
    parser.add_argument("--version", action="version", version=f"kvtxn {__version__}")
    parser.add_argument(
        "--log-level", choices=LEVELS, default="warning", help="what kvtxn reports on stderr"
    )
    return parser


def run_command(
    prog: str,
    command: Runnable,
    description: str,
    words: Sequence[str],
    args: argparse.Namespace,
) -> int:
    """Parse the rest of a command line by the command's own arguments, and run the command.

    Its help ends with the exit codes. Wrong usage ends by SystemExit.

    Args:
        prog: the words that led to this command, as its usage line shows them.
        command: the object that declares the arguments and runs.
        description: one line for its help.
        words: the rest of the command line.
        args: the arguments parsed so far; the command gets these as well.

    Returns:
        The exit code.
    """
    parser = _Parser(prog=prog, description=description)
    command.add_arguments(parser)
    ending = textwrap.fill(EXIT_CODES, WIDTH)  # some helps are printed as they are
    parser.epilog = "\n\n".join([parser.epilog, ending] if parser.epilog else [ending])
    return command.run(parser.parse_args(words, args))


def commands() -> dict[str, EntryPoint]:
    """Return the entry points of the commands that installed packages declare, by name, sorted."""
    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name)}


def summary(entry: EntryPoint) -> str:
    """Return a command's line of help, and the missing packages that it needs.

    If the command cannot be loaded, the line says why.
    """
    try:
        says = _literals(entry)
        line = str(says["help"] if "help" in says else entry.load().help)
    except Exception as error:  # another package's error must not hide the other commands
        return f"(cannot be used: {_reason(error, entry.name)})"
    return line + needed(says.get("NEEDS", ()))


def needed(modules: Sequence[str]) -> str:
    """Return the packages that a command needs, in brackets, for its line of help; "" for none."""
    return f" (needs {extras.listed(modules)})" if modules else ""


def _literals(entry: EntryPoint) -> dict[str, Any]:
    """Read ``help`` and ``NEEDS`` from the source of a command's Python module.

    Returns:
        Those of the two that are literals at the top of the module; none for other objects.
    """
    module = None if entry.attr else find_spec(entry.module)
    if module is None or module.origin is None or not module.origin.endswith(".py"):
        return {}
    found = {}
    for node in ast.parse(Path(module.origin).read_text("utf-8")).body:
        if isinstance(node, ast.AnnAssign):
            targets: list[ast.expr] = [node.target]
        elif isinstance(node, ast.Assign):
            targets = node.targets
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name) and target.id in ("help", "NEEDS") and node.value:
                with suppress(ValueError):  # no literal
                    found[target.id] = ast.literal_eval(node.value)
    return found


def _reason(error: Exception, command: str) -> str:
    """Return why a command cannot be imported, and how to install missing packages, if known."""
    remedy = _remedy(error, command) if isinstance(error, ModuleNotFoundError) else None
    return remedy or f"{error!r}; install what it needs"


def _remedy(error: ModuleNotFoundError, command: str) -> str | None:
    """Name all that a command lacks, and the extra of kvtxn that brings it; None if no extra does.

    If several extras have it, the command's namesake is taken, since it brings all that the command
    needs.
    """
    needs = [*getattr(error, "modules", ()), *_literals(commands()[command]).get("NEEDS", ())]
    extra = extras.bringing(error, command, needs)
    if extra is None:
        return None
    several = " and " in extra.distribution
    which = "which are not installed" if several else "which is not installed"
    return f"needs {extra.distribution}, {which}: {extra.command}"


class MissingModules(ModuleNotFoundError):
    """Modules that a command needs are not installed.

    Attributes:
        modules: their names.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        super().__init__(f"No module named {modules[0]!r}", name=modules[0])
        self.modules = modules


def require(*modules: str) -> None:
    """Raise an error if modules are missing, without importing a module that exists.

    Raises:
        MissingModules: some are not installed.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MissingModules(missing)


def natural(text: str) -> int:
    """Parse a positive number; for the ``type`` of a command's arguments.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
