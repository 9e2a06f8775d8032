"""A result says which sources it was made with."""

from __future__ import annotations

import subprocess

import pytest
from kvtxn.benchmarks import machine


@pytest.fixture
def elsewhere(tmp_path):
    """A folder outside of any repository, as an installed package is."""
    folder = tmp_path / "kvtxn" / "benchmarks"
    folder.mkdir(parents=True)
    return folder


def test_commit_from_git():
    """Where git tracks this very file; changes are said."""
    found = machine.commit_of()
    expected = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=machine.Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    if not expected:
        pytest.skip("these sources are in no repository")
    assert found.removesuffix("+changes") == expected


@pytest.mark.parametrize("above", [False, True])
def test_commit_from_a_file(elsewhere, above):
    """Beside the sources, or in the package's folder."""
    folder = elsewhere.parent if above else elsewhere
    (folder / "COMMIT").write_text("0123456789abcdef0123\n")
    assert machine.commit_of(elsewhere) == "0123456789ab"


def test_no_commit_of_somebody_elses_repository(elsewhere):
    """Installed into a folder of another project, its commit says nothing about kvtxn."""
    root = elsewhere.parent.parent
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        author = ["-c", "user.name=A", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(root), *author, *command], check=True)
    assert machine.commit_of(elsewhere) == "unknown"


def test_commit_from_the_command_line():
    """What the user says goes."""
    assert machine.describe("feed")["commit"] == "feed"


def test_state_of_the_gpu(monkeypatch, tmp_path):
    """As nvidia-smi says it; nothing where there is none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpu_state() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 1980 MHz\necho another GPU\n")
    tool.chmod(0o755)
    assert machine.gpu_state() == "1980 MHz"


def test_where_results_go(monkeypatch, tmp_path):
    """With the others in a checkout; an installed package has none, so not into its folder."""
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    assert machine.results_folder() == tmp_path
    monkeypatch.setattr(machine, "RESULTS", tmp_path / "results")
    assert machine.results_folder() == machine.Path()


def test_the_command_without_its_folder(monkeypatch):
    """What was run, but not where its results went."""
    monkeypatch.setattr("sys.argv", ["kvtxn", "bench", "vllm", "--folder", "/x y", "--rounds", "6"])
    assert machine.describe("abc")["command"] == "kvtxn bench vllm --rounds 6"


def test_what_is_saved_goes_there(monkeypatch, tmp_path):
    """In a checkout to the others; an installed package is nobody's place to write to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "RESULTS", tmp_path / "package" / "results")
    assert machine.write("mine", {"rows": []}) == machine.Path("mine.json")
    machine.RESULTS.mkdir(parents=True)
    assert machine.write("mine", {"rows": []}) == machine.RESULTS / "mine.json"
    for path in (tmp_path / "mine.json", machine.RESULTS / "mine.json"):
        assert '"rows": []' in path.read_text()
