"""SEEN.md is what the recorded runs say, and the records are clean; no GPU needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import identity_faults
import identity_jobs
import pytest
import seen_kit
import seen_stages
from gpu_seen import PAGE, RECORD, draw
from gpu_ties import NEAR, NOISE
from kvtxn.integrations.vllm_plugin.policy import matrix
from test_gpu_serve import misread

SEEN = json.loads(RECORD.read_text())


def test_the_page_is_drawn_from_the_record():
    assert PAGE.read_text() == draw(SEEN)


@pytest.mark.parametrize("subject", SEEN.get("kit", {}))
def test_every_executor_passes(subject):
    found = SEEN["kit"][subject]
    assert found["failed"] == 0
    assert found["passed"] > 0


def test_a_report_of_the_kit_is_reduced(tmp_path):
    """Cases count to what their file tests, else to its folder; an error is a failure, too."""
    ended = ["", "<skipped/>", "<failure/>", "<error/>", "<failure/><error/>"]
    cases = [
        *(("tests.backends.test_cudagraph.TestCudaGraph", each) for each in ended),
        *(("tests.test_mutations", each) for each in ended[:2]),
        ("tests.backends.test_launch", ""),
        ("tests.serving.test_graph_steps.TestSteps", ""),
    ]
    lines = [f'<testcase classname="{place}" name="n">{each}</testcase>' for place, each in cases]
    report = f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>"
    (tmp_path / "kit.xml").write_text(report)
    assert {name: (*each.values(),) for name, each in seen_kit.kit(tmp_path).items()} == {
        "kit, cudagraph": (1, 1, 3),
        "broken executors": (1, 1, 0),
        "launches and the ledger's kernels": (1, 0, 0),
        "engines' steps and caches": (1, 0, 0),
    }
    assert "| kit, cudagraph" in seen_kit.drawn(seen_kit.kit(tmp_path))


@pytest.mark.parametrize("path", [*seen_kit.KITS, *seen_kit.OTHERS])
def test_what_the_kit_runs_is_there(path):
    assert (Path(__file__).parents[1] / path).exists()


@pytest.mark.parametrize("engine", SEEN["states"])
def test_states_are_those_of_stock(engine):
    """Tokens, states and counts, also after faults; one block a request, and more requests."""
    found = SEEN["states"][engine]
    assert (found["same"], found["equal"]) == (found["requests"], found["states"])
    assert found["accepted_alike"]
    assert found["fault"]
    assert not found["strays"]
    stock, ours = found["blocks"]
    assert sum(ours) < sum(stock)
    assert found["at_once"][1] > found["at_once"][0]


@pytest.mark.parametrize("engine", SEEN.get("fast", {}))
def test_fast_states_are_those_of_the_kept_rows(engine):
    """Tokens part at near-ties alone; wrong counts were seen, each of them."""
    found = SEEN["fast"][engine]
    assert found["gap"] <= NEAR
    assert found["noise"] <= NOISE
    if "states" not in found:  # stock beside stock
        return
    for wrong in ("off", "other_blocks", "strays"):
        assert found.get(wrong, 0) == 0
    # A state that two counts leave alike cannot show a wrong one: few of a rank with few heads, and
    # few in bfloat16, which rounds a small step away.
    some = engine.startswith(("ranks", "granite")) or "bfloat16" in engine
    assert found["blind"] <= (found["states"] / 10 if some else 0)
    assert found["states"] > 500
    assert found["repeated"] > 0
    assert found["fault"]
    assert found["given_wrong"] >= found["seen_wrong"] >= found["given_wrong"] - found["blind"]
    assert found["seen_wrong"] > 20
    assert (found["replays"] > 0) == (found["graphs"] != "NONE")
    stock, ours = found["blocks"]
    assert sum(ours) < sum(stock)


@pytest.mark.parametrize("server", SEEN["servers"])
def test_servers_count_what_vllm_counts(server):
    """For every engine and rank, also as curl reads the page."""
    found = SEEN["servers"][server]
    curl = found["curl"] and {**found["curl"], "page": [""] * found["curl"]["lines"]}
    assert misread(found | {"curl": curl}) == {}


#: By the beginning of an engine's name: its model's family in the doctor's matrix, and its model.
FAMILIES = {
    **dict.fromkeys(("triton", "fused", "ahead", "mtp", "few"), (matrix.STATES, "Qwen3.5")),
    **dict.fromkeys(("eagle", "left"), (matrix.STATES, "Qwen3.5")),
    "ranks": (matrix.STATES, "Qwen3.5"),
    "experts": (matrix.STATES, "Qwen3-Next"),
    "olmo": (matrix.OLMO, "OLMo hybrid"),
    "nemotron": (matrix.MIXED, "Nemotron-H"),
    "granite": (matrix.MIXED, "Granite 4"),
    "falcon": (matrix.MIXED, "Falcon-H1"),
    "lfm2": (matrix.CONVOLVED, "LFM2"),
}
#: The families of the same models with the setting "fast".
FAST = {matrix.STATES: matrix.FAST, matrix.MIXED: matrix.MIXED_FAST}


def test_the_matrix_says_which_hybrids_were_seen():
    """Under which policies, which models of a family, and where no graphs were captured."""
    seen, graphs, older = {}, {}, {}
    engines = {**SEEN["states"], **SEEN.get("fast", {})}
    for engine, found in engines.items():
        if engine.startswith("vLLM's two kernels"):
            continue
        kind, _, policy = engine.partition(",")[0].rpartition(".")  # of whatever release
        start = kind.partition(".")[0].partition("_")[0]
        family, name = FAMILIES[start]
        family = FAST[family] if policy == "fast" else family
        key = (("cuda", found["runner"]), family, "tensor" if start == "ranks" else "one worker")
        # "auto" is "deferred" where FlashAttention 3 reads the rows, as on an H200; "chosen"
        # is "exact", taken by the rule.
        given = {"auto": "deferred", "fast": "deferred", "chosen": "deferred"}
        seen.setdefault(key, set()).add(given.get(policy, policy))
        release = engine.partition(", vLLM ")[2]
        captured = (older.setdefault(release, {}) if release else graphs).setdefault(key, {})
        captured[name] = captured.get(name, False) or found["graphs"] != "NONE"
    said = {
        (where, kind[0], kind[-1]): set(policies)
        for where, kinds in matrix.SEEN.items()
        for kind, policies in kinds.items()
        if where[0] == "cuda"
        and kind[0] in {*(family for family, _ in FAMILIES.values()), *FAST.values()}
    }
    assert seen == said
    remarks = {key: as_remark(key[1], captured) for key, captured in graphs.items()}
    for release, kinds in older.items():  # models that the newest release has not run like this
        for key, captured in kinds.items():
            for name in captured:
                if name not in graphs[key] or graphs[key][name] < captured[name]:
                    remarks[key] += f", and with vLLM {release} {name}"
    assert remarks == {key: matrix.ONLY[key[0]].get(key[1:], "") for key in graphs}


def test_what_the_rule_of_auto_takes_was_seen_by_its_own_name():
    """An engine for which "auto" takes "exact" is one with "exact"."""
    for where, kinds in matrix.SEEN.items():
        named = {
            kind[1:]: {*policies} for kind, policies in kinds.items() if kind[0] == matrix.STATES
        }
        for kind, policies in kinds.items():
            if kind[0] == matrix.CHOSEN:
                assert {*policies} <= named[kind[1:]], where
    assert any(kind[0] == matrix.CHOSEN for kinds in matrix.SEEN.values() for kind in kinds)


def listed(names):
    """Name all, with an "and" before the last one."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def as_remark(family, captured):
    """Name the models that were seen with captured graphs, then those that were not.

    Nothing is to be said of a family whose models were all seen with them.
    """
    if all(captured.values()) and set(captured) == {*family.partition(" with")[0].split(", ")}:
        return ""
    with_graphs, eager = ([n for n in captured if captured[n] == each] for each in (True, False))
    parts = [listed(with_graphs)] if with_graphs else []
    parts += [f"{listed(eager)} with enforce_eager=True"] if eager else []
    return ", ".join(parts)


