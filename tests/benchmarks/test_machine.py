"""A result says which sources it was made with."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import torch
from kvtxn.benchmarks.common import machine


@pytest.fixture
def elsewhere(tmp_path):
    """A folder outside of any repository, as an installed package is."""
    folder = tmp_path / "kvtxn" / "benchmarks"
    folder.mkdir(parents=True)
    return folder


def test_commit_from_git():
    """The commit is that of the checkout that tracks this very file; changes are said."""
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


def test_a_result_that_grows_is_no_change_of_the_sources(elsewhere):
    """A suite adds pieces to a file that git tracks; another change is said."""
    root, (sources, results) = (
        elsewhere.parent.parent,
        [elsewhere / "common", elsewhere / "results"],
    )
    author = ["-c", "user.name=A", "-c", "user.email=a@b"]
    for path in (sources / "machine.py", results / "soak.json"):
        path.parent.mkdir()
        path.write_text("1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-C", str(root), *author, *command], check=True)
    (results / "soak.json").write_text("2\n")
    assert len(machine.commit_of(sources)) == 12
    (sources / "machine.py").write_text("2\n")
    assert machine.commit_of(sources).endswith("+changes")


@pytest.mark.parametrize("above", [0, 1, 2])
def test_commit_from_a_file(elsewhere, above):
    """Beside the sources, or in the package's folder, or in that of a checkout."""
    folder = (elsewhere, *elsewhere.parents)[above]
    (folder / "COMMIT").write_text("0123456789abcdef0123\n")
    assert machine.commit_of(elsewhere) == "0123456789ab"


def test_no_commit_of_somebody_elses_repository(elsewhere):
    """Installed into a folder of another project, its commit says nothing about kvtxn."""
    root = elsewhere.parent.parent
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        author = ["-c", "user.name=A", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(root), *author, *command], check=True)
    assert machine.commit_of(elsewhere) == "unknown"


class Nvml(ModuleType):
    """Stands for pynvml on a machine with a GPU."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self):
        super().__init__("pynvml")
        self.calls = []
        self.nvmlInit = lambda: self.calls.append("init")
        self.nvmlShutdown = lambda: self.calls.append("shutdown")
        self.nvmlSystemGetDriverVersion = lambda: "580.1"
        self.nvmlDeviceGetHandleByIndex = lambda number: ("gpu", number)
        self.nvmlDeviceGetClockInfo = lambda gpu, kind: 345 + kind
        self.nvmlDeviceGetMaxClockInfo = lambda gpu, kind: 1979 + kind
        self.nvmlDeviceGetTemperature = lambda gpu, kind: 33 + kind
        self.nvmlDeviceGetPowerUsage = lambda gpu: 76_540
        self.nvmlDeviceGetEnforcedPowerLimit = lambda gpu: 700_000


def test_state_of_the_gpu(monkeypatch):
    """Clock and its limit, temperature, power and its limit; as nvidia-smi wrote them."""
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert machine.gpu_state() == "346 MHz, 1980 MHz, 33, 76.54 W, 700.00 W"
    assert nvml.calls == ["init", "shutdown"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    facts = machine.describe()
    assert (facts["gpu"], facts["driver"]) == ("a GPU", "580.1")


@pytest.mark.parametrize("installed", [False, True])
def test_a_machine_without_a_gpu_or_the_libraries(monkeypatch, installed):
    """Nothing is said of a GPU, and the processor is named as well as Python can."""
    broken = Nvml()
    monkeypatch.setattr(broken, "nvmlInit", lambda: 1 / 0)
    monkeypatch.setitem(sys.modules, "pynvml", broken if installed else None)
    assert machine.gpu_state() is None
    if not installed:
        monkeypatch.setitem(sys.modules, "cpuinfo", None)
    assert machine.describe()["processor"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert machine.describe()["driver"] == "unknown"


def test_the_command_without_its_folder(monkeypatch):
    """The command that was run, but not the folder of its results."""
    monkeypatch.setattr("sys.argv", ["kvtxn", "bench", "vllm", "--folder", "/x y", "--rounds", "6"])
    assert machine.describe()["command"] == "kvtxn bench vllm --rounds 6"


def test_what_is_saved_goes_there(monkeypatch, tmp_path):
    """In a checkout to the others; an installed package is nobody's place to write to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "RESULTS", tmp_path / "package" / "results")
    assert machine.write("mine", {"rows": []}) == machine.Path("mine.json")
    machine.RESULTS.mkdir(parents=True)
    assert machine.write("mine", {"rows": []}) == machine.RESULTS / "mine.json"
    for path in (tmp_path / "mine.json", machine.RESULTS / "mine.json"):
        assert '"rows": []' in path.read_text()


@pytest.mark.parametrize(
    "words", [["--engine-args", "{}"], ["--engine-args={}"], ["--engine", "{}"]]
)
def test_the_command_has_no_secret(monkeypatch, words):
    """Of engine arguments that may be secret it has the names alone."""
    given = [word.replace("{}", '{"hf_token": "s3cret", "seed": 1}') for word in words]
    monkeypatch.setattr("sys.argv", ["kvtxn", "bench", "soak", *given, "--seed", "2"])
    shown = """kvtxn bench soak --seed 2 --engine-args '{"hf_token": "...", "seed": 1}'"""
    assert machine.describe()["command"] == shown
