"""Recurrent states in the plug-in: the setting, and what the table, doctor and matrix decide."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import model_files
import pytest
from engine_jobs import missing
from invented_releases import invented  # noqa: F401
from kvtxn.integrations.vllm_plugin.policy import doctor, state_rules, supported
from kvtxn.integrations.vllm_plugin.policy.decision import ON_ONE_GPU
from kvtxn.integrations.vllm_plugin.policy.doctor import report
from kvtxn.integrations.vllm_plugin.policy.engine_facts import (
    GATED_DELTA,
    MAMBA2,
    OLMO_DELTA,
    OTHER_STATES,
    EngineFacts,
)
from kvtxn.integrations.vllm_plugin.policy.matrix import matrix
from kvtxn.integrations.vllm_plugin.policy.rules import decide
from kvtxn.integrations.vllm_plugin.policy.settings import asked_states, settings

from kvtxn import ConfigError

ROOT = Path(__file__).parents[3]
EXACT = {"kvtxn": {"policy": "auto", "recurrent": "exact"}}
FAST = {"kvtxn": {"policy": "auto", "recurrent": "fast"}}
ON_GPU = {"device": "cuda", "runner": "v2"}
ENGINE = EngineFacts(recurrent=GATED_DELTA, states="exact", dtype="bfloat16")

real_vllm = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def test_the_setting_is_off_unless_it_is_given():
    for given, states in ((EXACT, "exact"), ({"kvtxn": {"policy": "auto"}}, "off")):
        found = settings(given, 8, "cpu")
        assert found is not None
        assert found.recurrent == asked_states(given) == states
    assert asked_states(None) == asked_states({"kvtxn": {"recurrent": "nope"}}) == "off"


@pytest.mark.parametrize(
    ("given", "device", "says"),
    [
        ({"policy": "auto", "recurrent": "bits"}, "cpu", "one of 'off', 'exact', 'fast', 'auto'"),
        ({"audit": "ledger", "recurrent": "auto"}, "cuda", "without a policy: no window"),
        ({"policy": "auto", "recurrent": "fast"}, "cpu", "vLLM's own operator is exact there"),
        ({"policy": "auto", "recurrent": "exact"}, "xpu", "on CPUs and GPUs only"),
        ({"policy": "auto", "recurrent": "fast"}, "cpu", 'has no faster one.*; use "exact"'),
        ({"policy": "auto", "recurrent": "fast"}, "xpu", "on CPUs and GPUs only"),
        ({"audit": "ledger", "recurrent": "exact"}, "cpu", "without a policy: no window"),
    ],
)
def test_a_value_without_effect_is_refused(given, device, says):
    with pytest.raises(ConfigError, match=says):
        settings({"kvtxn": given}, 8, device)


def test_states_are_held_under_deferred_alone():
    """The attention beside them is vLLM's own, so that no rounding speaks against "auto"."""
    auto, named = decide("auto", ENGINE), decide("deferred", ENGINE)
    assert auto.policy == named.policy == "deferred"
    assert "cannot be taken back to the middle of a window" in auto.reason
    for asked in ("undo", "direct"):
        off = decide(asked, ENGINE)
        assert off.policy == "off"
        assert off.reason.startswith(f"policy '{asked}' cannot work here: a recurrent state")


