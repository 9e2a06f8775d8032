"""Two checkouts are measured by turns, each by its own code; here they only pretend."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from kvtxn.benchmarks.common import machine
from kvtxn.benchmarks.host import against, engine_step
from kvtxn.integrations.serving.engine_process import EngineError
from pages import narrow

from kvtxn.cli import main
from kvtxn.errors import ConfigError

OLD = """
import kvtxn
def _steps(args, policy):
    assert args.model == "llama3-8b"
    return [policy, 0], 1.0
def _measure(args, steps, requests, *, changing):
    steps[1] += 1
    if requests == 666:
        raise ValueError("no such steps")
    time = requests * (2 if changing else 1) * steps[1]
    return {"begin": time / 4, "commit": 3 * time / 4, "all": float(time), "who": kvtxn.WHO}
"""


@pytest.fixture
def checkout(tmp_path):
    """Makes a checkout with the benchmark where old ones have it."""

    def make(name: str, code: str = OLD):
        root = tmp_path / name
        for folder in ("kvtxn", "backends", "integrations", "benchmarks"):
            (root / folder).mkdir(parents=True)
            (root / folder / "__init__.py").write_text(f"WHO = {len(name)}\n")
        (root / "benchmarks" / "steps.py").write_text(code)
        return root

    return make


def test_an_old_checkout_measures_with_its_own_code(checkout):
    """Its package is found before the installed one, with the parts that lie beside it."""
    with against.processes(checkout("older")) as (_, old):
        where = old.ask({"model": "llama3-8b"}, "while it imported")
        assert where.endswith("/kvtxn/__init__.py")
        found = [old.ask(("undo", 8, changing), "while it measured") for changing in (False, True)]
    assert [each["all"] for each in found] == [8.0, 32.0]
    assert found[0]["who"] == len("older")


def test_failures_are_sentences(checkout, tmp_path):
    """In the other's code, no benchmark in it, and a folder that is no checkout."""
    with against.processes(checkout("older")) as (_, old):
        old.ask({"model": "llama3-8b"}, "while it imported")
        with pytest.raises(EngineError, match="ValueError: no such steps"):
            old.ask(("undo", 666, False), "while it measured")
    other = checkout("without")
    (other / "benchmarks" / "steps.py").unlink()
    with (
        against.processes(other) as (_, old),
        pytest.raises(EngineError, match="this kvtxn has none of"),
    ):
        old.ask({"model": "llama3-8b"}, "while it imported")
    with (
        pytest.raises(ConfigError, match="is not a checkout of kvtxn"),
        against.package_of(tmp_path / "nothing"),
    ):
        pass


class Steps:
    """A process of a known speed, on a machine that slows down with every round."""

    def __init__(self, microseconds, log):
        self.microseconds, self.log, self.rounds = microseconds, log, 0

    def ask(self, asked, when):
        self.rounds += 1
        self.log.append(self.microseconds)
        time = self.microseconds * (1 + self.rounds)
        return {"begin": time / 2, "commit": time / 2, "all": time}


def test_ratios_are_taken_within_rounds_that_alternate():
    """The two go first in turn, a first round does not count, and drift leaves the ratio alone."""
    log: list[float] = []
    turns = against.measured(Steps(9.0, log), Steps(10.0, log), ("undo", 8, True), rounds=6)
    assert len(log) == 14
    assert {tuple(log[i : i + 2]) for i in range(0, 14, 2)} == {(9.0, 10.0), (10.0, 9.0)}
    assert turns.ratios == pytest.approx([0.9] * 6)
    assert [each["all"] for each in turns.new] == [27.0, 36.0, 45.0, 54.0, 63.0, 72.0]


def test_an_interval_is_over_starts_and_not_over_their_rounds(capsys):
    """A start whose processes lie badly in memory is one value, however many rounds it has."""

    def turns(*ratios):
        return against.Turns([{"all": 10 * each} for each in ratios], [{"all": 10.0}] * len(ratios))

    starts = [turns(1.0, 1.0, 1.2), turns(1.1, 1.1, 1.1), turns(0.9, 0.9, 0.7)]
    row = against.row_of(("undo", 8, True), starts)
    assert row["ratios"] == pytest.approx([1.0, 1.1, 0.9])
    assert (row["of_old"]["median"], row["of_old"]["rounds"]) == (pytest.approx(1.0), 3)
    assert (row["all"], row["old"]["all"]) == (10.0, 10.0)
    assert "undo, 8 requests, changing: 10.00 us, old 10.00 us, 1.000" in capsys.readouterr().out
    other = {"policy": "undo", "ratios": [1.2, 1.1, 1.1]}
    joined = against.joint([row, other, {"policy": "direct"}], "undo")
    assert (joined["median"], joined["low"], joined["high"]) == pytest.approx((1.1, 1.0, 1.1))


def test_the_command(checkout, monkeypatch, tmp_path, capsys):
    """It measures every combination, and writes them with the other's commit."""
    older = checkout("older")
    (older / "COMMIT").write_text("0123456789abcdef\n")
    monkeypatch.setattr(machine, "results_folder", lambda: tmp_path)
    new = checkout("newer")
    real = against.EngineProcess

    def both_pretend(command, **others):
        return real([command[0], command[1] or str(site)], **others)

    monkeypatch.setattr(against, "EngineProcess", both_pretend)
    given = ["--policies", "undo", "--requests", "1", "4", "--rounds", "2", "--save", "beside"]
    given += ["--starts", "3"]
    with against.package_of(new) as site:
        assert main(["bench", "steps", "--against", str(older), *given]) == 0
    assert "undo, all together: new / old 1.000 (1.000 to 1.000)" in capsys.readouterr().out
    found = SimpleNamespace(**json.loads((tmp_path / "beside.json").read_text()))
    assert found.against == "0123456789ab"
    assert [(row["requests"], row["changing"]) for row in found.rows] == [
        (1, False),
        (1, True),
        (4, False),
        (4, True),
    ]
    assert found.together["undo"]["rounds"] == 3
    text = narrow(engine_step.report(vars(found)))
    assert "| undo, changing | 4 |" in text
    assert "| both at 0123456789ab | new / old |" in text
    assert "Over all batches: undo 1.000 (1.000 to 1.000). Microseconds" in text
