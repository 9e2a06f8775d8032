"""The evidence names its commits, and a release whose product is another one is seen."""

from __future__ import annotations

import json
import subprocess

import evidence_commits
import pytest


def git(root, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    found = subprocess.run(["git", "-C", str(root), *who, *words], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A product of two files, one commit."""
    for name in ("kvtxn/window.py", "integrations/vllm_plugin/policy/measured.json", "docs/a.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def measured(checkout, **results):
    for name, content in results.items():
        path = checkout / "benchmarks" / "results" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))


def test_every_result_is_listed_by_its_commits():
    """Those of this checkout, whatever their commits are."""
    results = evidence_commits.ROOT.glob("benchmarks/results/*.json")
    records = [f"tests/gpu/{name}.json" for name in ("seen", "grid", "grid-0.33.0")]
    names = {f"benchmarks/results/{path.name}" for path in results} | {*records}
    assert {name for each in evidence_commits.commits().values() for name in each} == names


def test_one_commit_and_its_product(checkout, capsys):
    """Texts and what follows from results may change after a measurement."""
    commit = git(checkout, "rev-parse", "--short=12", "HEAD")
    measured(checkout, a={"machine": {"commit": commit}}, b={"pieces": [{"commit": commit}]})
    (checkout / "integrations/vllm_plugin/policy/measured.json").write_text("[]")
    (checkout / "docs" / "a.md").write_text("more")
    assert evidence_commits.main(checkout) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{commit}: benchmarks/results/a.json, benchmarks/results/b.json"
    ]
    (checkout / "kvtxn" / "window.py").write_text("changed")
    assert evidence_commits.main(checkout) == 1
    assert "changed since: kvtxn/window.py" in capsys.readouterr().out


def test_two_commits(checkout, capsys):
    measured(checkout, a={"machine": {"commit": "abc"}}, b=[{"commit": "def"}, {"commit": "abc"}])
    assert evidence_commits.main(checkout) == 1
    assert capsys.readouterr().out.splitlines() == [
        "abc: benchmarks/results/a.json, benchmarks/results/b.json",
        "def: benchmarks/results/b.json",
        "results are of 2 commits, expected one: run `make evidence`",
    ]


def test_a_commit_that_git_does_not_know(checkout):
    with pytest.raises(subprocess.CalledProcessError):
        evidence_commits.changed("0" * 12, checkout)
