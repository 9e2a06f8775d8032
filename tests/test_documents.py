"""The documents' code runs, and what is generated in them is current."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import attrs
import forked_programs
import pytest
from kvtxn.benchmarks import documents as tables
from kvtxn.integrations.vllm_plugin.policy.settings import PluginSettings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
#: The pages of the site, by their paths in the repository.
PAGES = [
    Path(name)
    for name in re.findall(r"^ +- (?:.+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
]
#: The pages whose code runs.
GUIDES = [path for path in PAGES if path.parent.name == "docs" or path.name == "README.md"]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


PYTHON = [
    pytest.param(code, id=f"{path}-{number}")
    for path in GUIDES
    for number, code in enumerate(blocks(path, "python"))
    if "from vllm" not in code
]


@pytest.fixture(autouse=True)
def _results_of_this_tree(monkeypatch):
    """An installed package has no results beside it."""
    monkeypatch.setattr(tables, "RESULTS", ROOT / "benchmarks" / "results")


def test_generated_parts_are_current():
    """`python -m kvtxn.benchmarks.documents` changes nothing; every part stands in one document."""
    texts = [(ROOT / path).read_text() for path in tables.DOCUMENTS]
    for text in texts:
        assert tables.fill(text) == text
    for name in tables.SECTIONS:
        assert sum(text.count(f"<!-- {name} -->") for text in texts) == 1


#: A link to a file of this repo, and to which heading.
LINK = re.compile(r"\]\(([^)#:]+)(?:#([^)]+))?\)")


def places(path: Path) -> set[str]:
    """The places that links can name in a document: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    """Those to files of this repo, and to headings in them."""
    for document in PAGES:
        for target, place in LINK.findall((ROOT / document).read_text()):
            path = (ROOT / document).parent / target
            assert path.exists(), f"{document}: {target}"
            if place:
                assert place in places(path), f"{document}: {target}#{place}"


def test_a_stale_part_is_noticed():
    """The test above can fail."""
    assert tables.fill(README.replace("| STAGED |", "| READY |")) == README


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How each block without a test ended, by itself."""
    programs = {}
    for (code,) in (each.values for each in PYTHON if "pytest" not in each.values[0]):
        programs[code] = tmp_path_factory.mktemp("block") / "block.py"
        programs[code].write_text(code)
    variables = os.environ | {"NUMBA_DISABLE_JIT": "1"}  # compiled, the ledger takes half a minute
    found = forked_programs.run([*programs.values()], variables)
    return {code: found[path] for code, path in programs.items()}


@pytest.mark.parametrize("code", PYTHON)
def test_python_blocks_run(code, ended, tmp_path):
    """Each block by itself, the kit's block under pytest."""
    if code in ended:
        assert ended[code]["code"] == 0, ended[code]["printed"]
        return
    (tmp_path / "test_block.py").write_text(code)
    some = ["-m", "pytest", "-q", "-x", "-k", "abort_at_any_point"]  # the kit has tests of its own
    command = [sys.executable, *some, "test_block.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_guides_executor_passes_the_kit(tmp_path):
    """In the tests with failures, some of which this executor cannot have."""
    text = blocks(Path("docs/executor.md"), "python")
    (mine,) = (code for code in text if "class Mine" in code)
    (kit,) = (code for code in text if "ExecutorConformance" in code)
    assert '"torch"' in kit
    (tmp_path / "mine.py").write_text(mine)
    (tmp_path / "test_mine.py").write_text(kit.replace('"torch"', "__import__('mine').Mine"))
    some = "whole_states or cannot_take_back"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", some, "test_mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_first_window_is_at_most_fifteen_lines():
    example = next(code for code in blocks(Path("README.md"), "python") if "manager.window" in code)
    assert len([line for line in example.splitlines() if line.strip()]) <= 15


def test_make_targets_exist():
    """Every `make X` of the shell blocks and of the text."""
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join((ROOT / path).read_text() for path in PAGES)
    for target in set(re.findall(r"(?:`|^)make (\w[\w-]*)", text, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    shell = "".join(blocks(Path("README.md"), "bash"))
    assert "make demo" in shell
    assert "make test" in shell


def commands():
    """Find the commands `kvtxn ...` of all shell blocks: lines that go on are one."""
    for path in GUIDES:
        for block in (code for kind in ("bash", "sh") for code in blocks(path, kind)):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0] == "kvtxn":
                    yield pytest.param(words[1:], id=" ".join(words))


@pytest.mark.parametrize("words", [*commands()])
def test_commands_take_these_arguments(words):
    """A command parses each line of a shell block; it does not run."""
    command = entry_points(group="kvtxn.commands")[words[0]].load()
    if hasattr(command, "SUITES"):
        module, _ = command.SUITES[words[1]]
        command, words = import_module(f"kvtxn.benchmarks.{module}"), words[1:]
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    _, unknown = parser.parse_known_args(words[1:])
    assert unknown == []


def test_folders_exist():
    """The table of folders names what is there."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    folders = re.findall(r"^\| `([\w/]+)/` \|", text, re.MULTILINE)
    assert len(folders) > 5
    for folder in folders:
        assert (ROOT / folder).is_dir()


def test_every_setting_of_the_plug_in_is_named():
    """The page of settings lists the keys of ``additional_config={"kvtxn": {...}}``."""
    derived = {"txn", "windows"}
    keys = {field.name for field in attrs.fields(PluginSettings)} - derived
    text = (ROOT / "docs/vllm-settings.md").read_text()
    listed = next(part for part in re.split(r"\n\n|\n- ", text) if "of `TxnConfig`, " in part)
    assert keys <= set(re.findall(r"`(\w+)`", listed))


def test_every_event_of_the_log_is_named():
    """The page of settings names every event that kvtxn writes above debug level to vLLM's log."""
    texts = [
        path.read_text()
        for folder in ("kvtxn", "backends", "integrations/serving", "integrations/vllm_plugin")
        for path in (ROOT / folder).rglob("*.py")
    ]
    named = r'"((?:kvtxn|window|hook|manager)\.[a-z_]+)"'
    events = {
        event
        for text in texts
        for quiet, event in re.findall(rf"(debug\(\s*)?{named}", text)
        if not quiet
    }
    groups = re.findall(r'entry-points\."?([\w.]+)', (ROOT / "pyproject.toml").read_text())
    page = (ROOT / "docs/vllm-settings.md").read_text()
    assert events - set(groups) - set(re.findall(r"`([\w.]+)`", page)) == set()
