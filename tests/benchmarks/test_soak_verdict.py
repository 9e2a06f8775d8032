"""The verdict on a soak: each count that must not be, slopes, and the account of requests."""

from __future__ import annotations

import asyncio
import json
import math
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
from kvtxn.benchmarks.soak import verdict
from kvtxn.benchmarks.soak.client import Account, SoakClient
from kvtxn.benchmarks.soak.command import _before
from kvtxn.benchmarks.soak.engine import HostUse
from kvtxn.benchmarks.soak.reference import judge as judge_texts
from kvtxn.benchmarks.soak.reference import without_windows

from kvtxn import ConfigError

MIB = 1 << 20


def sample(number, **changes):
    """A sample of a healthy piece, ten seconds after the one before."""
    steps = 100 * (number + 1)
    return {
        **{"at": 10.0 * number, "busy": 9.0 * number, "played": 900 * number, "rounds": number},
        **{"asked": steps, "finished": steps - 5, "aborted": 5, "lost": 0, "why": []},
        **{"steps": steps, "tokens": 10 * steps, "preempted": 3, "drafted": 9, "accepted": 4},
        **{"cached": 5, "loaded": 5, "running": 0, "missing": 0, "cleared": True, "active": 1},
        **{"windows": steps, "committed": steps, "fell_back": 0, "bypassed": 0, "open": 0},
        **{"rows_staged": 9, "rows_committed": 4, "rows_rejected": 5},
        **{"device": 64 * MIB, "host": 700 * MIB, "cpu": 8.0 * number},
        **changes,
    }


def piece(count=12, **changes):
    """A healthy piece; ``changes`` are functions of a sample's number."""
    samples = [
        sample(number, **{name: made(number) for name, made in changes.items()})
        for number in range(count)
    ]
    texts = {"texts": 8, "same": 8, "near": 0, "other": 0, "gap": 0.0, "wrong": []}
    return {"samples": samples, "texts": texts, "error": None}


def test_a_healthy_soak_is_called_healthy():
    """Sums over pieces, and slopes of nothing."""
    found = verdict.judge([piece(), piece()], windows=True)
    assert found.wrong == []
    assert found.seconds == 220.0
    assert found.sums["pieces"] == 2
    assert found.sums["asked"] == 2400
    assert found.speed == pytest.approx(100.0)
    assert (found.host.median, found.device.median, found.change.median) == (0.0, 0.0, 0.0)


def test_captured_commits_are_said_by_thirds():
    """The most of all pieces; a soak that did not sample them says nothing."""
    full = piece(graphs=lambda number: min(number, 5) * MIB)
    assert verdict.judge([full], windows=True).graphs == [3 * MIB, 5 * MIB, 5 * MIB]
    early = piece(graphs=lambda number: 4 * MIB)
    assert verdict.judge([full, early], windows=True).graphs == [4 * MIB, 5 * MIB, 5 * MIB]
    assert verdict.judge([full, piece()], windows=True).graphs is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lost": lambda n: n // 6, "finished": lambda n: 95 + 100 * n - n // 6}, "were lost"),
        ({"finished": lambda n: 94 + 100 * n}, "in no account"),
        ({"open": lambda n: int(n == 4)}, "windows were left open"),
        ({"missing": lambda n: int(n == 11)}, "blocks did not come back"),
        ({"cleared": lambda n: n != 3}, "could not be cleared 1 times"),
        ({"running": lambda n: int(n == 7)}, "stayed in the scheduler"),
        ({"fell_back": lambda n: int(n > 3)}, "fell back"),
        ({"rows_rejected": lambda n: 4}, "neither kept nor rejected"),
        ({"committed": lambda n: 0}, "no window was committed"),
        ({"device": lambda n: (64 << 20) + 512 * n}, "device's memory grows"),
        ({"host": lambda n: (700 << 20) + MIB * n}, "host's memory grows"),
        ({"cpu": lambda n: 8.0 * n + 0.1 * n * n}, "throughput falls"),
    ],
)
def test_each_fault_is_said(changes, said):
    """Whatever is lost or left, or grows, and nothing else."""
    (wrong,) = verdict.judge([piece(**changes)], windows=True).wrong
    assert said in wrong


