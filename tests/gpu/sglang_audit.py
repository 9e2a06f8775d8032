"""``kvtxn audit --engine sglang`` over small engines of SGLang, one after the other.

python tests/gpu/sglang_audit.py OUT [ENGINE ...]

OUT gets ``audits/ENGINE.json``, ``ENGINE.html`` and ``ENGINE.log`` as each audit ends. An audit
that is out of time is interrupted, and says what it found so far.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sglang_engines import add_options, prepare, variables
from sglang_models import ENGINES, arguments

NAMES: Final = ("radix", "eagle", "page16", "mla")
#: Seconds that an interrupted audit has for its verdict.
GRACE: Final = 40


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=", ".join(ENGINES))
    parser.add_argument("--requests", default="120", help="of each audit, at least")
    parser.set_defaults(limit=150, total=520)
    given = parser.parse_args(words)
    given.engines = given.engines or list(NAMES)
    if unknown := {*given.engines} - {*ENGINES}:
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    return given


def command(given: argparse.Namespace, name: str) -> list[str]:
    """Return the command line of an engine's audit."""
    engine = {**arguments(name, given.out / "models"), **given.extra}
    page = given.out / "audits" / f"{name}.html"
    words = ["audit", "--engine", "sglang", "--engine-args", json.dumps(engine)]
    words += ["--workload", "all", "--requests", given.requests, "--html", str(page), "--json"]
    return [sys.executable, "-c", "from kvtxn.cli import main; raise SystemExit(main())", *words]


def audit(given: argparse.Namespace, name: str, limit: float) -> dict[str, Any]:
    """Audit an engine; say what the audit said, and how it ended."""
    out, begun = given.out / "audits" / f"{name}.json", time.time()
    with out.open("w") as file, out.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            command(given, name), stdout=file, stderr=log, env=variables(name, "plain", given.out)
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(GRACE)
        finally:
            process.kill()
    text = out.read_text()
    found = json.loads(text) if text.startswith("{") else {}
    said = {key: found.get(key) for key in ("verdict", "headline", "sentences", "failed")}
    last = out.with_suffix(".log").read_text()[-600:]
    took = round(time.time() - begun, 1)
    return {"engine": name, "exit": process.returncode, "took": took, **said, "last": last}


def main() -> None:
    """Run the audits, and print a line for each."""
    given = parsed()
    prepare(given)
    Path(given.out / "audits").mkdir(exist_ok=True)
    deadline = time.time() + given.total
    for name in given.engines:
        left = min(given.limit, deadline - time.time() - GRACE)
        if left > 0:
            print(json.dumps(audit(given, name, left)), flush=True)


if __name__ == "__main__":
    main()
