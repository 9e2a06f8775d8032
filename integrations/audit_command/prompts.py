"""The user's own prompts: a file of JSON lines, checked before an engine starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeGuard

import attrs

from ...errors import ConfigError

#: Tokens that one hash id of a trace stands for.
TRACE_BLOCK: Final = 512

_KEYS: Final = ("prompt", "prompt_token_ids", "max_tokens", "at", "leave_after")
#: The keys of a public trace of a service, see ``Prompt.blocks``.
_TRACE: Final = ("timestamp", "input_length", "output_length", "hash_ids")
_HINT: Final = """write one JSON value per line: "text", or {"prompt": "text", "max_tokens": 32}"""


@attrs.frozen
class Prompt:
    """One request of the user's file.

    Attributes:
        line: its line in the file, counted from 1.
        text: the prompt as text; None if it is given as tokens.
        tokens: the prompt as token ids; None if it is given as text.
        max_tokens: output tokens.
        at: seconds after the first request at which it is made; None: when there is room.
        leave_after: the client leaves after so many output tokens; None: it stays.
        blocks: a line of a trace as Mooncake publishes them
            (https://github.com/kvcache-ai/Mooncake), which has no texts: names of the prompt's
            blocks, each of ``TRACE_BLOCK`` tokens; prompts with the same names begin alike.
            None of all other lines.
        length: tokens of the prompt that ``blocks`` stand for.
    """

    line: int
    text: str | None
    tokens: list[int] | None
    max_tokens: int
    at: float | None = None
    leave_after: int | None = None
    blocks: list[int] | None = None
    length: int = 0

    def sized(self, block_size: int, block: Callable[[int], list[int]]) -> Prompt:
        """Return a line of a trace as a prompt with tokens; every other prompt as it is.

        A block of the trace becomes a block of the engine, so that prompts share as many blocks
        here as they did there. Lengths shrink by the same factor.

        Args:
            block_size: tokens of the engine's block.
            block: returns the tokens of a block, given its name; the same ones each time.
        """
        if self.blocks is None:
            return self
        tokens = [token for name in self.blocks for token in block(name)]
        length = max(1, self.length * block_size // TRACE_BLOCK)
        most = max(1, self.max_tokens * block_size // TRACE_BLOCK)
        return attrs.evolve(self, tokens=tokens[:length], max_tokens=most, blocks=None)


def read(path: Path) -> tuple[Prompt, ...]:
    """Read a file of JSON lines as prompts, in order; empty lines are skipped.

    A line is a string (the prompt), or an object with ``prompt`` (a string) or ``prompt_token_ids``
    (a list of ints), and ``max_tokens`` (32), ``at`` (seconds) and ``leave_after`` (output tokens).
    Or it is a line of a trace, see ``Prompt.blocks``: an object with ``timestamp`` (milliseconds),
    ``input_length``, ``output_length`` and ``hash_ids``.

    Raises:
        ConfigError: the file cannot be read, has no prompt, or a line is none of these.
    """
    try:
        # Not ``splitlines``: JSON texts may have other characters at which it parts lines.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            "audit", f"the prompts cannot be read: {why}",
            expected="a file of prompts, or the name of a workload", got=repr(str(path)),
            hint="`kvtxn audit --help` says what both are",
        ) from None  # fmt: skip
    prompts = tuple(
        _prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()
    )
    if not prompts:
        raise ConfigError("audit", f"the file {str(path)!r} has no prompts", hint=_HINT)
    return prompts


def _prompt(path: Path, number: int, line: str) -> Prompt:
    """Return the prompt of one line, a string, an object or a line of a trace.

    Raises:
        ConfigError: the line is none of these; the message has its number.
    """

    def refuse(problem: str) -> ConfigError:
        return ConfigError("audit", f"line {number} of {str(path)!r} {problem}", hint=_HINT)

    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise refuse(f"is not JSON: {error}") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise refuse("is neither a string nor an object")
    if value.keys() >= {*_TRACE}:
        return _of_trace(number, value, refuse)
    unknown = sorted(value.keys() - {*_KEYS})
    if unknown:
        raise refuse(f"has an unknown key, {unknown[0]!r}")
    text, tokens = value.get("prompt"), value.get("prompt_token_ids")
    most, at, leaves = value.get("max_tokens", 32), value.get("at"), value.get("leave_after")
    if (text is None) == (tokens is None):
        raise refuse("needs either 'prompt' or 'prompt_token_ids'")
    if text is not None and not (isinstance(text, str) and text):
        raise refuse("has a prompt that is not a text, or an empty one")
    if tokens is not None and not _are_ids(tokens):
        raise refuse("has token ids that are not a list of numbers from 0 on")
    if not _is_count(most):
        raise refuse("has a max_tokens that is not a positive number")
    if leaves is not None and not _is_count(leaves):
        raise refuse("has a leave_after that is not a positive number")
    if at is not None and not _is_time(at):
        raise refuse("has an 'at' that is not a number of seconds from 0 on")
    return Prompt(number, text, tokens, most, at, leaves)


def _of_trace(
    number: int, value: Mapping[str, object], refuse: Callable[[str], ConfigError]
) -> Prompt:
    """Return the prompt of a line of a trace; keys beside those of ``_TRACE`` are other programs'.

    Raises:
        ConfigError: what ``refuse`` returns: a value is not valid, or hash ids are too few.
    """
    time, length, most, blocks = (value[key] for key in _TRACE)
    if not _is_time(time):
        raise refuse("has a timestamp that is not a number of milliseconds from 0 on")
    if not (_is_count(length) and _is_count(most)):
        raise refuse("has a length that is not a positive number")
    if not _are_ids(blocks) or len(blocks) * TRACE_BLOCK < length:
        raise refuse(f"needs a hash id for each {TRACE_BLOCK} tokens of its input")
    return Prompt(number, None, None, most, time / 1000, None, blocks, length)


def _is_count(value: object) -> TypeGuard[int]:
    """Tell whether a value is an int above 0, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_time(value: object) -> TypeGuard[float]:
    """Tell whether a value is a finite number from 0 on, and no bool."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= sys.float_info.max  # type: ignore[operator]


def _are_ids(value: object) -> TypeGuard[list[int]]:
    """Tell whether a value is a list of ints from 0 on, with one at least."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value)
    )
