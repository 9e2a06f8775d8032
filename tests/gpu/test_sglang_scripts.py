"""The scripts that run SGLang on a GPU: what they can be asked for, and how they judge."""

from __future__ import annotations

import argparse
import json
import shlex
from types import SimpleNamespace

import pytest
import seen_sglang
import sglang_audit
import sglang_cost
import sglang_engines
import sglang_faults
import sglang_mamba
import sglang_models
import sglang_rings
import sglang_weights
import torch
from gpu_seen import RECORD


def test_engines_with_faults_name_a_set_of_them():
    named = {more["FAULTS"] for _, _, more in sglang_models.ENGINES.values() if "FAULTS" in more}
    assert named == set(sglang_faults.SETS)


@pytest.mark.parametrize("name", sglang_weights.DRAWN)
def test_a_model_with_drawn_weights_has_each_once(name):
    """Of finite numbers, and the same ones each time."""
    small = {"vocab_size": 64, "intermediate_size": 32}
    config = {**sglang_models.MODELS[name], **small}
    one, other = (sglang_weights.weights(name, config) for _ in range(2))
    assert one.keys() == other.keys()
    assert all(torch.equal(each, other[key]) for key, each in one.items())
    assert all(bool(each.isfinite().all()) for each in one.values())


def test_the_drafter_of_eagle3_mostly_drafts_the_targets_next_token():
    """And now and then another one, so that drafts are rejected."""
    target = sglang_weights.weights("llama", sglang_models.LLAMA)
    drafter = sglang_weights.weights("eagle3", sglang_models.DRAFTER3)
    embed, head = (target[f"{each}.weight"] for each in ("model.embed_tokens", "lm_head"))
    assert torch.equal(drafter["lm_head.weight"], head)
    seen = torch.randn(256, 3 * 512) * 1.2 @ drafter["fc.weight"].T
    drafted = ((embed[:256] + seen) @ head.T).argmax(1)
    right = (embed[:256] @ head.T).argmax(1)
    assert 0.3 < (drafted == right).float().mean() < 0.98


def test_a_plain_run_of_an_engine_that_contains_faults_has_none(tmp_path):
    """So the texts of both are the same."""
    faulty = sglang_engines.variables("contain-eagle", "ledger", tmp_path)
    plain = sglang_engines.variables("contain-eagle", "plain", tmp_path)
    assert json.loads(faulty["KVTXN_SGLANG"])["on_violation"] == "contain"
    assert (faulty["FAULTS"], plain.get("FAULTS")) == ("contain", None)


def test_any_engine_can_be_recorded(monkeypatch, tmp_path):
    """Of trees, windows and states, too; the recorder is told the file, and how long it goes on."""
    monkeypatch.setenv("RECORD_STEPS", "250")
    names = ["eagle3-tree", "windows-chunked", "next-mtp"]
    given = sglang_engines.parsed(["OUT", *names, "--plain", "--recorded", *names])
    queue = sglang_engines.queue_of(given)
    assert [name for name, kind in queue if kind == "recorded"] == names
    for name in names:
        found = sglang_engines.variables(name, "recorded", tmp_path)
        assert found["RECORD_FILE"] == str(tmp_path / "logs" / f"{name}.recorded.jsonl")
        assert found["RECORD_STEPS"] == "250"
        assert "RECORD_FILE" not in sglang_engines.variables(name, "ledger", tmp_path)


def test_texts_are_held_against_those_of_any_engine_of_the_model_without_kvtxn(tmp_path):
    (tmp_path / "results").mkdir()
    assert sglang_engines.plain_tokens("contain-eagle", tmp_path) == []
    for name, tokens in (("radix", [[[1]]]), ("mla", [[[2]]])):
        path = tmp_path / "results" / f"{name}.plain.json"
        path.write_text(json.dumps({"tokens": tokens}))
    assert sglang_engines.plain_tokens("contain-eagle", tmp_path) == [[[1]]]
    assert sglang_engines.plain_tokens("bytes-mla", tmp_path) == [[[2]]]


def test_the_recorded_commands_can_be_given_again():
    """Each command of the record is one that the script reads."""
    for each in json.loads(RECORD.read_text())["sglang"].values():
        given = sglang_engines.parsed(shlex.split(each["command"])[2:])
        assert given.engines


def test_an_unknown_engine_is_refused(capsys):
    with pytest.raises(SystemExit):
        sglang_engines.parsed(["OUT", "radixx"])
    assert "no such engine: radixx" in capsys.readouterr().err


def test_tokens_count_until_two_engines_part():
    found = sglang_engines.same([[[1, 2, 3], [4, 5], None]], [[[1, 9, 3], [4, 5], [6]]])
    assert found == {"requests": 2, "equal": 1, "tokens": 5, "first_equal": 3}


def violation(**facts):
    some = {"kind": "foreign", "step": 5, "request": "a", "position": 3, "slot": 9, "layer": None}
    return {**some, **facts}


def test_a_violation_fits_the_fault_that_made_it():
    fault = {"fault": "old_row", "step": 4, "request": "a", "position": 3, "slot": 9}
    early, other, near = violation(step=3), violation(request="b"), violation(position=4, slot=2)
    found = sglang_engines.judged(fault, [early, other, near, violation()])
    assert (found["exact"], found["fits"]) == (1, 2)
    assert "layer" not in found["found"][0]
    assert seen_sglang._fault(found)["slot"] == "yes"
    assert sglang_engines.judged(fault, [early, other])["fits"] == 0