def test_a_short_soak_is_not_judged_by_its_slopes():
    """Memory that grows in its first seconds fills caches."""
    grows = {"host": lambda number: (700 << 20) + MIB * number}
    short = piece(**grows, at=lambda number: 0.5 * number, busy=lambda number: 0.4 * number)
    assert verdict.judge([short], windows=True).wrong == []
    long = piece(**grows, at=lambda number: 1.0 * number, busy=lambda number: 0.9 * number)
    assert any("memory grows" in said for said in verdict.judge([long], windows=True).wrong)


def test_a_text_that_is_not_stocks_and_a_piece_that_ended_early_are_said():
    """Near-ties are not."""
    bad = piece()
    bad["texts"] |= {"other": 1, "near": 2, "same": 5}
    bad["error"] = "the engine 'soaked' ended"
    wrong = verdict.judge([bad], windows=True).wrong
    assert [each.split(":")[0] for each in wrong] == [
        "piece 0 ended early",
        "1 texts are not stock's",
    ]


def test_pieces_that_were_cut_off_are_counted():
    """They are no mistake."""
    pieces = [piece() | {"cut": number > 0} for number in range(10)]
    found = verdict.judge(pieces, windows=True)
    assert found.wrong == []
    assert "in 10 pieces, 9 cut off: " in str(found)
    machine = {"torch": "2", "commit": "0", "command": "c"}
    soak = {"pieces": [each | {"machine": machine} for each in pieces]}
    text = verdict.report([soak | {"settings": {"about": "ngram", "policy": "auto"}}])
    assert "(10, 9 cut off) |" in text


#: Prints what it uses before, while and after a process of one that it starts holds 64 MiB. A
#: process of its own: what the tests' process gives back meanwhile does not count.
USES = """
import json, subprocess, sys, time
from kvtxn.benchmarks.soak.engine import host_use

fill = "x = bytearray(b'1') * (64 << 20); [i for i in range(10**7)]; input()"
outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {fill!r}])"
uses = [host_use()]
with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE) as process:
    until = time.monotonic() + 60
    while host_use().memory < uses[0].memory + (64 << 20) and time.monotonic() < until:
        time.sleep(0.1)
    uses.append(host_use())
    process.communicate(b"\\n")
uses.append(host_use())
print(json.dumps([(use.memory, use.cpu) for use in uses]))
"""


def test_the_hosts_memory_and_time_are_those_of_all_processes():
    """A process that another one has started counts; one that nobody of them started does not."""
    said = subprocess.run([sys.executable, "-c", USES], stdout=subprocess.PIPE, check=True)
    before, during, after = (HostUse(*use) for use in json.loads(said.stdout.splitlines()[-1]))
    assert during.memory >= before.memory + (64 << 20)
    assert during.cpu > before.cpu
    assert after.memory < during.memory - (32 << 20)


def test_the_interval_of_a_slope_holds_it():
    """Of 200 noisy series with one slope, the intervals of about 95 % hold it."""
    chance, held = random.Random(0), 0
    for _ in range(200):
        series = [
            [(x, 3.0 * x + chance.gauss(offset, 5.0)) for x in range(15)] for offset in (0, 50)
        ]
        found = verdict.slope(series)
        held += found.low <= 3.0 <= found.high
    assert 180 <= held <= 199


def test_a_slope_of_too_few_samples_says_so():
    found = verdict.slope([[(0.0, 1.0), (1.0, 2.0)]])
    assert math.isnan(found.median)
    assert str(found) == "too few samples"
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_the_table_says_what_each_soak_showed():
    """One column each; whatever is wrong stands below."""
    machine = {"torch": "2", "commit": "abc", "command": "kvtxn bench soak --save x", "vllm": "0.3"}
    settings = {"about": "ngram, a connector", "policy": "undo"}

    def result(*pieces):
        return {"settings": settings, "pieces": [{"machine": machine, **each} for each in pieces]}

    text = verdict.report([result(piece(), piece()), result(piece(open=lambda n: 1))])
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    cells = [cell.strip() for cell in lines["requests (aborted)"].split("|")[2:4]]
    assert cells == ["2,400 (10)", "1,200 (5)"]
    assert [cell.strip() for cell in lines["windows left open"].split("|")[2:4]] == ["0", "1"]
    assert text.count("vLLM 0.3, commit abc") == 2
    assert text.endswith("- **wrong**: 1 windows were left open.")


# -- the account of requests -------------------------------------------------------------------


