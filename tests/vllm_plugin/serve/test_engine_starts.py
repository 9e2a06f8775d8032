"""Real engines whose start a mistake stops, and one that goes on without its hooks."""

from __future__ import annotations

import pytest
from engine_jobs import missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.engines("starts", "unhooking"),
]

#: What the error says that reaches the user, by mistake.
SAYS = {
    "misspelled": ("ConfigError", "there is no setting 'polcy'; expected one of policy, backend, "),
    "bad value": ("ConfigError", "policy is not valid; expected one of 'auto', 'deferred', "),
    "wrong type": ("ConfigError", "max_rows is not valid; expected a positive int of at most "),
    "no such backend": ("BackendUnavailableError", "no backend is registered as 'abacus'"),
    "not on this device": ("BackendUnavailableError", "'cudagraph' cannot run on cpu: "),
    "no graphs here": ("BackendUnavailableError", "acceptance='graph' needs a CUDA device, not "),
    "no room": ("ConfigError", "max_rows=1 leaves no room for one request, so no window could "),
}


@pytest.fixture(scope="module")
def run(reports):
    """Engines that must not start, and one that must: their report, and the process's log."""
    found = reports("starts")
    return found["alone"], found.log("alone")


def log_of(printed, name, where):
    """The part of a start."""
    return printed.partition(f"--- {name} in {where}\n")[2].partition("\n--- ")[0]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, "one process") for name in SAYS),
        ("misspelled", "processes"),
        ("not on this device", "processes"),
    ],
)
def test_a_mistake_reaches_the_user_as_one_sentence(run, name, where):
    """``LLM(...)`` itself raises the user's mistake, before any worker starts."""
    error, says = SAYS[name]
    found = run[0][where][name]
    assert found["type"] == error
    assert found["says"].startswith(f"additional_config['kvtxn']: {says}")


@pytest.mark.parametrize("where", ["one process", "processes"])
def test_a_misspelled_setting_comes_with_the_nearest_one(run, where):
    found = run[0][where]["misspelled"]["says"]
    assert found.endswith(", got 'polcy'; did you mean 'policy'?")


@pytest.mark.parametrize("where", ["one process", "processes"])
def test_an_engine_that_cannot_have_kvtxn_runs_stock_unless_it_is_required(run, where):
    """An engine without speculation runs stock; with ``required`` its start stops."""
    report, printed = run
    assert report[where]["stock"] == {"type": None, "active": [0.0]}
    place = "processes" if where == "processes" else "this process"
    said = log_of(printed, "stock", place)
    assert said.count("kvtxn.inactive") == 1
    assert "the engine does not speculate" in said
    found = report[where]["required"]
    assert found["type"] == "RequiredError"
    assert "kvtxn is required, but the engine does not speculate" in found["says"]


@pytest.mark.parametrize("where", ["one process", "processes"])
def test_workers_check_as_well(run, where):
    """Workers refuse settings that no front end checked: the start stops, and the log says why."""
    report, printed = run
    sentences = {
        "misspelled": "there is no setting 'polcy'",
        "required": "kvtxn is required, but the engine does not speculate",
    }
    for name, found in report[f"{where}, workers alone"].items():
        assert found["type"] is not None
        place = "processes" if where == "processes" else "this process"
        last = printed.rpartition(f"--- {name} in {place}\n")[2].partition("\n--- ")[0]
        assert sentences[name] in found["says"] + last


@pytest.fixture(scope="module")
def unhooking(reports):
    """Classes and tokens of engines before and after."""
    return reports("unhooking")["alone"]


@pytest.mark.parametrize("policy", ["undo", "deferred"])
def test_a_running_engine_goes_on_without_its_hooks(unhooking, policy):
    """Its classes are those of an engine that never had any, and so are its tokens."""
    hooked, unhooked = (unhooking[policy][name] for name in ("hooked", "unhooked"))
    stock = unhooking["stock"]
    assert hooked[0] != stock[0]
    assert any(name.startswith("Window") for name in hooked[0])
    assert unhooked == stock
    assert hooked[1] == stock[1]
