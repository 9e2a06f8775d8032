"""Pieces of a soak that are played at once: all are kept, and none goes on when the soak ends."""

from __future__ import annotations

import argparse
import json
import threading
from types import SimpleNamespace

import pytest
from kvtxn.benchmarks.soak import command

PATIENCE = 60.0


class Playing:
    """Stands for ``piece.run``: pieces of two samples each, which wait for each other.

    Args:
        number: pieces that have to run at once.
        fails: the piece of this seed fails while the others run.
    """

    def __init__(self, number, fails=None):
        self._together, self._fails = threading.Barrier(number), fails
        self.ended, self.compared = [], []

    def run(self, piece, compared, keep, stops):
        ended = threading.Event()
        process = SimpleNamespace(stop=lambda patience=None: ended.set())
        stops.append(process)
        self.compared.append(compared)
        report = {"samples": [], "error": None}
        for number in range(2):
            report["samples"].append({"at": number, "seed": piece.seed})
            keep(report)
            self._together.wait(PATIENCE)
        if piece.seed == self._fails:
            raise OSError("no space left")
        if self._fails is not None:
            assert ended.wait(PATIENCE)
            self.ended.append(piece.seed)
            report["error"] = "the engine 'soaked' ended while it ran, exit code -9"
        return report


@pytest.fixture
def play(monkeypatch):
    """A function that plays pieces, and returns what was kept."""

    def playing(
        played, path, *, pieces, at_once, before=(), describe=lambda: {"gpu": None}, found=None
    ):
        monkeypatch.setattr(command.pieces, "run", played.run)
        monkeypatch.setattr(command.machine, "describe", describe)
        monkeypatch.setattr(command, "line", lambda number, sample: f"{number}: {sample['at']}")
        given = {"pieces": pieces, "at_once": at_once, "workloads": ["chat"], "requests": 8}
        given |= {"seconds": 1, "every": 1.0, "patience": 1.0, "seed": 40, "no_texts": True}
        found = {} if found is None else found
        found |= {"machine": {}, "pieces": [*before]}
        command._play(argparse.Namespace(**given), {}, command._Kept(found, path))
        return found

    return playing


def test_pieces_that_are_played_at_once_are_kept_in_their_order(play, tmp_path, capsys):
    """Behind those that the file has; each has its own seed."""
    played, path = Playing(3), tmp_path / "soak.json"
    before = [{"machine": {}, "seed": 40, "samples": []}]
    found = play(played, path, pieces=3, at_once=3, before=before)
    assert json.loads(path.read_text()) == found
    assert [each["seed"] for each in found["pieces"]] == [40, 41, 42, 43]
    assert all(
        [(each["at"], each["seed"]) for each in piece["samples"]] == [(0, seed), (1, seed)]
        for seed, piece in zip((41, 42, 43), found["pieces"][1:], strict=True)
    )
    said = capsys.readouterr().err.split("\n")[:-1]
    assert sorted(said) == sorted(f"{number}: {at}" for number in (1, 2, 3) for at in (0, 1))
    assert played.compared == [False] * 3


def test_a_sample_costs_no_description_of_the_machine(play, tmp_path):
    """It takes a second, in which every engine that is played would wait to be heard."""
    described = []
    path = tmp_path / "soak.json"
    found = play(
        *(Playing(3), path),
        **{"pieces": 3, "at_once": 3, "describe": lambda: described.append(0) or {"gpu": None}},
    )
    assert len(described) == 1
    assert [each["machine"] for each in found["pieces"]] == [{"gpu": None}] * 3


def test_the_file_is_not_written_for_every_sample(play, tmp_path, monkeypatch):
    """It grows with the soak; but at the end, and after a failure, it has all."""
    writes, path = [], tmp_path / "soak.json"
    write = command._Kept.write
    monkeypatch.setattr(command._Kept, "write", lambda kept: (writes.append(0), write(kept)))
    found = play(Playing(3), path, pieces=3, at_once=3)
    assert len(writes) == 4  # the first sample, and three ends
    assert json.loads(path.read_text()) == found
    with pytest.raises(OSError, match="no space left"):
        play(Playing(3, fails=41), path, pieces=3, at_once=3)
    pieces = json.loads(path.read_text())["pieces"]
    assert [len(each["samples"]) for each in pieces] == [2, 2, 2]


def test_a_piece_that_is_ended_with_the_command_has_no_error(play):
    """Its engine did not fail: what it had done until then stands."""
    played, found = Playing(3, fails=41), {}
    with pytest.raises(OSError, match="no space left"):
        play(played, None, pieces=3, at_once=3, found=found)
    cut = {each["seed"]: (each["error"], each.get("cut")) for each in found["pieces"]}
    assert cut == {40: (None, True), 41: (None, None), 42: (None, True)}


def test_no_more_pieces_are_played_at_once_than_asked_for(play):
    """A third one would leave two waiting for a fourth."""
    found = play(Playing(2), None, pieces=4, at_once=2)
    assert [each["seed"] for each in found["pieces"]] == [40, 41, 42, 43]


def test_a_failure_ends_the_pieces_that_are_played(play):
    played = Playing(3, fails=41)
    with pytest.raises(OSError, match="no space left"):
        play(played, None, pieces=3, at_once=3)
    assert sorted(played.ended) == [40, 42]
