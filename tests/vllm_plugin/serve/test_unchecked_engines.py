"""Real engines of a release that was taken off the list: their self-test decides."""

from __future__ import annotations

import pytest
from engine_jobs import missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.engines("unchecked"),
]

#: What the log says of an engine that runs stock, by what is wrong.
SAYS = {
    "wrong row": "and the self-test failed: ",
    "nothing rejected": "and the self-test failed: ",
    "elsewhere": "and the self-test failed: rows of other blocks were written",
    "refused": "and the self-test failed: ",
    "gone": ", and lacks vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample",
    "not asked for": "was not checked; supported: ",
    "connector": "and the self-test cannot take steps beside a KV connector",
}


@pytest.fixture(scope="module")
def run(reports):
    """The report of every engine, and the process's log."""
    found = reports("unchecked")
    return found["alone"], found.log("alone")


def log_of(printed, name):
    """The part of an engine."""
    return printed.partition(f"--- {name}\n")[2].partition("\n--- ")[0]


@pytest.mark.parametrize("policy", ["deferred", "undo", "groups", "few rows", "short steps"])
def test_windows_start_after_the_self_test(run, policy):
    """They count nothing of it, leave nothing of it, and give stock's tokens."""
    report, printed = run
    found = report[policy]
    assert found["type"] is None
    assert found["class"].startswith("Window")
    assert (found["before"]["kvtxn_active"], found["before"]["kvtxn_rows_staged_total"]) == (1, 0)
    assert (found["left"], found["written"]) == ([], 0)
    assert found["tokens"] == report["stock, groups" if policy == "groups" else "stock"]
    assert found["after"]["kvtxn_rows_committed_total"] > 0
    assert found["after"]["kvtxn_rows_rejected_total"] > 0
    assert found["after"]["kvtxn_fallbacks_total"] == 0
    said = log_of(printed, policy)
    passed, active = said.index("kvtxn.self_test_passed"), said.index("kvtxn.active")
    assert passed < active
    assert said.count("kvtxn.active") == 1
    assert "kvtxn.inactive" not in said


@pytest.mark.parametrize("name", SAYS)
def test_stock_goes_on_with_one_sentence(run, name):
    """With classes of its own, nothing left in the caches, and its own tokens."""
    report, printed = run
    found = report[name]
    assert (found["type"], found["class"]) == (None, "CPUModelRunner")
    assert found["before"] == {"kvtxn_active": 0.0}
    assert (found["left"], found["tokens"]) == ([], report["stock"])
    assert found["written"] == 0 or name == "elsewhere"
    said = log_of(printed, name)
    assert said.count("kvtxn.inactive") == 1
    assert "kvtxn.active" not in said
    assert f"vLLM {found['version']} was not checked" in said
    assert SAYS[name] in said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("required", "and the self-test failed: "),
        ("required, gone", ", and lacks vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample"),
        ("required, connector", "and the self-test cannot take steps beside a KV connector"),
    ],
)
def test_required_stops_the_start_with_the_sentence(run, name, says):
    found = run[0][name]
    assert found["type"] == "RequiredError"
    start = f"kvtxn is required, but vLLM {found['version']} was not checked"
    assert start in found["says"]
    assert says in found["says"]


@pytest.mark.parametrize("name", ["deferred", "undo", "groups"])
def test_the_doctor_says_that_the_self_test_decides(run, name):
    [line] = run[0][name]["foreseen"]
    assert "if the engine passes the self-test at its start, else off" in line
    assert " -> off" not in line


@pytest.mark.parametrize("name", ["gone", "not asked for", "connector"])
def test_the_doctor_says_of_an_engine_that_runs_stock_what_its_log_says(run, name):
    report, printed = run
    [line] = report[name]["foreseen"]
    policy, _, reason = line.removesuffix(")").partition(" -> off (")
    assert policy.startswith("policy ")
    assert reason in log_of(printed, name)


@pytest.mark.parametrize("name", ["required, gone", "required, connector"])
def test_the_doctor_says_why_a_start_will_stop(run, name):
    *_, line = run[0][name]["foreseen"]
    said = line.removeprefix("required -> the start stops: ")
    assert said in run[0][name]["says"]