#: An engine without rows that the ledger knows.
UNWATCHED = ("mamba2",)


@pytest.mark.parametrize("engine", SEEN["audit"])
def test_the_audit_cries_wolf_nowhere(engine):
    found = SEEN["audit"][engine]
    assert found["wrong"] == 0
    assert found["same"] == found["requests"] > 0
    assert (found["rows"] > 0) == (engine not in UNWATCHED)
    if found["audit"] == "bytes":
        assert found["compared"] > 0


@pytest.mark.parametrize("engine", SEEN["connectors"])
def test_what_leaves_is_durable(engine):
    found = SEEN["connectors"][engine]
    assert found["rejected"] > 0
    if engine.partition(", ")[0].endswith(".stock"):  # a release may follow
        assert found["residue"] > 0
        return
    for wrong in ("stored_wrong", "stored_pending", "loaded_wrong"):
        assert found[wrong] == 0
    assert found["bypassed"] or not found["residue"]


def guide(name):
    """A guide's text, on one line."""
    return " ".join((Path(__file__).parents[2] / "docs" / name).read_text().split())


def test_the_guides_have_the_records_numbers():
    stock, ours = SEEN["states"]["nemotron.eager.auto"]["at_once"]
    (release,) = re.findall(r"of vLLM (\S+) where\s+nothing else is named", PAGE.read_text())
    room = f"room for {ours:.0f} requests where vLLM {release} has room for {stock:.0f}**"
    assert room in guide("vllm.md")
    rows = sum(found["rows"] for found in SEEN["audit"].values()) / 1e9
    assert f"In {rows:.2f} billion rows read it gave no false alarm" in guide("ledger.md")


