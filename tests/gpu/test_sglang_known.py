"""Public faults of SGLang: legs are summed up, read from logs, and drawn; no GPU needed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import seen_known
import sglang_known
import sglang_models

INACTIVE = (
    "[x] kvtxn event='kvtxn.audit_inactive' rank=0 why='the recurrent states of a hybrid model are "
    "not followed yet' effect='this engine runs as if kvtxn were not there'"
)


def answer(cached=0, **source):
    return {"cached": cached, "from": source or None}


def leg_lines(name, *alarms):
    said = [
        f"kv_canary violation: launch_tag=HEAD_K_FULL fail_reason=verify_position slot_idx={slot} "
        "position=3 stored_token=1 expected_token=-1"
        for slot in alarms
    ]
    return [f"planted {json.dumps({'fault': name})}", *said]


def test_tokens_of_a_leg_are_summed_by_source():
    legs = {
        "cold": [answer(), answer()],
        "evicted": [answer(10, device=2, host=8), answer(4, host=4)],
    }
    found = sglang_known.sources(legs)
    assert found["cold"] == {"asked": 2, "cached": 0, "host": 0, "storage": 0}
    assert found["evicted"] == {"asked": 2, "cached": 14, "host": 12, "storage": 0}


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
    """What it was asked before comes from its cache."""

    def __init__(self):
        self.known, self.asked = {}, []

    def generate(self, input_ids, sampling_params, cache_salt=None):
        key = (tuple(input_ids), cache_salt)
        self.asked.append(cache_salt)
        cached = self.known.get(key, 0)
        self.known[key] = len(input_ids) - 1
        return {"meta_info": {"cached_tokens": cached}}

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
    found = sglang_known.sources(written["legs"])
    assert found["cold"]["cached"] == found["others"]["cached"] == 0
    assert found["cached"]["cached"] == sum(sglang_known.PROMPTS) - len(sglang_known.PROMPTS)
    assert found["again"] == found["evicted"] == found["cached"]
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


# -- the record and the pages -----------------------------------------------------------


def run(engine, kind, legs=None, **facts):
    return {"engine": engine, "kind": kind, "ok": bool(legs), "legs": legs or {}, **facts}


@pytest.fixture
def found():
    legs = sglang_known.sources({"cold": [answer()], "evicted": [answer(9, host=9)]})
    alarms = {"refused": None, "legs": {"evicted": 5}}
    rows = [
        run("hicache", "canary", legs, canary=alarms),
        run("next-graph", "ledger", legs, log=[INACTIVE]),
        run("next-hicache", "ledger", wrong=["an error"]),
        run("salts", "ledger", legs, active=1, rows=70, violations=[{}]),
    ]
    return seen_known.known({"machine": "M", "command": "python x", "engines": rows})


def test_the_table_says_what_each_leg_showed(found):
    page = seen_known.drawn(found)
    assert "| hicache | canary | evicted | 9 | 9 | 0 | 5 |" in page
    assert "| hicache | canary | cold | 0 | 0 | 0 | 0 |" in page
    assert "| next-hicache | ledger | does not start: an error |" in page
    assert "salts: 70 rows read, 1 violations" in page
    assert "next-graph: left out, as the recurrent states of a hybrid model are not" in page
    assert "sgl-project/sglang#33656" in page
    assert "sgl-project/sglang#39830" in page
