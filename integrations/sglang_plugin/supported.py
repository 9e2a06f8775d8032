"""The engines of SGLang's that can be watched: one table of reasons why not, each a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from .seam.engine_facts import EngineFacts

#: Releases whose engines were seen running beside the ledger, on a GPU.
SEEN: Final = ("0.5.23",)

#: Pools with one row of each layer per slot, and allocators and tables without a second space.
_POOLS: Final = ("MHATokenToKVPool", "MHATokenToKVPoolFP4", "MLATokenToKVPool")
_ALLOCATORS: Final = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
_TABLES: Final = ("ReqToTokenPool",)
#: Methods of speculation whose drafts are rows of a chain or a tree, verified by the target.
_METHODS: Final = ("NONE", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM")

#: Arguments of the server that bring rows by another way than a forward, or read them by another
#: table; and what kvtxn does not follow there.
SETTINGS: Final[Mapping[str, str]] = {
    "enable_hierarchical_cache": "rows that HiCache brings back from the host are not followed yet",
    "enable_lmcache": "rows that LMCache brings are not followed",
    "enable_flexkv": "rows that FlexKV brings are not followed",
    "radix_cache_backend": "a radix cache of another package may bring rows that are not followed",
    "disaggregation_mode": "rows that another server computes are not followed",
    "enable_pdmux": "a prefill that is split over its layers is not followed",
    "enable_hisparse": "rows that HiSparse moves are not followed",
    "enable_unified_memory": "slots of the unified pool move, and that is not followed",
    "enable_dp_attention": "steps of data-parallel attention are padded, and not followed yet",
    "dllm_algorithm": "a diffusion model computes its rows several times",
    "elastic_ep_backend": "a forward that is run again after a rank's fault is not followed",
    "pp_size": "pipeline stages are not followed yet",
    "attn_cp_size": "prompts that are spread over ranks are not followed",
    "enable_prefill_cp": "prompts that are spread over ranks are not followed",
    "dcp_size": "rows that are spread over ranks by their positions are not followed",
}

_Rule = tuple[Callable[[EngineFacts], bool], Callable[[EngineFacts], str]]

_RULES: Final[tuple[_Rule, ...]] = (
    (lambda f: f.device != "cuda", lambda f: f"the device {f.device!r} is not followed"),
    (lambda f: not f.samples, lambda f: "an engine that samples no tokens is not followed yet"),
    (
        lambda f: f.encodes,
        lambda f: "rows of an encoder, which are in front of the tokens', are not followed yet",
    ),
    (
        lambda f: "SWA" in f.slots or "SWA" in f.rows,
        lambda f: "the second pool of sliding windows is not followed yet",
    ),
    (
        lambda f: "Hybrid" in f.table or "Hybrid" in f.rows,
        lambda f: "the recurrent states of a hybrid model are not followed yet",
    ),
    (
        lambda f: f.rows not in _POOLS,
        lambda f: f"the rows of {f.rows} are not known to be one per slot",
    ),
    (lambda f: f.slots not in _ALLOCATORS, lambda f: f"the slots of {f.slots} are not known"),
    (lambda f: f.table not in _TABLES, lambda f: f"the table {f.table} is not known"),
    (
        lambda f: f.algorithm not in _METHODS,
        lambda f: f"the drafts of {f.algorithm} are not followed yet",
    ),
)


def cannot_watch(facts: EngineFacts) -> str | None:
    """Say why an engine cannot be watched; None if it can.

    Args:
        facts: the engine's.
    """
    for name, why in SETTINGS.items():
        if name in facts.settings:
            return why
    return next((why(facts) for applies, why in _RULES if applies(facts)), None)