def test_what_rules_deferred_out_leaves_nothing_else():
    """Policy "auto" does not take ``undo`` over states if rows cannot wait."""
    shared = attrs.evolve(ENGINE, kv_sharing=True)
    for asked in ("auto", "deferred", "undo"):
        assert decide(asked, shared).policy == "off"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"states": "off"}, 'the settings lack "recurrent": "exact"'),
        (
            {"recurrent": OTHER_STATES},
            "of other recurrent layers it would have to",
        ),
        ({**ON_GPU, "states": "off"}, 'the settings lack "recurrent": "exact" or "auto"'),
        ({"states": "fast"}, 'set "recurrent" to "exact"'),
        ({**ON_GPU, "runner": "v1", "tensor_parallel": 2}, "states over several ranks were not"),
        (
            {**ON_GPU, "recurrent": MAMBA2, "tensor_parallel": 2},
            'cuda; "unchecked": true lets "recurrent"',
        ),
        ({**ON_GPU, "pipeline_parallel": 2}, "under pipeline parallelism: each step that is under"),
        ({**ON_GPU, "connectors": ("ExampleConnector",)}, "would have to read them after their"),
        ({"recurrent": OLMO_DELTA}, "by Triton kernels alone, which need a GPU"),
        ({"recurrent": OLMO_DELTA, "states": "off"}, "by Triton kernels alone, which need a GPU"),
        ({**ON_GPU, "recurrent": OLMO_DELTA, "states": "fast"}, "and none for gated delta nets of"),
        (
            {**ON_GPU, "recurrent": OTHER_STATES},
            "of other recurrent layers it would have to",
        ),
        ({**ON_GPU, "dtype": "float16"}, "not checked with recurrent states of a float16 model"),
        ({"cached_states": True}, "set enable_prefix_caching to False"),
        (
            {**ON_GPU, "cached_states": True, "inner_states": True},
            "set gdn_prefill_backend to 'triton'",
        ),
        ({"state_dtype": "bfloat16"}, "not checked with bfloat16 states"),
        ({"version": ON_ONE_GPU}, f"not checked with vLLM {ON_ONE_GPU} on device cpu; supported"),
    ],
)
@pytest.mark.usefixtures("invented")
def test_other_engines_with_states_stay_stock_with_a_reason(changes, says):
    off = decide("auto", attrs.evolve(ENGINE, **changes))
    assert off.policy == "off"
    assert says in off.reason


@pytest.mark.parametrize("asked", ["exact", "fast"])
def test_a_prefix_cache_may_keep_states_on_a_gpu(asked):
    """There commits write the states at the ends of blocks; on a CPU vLLM cannot move them."""
    facts = attrs.evolve(ENGINE, **ON_GPU, flash=3, states=asked, cached_states=True)
    assert decide("auto", facts).policy == "deferred"


@pytest.mark.parametrize("asked", ["exact", "fast"])
def test_gated_delta_nets_over_ranks_were_checked(asked):
    """Each rank commits its own heads; other layers start on GPUs with ``unchecked``."""
    ranks = {**ON_GPU, "flash": 3, "tensor_parallel": 2}
    assert decide("auto", attrs.evolve(ENGINE, **ranks, states=asked)).policy == "deferred"
    assert decide("auto", attrs.evolve(ENGINE, tensor_parallel=2)).policy == "deferred"
    olmo = attrs.evolve(ENGINE, **ranks, recurrent=OLMO_DELTA, states="exact")
    assert decide("auto", olmo).policy == "off"
    assert decide("auto", attrs.evolve(olmo, unchecked=True)).policy == "deferred"
    mamba = {"recurrent": MAMBA2, "tensor_parallel": 2, "unchecked": True}
    off = decide("auto", attrs.evolve(ENGINE, **mamba))
    assert "under tensor parallelism on device cpu" in off.reason


@pytest.mark.parametrize(("changes", "names"), [({}, "0.30.9"), (ON_GPU, "0.31.9")])
def test_releases_for_states_are_those_of_the_device(monkeypatch, changes, names):
    monkeypatch.setattr(supported, "STATE_RELEASES", ("0.30.9",))
    monkeypatch.setattr(supported, "GPU_STATE_RELEASES", ("0.31.9",))
    off = decide("auto", attrs.evolve(ENGINE, **changes))
    assert off.policy == "off"
    assert f"; supported: {names}; the setting 'unchecked' does not" in off.reason


@pytest.mark.parametrize("changes", [{}, ON_GPU])
@pytest.mark.usefixtures("invented")
def test_no_reason_asks_for_a_setting_that_the_release_rules_out(changes):
    """Without the setting ``recurrent`` the reason is the one that holds with it."""
    facts = attrs.evolve(ENGINE, **changes, version=ON_ONE_GPU)
    left_out = attrs.evolve(facts, states="off")
    assert decide("auto", left_out) == decide("auto", facts)
    assert "settings lack" not in decide("auto", left_out).reason


def test_a_dtype_of_states_that_is_not_known_yet_has_no_name():
    """Before the model is loaded; no reason of any rule names a fact that is missing."""
    for device in ("cpu", "cuda"):
        for row in matrix(EngineFacts(device=device, runner="v2" if device == "cuda" else "v1")):
            assert "None" not in str(row)


