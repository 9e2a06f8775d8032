"""Rules that decide the policy of a vLLM engine.

``RULES`` is the one table: the plug-in decides by it, and ``kvtxn doctor`` prints its decision for
every kind of engine (``policy.matrix``). A new rule is a new row, with an example of an engine that
it concerns; the tests walk the rows.
"""

from __future__ import annotations

from typing import Final

from . import supported
from .decision import (
    MEASURED,
    ON_ONE_GPU,
    UNLISTED,
    WITHOUT_STAGES,
    Decision,
    Rule,
    connector,
    lacking,
)
from .engine_facts import EngineFacts
from .state_rules import STATE_RULES

#: The reason for a policy that the user names and the engine can have.
ASKED_FOR: Final = "asked for"

#: Ends the reason where a release was not checked.
_TRIAL: Final = (
    "; with the setting 'unchecked' windows start after a self-test, but not beside a KV "
    "connector, on pipeline stages or over recurrent states"
)


def on_trial(facts: EngineFacts) -> bool:
    """Tell whether windows need a self-test: nothing was checked, and the user allows it."""
    return facts.unchecked and facts.version not in supported.releases_for(facts.device)


#: In order of precedence, before all other rules.
RELEASE_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "version",
        "windows",
        lambda f: f.device != "cuda" and f.version not in supported.RELEASES and not f.unchecked,
        "vLLM {version} was not checked; supported: " + ", ".join(supported.RELEASES) + _TRIAL,
        {"version": UNLISTED},
    ),
    Rule(
        "release on GPUs",
        "windows",
        lambda f: (
            f.device == "cuda" and f.version not in supported.GPU_RELEASES and not f.unchecked
        ),
        "vLLM {version} was not checked on GPUs; supported there: "
        + ", ".join(supported.GPU_RELEASES)
        + _TRIAL,
        {"device": "cuda", "runner": "v2", "version": UNLISTED},
    ),
    Rule(
        "release on several GPUs",
        "windows",
        lambda f: (
            f.device == "cuda"
            and f.tensor_parallel * f.pipeline_parallel > 1
            and f.version not in supported.MORE_GPU_RELEASES
            and not f.unchecked
        ),
        "vLLM {version} was checked on one GPU alone; supported on several: "
        + ", ".join(supported.MORE_GPU_RELEASES)
        + "; the setting 'unchecked' lets windows start",
        {"device": "cuda", "runner": "v2", "version": ON_ONE_GPU, "tensor_parallel": 2},
    ),
    Rule(
        "method on GPUs",
        "windows",
        lambda f: (
            f.device == "cuda"
            and f.method in supported.LEFT_OUT.get(f.version, {})
            and not f.unchecked
        ),
        "kvtxn was not checked with method {method} on a GPU with vLLM {version}: {left_out}; the "
        "setting 'unchecked' lets windows start",
        {"device": "cuda", "runner": "v2", "version": ON_ONE_GPU, "method": "mtp"},
    ),
)

#: Engines that vLLM itself does not run, so leaving kvtxn out does not help.
VLLM_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "head size",
        "windows",
        lambda f: (
            f.device == "cpu"
            and f.version in supported.RELEASES
            and f.head_size is not None
            and not supported.takes_heads(f.head_size, f.kv_cache_dtype)
        ),
        "vLLM's attention on CPUs has no kernel for heads of {head_size} numbers{over_bits}, with "
        "or without kvtxn",
        {"head_size": 16},
    ),
    Rule(
        "not in vLLM",
        "windows",
        lambda f: bool(lacking(f)),
        "vLLM's attention backend {attention} does not support {lacking}, with or without kvtxn",
        {"device": "cuda", "runner": "v2", "attention": "FLASH_ATTN"},  # and float32
    ),
)


#: Engines that the self-test cannot drive; in the table these come after what rules out windows in
#: any release.
TRIAL_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "self-test beside a connector",
        "windows",
        lambda f: on_trial(f) and bool(f.connectors),
        "vLLM {version} was not checked, and the self-test cannot take steps beside a KV "
        "connector: leave kv_transfer_config out, or take a release that was checked",
        {"version": UNLISTED, "unchecked": True, "connectors": ("ExampleConnector",)},
    ),
    Rule(
        "self-test over stages",
        "windows",
        lambda f: on_trial(f) and f.pipeline_parallel > 1,
        "vLLM {version} was not checked, and the self-test cannot take steps over pipeline stages: "
        "set pipeline_parallel_size to 1, or take a release that was checked",
        {
            **{"device": "cuda", "runner": "v2", "version": UNLISTED},
            **{"unchecked": True, "pipeline_parallel": 2},
        },
    ),
)


