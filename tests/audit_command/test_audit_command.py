"""``kvtxn audit``: what it refuses before an engine starts, and what it finds in real engines."""

from __future__ import annotations

import argparse
import asyncio
import json

import pytest
import recorded

pytest.importorskip("rich")
pytest.importorskip("vllm")

from kvtxn.integrations.audit_command import command, engine, trace, vllm_engine, workloads
from kvtxn.integrations.audit_command.client import EngineClient
from kvtxn.integrations.audit_command.jobs import Job, Refused, sentence
from kvtxn.integrations.audit_command.prompts import Prompt
from kvtxn.integrations.audit_command.vllm_engine import VllmRequests
from kvtxn.integrations.audit_command.workloads import WORKLOADS

from kvtxn.cli import main


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch):
    def play(job, progress):
        raise AssertionError("an engine would have started")

    monkeypatch.setattr(command, "run_engine", play)


def refusal(capsys, *words):
    """The one sentence of a refusal."""
    try:
        code = main(["audit", *map(str, words)])
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert max(map(len, lines)) <= 100 or lines[0].startswith("usage: ")
    return " ".join(printed.err.split())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("{", "expected JSON"),
        ("[1]", "--engine-args is not a JSON object with a model"),
        ('{"model": 3}', "--engine-args is not a JSON object with a model"),
        ('{"model": "m", "additional_config": []}', "is not an object of objects"),
        ('{"model": "m", "additional_config": [1]}', "is not an object of objects"),
        ('{"model": "m", "additional_config": {"kvtxn": 3}}', "is not an object of objects"),
        ('{"model": "m", "additional_config": {"kvtxn": {"audti": "x"}}}', "did you mean 'audit'?"),
        ('{"model": "m", "additional_config": {"kvtxn": {"policy": "un"}}}', "policy"),
        *(
            (
                f'{{"model": "m", "additional_config": {{"kvtxn": {{"audit": {audit}}}}}}}',
                f"{why}; expected one of 'ledger', 'bytes', got {got}; leave audit out",
            )
            for audit, got, why in (
                ('"ledgr"', "'ledgr'", "audit is not valid"),
                ("[]", "[]", "audit is not valid"),
                ('"off"', "'off'", "an audit that is off finds nothing"),
            )
        ),
        (
            '{"model": "m", "additional_config": {"kvtxn": {"on_violation": "raise"}}}',
            "would end the engine before it can report",
        ),
    ],
)
def test_engine_arguments_that_are_refused(capsys, arguments, why):
    assert why in refusal(capsys, "--engine-args", arguments)


def trace_line(**changes):
    """A line of a public trace."""
    given = {"timestamp": 3000, "input_length": 600, "output_length": 64, "hash_ids": [0, 7]}
    return json.dumps(given | changes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no prompts"),
        ("\n\n", "has no prompts"),
        ('"fine"\n{', "line 2 of"),
        ("3", "is neither a string nor an object"),
        ('{"prompt": "a", "max_token": 3}', "has an unknown key, 'max_token'"),
        ("{}", "needs either 'prompt' or 'prompt_token_ids'"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "needs either"),
        ('{"prompt": ""}', "is not a text"),
        ('{"prompt_token_ids": []}', "not a list of numbers"),
        ('{"prompt_token_ids": [1, -1]}', "not a list of numbers"),
        ('{"prompt_token_ids": [true]}', "not a list of numbers"),
        pytest.param("[" * 100_000, "is not JSON: maximum recursion", id="nested"),
        pytest.param(f'{{"max_tokens": {"9" * 5000}}}', "is not JSON: Exceeds", id="long"),
        ('{"prompt": "a", "max_tokens": 0}', "is not a positive number"),
        ('{"prompt": "a", "max_tokens": true}', "is not a positive number"),
        ('{"prompt": "a", "at": -1}', "has an 'at' that is not a number of seconds"),
        ('{"prompt": "a", "at": NaN}', "has an 'at' that is not a number of seconds"),
        ('{"prompt": "a", "leave_after": 0}', "has a leave_after that is not a positive number"),
        (trace_line(timestamp="soon"), "has a timestamp that is not a number of milliseconds"),
        pytest.param(trace_line(timestamp=10**400), "has a timestamp that is not", id="late"),
        pytest.param(
            f'{{"prompt": "a", "at": {10**400}}}', "has an 'at' that is not", id="at late"
        ),
        (trace_line(output_length=0), "has a length that is not a positive number"),
        (trace_line(input_length=1025), "needs a hash id for each 512 tokens of its input"),
        (trace_line(hash_ids=[0, -1]), "needs a hash id for each 512 tokens of its input"),
    ],
)
def test_prompts_that_are_refused(capsys, tmp_path, text, why):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    assert why in refusal(capsys, "--workload", path)


