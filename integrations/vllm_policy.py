"""What to do for a given vLLM engine: the rules, the decision.

``RULES`` is the one table: the plugin decides by it, and ``kvtxn doctor``
prints what it says for every kind of engine (``vllm_matrix``). A new rule is a
new row with an example of an engine that it concerns; the tests walk the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple

import attrs

from . import vllm_connectors as connectors
from . import vllm_lacks as lacks
from .vllm_facts import ATTENTION, FLASH, FORMATS, ON_GPU, RUNNERS, SUPPORTED, Facts


class Decision(NamedTuple):
    """What the plugin does: a policy, or ``"off"`` (stock vLLM, untouched), and why."""

    policy: str
    reason: str


@attrs.frozen
class Rule:
    """One row of the table.

    Attributes:
        name: short, unique.
        forbids: ``"windows"``: kvtxn stays out altogether. ``"deferred"``: the attention cannot
            read the window, so drafts have to be in the cache. ``"auto"``: deferring works and
            can be had by name, but "auto", which promises stock's tokens, does not take it.
        applies: whether it concerns an engine.
        reason: one sentence; ``{names}`` are facts, ``{lacking}`` what ``lacking`` says.
        example: how an engine that it concerns differs from the plainest one.
    """

    name: str
    forbids: Literal["windows", "deferred", "auto"]
    applies: Callable[[Facts], bool]
    reason: str
    example: Mapping[str, object]

    def says(self, facts: Facts) -> str:
        """The reason, for this engine."""
        return self.reason.format_map(attrs.asdict(facts) | {"lacking": lacking(facts)})


def lacking(facts: Facts) -> str:
    """What the engine asks of its attention backend that vLLM has not; "" if there is none."""
    asked = {"ALiBi": facts.alibi, "attention sinks": facts.sinks, "shared rows": facts.kv_sharing}
    wanted = [facts.dtype, facts.kv_cache_dtype, *(name for name, has in asked.items() if has)]
    return lacks.lacking(facts.attention, wanted) if facts.device == "cuda" else ""


#: In order of precedence: of several reasons the first one is given.
RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "version",
        "windows",
        lambda f: f.version not in SUPPORTED,
        "vLLM {version} was not checked; supported: " + ", ".join(SUPPORTED),
        {"version": "0.26.0"},
    ),
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
        lambda f: f.device not in RUNNERS,
        "device {device} is not supported yet",
        {"device": "xpu"},
    ),
    Rule(
        "runner",
        "windows",
        lambda f: f.device in RUNNERS and f.runner not in RUNNERS[f.device],
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
    Rule(
        "stage",
        "windows",
        lambda f: f.pipeline_parallel > 1 and f.runner != "v1" and not f.last_stage,
        "only the last pipeline stage learns what was accepted before its rows can be reused",
        {"device": "cuda", "runner": "v2", "pipeline_parallel": 2, "last_stage": False},
    ),
    Rule(
        "context",
        "windows",
        lambda f: f.context_parallel > 1,
        "context parallelism is not supported yet",
        {"context_parallel": 2},
    ),
    Rule(
        "microbatches",
        "windows",
        lambda f: f.microbatches,
        "overlapping microbatches are not supported yet",
        {"microbatches": True},
    ),
    Rule(
        "adaptive",
        "windows",
        lambda f: f.adaptive,
        "the number of drafts is decided during the step",
        {"adaptive": True},
    ),
    Rule(
        "release on GPUs",
        "windows",
        lambda f: f.device == "cuda" and f.version not in ON_GPU,
        "vLLM {version} was not checked on GPUs; supported there: " + ", ".join(ON_GPU),
        {"device": "cuda", "runner": "v2", "version": "0.31.0"},
    ),
    Rule(
        "cache format",
        "windows",
        lambda f: f.device in FORMATS and f.kv_cache_dtype not in FORMATS[f.device],
        "how rows in {kv_cache_dtype} lie on device {device} was not checked",
        {"device": "cuda", "runner": "v2", "kv_cache_dtype": "nvfp4"},
    ),
    Rule(
        "recurrent",
        "windows",
        lambda f: f.recurrent,
        "recurrent state cannot be in a window",
        {"recurrent": True},
    ),
    Rule(
        "not in vLLM",
        "windows",
        lambda f: bool(lacking(f)),
        "vLLM itself has no {lacking} in attention backend {attention}",
        {"device": "cuda", "runner": "v2", "attention": "FLASH_ATTN"},  # and float32
    ),
    Rule(
        "quantised latents",
        "windows",
        lambda f: (
            f.mla
            and f.kv_cache_dtype != "auto"
            and not (f.device == "cuda" and f.attention in (None, "TRITON_MLA"))
        ),
        "latent rows in {kv_cache_dtype} were not checked with this attention",
        {"mla": True, "kv_cache_dtype": "fp8"},
    ),
    Rule(
        "connector within the forward",
        "windows",
        lambda f: f.connector in connectors.WITHIN_FORWARD,
        "{connector} may take rows before it is known which are kept",
        {"connector": "LMCacheConnectorV1"},
    ),
    Rule(
        "connector after the step",
        "windows",
        lambda f: f.connector in connectors.AFTER_STEP,
        "{connector} takes rows after a step, but was not seen running with windows",
        {"connector": "OffloadingConnector"},
    ),
    Rule(
        "unknown connector",
        "windows",
        lambda f: f.connector is not None and f.connector not in connectors.KNOWN,
        "which rows {connector} stores, and when, was not checked",
        {"connector": "MyConnector"},
    ),
    Rule(
        "connector on GPUs",
        "windows",
        lambda f: f.device == "cuda" and f.connector in connectors.CHECKED,
        "{connector} was not seen running with windows on device {device}",
        {"device": "cuda", "runner": "v2", "connector": "ExampleConnector"},
    ),
    Rule(
        "foreign layer",
        "windows",
        lambda f: f.foreign_layer is not None,
        "layer {foreign_layer} is no plain attention",
        {"foreign_layer": "model.layers.3"},
    ),
    Rule(
        "attention",
        "windows",
        lambda f: f.attention is not None and f.attention not in ATTENTION.get(f.device, ()),
        "how attention backend {attention} keeps its rows was not checked",
        {"attention": "FLEX_ATTENTION"},
    ),
    Rule(
        "other attention",
        "deferred",
        lambda f: f.device == "cuda" and f.attention not in (None, "FLASH_ATTN"),
        "attention backend {attention} cannot read the window",
        {"device": "cuda", "runner": "v2", "attention": "TRITON_ATTN"},
    ),
    Rule(
        # Before the layers are known; then it is one of the other attentions.
        "latent on GPUs",
        "deferred",
        lambda f: f.device == "cuda" and f.mla and f.attention is None,
        "latent attention on device {device} cannot read the window",
        {"device": "cuda", "runner": "v2", "mla": True},
    ),
    Rule(
        "batch invariance",
        "deferred",
        lambda f: f.device == "cpu" and f.batch_invariant,
        "how the window attention sums depends on what shares a step",
        {"batch_invariant": True},
    ),
    Rule(
        "FlashAttention",
        "deferred",
        lambda f: f.flash is not None and f.flash not in FLASH,
        "FlashAttention {flash} was not seen reading blocks of one row",
        {"flash": 4},
    ),
    Rule(
        "ALiBi on GPUs",
        "deferred",
        lambda f: f.device == "cuda" and f.alibi,
        "for ALiBi vLLM takes FlashAttention 2, which reads no blocks of one row",
        {"device": "cuda", "runner": "v2", "alibi": True},
    ),
    Rule(
        # vLLM's own writer is in them then, and cannot be told that drafts go elsewhere.
        "writes in graphs",
        "deferred",
        lambda f: f.device == "cuda" and f.graph_writes,
        "graphs of parts of the forward write the rows themselves",
        {"device": "cuda", "runner": "v2", "graph_writes": True},
    ),
    Rule(
        "spare blocks",
        "deferred",
        lambda f: f.device == "cuda" and not f.spare_blocks,
        "this KV cache has no room for rows that wait where blocks of one row could be read",
        {"device": "cuda", "runner": "v2", "spare_blocks": False},
    ),
    Rule(
        "shared rows",
        "deferred",
        lambda f: f.kv_sharing,
        "some layers read the rows of others within the forward",
        {"kv_sharing": True},
    ),
    Rule(
        "sinks",
        "deferred",
        lambda f: f.device == "cpu" and f.sinks,
        "the window attention has no sinks",
        {"sinks": True},
    ),
    Rule(
        "alibi",
        "deferred",
        lambda f: f.device == "cpu" and f.alibi,
        "the window attention has no ALiBi",
        {"alibi": True},
    ),
    Rule(
        # Near-ties between two tokens can fall the other way. Latent attention stays vLLM's own.
        "order of sums",
        "auto",
        lambda f: f.device == "cpu" and f.dtype != "float32" and not f.mla,
        "in {dtype} another order of sums can tip a near-tie",
        {"dtype": "bfloat16"},
    ),
    Rule(
        "order of sums in fp8",
        "auto",
        lambda f: f.device == "cpu" and f.kv_cache_dtype != "auto" and not f.mla,
        "over {kv_cache_dtype} rows another order of sums can tip a near-tie",
        {"kv_cache_dtype": "fp8"},
    ),
)


def decide(asked: str, facts: Facts) -> Decision:
    """The policy for this engine, and why.

    Args:
        asked: ``"auto"``, ``"deferred"``, ``"undo"`` or ``"direct"``.
        facts: the engine.

    Returns:
        A policy that is safe here, or ``"off"``; a policy asked for by name is never swapped
        for another one.
    """
    found = [rule for rule in RULES if rule.applies(facts)]
    for rule in found:
        if rule.forbids == "windows":
            return Decision("off", rule.says(facts))
    if asked in ("undo", "direct"):
        return Decision(asked, "asked for")
    for rule in found:
        if rule.forbids == "deferred" and asked == "deferred":
            return Decision("off", f"policy 'deferred' cannot work here: {rule.says(facts)}")
        if asked == "auto":
            return Decision("undo", f"rows cannot be deferred here: {rule.says(facts)}")
    why = "asked for" if asked == "deferred" else "the attention can read the window"
    return Decision("deferred", why)