@real_vllm
@pytest.mark.parametrize(
    ("kvtxn", "says"),
    [
        ({"policy": "auto", "recurrent": "exact"}, "auto -> deferred (a recurrent state cannot be"),
        ({"policy": "auto"}, "auto -> off (the model has recurrent states, and the settings lack"),
    ],
)
def test_the_doctor_judges_a_model_with_states(tmp_path, kvtxn, says):
    """As the plug-in will, from the model's files and the user's settings."""
    options = {"dtype": "bfloat16", "enable_prefix_caching": False, "skip_tokenizer_init": True}
    options["mamba_ssm_cache_dtype"] = "float32"  # vLLM chooses by what the CPU can do
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    found = report(
        {
            "model": model_files.write("qwen3next", tmp_path),
            "speculative_config": speculation,
            "additional_config": {"kvtxn": kvtxn},
            **options,
        }
    )
    assert found["policies"][0] == f"{says.partition(' (')[0]} (see asked)"
    assert found["asked"][0].startswith(f"policy {says}")


@pytest.mark.parametrize(
    ("asked", "kind", "says"),
    [
        ("exact", GATED_DELTA, 'to the bit; with "fast" kvtxn\'s kernels verify and commit'),
        ("fast", GATED_DELTA, "kvtxn's kernels verify and commit, each"),
        ("exact", MAMBA2, 'to the bit; with "fast" kvtxn\'s kernels verify and commit'),
        ("fast", MAMBA2, "kvtxn's kernels verify and commit, each"),
        ("exact", OLMO_DELTA, "states and tokens are stock's to the bit"),
    ],
)
def test_the_doctor_says_what_the_setting_does(asked, kind, says):
    """And what the other one would bring, where there is one."""
    facts = attrs.evolve(ENGINE, **ON_GPU, flash=3, states=asked, recurrent=kind)
    wanted = settings({"kvtxn": {"policy": "auto", "recurrent": asked}}, 8, "cuda")
    policy, recurrent = doctor._outcomes(wanted, facts, None)
    assert policy.found == "deferred"
    assert str(recurrent).startswith(f"recurrent {asked} -> {asked} (")
    assert says in str(recurrent)
    other = asked == "exact" and kind != OLMO_DELTA
    assert ('with "fast"' in str(recurrent)) == other
    measured = {GATED_DELTA: "took 0.45 of stock's time with 1 request, 0.66 with 8, "}
    measured[MAMBA2] = "took 1.04 of stock's time with 1 request, 0.88 with 8, "
    assert [says in str(recurrent) for says in measured.values()] == [
        other and kind == each for each in measured
    ]
    assert not recurrent.lacks


def test_what_fast_brings_was_measured():
    """Each number is that of the result beside these sources, with the norm that it leaves out."""
    found = json.loads((ROOT / "benchmarks/results/h200-recurrent.json").read_text())
    rows = [row for row in found["rows"] if (row["dtype"], row["drafts"]) == ("float32", 4)]
    measured = {
        row["requests"]: round(row["fast"]["of_stock"]["vLLM's, fused"]["median"], 2)
        for row in rows
        if row["model"] == "qwen3.5-9b"
    }
    assert measured == state_rules.FAST_OF_STOCK
    for model, told in (
        ("qwen3.5-9b", state_rules.FAST_PER_TOKEN),
        ("nemotron-h-8b", state_rules.FAST_PER_TOKEN_OF_MAMBA2),
    ):
        engines = json.loads((ROOT / f"benchmarks/results/h200-vllm-{model}.json").read_text())
        shares = {
            cell["requests"]: cell["engines"]["fast"]["of_stock"]["per_token_ms"]["median"]
            for cell in engines["cells"]
        }
        assert {count: round(share, 2) for count, share in shares.items()} == told


def test_on_a_gpu_states_go_with_every_policy():
    """The states are read alone until the commit, so the rows of attention may be undone."""
    engine = attrs.evolve(ENGINE, **ON_GPU, flash=3)
    for asked, policy in (("auto", "deferred"), ("undo", "undo"), ("deferred", "deferred")):
        assert decide(asked, engine).policy == policy
        assert decide(asked, attrs.evolve(engine, states="fast")).policy == policy
    other = attrs.evolve(engine, attention="FLASHINFER", flash=None)
    assert decide("auto", other).policy == "undo"
