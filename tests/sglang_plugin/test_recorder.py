"""What the recorder writes beside a toy of SGLang, replayed: trees, windows, states, and faults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kvtxn.integrations.serving.audit_settings import AuditSettings
from kvtxn.integrations.sglang_plugin.starting import Hooks
from planted_steps import (
    foreign_state,
    lost_copy,
    plants_of,
    replay_with,
    wrong_commit,
    wrong_entry,
    wrong_move,
    wrong_parent,
)
from replay import RECORDED, Replay, events
from toy_sglang import ToySglang, counters_of_clean_steps
from toy_states import Mamba2AttnBackend, ToyHybrid

TREE = {"drafts": 5, "trees": True}
COPIES = {"strategy": "no_buffer", "overlap": False}
#: By name: a toy, and its arguments.
TOYS = {
    "plain": (ToySglang, {}),
    "chain": (ToySglang, {"drafts": 3}),
    "tree": (ToySglang, TREE),
    "windows": (ToySglang, {"kind": "windows"}),
    "windows-tree": (ToySglang, {"kind": "windows", **TREE}),
    "pure": (ToySglang, {"kind": "pure"}),
    "states": (ToyHybrid, {}),
    "copies": (ToyHybrid, {**COPIES, "linear": Mamba2AttnBackend}),
    "commits": (ToyHybrid, {"drafts": 3}),
    "states-tree": (ToyHybrid, TREE),
}
STEPS = 120


@pytest.fixture
def recording(monkeypatch, tmp_path):
    """A function that lets the recorder run beside a toy, and returns the shortened events."""
    for folder in (RECORDED, Path(__file__).parent.parent / "gpu"):
        monkeypatch.syspath_prepend(folder)

    def record(name):
        path = tmp_path / f"{name}.jsonl"
        recorder = __import__("sglang_recorder").Recorder(path, STEPS + 20)
        kind, more = TOYS[name]
        toy = kind(
            {
                "ModelRunner.forward": recorder.forward,
                "Scheduler.run_batch": recorder.run_batch,
                "Scheduler.flush_cache": recorder.flushed,
                "common.release_kv_cache": recorder.released,
            },
            seed=3,
            **more,
        )
        while recorder.steps > 0:
            toy.serve(14)
            for req in toy.done[-8:] if kind is ToyHybrid else ():  # they go on with what was said
                if len(req.tokens) < 60:
                    toy.offer([*req.tokens, 1, 2, 3], 8)
            toy.serve(0)
            assert toy.flush()
        recorder.file.close()
        short = str(tmp_path / f"{name}.jsonl.xz")
        __import__("trim").main(str(path), short, STEPS)
        monkeypatch.setattr(sys.modules["replay"], "RECORDED", tmp_path)
        return events(name)

    return record


@pytest.mark.parametrize("name", TOYS)
def test_what_the_recorder_writes_can_be_replayed(hooks, recording, tmp_path, name):
    """The plug-in that made the recordings runs beside the toy here."""
    replay = Replay(hooks, recording(name))
    replay.run()
    assert replay.steps == STEPS
    counted = counters_of_clean_steps(hooks)
    assert counted["kvtxn_audit_rows_checked_total"] > 2000
    hybrid = TOYS[name][0] is ToyHybrid
    assert (counted["kvtxn_audit_states_checked_total"] > 100) == hybrid
    assert (tmp_path / f"{name}.jsonl.xz").stat().st_size < 50_000


def test_recordings_keep_only_what_an_engine_has(recording):
    """So one of a plain engine is as it was before others could be recorded."""
    kinds = {
        "tree": {"children", "siblings"}, "windows": {"map"},
        "states": {"state_slots", "keeps", "mamba_clear_indices", "mamba_track_indices"},
    }  # fmt: skip
    every = set().union(*kinds.values())
    for name, kept in {"plain": set(), "chain": set(), **kinds}.items():
        recorded = recording(name)
        names = set().union(*recorded[1:])
        assert names & every == kept
        assert {*recorded[0]} & {"windows", "states"} == {name} & {"windows", "states"}


# -- faults ----------------------------------------------------------------------------------

TREES, MAPS = (wrong_parent, wrong_move), (wrong_entry,)
SLOTS = (foreign_state, lost_copy)
PLANTED = {
    "plain": (), "chain": (), "pure": (), "tree": TREES, "windows": MAPS,
    "windows-tree": (*TREES, *MAPS), "states": SLOTS, "copies": SLOTS,
    "commits": (*SLOTS, wrong_commit), "states-tree": (*TREES, *SLOTS, wrong_commit),
}  # fmt: skip


@pytest.mark.parametrize("name", TOYS)
def test_a_fault_in_what_was_written_is_found(on_a_cpu, recording, name):
    """By its request, and by its slot in its group: all that such a recording can have."""
    assert plants_of(recording(name)) == [*PLANTED[name]]
    for plant in PLANTED[name]:
        hooks = Hooks(AuditSettings(audit="ledger"))
        expected, found = replay_with(hooks, events(name), plant)
        assert any(expected.items() <= each.items() for each in found), (plant, expected, found[:3])
