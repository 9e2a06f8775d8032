"""The user's own prompts: a file of JSON lines, checked before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import attrs

from ...errors import ConfigError

_KEYS: Final = ("prompt", "prompt_token_ids", "max_tokens")
_HINT: Final = """write one JSON value per line: "text", or {"prompt": "text", "max_tokens": 32}"""


@attrs.frozen
class Prompt:
    """One request of the user's file.

    Attributes:
        line: its line in the file, counted from 1.
        text: the prompt as text; None if it is given as tokens.
        tokens: the prompt as token ids; None if it is given as text.
        max_tokens: output tokens.
    """

    line: int
    text: str | None
    tokens: list[int] | None
    max_tokens: int

    def given(self) -> object:
        """Return the prompt as vLLM takes it."""
        from vllm import TokensPrompt

        return self.text if self.tokens is None else TokensPrompt(prompt_token_ids=self.tokens)


def read(path: Path) -> tuple[Prompt, ...]:
    """Read a file of JSON lines; empty lines are skipped.

    A line is a string (the prompt), or an object with ``prompt`` (a string) or
    ``prompt_token_ids`` (a list of ints), and ``max_tokens`` (32).

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
    unknown = sorted(value.keys() - {*_KEYS})
    if unknown:
        raise refuse(f"has an unknown key, {unknown[0]!r}")
    text, tokens = value.get("prompt"), value.get("prompt_token_ids")
    most = value.get("max_tokens", 32)
    if (text is None) == (tokens is None):
        raise refuse("needs either 'prompt' or 'prompt_token_ids'")
    if text is not None and not (isinstance(text, str) and text):
        raise refuse("has a prompt that is not a text, or an empty one")
    if tokens is not None and not _are_ids(tokens):
        raise refuse("has token ids that are not a list of numbers from 0 on")
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise refuse("has a max_tokens that is not a positive number")
    return Prompt(number, text, tokens, most)


def _are_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value)
    )
