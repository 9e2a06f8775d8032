"""Files of ``kvtxn bench vllm``: Markdown of whole and of cut results."""

from __future__ import annotations

import argparse
import contextlib
import json

import pytest
from kvtxn.benchmarks.engines import command as vllm_bench
from kvtxn.benchmarks.engines import files as vllm_files
from kvtxn.benchmarks.engines.audits import complaints
from kvtxn.benchmarks.engines.process import EngineError
from pages import narrow
from pretended_engines import Pretender

from kvtxn.cli import main


class Failing(Pretender):
    """An engine that ends in the second cell."""

    def run(self, work):
        if len(self.works) == 2:
            raise self.failure
        return super().run(work)


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (
            EngineError("bench vllm", "the engine 'stock' ended\nin flames"),
            "the engine 'stock' ended",
        ),
        (SystemExit(143), "the run ended with SystemExit"),
    ],
)
def test_cells_are_kept_when_an_engine_fails(failure, says, monkeypatch, tmp_path, log):
    """Markdown and JSON of what was measured, with what was not and why; the error goes on."""
    engine = Failing("stock", 1.0, log)
    engine.failure = failure
    monkeypatch.setattr(vllm_bench, "running", lambda _: contextlib.nullcontext([engine]))
    parser = argparse.ArgumentParser()
    vllm_bench.add_arguments(parser)
    given = ["--policies", "stock", "--requests", "1", "3", "--rounds", "1", "--output", "cut"]
    args = parser.parse_args([*given, "--folder", str(tmp_path)])
    with pytest.raises(type(failure)):
        vllm_bench.run(args)
    found = json.loads((tmp_path / "cut.json").read_text())
    assert [cell["requests"] for cell in found["cells"]] == [1]
    text = narrow((tmp_path / "cut.md").read_text())
    assert f"({says}):" in text
    assert "- short, 64 tokens of context, 3 requests, real acceptance" in text
    assert "| short | 64 | 1 | real |" in text


@pytest.mark.parametrize("wrong", [0, 7])
def test_violations_are_said(wrong, monkeypatch, tmp_path, log, capsys):
    """In the file, and on the terminal with exit code 1; every cell is measured all the same."""
    engines = [Pretender(policy, 1.0, log) for policy in ("stock", "ledger")]
    engines[1].wrong = wrong
    monkeypatch.setattr(vllm_bench, "running", lambda _: contextlib.nullcontext(engines))
    monkeypatch.setattr(vllm_bench, "Engine", Pretender)
    parser = argparse.ArgumentParser()
    vllm_bench.add_arguments(parser)
    given = ["--policies", "stock", "ledger", "--requests", "1", "3", "--rounds", "1"]
    args = parser.parse_args([*given, "--output", "audited", "--folder", str(tmp_path)])
    assert vllm_bench.run(args) == (1 if wrong else 0)
    cells = json.loads((tmp_path / "audited.json").read_text())["cells"]
    # 20 steps a cell; each rank reads ten rows a step.
    assert [cell["engines"]["ledger"]["audit"]["rows"] for cell in cells] == [400, 400]
    assert [cell["engines"]["ledger"]["audit"]["violations"] for cell in cells] == [wrong, 0]
    said = capsys.readouterr().err
    text = narrow((tmp_path / "audited.md").read_text())
    count = f"**{wrong}**: foreign {wrong}" if wrong else "0"
    assert f"| short | 64 | 1 | real | ledger | 40 | 400 | 0 | {count} | 0 |" in text
    assert "| ledger | 0 | 100 | 100 | 80 | 16 | 0 | 4 |" in text
    assert f"400 rows read, {wrong} wrong" in said
    problem = f"ledger, short, context 64, requests 1: {wrong} violations (foreign {wrong}); "
    problem += "the first: "
    problem += "rank 1, kind foreign, request 7, slot 33"
    assert (f"kvtxn bench: the audit found: {problem}" in said) == bool(wrong)
    assert (f"- **The audit found:** {problem}" in text) == bool(wrong)


def test_requests_that_were_not_judged_are_said(cell):
    """Nobody knows whether their rows were right."""
    audit = {"violations": 0, "kinds": {}, "first": [], "unjudged": 3}
    cell["engines"]["ledger"] = cell["engines"].pop("undo") | {"audit": audit}
    said = "ledger, short, context 8, requests 2: 3 requests were not judged"
    assert complaints([cell]) == [said]


def test_report_makes_markdown_again(result, tmp_path, capsys):
    """From the JSON alone."""
    path = vllm_files.write(tmp_path, "again", result)
    assert main(["bench", "report", str(path)]) == 0
    assert capsys.readouterr().out.split() == [
        str(path.with_suffix(suffix)) for suffix in (".json", ".md")
    ]
    assert not list(tmp_path.glob("*.part"))


def test_report_refuses_other_files(tmp_path, capsys):
    """A result of another kind, and no file at all."""
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"rows": []}))
    for path in (other, tmp_path / "nothing.json"):
        assert main(["bench", "report", str(path)]) == 2
        said = " ".join(capsys.readouterr().err.split())  # lines end where the path's length says
        assert "is not a result of `kvtxn bench vllm`" in said
