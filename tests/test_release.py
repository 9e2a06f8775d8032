"""A release: the same bytes twice, one version everywhere, files that others' tools read."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from building import ROOT

import kvtxn


def hashes(clone: Path, umask: int) -> dict[str, str]:
    """Build the last commit in a clone; returns the SHA-256 of each file by its name."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    for path in clone.glob("*/**/*.py"):
        os.utime(path, (umask, umask))  # no file is as old as in another clone
    command = ["make", "dist", f"PYTHON={sys.executable}"]
    done = subprocess.run(
        command, cwd=clone, capture_output=True, text=True, check=False, umask=umask
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2  # by twine
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (clone / "dist").iterdir()
    }


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout, so there is no last commit")
def test_a_build_has_the_same_bytes_again(tmp_path):
    """In other clones, with other times and permissions of files. Two whole builds take a while."""
    first = hashes(tmp_path / "first", 0o022)
    assert len(first) == 2
    assert hashes(tmp_path / "second", 0o077) == first


@pytest.mark.parametrize(
    ("file", "line"),
    [("CHANGELOG.md", r"^## ([\w.]+)"), ("CITATION.cff", r"^version: ([\w.]+)$")],
)
def test_the_version_is_the_packages(file, line):
    """Where a tool reads it from another file."""
    found = re.search(line, (ROOT / file).read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == kvtxn.__version__


def test_the_version_is_in_no_other_file():
    """Of those that a release is made with."""
    files = ("pyproject.toml", "Makefile", "MANIFEST.in", ".github/workflows/release.yml")
    named = [file for file in files if f"{kvtxn.__version__}\n" in (ROOT / file).read_text()]
    assert named == []


@pytest.mark.parametrize(
    ("schema", "file"),
    [
        ("vendor.github-workflows", ".github/workflows/release.yml"),
        ("vendor.citation-file-format", "CITATION.cff"),
    ],
)
def test_a_file_fits_its_schema(schema, file):
    """As its readers publish it."""
    if not (ROOT / file).exists():
        pytest.skip("a source distribution has no workflows")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, ROOT / file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_workflow_refuses_another_tag(tmp_path):
    """Its own line, with the tag of another version."""
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    found = re.search(r"The tag is the version\n +run: (.*)", workflow)
    assert found is not None
    for tag, code in ((f"v{kvtxn.__version__}", 0), ("v9.9.9", 1), (kvtxn.__version__, 1)):
        done = subprocess.run(
            ["bash", "-c", found[1]], cwd=ROOT, env=os.environ | {"GITHUB_REF_NAME": tag}
        )
        assert done.returncode == code
