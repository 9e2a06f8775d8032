"""The README's code runs, and what is generated in it is current."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from kvtxn.benchmarks import tables

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = "".join(code for language, code in BLOCKS if language == "bash")


@pytest.fixture(autouse=True)
def _results_of_this_tree(monkeypatch):
    """An installed package has no results beside it."""
    monkeypatch.setattr(tables, "RESULTS", ROOT / "benchmarks" / "results")


def test_generated_parts_are_current():
    """`python -m kvtxn.benchmarks.tables` changes nothing; every part stands in one document."""
    texts = [(ROOT / path).read_text() for path in tables.DOCUMENTS]
    for text in texts:
        assert tables.fill(text) == text
    for name in tables.SECTIONS:
        assert sum(text.count(f"<!-- {name} -->") for text in texts) == 1


def test_links_lead_somewhere():
    """Those to files of this repo."""
    for document in tables.DOCUMENTS:
        path = ROOT / document
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{document}: {target}"


def test_a_stale_part_is_noticed():
    """The test above can fail."""
    assert tables.fill(README.replace("| STAGED |", "| READY |")) == README


@pytest.mark.parametrize("code", [c for c in PYTHON if "from vllm" not in c])
def test_python_blocks_run(code, tmp_path):
    """Each block by itself, the kit's block under pytest."""
    path = tmp_path / "test_block.py"
    path.write_text(code)
    command = ["-m", "pytest", "-q", "-x", "-k", "abort"] if "pytest" in code else []
    done = subprocess.run(
        [sys.executable, *command, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_example_is_fifteen_lines():
    """As the heading says."""
    example = next(code for code in PYTHON if "manager.window" in code)
    assert len([line for line in example.splitlines() if line.strip()]) <= 15


def test_make_targets_exist():
    """Every `make X` of the shell blocks and of the text."""
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^)make (\w+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make demo" in SHELL
    assert "make test" in SHELL


def test_folders_exist():
    """The table of folders names what is there."""
    for folder in re.findall(r"^\| `([\w/]+)/` \|", README, re.MULTILINE):
        assert (ROOT / folder).is_dir()
