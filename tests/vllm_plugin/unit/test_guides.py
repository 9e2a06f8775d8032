"""The guides' programs over vLLM run, with the model that comes with kvtxn."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engine_jobs import ENVIRONMENT, missing
from kvtxn.integrations.demo.engine import MODEL

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

DOCS = Path(__file__).parents[3] / "docs"
#: Runs each program of a JSON list in a process of its own, forked after the import of vLLM.
ALL = """
import json, os, sys, vllm
for code in json.loads(sys.stdin.read()):
    if not (child := os.fork()):
        exec(code, {"__name__": "program"})
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(code)
"""


def programs() -> list[str]:
    """Find the blocks in ``python`` that start an engine."""
    blocks = [
        code
        for page in sorted(DOCS.glob("*.md"))
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    return [code.replace("path/to/model", str(MODEL)) for code in blocks if "from vllm" in code]


def test_programs_run(tmp_path):
    """None fails, and a loop that trains hears of old rows."""
    texts = programs()
    assert len(texts) == 3
    done = subprocess.run(
        [sys.executable, "-c", ALL],
        input=json.dumps(texts),
        env=os.environ | ENVIRONMENT | {"NUMBA_DISABLE_JIT": "1"},  # to compile takes longer
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "kvtxn.active" in done.stdout + done.stderr
    assert "[[]]" in done.stdout.splitlines()
    stale = re.search(r"'kvtxn_audit_rows_read_by_age_1': (\d+)", done.stdout)
    assert stale is not None
    assert int(stale[1]) > 0