def test_files_that_cannot_be_used(capsys, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "no such workload" in refusal(capsys, "--workload", "chta")
    assert "cannot be read" in refusal(capsys, "--workload", tmp_path / "binary")
    said = refusal(capsys, "--workload", tmp_path)
    assert "the prompts cannot be read: Is a directory; expected a file of prompts, or" in said
    assert said.endswith(f"got '{tmp_path}'; `kvtxn audit --help` says what both are")
    assert "there is no folder" in refusal(capsys, "--html", tmp_path / "none" / "page.html")
    assert "cannot be written" in refusal(capsys, "--html", tmp_path)
    assert "is not a positive number" in refusal(capsys, "--requests", "0")


def test_good_prompts_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    text = '"a\u2028\x85c"\r\n\n{"prompt": "b", "max_tokens": 3}\n{"prompt_token_ids": [1, 2]}\n'
    timed = '{"prompt": "a", "at": 0.5, "leave_after": 3}\n' + trace_line(session="x")
    path.write_text(text + timed, encoding="utf-8", newline="")
    assert command.read(path) == (
        Prompt(1, "a\u2028\x85c", None, 32),
        Prompt(3, "b", None, 3),
        Prompt(4, None, [1, 2], 32),
        Prompt(5, "a", None, 32, 0.5, 3),
        Prompt(6, None, None, 64, 3.0, None, [0, 7], 600),
    )


def test_the_user_s_settings_stay(monkeypatch, capsys):
    """An audit is asked for, with a recording; a policy is left alone."""
    jobs = []

    def play(job, progress):
        jobs.append(job)
        return Refused("vLLM refuses these engine arguments: no")

    monkeypatch.setattr(command, "run_engine", play)
    given = {"model": "m", "additional_config": {"other": 1, "kvtxn": {"policy": "undo"}}}
    words = ["--engine-args", json.dumps(given), "--workload", "prefix", "--requests", "5"]
    assert "vLLM refuses these engine arguments: no" in refusal(capsys, *words)
    (job,) = jobs
    assert job.engine_args["additional_config"] == {
        "other": 1, "kvtxn": {"policy": "undo", "audit": "ledger", "record": True},
    }  # fmt: skip
    assert (job.workloads, job.requests, job.prompts) == (("prefix",), 5, ())


@pytest.mark.parametrize(
    ("words", "workloads"),
    [
        ("chat", ("chat",)),
        ("sessions,preempt", ("sessions", "preempt")),
        ("all", ("chat", "sessions", "prefix", "preempt", "offload", "bursts")),
    ],
)
def test_several_workloads_are_played_in_turn(words, workloads):
    args = argparse.Namespace(
        workload=words, engine="vllm", engine_args=None, requests=9, seed=0, log_level="error"
    )
    assert command.job_of(args).workloads == workloads


def test_a_request_that_failed_was_not_judged(capsys, monkeypatch):
    """The verdict speaks of the others, and the exit code says that something is open."""
    result = recorded.found(steps=30)
    result.failed.append("request 3: too long")
    monkeypatch.setattr(command, "run_engine", lambda job, progress: result)
    assert main(["audit"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert f"in 30 steps of {result.requests - 1} requests, and no wrong one was found" in said
    assert "Healthy" not in said
    assert "- 1 request failed." in said
    assert "- failed: request 3: too long" in said


def test_a_trace_names_its_command_and_refuses_more_prompts_than_there_are(
    capsys, monkeypatch, tmp_path
):
    """Its page has the whole command line; errors name the command once."""
    page = tmp_path / "trace.html"
    monkeypatch.setattr(trace, "play", lambda job, name: recorded.found(steps=30))
    assert main(["trace", "--count", "2", "--max-tokens", "7", "--html", str(page)]) == 0
    assert "kvtxn trace --policy deferred --count 2 --max-tokens 7" in page.read_text()
    capsys.readouterr()
    for name in ("trace", "demo"):
        assert main([name, "--count", "999"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert said.startswith(f"kvtxn {name}: --count: there are not so many prompts; expected 1")
    monkeypatch.undo()
    assert main(["audit", "--engine-args", "3"]) == 2
    assert capsys.readouterr().err.startswith("kvtxn audit: --engine-args is not")


def test_help_names_every_workload(capsys):
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"{name}: {workload.help}" in text for name, workload in WORKLOADS.items())


def test_needs_of_a_workload_give_way_to_the_user():
    class Sizes:
        max_length, block_size, vocabulary = 512, 32, 2048

    assert vllm_engine.needs("chat", {}, Sizes, "cpu") == {}
    few = vllm_engine.needs("preempt", {}, Sizes, "cpu")
    assert few == {"max_num_seqs": 16, "num_gpu_blocks_override": 26}
    more = vllm_engine.needs("preempt", {}, Sizes, "cpu", 4)
    assert more == {"max_num_seqs": 16, "num_gpu_blocks_override": 104}
    given = {"max_num_seqs": 2, "num_gpu_blocks_override": 99, "kv_transfer_config": {}}
    assert vllm_engine.needs("preempt", given, Sizes, "cpu") == {}
    assert vllm_engine.needs("offload", given, Sizes, "cpu") == {}
    store = "kv_connector_extra_config"
    on_cpu, on_gpu = (
        vllm_engine.needs("offload", {}, Sizes, device)["kv_transfer_config"][store]
        for device in ("cpu", "cuda")
    )
    assert on_cpu["spec_name"] == "MemoryStoreSpec"
    assert "spec_name" not in on_gpu


@pytest.fixture
def small():
    """A client of an engine of 64 tokens per request."""

    class Sizes:
        max_length, block_size, vocabulary = 64, 32, 100

    return EngineClient(
        None, VllmRequests(), Sizes, Job(engine_args={}, workloads=()), lambda done: None
    )


def test_sessions_fit_the_engine(small):
    """vLLM refuses a request that is too long; a session that is ends its engine."""
    turns = [([1] * 36, 21), ([2] * 12, 8), ([3] * 12, 5)]
    assert small.fitted_turns(turns) == [([1] * 36, 21)]
    assert small.fitted_turns([([1] * 36, 8), *turns[1:]]) == [([1] * 36, 8), ([2] * 12, 7)]
    assert small.fitted_turns([([1] * 100, 50), ([2], 1)]) == [([1] * 31, 32)]
    small.max_length = 512
    assert small.fitted_turns(turns) == turns
    small.max_length = 2
    assert small.fitted_turns(turns) == [([1], 1)]
    assert small.fitted([7, 8], 3) == ([7], 1)


def test_a_token_id_beyond_the_vocabulary_fails_alone(small):
    asked = []

    async def listen(name, given, sampling, abort):
        asked.append(name)

    small._listen = listen
    prompts = [Prompt(number, None, [1, most], 3) for number, most in ((1, 99), (2, 100), (3, 0))]
    asyncio.run(small.answer(prompts))
    assert asked == ["line 1", "line 3"]
    assert small.failed == ["line 2: token id 100 of a vocabulary of 100"]
    assert small.made == 3


def test_requests_are_made_at_their_times(small, monkeypatch):
    """The first one at once; in between as much time passes as in the file."""
    asked, slept = [], []

    async def listen(name, given, sampling, abort):
        asked.append((name, abort))

    async def sleep(seconds):
        slept.append(seconds)

    small._listen = listen
    monkeypatch.setattr(asyncio, "sleep", sleep)
    times = [(10.0, None), (12.5, 4), (None, None), (10.25, None)]
    prompts = [Prompt(line, None, [1], 3, *each) for line, each in enumerate(times)]
    asyncio.run(small.answer(prompts))
    assert sorted(slept) == [0.0, 0.0, 0.25, 2.5]
    assert sorted(asked) == [("line 0", None), ("line 1", 4), ("line 2", None), ("line 3", None)]


def test_a_trace_keeps_its_common_blocks(small):
    """A block of a trace is a block of the engine; what does not fit the engine is cut off."""
    small.max_length = 512
    one, two, long = (
        small._sized(Prompt(1, None, None, most, 0.0, None, blocks, length))
        for blocks, length, most in (
            ([4, 5, 6], 1400, 64),
            ([4, 5, 9], 1536, 8),
            ([1] * 99, 9999, 9),
        )
    )
    assert len(one.tokens) == 1400 * 32 // 512
    assert one.tokens[:64] == two.tokens[:64]
    assert one.tokens[64:] != two.tokens[64 : len(one.tokens)]
    assert one.tokens[:32] != one.tokens[32:64]
    assert (one.max_tokens, two.max_tokens) == (4, 1)
    assert len(long.tokens) + long.max_tokens < 512
    plain = Prompt(1, "text", None, 3)
    assert small._sized(plain) is plain


def test_bursts_are_made_of_earlier_ones(small, monkeypatch):
    """Requests overlap, some leave, some come twice, and all end or begin within the engine."""
    asked = []

    async def ask(prompt, most, *, abort=None, among=None):
        small.made += 1
        asked.append((tuple(prompt), most, abort))
        return []

    async def reset(*, running=False):
        asked.append("reset")

    monkeypatch.setattr(small, "ask", ask)
    monkeypatch.setattr(small, "reset", reset)
    monkeypatch.setattr(workloads, "_SPREAD", 0.0)
    small.max_length, small.budget = 512, 400
    asyncio.run(WORKLOADS["bursts"].play(small))
    requests = [each for each in asked if each != "reset"]
    assert 400 <= len(requests) < 412
    assert "reset" in asked
    assert len({*requests}) < len(requests)  # some came twice
    assert any(abort for *_, abort in requests)
    assert any(most == 1 for _, most, _ in requests)
    assert any(len(prompt) % 32 == 0 for prompt, *_ in requests)
    assert all(prompt and most >= 1 for prompt, most, _ in requests)


def test_an_engine_with_too_few_blocks_by_its_workload_gets_more(monkeypatch):
    """A model has several groups of layers, say."""
    rooms = []

    def starts_with(room):
        def play(job, progress):
            rooms.append(job.room)
            return Refused("enough") if job.room >= room else None

        return play

    monkeypatch.setattr(engine, "_run", starts_with(4))
    assert engine.run(Job(engine_args={}, workloads=("preempt",)), None) == Refused("enough")
    assert rooms == [1, 2, 4]
    assert engine._has_few_blocks(Job(engine_args={}, workloads=("chat", "preempt")))
    assert not engine._has_few_blocks(Job(engine_args={}, workloads=("chat",)))
    own = {"num_gpu_blocks_override": 3}
    assert not engine._has_few_blocks(Job(engine_args=own, workloads=("preempt",)))


def test_the_point_of_an_error_is_a_sentence():
    """pydantic says it in a list, others in a first line, some only by their class."""

    class Invalid(ValueError):
        def errors(self):
            return [{"msg": "Value error, too long"}]

    assert sentence(Invalid("1 validation error\nfor Config")) == "Value error, too long"
    assert sentence(TypeError("no argument 'nope'\n  more")) == "no argument 'nope'"
    assert sentence(KeyError()) == "KeyError"
