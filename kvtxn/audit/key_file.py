"""``key_from_file``: one key for the ledgers of several processes."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Final

from ..errors import ConfigError
from .digest import Key

#: The largest file that is read.
_MOST_BYTES: Final = 4096


def key_from_file(path: str | os.PathLike[str], *, may_write: bool = True) -> Key:
    """Return the key in a file; write a new one there if the file does not exist.

    Of several processes that begin at one time one writes the file, and all have its key. Only the
    user who owns the file can read it. Who has it can build two prompts of one digest.

    Args:
        path: the file, in a folder that exists.
        may_write: False if other machines have the key: each would write another one.

    Raises:
        ConfigError: the file cannot be read or written, or has no key.
    """
    where = Path(path)
    try:
        if may_write and not where.exists():
            _write(where, Key.new())
        with where.open("rb") as file:
            text = file.read(_MOST_BYTES)
    except (OSError, ValueError) as error:  # a path may have a null byte
        raise _invalid(where, str(error)) from error
    try:
        found = json.loads(text)
        return Key(tuple(int(word, 16) for word in found["kvtxn audit key"]))  # type: ignore[arg-type]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _invalid(where, "a file with something else") from error


def _write(path: Path, key: Key) -> None:
    """Write a key into a file that its owner alone can read; leave a file that exists by then."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    content = json.dumps({"kvtxn audit key": [f"{word:016x}" for word in key.words]})
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(content)
        os.link(beside, path)
    except FileExistsError:
        pass
    finally:
        beside.unlink()


def _invalid(path: Path, got: str) -> ConfigError:
    """Return the error of a file that has no key."""
    return ConfigError(
        "key_from_file", f"{path} has no key for an audit",
        expected="a file that key_from_file has written, or none in a folder that exists", got=got,
        hint="name another file, which is then written",
    )  # fmt: skip
