"""The doctor's matrix says of every kind of engine what the plugin's table decides."""

from __future__ import annotations

import re
from itertools import product

import attrs
import model_files
import pytest
import torch
from invented_releases import invented  # noqa: F401
from kvtxn.integrations.vllm_plugin.policy.decision import UNLISTED, WITHOUT_STAGES
from kvtxn.integrations.vllm_plugin.policy.doctor import report
from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts
from kvtxn.integrations.vllm_plugin.policy.matrix import (
    BACKENDS,
    FAMILIES,
    FORMATS,
    LEGEND,
    PARALLELISM,
    PLAIN,
    RELEASES,
    SEEN,
    matrix,
)
from kvtxn.integrations.vllm_plugin.policy.rules import RULES, decide
from kvtxn.integrations.vllm_plugin.policy.supported import GPU_RELEASES, LACKS, takes_heads
from kvtxn.integrations.vllm_plugin.seam import backends, workers
from kvtxn.integrations.vllm_plugin.seam import engine_config as engine_config

from kvtxn import ConfigError, doctor
from kvtxn.config import POLICIES

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
#: With the newest release of ``SEEN``, on a CPU and on a GPU.
ON_CPU = EngineFacts(version=RELEASES["cpu"][0])
ON_GPU = EngineFacts(version=RELEASES["cuda"][0], device="cuda", runner="v2")
DEVICES = {"cpu": ON_CPU, "cuda": ON_GPU, "tpu": attrs.evolve(ON_CPU, device="tpu")}


@pytest.mark.parametrize("device", DEVICES)
def test_every_row_is_what_the_plugin_decides(device):
    for row in matrix(DEVICES[device]):
        assert row.facts
        for facts in row.facts:
            assert row.auto == decide("auto", facts)
            found = {asked: decide(asked, facts).policy for asked in POLICIES}
            named = {policy for policy, policy_found in found.items() if policy == policy_found}
            assert set(row.named) == named


@pytest.mark.parametrize("device", DEVICES)
def test_every_kind_of_engine_is_named_once(device):
    attention, latent = BACKENDS.get(device, (("any",), ("any",)))
    kinds = [
        (family, backend)
        for family, changes in FAMILIES.items()
        for backend in (latent if "mla" in changes else attention)
    ]
    expected = sorted(product(kinds, FORMATS, PARALLELISM))
    rows = matrix(DEVICES[device])
    said = [one for row in rows for one in product(row.kinds, row.formats, row.parallelism)]
    assert sorted(said) == expected
    assert sum(len(row.facts) for row in rows) == len(expected)


def test_rows_say_it_in_a_line():
    """Properties that decide are named; those that do not are "any"."""
    lines = [str(row) for row in matrix(ON_CPU)]
    pipeline = next(line for line in lines if "| pipeline (last stage)" in line)
    assert pipeline == (
        "any | any | pipeline (last stage), pipeline (other stages): off "
        "(vLLM's V1 model runner cannot speculate under pipeline parallelism)"
    )
    plain = next(line for line in lines if line.startswith("Llama"))
    assert " on CPU_ATTN | float32, bfloat16, fp8 | one worker: undo, deferred by name (" in plain
    assert "on a CPU 'undo' keeps the same rows and leaves the attention alone; name" in plain


def test_what_was_seen_is_in_its_line():
    """Next to what is promised from reading alone."""
    rows = matrix(ON_GPU)
    [seen] = [
        str(row)
        for row in rows
        if (PLAIN, "FLASH_ATTN") in row.kinds
        and "bfloat16" in row.formats
        and "one worker" in row.parallelism
    ]
    assert ": deferred, undo by name (" in seen
    assert seen.endswith("; seen running")
    lines = [str(row) for row in rows]
    unseen = [line for line in lines if line.endswith("; not seen running")]
    for family in ("ALiBi", "sinks", "share rows"):
        assert any(family in line for line in unseen)
    assert not any(": off" in line and "seen" in line for line in lines)


@pytest.mark.parametrize("version", [UNLISTED, *RELEASES["cuda"]])
@pytest.mark.parametrize("flash", [2, 3])
def test_the_doctor_asks_vllm_which_one_that_is(flash, version, monkeypatch):
    """On GPUs, with releases that were checked there."""
    asked = []
    monkeypatch.setattr(workers, "version", lambda: version)
    monkeypatch.setattr(workers, "device_type", lambda: "cuda")
    monkeypatch.setattr(backends, "flash_version", lambda named=None: asked.append(1) or flash)
    policies = report(None)["policies"]
    if version == UNLISTED:
        assert not asked
        return
    assert policies[0].startswith("auto -> deferred" if flash == 3 else "auto -> undo")