def test_a_fault_of_slots_asks_for_no_request():
    fault = {"fault": "stale_node", "step": 4, "request": None, "position": 4, "slot": [8, 9]}
    found = sglang_engines.judged(fault, [violation(request="x"), violation(slot=1)])
    assert (found["exact"], found["fits"]) == (1, 1)
    flush = {"fault": "flush_without_tree", "step": 4, "position": 3, "slot": None}
    assert sglang_engines.judged(flush, [violation(request="x")])["exact"] == 1


def test_plug_ins_surround_kvtxns():
    """SGLang loads entry points in the order of their names."""
    names = [line.split()[0] for line in sglang_engines.PLUGINS.splitlines()[1:]]
    assert sorted([*names, "kvtxn"]) == [names[0], "kvtxn", *names[1:]]


def test_each_engine_is_first_in_turn():
    assert [order[0] for order in sglang_cost.turns(["a", "b", "c"], 4)] == ["a", "b", "c", "a"]


def test_what_a_ring_holds_follows_the_accepted_counts():
    """A ring of 8 rows folds once two more steps of 3 rows do not fit behind what it has."""
    given = SimpleNamespace(requests=1, width=3, steps=2, lots=torch.full((2, 2, 1), 2))
    past = sglang_rings.history(given, 8, 3)
    # 2 rows stay, as 6 more fit; 4 do not, and are folded: every other step.
    assert past["folds_per_request_and_step"] == 0.5
    assert past["rows_per_fold"] == 4
    assert past["rows_in_ring_at_verify"] == 1
    moved = sglang_rings.traffic(given, 8, past)
    assert moved["kvtxn"]["step"] == moved["kvtxn"]["verify"] + moved["kvtxn"]["commit"]
    idle = sglang_rings.traffic(given, 8, dict.fromkeys(past, 0.0))
    assert idle["sglang"]["commit"] == 0
    assert idle["kvtxn"]["commit"] > 0


def test_a_spread_leaves_the_outer_fifths():
    found = sglang_rings.spread([float(number) for number in range(11)])
    assert (found["median"], found["p20"], found["p80"]) == (5, 2, 8)
    assert seen_sglang._spread([5.0, 1.0, 3.0, 2.0, 4.0]) == [3, 2, 4]


def test_an_audit_is_a_command_that_kvtxn_reads(tmp_path, monkeypatch):
    """It audits an engine of SGLang's, with a page and JSON."""
    from kvtxn.integrations.audit_command.command import add_arguments

    monkeypatch.setattr(sglang_audit, "arguments", lambda name, models: {"model_path": name})
    given = sglang_audit.parsed([str(tmp_path), "eagle", "--extra", '{"tp_size": 2}'])
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = sglang_audit.command(given, "eagle")
    read = parser.parse_args(words[words.index("audit") + 1 :])
    assert (read.engine, read.workload, read.json) == ("sglang", "all", True)
    assert read.engine_args == {"model_path": "eagle", "tp_size": 2}
    assert read.html == tmp_path / "audits" / "eagle.html"


def test_one_state_of_mamba2_follows_the_recurrence():
    """With the functions for a CPU; outputs and states of several steps, drafts rejected."""
    sizes = sglang_mamba.Sizes(layers=2, heads=4, head_size=8, groups=2, state_size=16)
    given = sglang_mamba.Inputs(sizes, 3, 3, 2, "cpu")
    found = sglang_mamba.check(sglang_mamba.One(given), 5)
    assert found["ok"], found
    given.counts = [[count * 0 + 1 for count in step] for step in given.counts]
    wrong = sglang_mamba.One(given)
    wrong.commit = lambda turn, step: None
    assert not sglang_mamba.check(wrong, 5)["ok"]


def test_the_memory_of_one_state_follows_the_sizes():
    """Four drafts' states and the request's own, beside the own one and four rows."""
    found = sglang_mamba.memory(sglang_mamba.Sizes(layers=24), 4)
    assert (found["states_mib"], found["stock_mib"]) == (96, 480)
    assert 4.5 < found["times"] < 5


class Controller:
    """HiCache's, whose copies to the device wait in a queue."""

    page_size = 2

    def __init__(self):
        self.load_queue = []

    def load(self, host_indices):
        slots = torch.arange(10, 10 + len(host_indices))
        self.load_queue.append(SimpleNamespace(host=host_indices, device_indices=slots))
        return slots

    def write(self, device_indices):
        return device_indices


@pytest.mark.parametrize("name", sglang_faults.HOST)
def test_a_fault_of_hicache_is_planted_once(name, tmp_path):
    """A page comes from, or goes to, another page's slots; the tree hears of the right ones."""
    faults = sglang_faults.Faults([], tmp_path / "faults")
    controller, hosts = Controller(), torch.tensor([4, 5, 6, 7])
    for number in range(2):
        faults.armed = None if number else name
        slots = faults.loaded(Controller.load, controller, host_indices=hosts)
        written = faults.written(Controller.write, controller, torch.tensor([1, 2, 3, 4]))
        assert slots.tolist() == [10, 11, 12, 13]
        copy = controller.load_queue.pop()
        planted = {
            "host_page": copy.host.tolist() != hosts.tolist(),
            "host_slot": copy.device_indices.tolist() == [12, 13, 10, 11],
            "host_write": written.tolist() == [3, 4, 1, 2],
        }
        assert [each for each, there in planted.items() if there] == ([] if number else [name])
    assert json.loads((tmp_path / "faults").read_text())["fault"] == name