@pytest.mark.parametrize("engine", SEEN["stages"])
def test_stages_are_those_of_stock(engine):
    """Tokens, with windows on and off; each stage counts what the oracle saw, and loses nothing.

    Where a batch depends on time a near-tie may fall otherwise than in stock.
    """
    found = SEEN["stages"][engine]
    assert found["on_and_off"] == found["requests"] > 0
    assert found["same"] == found["requests"] or found["gap"] <= NEAR
    assert found["noise"] <= NOISE
    early = [each for each in found["stages"] if not each["last"]]
    assert len(early) < len(found["stages"])
    for each in found["stages"]:  # of a tensor-parallel group each rank is a line
        assert each["steps"] == ("GraphSteps" if each["last"] else "PipelineSteps")
    for each in found["stages"]:
        assert each["rejected"] > 0
        assert each["rejected"] <= each["stays_in_stock"] or found["same"] < found["requests"]
        assert each["bypassed"] <= each["windows"] / 100
    assert seen_stages.wrong(found) == []
    assert all(each["gone"] > 0 for each in early)
    assert all(found["faults"].values())


@pytest.mark.parametrize("engine", SEEN["identities"])
def test_identities_follow_rows_behind_connectors(engine):
    """No alarm without a fault; blocks of other tokens are found, and unknown bytes are counted."""
    found, job = SEEN["identities"][engine], identity_jobs.ENGINES[engine]
    if found.get("misplaced"):  # by the connector: nobody can tell its faults from planted ones
        assert job["known"]
        assert found["alarms"] + found["unverified"] / identity_jobs.BLOCK >= found["misplaced"]
        return
    assert (found["alarms"] > 0) == ("differs" in job)  # the engine that stored the rows differs
    assert found["same"]
    assert found["brought"] > 400
    groups = 2 if job["model"] == "gemma3" else 1
    assert found["unverified"] <= groups * found["brought"] / 50  # parts of blocks, of each group
    assert set(job["faults"]) <= set(found["faults"])
    for fault, told in found["faults"].items():
        assert told == "imported" or (fault in identity_faults.UNKNOWN and "counted" in told)
    # Rows of another engine are of another process's weights.
    assert found["old"] in (("imported",) if job.get("second") else ("stale", None))