@pytest.mark.parametrize("device", DEVICES)
def test_the_doctors_page_fits_a_terminal(device, monkeypatch):
    """One page, unless the table of every kind of engine is asked for; on GPUs it names costs."""
    monkeypatch.setattr(workers, "device_type", lambda: device)
    monkeypatch.setattr(backends, "flash_version", lambda named=None: 3)
    page = doctor.examine() | {"vllm": report(None)}
    short, long = (doctor.as_text(page, matrix=matrix) for matrix in (False, True))
    for text in (short, long):
        assert max(map(len, text.splitlines())) <= 100
    assert len(short.splitlines()) <= 40 < len(long.splitlines()) or device == "tpu"
    assert ("spare blocks: deferred on a GPU writes every draft" in short) == (device == "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_the_legend_explains_the_words_of_the_rows(device, monkeypatch):
    """It stands above the rows, is printed with them alone, and has every mark that they have."""
    monkeypatch.setattr(workers, "device_type", lambda: device)
    monkeypatch.setattr(backends, "flash_version", lambda named=None: 3)
    page = doctor.examine() | {"vllm": report(None)}
    short, long = (doctor.as_text(page, matrix=asked) for asked in (False, True))
    assert "legend: " not in short
    assert long.index("legend: a row: models on attention backends") < long.index("matrix: ")
    legend, rows = " ".join(LEGEND), [str(row) for row in matrix(DEVICES[device])]
    marks = ("any", "off", "by name", "seen running", "not seen running")
    for mark in marks:
        assert f"'{mark}'" in legend
        assert any(mark in row for row in rows) or device == "tpu"
    assert all(row.count(" | ") == 2 for row in rows)


@pytest.mark.parametrize("where", SEEN)
def test_what_was_seen_is_a_kind_of_engine_that_can_be(where):
    device, runner = where
    rows = matrix(attrs.evolve(ON_CPU, device=device, runner=runner))
    drawn = {
        (*kind, number, parallelism): row.seen
        for row in rows
        for kind, number, parallelism in product(row.kinds, row.formats, row.parallelism)
        if row.seen
    }
    assert {kind: set(seen) for kind, seen in drawn.items()} == {
        kind: set(seen) for kind, seen in SEEN[where].items()
    }


@pytest.mark.parametrize("backend", LACKS)
def test_what_vllm_lacks_is_what_it_declares(backend):
    """Types of models and formats of caches, where the backend can be imported here."""
    registry = pytest.importorskip("vllm.v1.attention.backends.registry")
    try:
        found = registry.AttentionBackendEnum[backend].get_class()
    except (ImportError, AssertionError) as error:
        pytest.skip(f"{backend} cannot be imported here: {error}")
    types = {str(each).removeprefix("torch.") for each in found.supported_dtypes}
    assert types >= {"float16", "bfloat16"}
    assert ("float32" in LACKS[backend]) == ("float32" not in types)
    assert ("fp8" in LACKS[backend]) == ("fp8" not in found.supported_kv_cache_dtypes)


def takes(size, kv_cache_dtype):
    """Ask vLLM's kernels on CPUs, as a step does."""
    ops = pytest.importorskip("vllm._custom_ops")
    attention = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    given = {"dtype": torch.float32, "kv_cache_dtype": kv_cache_dtype}
    try:
        ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=2, num_kv_heads=2, head_dim=size,
            seq_lens=torch.tensor([4], dtype=torch.int32),
            query_start_loc=torch.tensor([0, 4], dtype=torch.int32),
            causal=True, sliding_window_size=-1, enable_kv_split=True,
            isa=attention._get_attn_isa(torch.float32, 128, size, kv_cache_dtype), **given,
        )  # fmt: skip
    except (RuntimeError, NotImplementedError) as error:
        if not re.search("Unsupported CPU attention conf|head_size divisible by 32", str(error)):
            raise
        return False
    return True


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_heads_on_cpus_are_the_kernels(kv_cache_dtype):
    """Every multiple of eight; a CPU without AVX-512 has no kernels over eight bits at all."""
    if kv_cache_dtype == "fp8" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM needs AVX-512 for fp8 caches on a CPU")
    sizes = range(8, 641, 8)
    found = [size for size in sizes if takes(size, kv_cache_dtype)]
    assert found == [size for size in sizes if takes_heads(size, kv_cache_dtype)]