#: Shares of stock's time of latent attention over blocks of one row, where they are too large.
_MOST, _LARGE = (
    MEASURED[name]["of_stock"]
    for name in (
        "TRITON_MLA over 8 bits by blocks of one row, at most",
        "FLASH_ATTN_MLA by blocks of one row, at most",
    )
)


def _early(facts: EngineFacts) -> bool:
    """Tell whether a worker gets accepted counts some steps later than the last stage does.

    It does on earlier pipeline stages, but not with the V1 runner.
    """
    return facts.pipeline_parallel > 1 and facts.runner != "v1" and not facts.last_stage


def _opened(facts: EngineFacts) -> bool:
    """Tell whether windows may run on early stages: that was checked, or the user allows it."""
    return facts.version in supported.STAGE_RELEASES or facts.unchecked


def _rows_unchecked(facts: EngineFacts) -> bool:
    """Tell whether an attention on a GPU was not checked with waiting drafts in this release.

    Before the model is loaded, latent attention is one of several, none of them FLASH_ATTN.
    """
    seen = supported.read_rows(facts.version, unchecked=facts.unchecked)
    named = facts.attention in supported.READ_ROWS and facts.attention not in seen
    latent = facts.attention is None and facts.mla and seen != supported.READ_ROWS
    return facts.device == "cuda" and (named or latent)


#: A worker of a stage before the last one.
_EARLY: Final = {"device": "cuda", "runner": "v2", "pipeline_parallel": 2, "last_stage": False}

#: Windows whose time is more than stock's, or was not measured; a user who names a policy gets it.
#: They concern whole devices, so they come last, and speak where no other rule does.
TIME_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "time on CPUs",
        "auto",
        lambda f: f.device == "cpu" and f.recurrent is None,
        "on a CPU 'undo' keeps the same rows and leaves the attention alone; name 'deferred' to "
        "let drafts wait all the same",
        {},
    ),
)

