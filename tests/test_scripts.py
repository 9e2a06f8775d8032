"""Scripts among the tests find their modules when they are started by hand, from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
#: Started by another test alone, which gives the process its paths.
CHILDREN = {"vllm_plugin/serve/api_server.py"}
SCRIPTS = sorted(
    path.relative_to(TESTS).as_posix()
    for path in TESTS.rglob("*.py")
    if '\nif __name__ == "__main__":' in path.read_text()
    and path.relative_to(TESTS).as_posix() not in CHILDREN
)

#: Imports a script as ``python SCRIPT`` does, and does not run it.
START = """
import runpy, sys
from pathlib import Path
script = Path(sys.argv[1])
sys.path[0] = str(script.parent)
runpy.run_path(str(script), run_name="imported")
"""


def start(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Import a script from another folder, without the paths that pytest has."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", START, str(script)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_by_hand(name, tmp_path):
    ended = start(TESTS / name, tmp_path)
    assert ended.returncode == 0, ended.stderr[-1000:]


def test_a_script_that_lacks_a_module_is_noticed(tmp_path):
    script = tmp_path / "lost.py"
    script.write_text("import folders\n")
    assert "No module named 'folders'" in start(script, tmp_path).stderr
