"""kvtxn as users install it: beside torch alone, with each extra, editable, from the source."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cached_property
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from building import ROOT, build_sdist, build_wheel, copy_sources, environment, install, needed
from kvtxn.benchmarks.command import SUITES
from test_dependencies import PROJECT

README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
#: Beside each suite without arguments: these are short enough to be carried out.
ARGUMENTS = {
    "host": ["--layers", "1", "--requests", "1", "--windows", "2"],
    "report": ["nothing.json"],
}
#: A sentence on what is missing, and the line that mends it.
REMEDY = re.compile(
    r"needs [\w, -]+, which (?:is|are) not installed: pip install 'kvtxn\[([\w,]+)\]'"
)


COMMANDS = [["--help"], ["doctor", "--json"], ["bench", "--help"], ["completion", "bash"]]
COMMANDS += [[name, *more] for name in ("audit", "demo", "trace") for more in ([], ["--help"])]
COMMANDS += [["bench", suite, *ARGUMENTS.get(suite, [])] for suite in SUITES]
COMMANDS += [["bench", suite, "--help"] for suite in SUITES]
#: All commands, as the package declares them.
KVTXN = PROJECT["entry-points"]["kvtxn.commands"]
FIRST = ["-c", next(code for code in README if "manager.window" in code)]
#: Extras that bring a single package, and no benchmark or engine with all that it needs.
NARROW = {"numba", "transformers"}
#: A module that an extra is for, and that nothing else brings. The extra "vllm" is an engine of
#: some gigabytes, and "dev" is for the sources: ``test_dependencies`` compares what they ask for
#: with the imports.
IMPORTS = {
    "": "kvtxn.backends.torch_executor",
    "numba": "kvtxn.backends.audit_numba",
    "triton": "kvtxn.backends.triton_executor",
    "transformers": "kvtxn.integrations.transformers_cache",
    "testing": "kvtxn.testing",
    "completion": "shtab",
    "doctor": "kvtxn.running_server",
    "bench": "kvtxn.benchmarks.common.markdown, tabulate",
}


class Installed:
    """An environment for kvtxn with all that an extra asks for, and nothing else."""

    def __init__(self, folder: Path, wheel: Path, extra: str = "") -> None:
        self.extra, self.folder, self.packages = extra, folder, needed(wheel, extra)
        self.python = environment(folder, self.packages)

    def run(self, *command: str | Path) -> str:
        """Run a command of this environment, without GPUs; returns what it prints."""
        bare = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [self.python.with_name(str(command[0])), *command[1:]],
            cwd=self.folder,
            env=bare,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @cached_property
    def ended(self) -> dict[str, dict[str, Any]]:
        """Exit code, output and imports of each command."""
        commands = [*COMMANDS, FIRST, ["-c", f"import {IMPORTS[self.extra]}"]]
        child = Path(__file__).with_name("installed_commands.py")
        found = json.loads(self.run("python", "-I", child, json.dumps(commands)))
        return {" ".join(words): ended for words, ended in zip(commands, found, strict=True)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module", params=IMPORTS, ids=lambda extra: extra or "torch alone")
def installed(request, wheel, tmp_path_factory):
    """The wheel, with one extra each."""
    folder = tmp_path_factory.mktemp("environment") / "here"
    try:
        found = Installed(folder, wheel, request.param)
    except PackageNotFoundError as error:
        pytest.skip(f"a package that the extra {request.param} asks for is not here: {error}")
    install(found.python, f"kvtxn{f'[{request.param}]' if request.param else ''} @ file://{wheel}")
    return found


def test_help_the_doctor_and_the_first_example(installed):
    """They work with torch alone as with any extra."""
    listed = installed.ended["--help"]["printed"]
    assert all(f"  {name} " in listed for name in KVTXN)
    report = json.loads(installed.ended["doctor --json"]["printed"])
    assert report["auto"]["cpu"]["policy"] == "deferred"
    lacking = "vllm is not installed; pip install 'kvtxn[vllm]' brings it"
    assert report["vllm"] == {"unavailable": lacking}
    triton = next(row for row in report["backends"] if row["name"] == "triton")
    # The builds of torch for CUDA bring Triton along.
    mended = "cannot be imported: No module named 'triton'; pip install 'kvtxn[triton]' brings it"
    assert (mended in triton["why_not"]) == ("triton" not in installed.packages)
    assert ("cannot be imported" in triton["why_not"]) == ("triton" not in installed.packages)
    assert installed.ended[" ".join(FIRST)] | {"imported": []} == {
        "code": 0, "printed": "1\n", "imported": [],
    }  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_each_command_comes_to_its_first_sentence(installed, words):
    """It runs, says that it needs a GPU, or names what is missing and the extra that brings it."""
    ended = installed.ended[" ".join(words)]
    printed = ended["printed"]
    missing = REMEDY.search(" ".join(printed.split()))
    assert "Traceback" not in printed
    if words == ["--help"]:
        assert ended["code"] == 0
    elif missing:
        extras = {*missing[1].split(",")}
        assert (ended["code"], installed.extra in extras) == (2, False)
        assert extras.isdisjoint(NARROW)
    elif words == ["bench", "report", "nothing.json"]:
        assert "nothing.json" in printed
        assert ended["code"] == 2
    elif "--help" in words:
        assert printed.startswith(f"usage: kvtxn {' '.join(words[:-1])} ")
        assert ended["code"] == 0
    else:
        no_gpu = re.search("^the .* needs? a CUDA device", printed) is not None
        assert (ended["code"], no_gpu) in ((0, False), (2, True)), printed


def test_what_an_extra_is_for_is_in_it(installed):
    """Its module can be imported."""
    ended = installed.ended[f"-c import {IMPORTS[installed.extra]}"]
    assert ended["code"] == 0, ended["printed"]


def test_a_command_imports_no_other(installed):
    """Neither a command, nor a suite of `kvtxn bench`."""
    own = {
        "audit": "kvtxn.integrations.audit_command.command",
        "demo": "kvtxn.integrations.demo.command",
        "bench --help": "kvtxn.benchmarks.",
        "doctor --json": "kvtxn.doctor",
    }
    for words in own:
        imported = installed.ended[words]["imported"]
        assert imported
        for other in set(own) - {words}:
            assert not [module for module in imported if module.startswith(own[other])]
    suites = {f"kvtxn.benchmarks.{module}": name for name, (module, _) in SUITES.items()}
    for words in COMMANDS:
        if words[0] == "bench":
            imported = suites.keys() & set(installed.ended[" ".join(words)]["imported"])
            written_again = "report"  # renders the files of `bench vllm`, by the same module
            assert {suites[module] for module in imported} <= {words[1], written_again}


@pytest.mark.parametrize("how", ["editable", "source distribution"])
def test_other_ways_to_install(tmp_path, wheel, how):
    """They come to the same as the wheel; here the command itself runs, not its function."""
    installed = Installed(tmp_path / "here", wheel)
    if how == "editable":
        (tmp_path / "copy").mkdir()
        copy_sources(tmp_path / "copy")
        install(installed.python, "--editable", str(tmp_path / "copy"))
    else:
        (tmp_path / "made").mkdir()
        install(installed.python, str(build_sdist(tmp_path / "made")))
    assert "doctor" in installed.run("kvtxn", "--help")
    assert "auto      on cpu" in installed.run("kvtxn", "doctor")
    assert installed.run("python", "-I", *FIRST).strip() == "1"