def test_an_engine_that_vllm_does_not_run_is_called_that(tmp_path):
    """Before anything about policies, which are all off; with or without drafts."""
    folder = tmp_path / "heads-of-16"
    transformers = pytest.importorskip("transformers")
    small = {**model_files.COMMON, "head_dim": 16, "num_hidden_layers": 1}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).save_pretrained(folder)
    for more in ({}, {"speculative_config": NGRAM}):
        found = report({"model": str(folder), "skip_tokenizer_init": True, **more})
        assert found["stock vLLM"].startswith("does not run this engine: vLLM's attention on CPUs")
        assert all("-> off (vLLM's attention on CPUs" in line for line in found["policies"])
        assert found["audit"] == "there is no engine to watch"
    assert "stock vLLM" not in report(None)


def test_arguments_that_vllm_does_not_take(tmp_path):
    """In vLLM's words, and for a model that is not found with the place where it is not."""
    gone = {"model": str(tmp_path / "gone")}
    with pytest.raises(ConfigError, match=rf"has no folder '{tmp_path}/gone', so vLLM took it for"):
        report(gone)
    with pytest.raises(ConfigError, match=r"^vLLM: TypeError: .* 'nonsense'; mend the engine arg"):
        report({**gone, "nonsense": 1})
    unfinished = {"model": model_files.write("llama", tmp_path), "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match="num_speculative_tokens must be provided") as caught:
        report({**unfinished, "speculative_config": {"method": "ngram"}})
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        ("llama", "time on CPUs"),
        ("gemma3n", "shared rows"),
        ("gptoss", "time on CPUs"),
        ("bloom", "time on CPUs"),
    ],
)
def test_an_engine_is_judged_as_the_plugin_will(tmp_path, monkeypatch, model, rule):
    """Facts in the model's configuration are known before the model is loaded."""
    monkeypatch.setattr(  # vLLM would import itself anew, to look at the model's class
        "vllm.model_executor.models.registry._run_in_subprocess", lambda function: function()
    )
    folder = model_files.write(model, tmp_path)
    options = {"model": folder, "skip_tokenizer_init": True, "dtype": "float32"}
    found = report({**options, "speculative_config": NGRAM})
    policy, reason = found["policies"][0].removeprefix("auto -> ").split(" ", 1)
    assert policy == "undo"
    says = {each.name: each.reason for each in RULES}
    assert says[rule] in reason
    assert "has the last word" in found["assumed"]


@pytest.mark.parametrize("unchecked", [False, True])
def test_pipeline_stages_before_the_last_one_are_judged_too(monkeypatch, invented, unchecked):  # noqa: F811
    """The doctor names their policies beside those of the last stage."""
    stages = {"version": WITHOUT_STAGES, "pipeline_parallel": 2, "unchecked": unchecked}
    facts = attrs.evolve(ON_GPU, dtype="bfloat16", **stages)
    monkeypatch.setattr(workers, "device_type", lambda: "cuda")
    monkeypatch.setattr("kvtxn.integrations.vllm_plugin.policy.doctor.engine_config.plain_facts",
                        lambda: facts)  # fmt: skip
    found = report(None)
    assert found["policies"][0].startswith("auto -> deferred")
    early = found["policies on earlier stages"]
    assert early[0].startswith("auto -> undo" if unchecked else "auto -> off")
    monkeypatch.undo()
    assert "policies on earlier stages" not in report(None)


MEMORY = {"cpu_bytes_to_use": 8 << 20}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": MEMORY}
SIMPLE = {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": MEMORY}
SEVERAL = {"connectors": [{**SIMPLE, "kv_role": "kv_both"}, {**OFFLOADING, "kv_role": "kv_both"}]}


@pytest.mark.parametrize(
    ("transfer", "layout", "policy"),
    [
        (None, None, "deferred"),
        (SIMPLE, None, "deferred"),
        (OFFLOADING, None, "undo"),
        (
            {"kv_connector": "MultiConnector", "kv_connector_extra_config": SEVERAL},
            *(None, "undo"),
        ),
        (OFFLOADING, "LBNHC", "deferred"),  # the user's environment wins
        (None, "HND", "undo"),
    ],
)
def test_a_layout_with_heads_before_rows_is_foreseen(
    tmp_path, monkeypatch, transfer, layout, policy
):
    """On GPUs, where FlashAttention could not read drafts by slot."""
    if workers.version() not in GPU_RELEASES:
        pytest.skip("of this release nothing was checked on GPUs")
    monkeypatch.setattr(backends, "flash_version", lambda named=None: 3)
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    if layout is not None:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    options = {"skip_tokenizer_init": True, "dtype": "bfloat16", "speculative_config": NGRAM}
    if transfer is not None:
        options["kv_transfer_config"] = {**transfer, "kv_role": "kv_both"}
    config = engine_config.config_from({"model": model_files.write("llama", tmp_path), **options})
    config.device_config.device_type = "cuda"
    facts = engine_config.expected_facts(config)
    assert facts.spare_blocks == (policy == "deferred")
    assert decide("auto", facts).policy == policy
