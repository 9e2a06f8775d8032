"""Contents of the wheel and of the source distribution; imports stay light."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from building import ROOT, build_sdist, build_wheel, sources
from folders import SHARED


def python(code: str, cwd: Path) -> str:
    """Run code in a fresh interpreter; returns its output."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel")))


def test_wheel_holds_every_source_file_and_nothing_else(wheel):
    """backends/, benchmarks/ and integrations/ are inside kvtxn/."""
    names = {n for n in wheel.namelist() if ".dist-info/" not in n}
    assert all(name.startswith("kvtxn/") for name in names)
    expected = set()
    for path in sources():
        inside = path.relative_to(ROOT).as_posix()
        expected.add(inside if inside.startswith("kvtxn/") else f"kvtxn/{inside}")
    assert {n for n in names if n.endswith(".py")} == expected
    assert "kvtxn/py.typed" in names
    assert not any(name.endswith(".nbc") for name in names)


#: Files that an installed package reads: the demo's model, the audit's page, and measurements.
DATA = [
    "integrations/demo/model/model.safetensors",
    "integrations/demo/prompts.json",
    *(f"integrations/vllm_plugin/policy/{name}.json" for name in ("measured", "releases")),
    *(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "integrations" / "audit_command" / "assets").iterdir()
    ),
]


def test_wheel_holds_data_and_no_documents(wheel):
    """Documents, results and the demo's corpus are for those who have the repository."""
    assert {f"kvtxn/{name}" for name in DATA} <= set(wheel.namelist())
    for name in DATA:
        assert wheel.read(f"kvtxn/{name}") == (ROOT / name).read_bytes()
    model = [i for i in wheel.infolist() if i.filename.startswith("kvtxn/integrations/demo/model/")]
    assert sum(i.file_size for i in model) < 6 * 2**20
    assert not any(
        "corpus" in name or "results" in name or name.endswith(".md") for name in wheel.namelist()
    )


def test_the_source_distribution_is_whole(tmp_path):
    """It holds every source file, data file and test, so that a distributor can build and test."""
    results = ROOT / "benchmarks" / "results"
    with tarfile.open(build_sdist(tmp_path)) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    expected = {path.relative_to(ROOT).as_posix() for path in sources()}
    expected |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    expected |= {*DATA} | {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    expected |= {"README.md", "benchmarks/README.md", "mkdocs.yml"}
    expected |= {f"benchmarks/results/{path.name}" for path in results.glob("*.json")}
    assert expected <= names
    assert not any(name.endswith((".pyc", ".nbc", ".gz")) for name in names)


def test_entry_points_are_declared(wheel):
    """Commands, backends, reports and the vLLM plug-in are found by name."""
    (name,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    text = wheel.read(name).decode()
    for line in (
        "kvtxn = kvtxn.cli:main",
        "kvtxn = kvtxn.integrations.vllm_plugin:register",
        "torch = kvtxn.backends.torch_executor:TorchExecutor",
        "doctor = kvtxn.doctor",
    ):
        assert line in text


def test_importing_the_library_is_light(tmp_path):
    """No engine, no kernels, no compiler, no test tools."""
    heavy = "{'vllm', 'triton', 'torch._dynamo', 'pytest', 'hypothesis', 'transformers'}"
    code = f"import kvtxn, kvtxn.cli, sys; print(sorted({heavy} & set(sys.modules)))"
    assert python(code, tmp_path).strip() == "[]"


def test_top_level_folders_are_no_second_copy():
    """`import backends.x` fails at once instead of making another module."""
    out = python("import backends.torch_executor", ROOT)
    assert "attempted relative import beyond top-level package" in out


def test_no_stale_metadata_hides_entry_points():
    """An egg-info folder in the root would shadow the installed entry points there."""
    code = (
        "from importlib.metadata import entry_points as e;"
        "print(len(e(group='vllm.general_plugins', name='kvtxn')), len(e(group='kvtxn.backends')))"
    )
    plugins, backends = map(int, python(code, ROOT).split())
    assert plugins >= 1
    assert backends >= 1


def test_child_processes_of_tests_find_what_pytest_finds():
    """pytest's ``pythonpath`` and the list for child processes are the same, and no package."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    assert settings["ini_options"]["pythonpath"] == SHARED
    assert not list((ROOT / "tests").rglob("__init__.py"))
