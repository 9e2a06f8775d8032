"""Run commands of kvtxn, or programs, and tell how each ended; a child process of the tests.

python -I installed_commands.py '[["doctor"], ["bench", "host"], ["-c", "import kvtxn"]]'

As ``python`` does, ``-c`` runs the code that follows. Each command has a fork of this process to
itself, so that torch is imported once.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from typing import Any

import torch  # noqa: F401  # once, and before what a command prints: without numpy it warns

from kvtxn import cli


def outcome(words: list[str]) -> dict[str, Any]:
    """Run one command; returns its exit code, what it printed, and what it imported."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as imported:
        child = os.fork()
        if child == 0:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            before, code = set(sys.modules), 1
            try:
                if words[0] == "-c":
                    exec(words[1], {"__name__": "__main__"})
                    code = 0
                else:
                    code = cli.main(words)
            except SystemExit as ended:
                code = int(ended.code or 0)
            except BaseException:
                traceback.print_exc()
            json.dump(sorted(set(sys.modules) - before), imported)
            for stream in (sys.stdout, sys.stderr, imported):
                stream.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed.seek(0)
        imported.seek(0)
        return {"code": code, "printed": printed.read(), "imported": json.load(imported)}


if __name__ == "__main__":
    found = [outcome(words) for words in json.loads(sys.argv[1])]
    print(json.dumps(found))
