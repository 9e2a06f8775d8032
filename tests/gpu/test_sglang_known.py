"""Public faults of SGLang: legs are compared, read from logs, and drawn; no GPU needed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import seen_known
import sglang_engines
import sglang_known
import sglang_models
import sglang_undone
import torch

INACTIVE = (
    "[x] kvtxn event='kvtxn.audit_inactive' rank=0 why='the recurrent states of a hybrid model are "
    "not followed yet' effect='this engine runs as if kvtxn were not there'"
)


def answer(tokens, first=-1.0, cached=0, **source):
    return {"tokens": tokens, "first": first, "cached": cached, "from": source or None}


def leg_lines(name, *alarms):
    said = [
        f"kv_canary violation: launch_tag=HEAD_K_FULL fail_reason=verify_position slot_idx={slot} "
        "position=3 stored_token=1 expected_token=-1"
        for slot in alarms
    ]
    return [f"planted {json.dumps({'fault': name})}", *said]


def test_each_leg_is_held_against_the_cold_one():
    legs = {
        "cold": [answer([1, 2]), answer([3, 4], -2.0)],
        "others": [answer([9])],
        "evicted": [answer([1, 2], -1.5, 10, device=2, host=8), answer([3, 5], -2.0, 4, host=4)],
    }
    found = sglang_known.compared(legs)
    assert found["evicted"] == {
        **{"asked": 2, "cached": 14, "host": 12, "storage": 0},
        **{"same": 1, "off": 0.5},
    }
    assert "same" not in found["others"]


def test_alarms_are_counted_by_leg(tmp_path):
    """The log says where a leg begins."""
    (tmp_path / "results").mkdir()
    log = tmp_path / "log"
    log.write_text("\n".join([*leg_lines("cold"), *leg_lines("evicted", 7, 8)]))
    job = SimpleNamespace(
        name="hicache", kind="canary", out=tmp_path, log=log, took=3.0,
        process=SimpleNamespace(poll=lambda: 0),
    )  # fmt: skip
    row = sglang_known.judged(job)
    assert row["canary"]["legs"] == {"cold": 0, "evicted": 2}
    assert not row["ok"]


class Engine:
    """It answers with the prompt's first token; what it was asked before comes from its cache."""

    def __init__(self):
        self.known, self.asked = {}, []

    def generate(self, input_ids, sampling_params, return_logprob, cache_salt=None):
        key = (tuple(input_ids), cache_salt)
        self.asked.append(cache_salt)
        cached = self.known.get(key, 0)
        self.known[key] = len(input_ids) - 1
        number = sampling_params["max_new_tokens"]
        about = {"output_token_logprobs": [(-1.25, input_ids[0], None)], "cached_tokens": cached}
        return {"output_ids": input_ids[:1] * number, "meta_info": about}

    def get_server_info(self):
        report = {"counters": {"kvtxn_audit_active": 1}, "violations": []}
        return {"internal_states": [{"kvtxn": report}]}

    def flush_cache(self):
        return True


@pytest.fixture
def asked(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_known.time, "sleep", lambda seconds: None)
    return sglang_known.Asked(Engine(), tmp_path / "result.json")


def test_legs_ask_the_same_prompts_and_others_in_between(asked, capsys):
    asked.evict()
    written = json.loads(asked.path.read_text())
    assert list(written["legs"]) == ["cold", "cached", "others", "evicted", "again"]
    assert written["report"]["number"] == 0
    found = sglang_known.compared(written["legs"])
    assert found["cold"]["cached"] == found["others"]["cached"] == 0
    assert found["cached"]["cached"] == sum(sglang_known.PROMPTS) - len(sglang_known.PROMPTS)
    assert found["again"]["same"] == len(sglang_known.PROMPTS)
    assert capsys.readouterr().out.count("planted") == 5


def test_others_fill_the_cache_more_than_once():
    number, length = sglang_known.CHURN
    assert number * length > 1.5 * sglang_models.HICACHE["max_total_tokens"]
    assert sum(sglang_known.PROMPTS) + len(sglang_known.PROMPTS) * sglang_known.TOKENS < 8192


def test_another_salt_is_asked_after_a_flush(asked):
    asked.salts()
    number = len(sglang_known.PROMPTS)
    assert asked.engine.asked == ["a"] * (2 * number) + ["b"] * number + ["a"] * number
    assert asked.result["flushed"] == ["True", "True"]


def test_every_engine_belongs_to_a_fault():
    tried = [name for trial in seen_known.TRIALS for name in trial.engines]
    assert sorted(tried) == sorted(sglang_models.KNOWN) == sorted({n for n, _ in sglang_known.RUNS})


def test_variables_of_the_engine_alone_are_set(tmp_path):
    found = sglang_engines.variables("next-untracked", "plain", tmp_path)
    assert (found["WEIGHTS"], found["UNDO"]) == ("random", "34043")
    assert "UNDO" not in sglang_engines.variables("next-graph", "plain", tmp_path)


def test_drawn_weights_keep_sizes_and_differ():
    model = torch.nn.Module()
    model.embed_tokens = torch.nn.Embedding(64, 32)
    model.norm = torch.nn.LayerNorm(32)
    model.one, model.two = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
    model.A_log = torch.nn.Parameter(torch.zeros(4))
    with torch.no_grad():
        sglang_undone.draw(model)
    assert not torch.equal(model.one.weight, model.two.weight)
    assert abs(model.one.weight.std().item() - 1.5 / 32**0.5) < 0.05
    assert model.norm.weight.unique().tolist() == [1.0]
    assert model.A_log.unique().tolist() == [-5.0]


# -- the record and the pages -----------------------------------------------------------


def run(engine, kind, legs=None, **facts):
    return {"engine": engine, "kind": kind, "ok": bool(legs), "legs": legs or {}, **facts}


@pytest.fixture
def found():
    legs = sglang_known.compared({"cold": [answer([1])], "evicted": [answer([2], -1.5, 9, host=9)]})
    alarms = {"refused": None, "legs": {"evicted": 5}}
    rows = [
        run("hicache", "canary", legs, canary=alarms),
        run("next-graph", "ledger", legs, log=[INACTIVE]),
        run("next-untracked", "plain", wrong=["an error"]),
    ]
    return seen_known.known({"machine": "M", "command": "python x", "engines": rows})


def test_the_table_says_what_each_leg_showed(found):
    page = seen_known.head(found) + seen_known.drawn(found)
    assert "| hicache | canary | evicted | 0 / 1 | 0.500 | 9 | 9 | 0 | 5 |" in page
    assert "| hicache | canary | cold | 1 / 1 | 0.000 | 0 | 0 | 0 | 0 |" in page
    assert "| next-untracked | plain | does not start: an error |" in page
    assert "next-graph: left out, as the recurrent states of a hybrid model are not" in page
    assert "sgl-project/sglang#33656" in page
    assert "sgl-project/sglang#37160" not in page
    assert "fix of #34043 is taken back" in page