#: In order of precedence: of several reasons the first one is given.
RULES: Final[tuple[Rule, ...]] = (
    *RELEASE_RULES,
    *VLLM_RULES,
    Rule(
        "no speculation",
        "windows",
        lambda f: f.method is None,
        "the engine does not speculate, so no row is ever rejected",
        {"method": None},
    ),
    Rule(
        "device",
        "windows",
        lambda f: f.device not in supported.RUNNERS,
        "device {device} is not supported yet",
        {"device": "xpu"},
    ),
    Rule(
        "runner",
        "windows",
        lambda f: f.device in supported.RUNNERS and f.runner not in supported.RUNNERS[f.device],
        "model runner {runner} is not supported yet on device {device}",
        {"runner": "v2"},
    ),
    Rule(
        "pipeline",
        "windows",
        lambda f: f.pipeline_parallel > 1 and f.runner == "v1",
        "vLLM's V1 model runner cannot speculate under pipeline parallelism",
        {"pipeline_parallel": 2},
    ),
    *TRIAL_RULES,
    Rule(
        "stage",
        "windows",
        lambda f: _early(f) and not _opened(f),
        "windows on a pipeline stage before the last one were not checked on several GPUs with "
        "vLLM {version}; the setting 'unchecked' lets them start",
        {**_EARLY, "version": WITHOUT_STAGES},
    ),
    Rule(
        "connector on a stage",
        "windows",
        lambda f: _early(f) and _opened(f) and bool(f.connectors),
        "a KV connector may read rows of a pipeline stage before the stage learns what was "
        "accepted",
        {**_EARLY, "unchecked": True, "connectors": ("OffloadingConnector",)},
    ),
    Rule(
        "context",
        "windows",
        lambda f: f.context_parallel > 1,
        "context parallelism spreads a request's rows over ranks: a window would have to know "
        "which of its rows lie on its rank",
        {"context_parallel": 2},
    ),
    Rule(
        "microbatches",
        "windows",
        lambda f: f.microbatches,
        "overlapping microbatches compute two halves of a step at one time: each would need staged "
        "rows and a commit of its own",
        {"microbatches": True},
    ),
    Rule(
        "adaptive",
        "windows",
        lambda f: f.adaptive,
        "the number of drafts is decided on the device within the step: kvtxn would have to plan "
        "the step's rows there, too",
        {"adaptive": True},
    ),
    Rule(
        "cache format",
        "windows",
        lambda f: (
            f.device in supported.CACHE_FORMATS
            and f.kv_cache_dtype not in supported.CACHE_FORMATS[f.device]
        ),
        "kvtxn was not checked with KV-cache format {kv_cache_dtype} on device {device}",
        {"device": "cuda", "runner": "v2", "kv_cache_dtype": "nvfp4"},
    ),
    *STATE_RULES,
    Rule(
        "quantised latents",
        "windows",
        lambda f: (
            f.mla
            and f.kv_cache_dtype != "auto"
            and not (f.device == "cuda" and f.attention in (None, "TRITON_MLA"))
        ),
        "kvtxn was not checked with latent attention over KV-cache format {kv_cache_dtype} here",
        {"mla": True, "kv_cache_dtype": "fp8"},
    ),
    Rule(
        "connector within the forward",
        "windows",
        lambda f: connector(f) in supported.CONNECTORS_WITHIN_FORWARD,
        "{connector} may copy draft rows before vLLM has decided which drafts are accepted",
        {"connectors": ("LMCacheConnectorV1",)},
    ),
    Rule(
        "connector after the step",
        "windows",
        lambda f: connector(f) in supported.CONNECTORS_AFTER_STEP,
        "{connector} copies rows after a step, but kvtxn was not checked with it on {device}",
        {"connectors": ("ExampleConnector", "NixlPushConnector")},
    ),
    Rule(
        "unknown connector",
        "windows",
        lambda f: bool(connector(f)) and connector(f) not in supported.CONNECTORS,
        "kvtxn was not checked with connector {connector}",
        {"connectors": ("MyConnector",)},
    ),
    Rule(
        "connector on this device",
        "windows",
        lambda f: (
            connector(f) in (*supported.CONNECTORS_CHECKED["cuda"], "MultiConnector")
            and f.device in supported.RUNNERS
        ),
        "kvtxn was not checked with connector {connector} on device {device}",
        {"connectors": ("SimpleCPUOffloadConnector",)},
    ),
    Rule(
        "foreign layer",
        "windows",
        lambda f: f.foreign_layer is not None,
        "layer {foreign_layer} is not an attention layer that kvtxn knows",
        {"foreign_layer": "model.layers.3"},
    ),
    Rule(
        "attention",
        "windows",
        lambda f: (
            f.attention is not None and f.attention not in supported.ATTENTION.get(f.device, ())
        ),
        "kvtxn was not checked with attention backend {attention}",
        {"attention": "FLEX_ATTENTION"},
    ),
    Rule(
        "drafts on a stage",
        "deferred",
        lambda f: _early(f) and _opened(f) and not f.connectors,
        "another request may read accepted rows of this pipeline stage before the stage learns "
        "that they were accepted",
        {**_EARLY, "unchecked": True},
    ),
    Rule(
        "other attention",
        "deferred",
        lambda f: f.device == "cuda" and f.attention not in (None, *supported.READ_ROWS),
        "attention backend {attention} cannot read draft rows that wait outside their slots"
        "{no_rows}",
        {"device": "cuda", "runner": "v2", "attention": "FLASHINFER", "dtype": "bfloat16"},
    ),
    Rule(
        "release of other attention",
        "deferred",
        _rows_unchecked,
        "kvtxn was not checked with draft rows that wait outside their slots under {attends} of "
        "vLLM {version}: name policy 'undo', or let drafts wait with {or_flash}the setting "
        "'unchecked', or with one of the releases " + ", ".join(supported.ROW_RELEASES),
        {
            **{"device": "cuda", "runner": "v2", "dtype": "bfloat16", "attention": "TRITON_ATTN"},
            **{"version": ON_ONE_GPU},
        },
    ),
    Rule(
        "FlashAttention",
        "deferred",
        lambda f: f.flash is not None and f.flash not in supported.FLASH_VERSIONS,
        "FlashAttention {flash} cannot read draft rows that wait outside their slots{no_rows}",
        {"flash": 4},
    ),
    Rule(
        "ALiBi on GPUs",
        "deferred",
        lambda f: f.device == "cuda" and f.alibi and f.attention in (None, "FLASH_ATTN"),
        "for ALiBi vLLM takes FlashAttention 2, which cannot read blocks of one row",
        {"device": "cuda", "runner": "v2", "alibi": True},
    ),
    Rule(
        "latents of 8 bits",
        "auto",
        lambda f: f.device == "cuda" and f.mla and f.kv_cache_dtype != "auto",
        f"over {{kv_cache_dtype}} rows TRITON_MLA's kernel takes up to {_MOST} times as long by "
        "blocks of one row",
        {"device": "cuda", "runner": "v2", "mla": True, "kv_cache_dtype": "fp8"},
    ),
    Rule(
        # By its order a batch of the V1 runner is divided into requests that decode and prompts.
        "latents with the V1 runner",
        "auto",
        lambda f: f.device == "cuda" and f.mla and f.runner == "v1",
        "with model runner {runner} latent attention was compared with stock, while drafts waited, "
        "with vLLM 0.33.0 alone and in two small engines",
        {"device": "cuda", "mla": True},
    ),
    Rule(
        "latents in large blocks",
        "auto",
        lambda f: f.attention == "FLASH_ATTN_MLA" and (f.block_size or 0) >= 64,
        f"FLASH_ATTN_MLA takes up to {_LARGE} times as long by blocks of one row as by blocks of "
        "{block_size} rows",
        {
            **{"device": "cuda", "runner": "v2", "dtype": "bfloat16", "mla": True},
            **{"attention": "FLASH_ATTN_MLA", "block_size": 64},
        },
    ),
    Rule(
        "attention left out",
        "auto",
        lambda f: (
            f.device == "cuda"
            and f.attention in supported.LEFT_OUT.get(f.version, {})
            and not f.unchecked
        ),
        "draft rows that wait under {attention} of vLLM {version}: {backend_left_out}",
        {
            **{"device": "cuda", "runner": "v2", "dtype": "bfloat16", "mla": True},
            **{"attention": "FLASH_ATTN_MLA", "version": WITHOUT_STAGES},
        },
    ),
    Rule(
        # vLLM's own writer runs inside these graphs, so kvtxn cannot give it other slots.
        "writes in graphs",
        "deferred",
        lambda f: f.device == "cuda" and f.graph_writes,
        "the KV-cache write is inside piecewise CUDA graphs (breakable graphs or Inductor "
        "partition) or fused with the rotary embedding, and cannot be redirected",
        {"device": "cuda", "runner": "v2", "graph_writes": True},
    ),
    Rule(
        "spare blocks",
        "deferred",
        lambda f: f.device == "cuda" and not f.spare_blocks,
        "no spare KV-cache blocks could be added, or the attention cannot read this cache layout "
        "by slot",
        {"device": "cuda", "runner": "v2", "spare_blocks": False},
    ),
    Rule(
        "cascade",
        "deferred",
        lambda f: f.device == "cuda" and f.cascade,
        "cascade attention reads a prefix that requests share in calls of its own, by whole blocks",
        {"device": "cuda", "cascade": True},
    ),
    Rule(
        "shared rows",
        "deferred",
        lambda f: f.kv_sharing,
        "some layers read rows of other layers within the forward",
        {"kv_sharing": True},
    ),
    *TIME_RULES,
)