class Pretended:
    """An engine that answers a prompt by the behaviour that its first token names."""

    def __init__(self):
        self.names = []

    def generate(self, given, sampling, name):
        self.names.append(name)
        return self._stream(given["prompt_token_ids"][0], sampling.max_tokens)

    async def _stream(self, behaviour, most):
        if behaviour == 3:
            raise RuntimeError("refused")
        for number in range(most):
            if behaviour == 1 and number == 2:
                break
            if behaviour == 2 and number == 2:
                await asyncio.sleep(60)
            reason = "length" if number == most - 1 else None
            output = SimpleNamespace(token_ids=[number], finish_reason=reason)
            yield SimpleNamespace(outputs=[output])

    async def abort(self, name):
        pass


def clients(engine, account):
    """Two clients of one account."""
    pytest.importorskip("vllm")
    sizes = SimpleNamespace(vocabulary=100, max_length=64, block_size=16)
    return [SoakClient(engine, sizes, seed, account, 0.2, keeps=True) for seed in (1, 2)]


def test_every_request_is_accounted_for():
    """Finished, aborted, cut short, without an end, refused; names are never the same."""
    engine, account = Pretended(), Account()

    async def ask():
        first, second = clients(engine, account)
        await asyncio.gather(
            first.ask([9], 5),
            second.ask([9], 5),
            second.ask([9], 5, abort=3),
            first.ask([1], 5),
            second.ask([2], 5),
            first.ask([3], 5),
        )
        return first.kept(), first.kept(), second.kept()

    kept, nothing, others = asyncio.run(ask())
    counts = (account.asked, account.finished, account.aborted, account.lost)
    assert counts == (6, 2, 1, 3)
    assert len(account.why) == 3
    assert len(set(engine.names)) == len(engine.names) == 6
    assert [(said.prompt, said.texts) for said in (*kept, *others)] == 2 * [
        ([9], [[0, 1, 2, 3, 4]])
    ]
    assert nothing == []


# -- texts -------------------------------------------------------------------------------------


class Stock:
    """A stock engine that always says 5, 6, 7; their logits are 10, of 50 7.9, of others 9.9."""

    def generate(self, prompts, sampling, use_tqdm):
        several = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        return [self._answer(each) for each in several]

    def _answer(self, sampling):
        if sampling.logprobs is None:
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5, 6, 7])])
        logits = {
            token: SimpleNamespace(logprob=10.0 if token in (5, 6, 7) else 9.9 - 2 * (token == 50))
            for token in sampling.allowed_token_ids
        }
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5], logprobs=[logits])])


@pytest.mark.parametrize(
    ("text", "dtype", "kind"),
    [
        ([5, 6, 7], "float32", "same"),
        ([5, 8, 8], "bfloat16", "near"),
        ([5, 8, 8], "float32", "other"),
        ([5, 50, 7], "bfloat16", "other"),
        ([5, 6], "bfloat16", "other"),
    ],
)
def test_a_text_is_stocks_or_parts_at_a_near_tie(text, dtype, kind):
    """A tie is near or not by the dtype's last bits."""
    pytest.importorskip("vllm")
    from kvtxn.benchmarks.soak.client import Said

    found = judge_texts(Stock(), [Said([1, 2], 3, None, [text])], dtype)
    assert {name for name in ("same", "near", "other") if found[name]} == {kind}
    assert len(found["wrong"]) == (kind == "other")


def test_the_stock_engine_computes_every_row_anew():
    """No windows, no connector, no prefix cache."""
    given = {"model": "m", "additional_config": {}, "kv_transfer_config": {}, "block_size": 32}
    found = without_windows(given | {"enable_prefix_caching": True})
    assert found == {
        **{"model": "m", "block_size": 32, "enable_prefix_caching": False},
        "logprobs_mode": "processed_logits",
    }


def test_pieces_of_other_settings_are_refused(tmp_path):
    """A file's pieces add up."""
    path = tmp_path / "soak.json"
    assert _before(path, {"policy": "undo"})["pieces"] == []
    path.write_text(json.dumps({"settings": {"policy": "undo"}, "pieces": [1]}))
    assert _before(path, {"policy": "undo"})["pieces"] == [1]
    with pytest.raises(ConfigError, match="other settings"):
        _before(path, {"policy": "auto"})
