"""Scripts among the tests find their modules when they are started by hand, from any folder."""

from __future__ import annotations

import os
from pathlib import Path

import forked_programs
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


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """How each script ended: imported from another folder, without the paths that pytest has."""
    folder = tmp_path_factory.mktemp("elsewhere")
    lost = folder / "lost.py"
    lost.write_text("import folders\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    scripts = [TESTS / name for name in SCRIPTS]
    return forked_programs.run([*scripts, lost], environment, folder, "imported")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_by_hand(name, started):
    ended = started[TESTS / name]
    assert ended["code"] == 0, ended["printed"][-1000:]


def test_a_script_that_lacks_a_module_is_noticed(started):
    (lost,) = (ended for script, ended in started.items() if script.name == "lost.py")
    assert "No module named 'folders'" in lost["printed"]