def refused(facts: EngineFacts) -> str | None:
    """Say why vLLM itself does not run this engine, with or without kvtxn.

    None if nothing of the kind is known.
    """
    return next((rule.says(facts) for rule in VLLM_RULES if rule.applies(facts)), None)


def decide(asked: str, facts: EngineFacts) -> Decision:
    """Choose the policy for an engine, and say why.

    Args:
        asked: ``"auto"``, ``"deferred"``, ``"undo"`` or ``"direct"``.
        facts: the facts of the engine.

    Returns:
        A policy that is safe for this engine, or ``"off"``, with the reason of the first rule that
        forbids another one. A policy that was asked for by name is never replaced by another one;
        "auto" becomes "deferred", or "undo" where drafts cannot wait or take too long.
    """
    found = [rule for rule in RULES if rule.applies(facts)]
    for rule in found:
        if rule.forbids == "windows":
            return Decision("off", rule.says(facts))
    alone = next((rule for rule in found if rule.forbids == "others"), None)
    if asked in ("undo", "direct"):
        if alone is None:
            return Decision(asked, ASKED_FOR)
        return Decision("off", f"policy {asked!r} cannot work here: {alone.says(facts)}")
    for rule in found:
        if rule.forbids == "deferred" and (asked == "deferred" or alone is not None):
            return Decision("off", f"policy 'deferred' cannot work here: {rule.says(facts)}")
        if asked == "auto" and rule.forbids in ("deferred", "auto"):
            cannot = rule.forbids == "deferred"
            lead = "rows cannot be deferred" if cannot else "'auto' does not choose 'deferred'"
            return Decision("undo", f"{lead} here: {rule.says(facts)}")
    if asked == "deferred":
        return Decision("deferred", ASKED_FOR)
    why = "the attention can read rows that wait" if alone is None else alone.says(facts)
    return Decision("deferred", why)
