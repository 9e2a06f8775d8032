"""The completion script, read by a real bash: what a press of the key offers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from kvtxn import cli
from kvtxn.cli import main

pytest.importorskip("shtab")
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")

#: Prints what the script offers for the words of a command line, one a line.
PRESS = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
PATH=
_shtab_kvtxn
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script that a user's shell reads."""
    path = tmp_path_factory.mktemp("completion") / "kvtxn.bash"
    command = [sys.executable, "-m", "kvtxn", "completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    path.write_text(done.stdout)
    return path


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["kvtxn", ""], {"audit", "bench", "completion", "demo", "doctor", "trace"}),
        (["kvtxn", "--log-level", ""], {"debug", "info", "warning", "error"}),
        (["kvtxn", "do"], {"doctor"}),
        (["kvtxn", "completion", "b"], {"bash"}),
        (["kvtxn", "doctor", "--j"], {"--json"}),
        (["kvtxn", "bench", "ho"], {"host"}),
        (["kvtxn", "trace", "--policy", ""], {"off", "undo", "deferred"}),
    ],
)
def test_what_a_press_of_the_key_offers(script, words, offered):
    """Without any program: the shell finds none here."""
    if words[1] == "trace":
        pytest.importorskip("rich")
    done = subprocess.run(
        ["bash", "-c", PRESS, "bash", script, *words], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert set(done.stdout.split()) >= offered
    assert not set(done.stdout.split()) - offered - {"-h", "--help"}


@pytest.mark.parametrize("shell", ["zsh", "tcsh", "fish", "powershell"])
def test_every_shell_gets_a_script(capsys, shell):
    """With the name of each command in it."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in cli.commands())


def test_a_command_that_cannot_be_imported_keeps_its_name(monkeypatch, capsys):
    """What it needs is missing here; the others are whole."""
    broken = EntryPoint("audit", "no_such_package.command", cli.GROUP)
    found = cli.commands() | {"audit": broken}
    monkeypatch.setattr("kvtxn.completion.commands", lambda: found)
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert "_subparsers=(audit " in script
    assert "_audit_option_strings=(-h --help)" in script
    assert "_trace___policy_choices" in script
