"""The engines of SGLang's that can be watched: one table of reasons why not, each a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from .seam.engine_facts import EngineFacts
from .seam.pools import STATES, WINDOWS

#: Releases whose engines were seen running beside the ledger, on a GPU.
SEEN: Final = ("0.5.23",)

#: Pools with one row of each layer per slot; those made of such pools; who hands out their slots.
_POOLS: Final = ("MHATokenToKVPool", "MHATokenToKVPoolFP4", "MLATokenToKVPool")
_MADE_OF_POOLS: Final = ("SWAKVPool", "HybridLinearKVPool")
_ALLOCATORS: Final = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
_OF_WINDOWS: Final = ("SWATokenToKVPoolAllocator", "PureSWATokenToKVPoolAllocator")
_TABLES: Final = ("ReqToTokenPool", "HybridReqToTokenPool")
#: Attention of recurrent layers whose states have a slot per request.
_STATES: Final = ("GDNAttnBackend", "KDAAttnBackend", "Mamba2AttnBackend")
#: Methods of speculation whose drafts are rows of a chain or a tree, verified by the target.
_METHODS: Final = ("NONE", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM")

#: Arguments of the server that bring rows by another way than a forward, or read them by another
#: table; and what kvtxn does not follow there.
SETTINGS: Final[Mapping[str, str]] = {
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


#: Arguments of HiCache: rows on the host, and in a storage behind it.
HOST: Final = "enable_hierarchical_cache"
STORAGE: Final = "hicache_storage_backend"

#: Arguments by which a hybrid's states are elsewhere than in their slots, or are committed by an
#: attention backend that the engine takes up as it serves: the commits of its first one are heard.
STATE_SETTINGS: Final[Mapping[str, str]] = {
    "enable_linear_replayssm": "states that a replay ring holds are not followed",
    "enable_linear_replayssm_spec": "states that a replay ring holds are not followed",
    "speculative_adaptive": "states are not followed where the number of drafts adapts",
}


def _unknown_rows(facts: EngineFacts) -> str | None:
    """Return the first class of pools that may not have a row of each layer per slot; or None."""
    made = facts.inside if facts.rows in _MADE_OF_POOLS else (facts.rows,)
    return next((name for name in made or (facts.rows,) if name not in _POOLS), None)


def _windows_unknown(facts: EngineFacts) -> str | None:
    """Return why it is not known which rows a sliding window still has; None if it is known.

    Without a window this is a reason, too.
    """
    if facts.chunked:
        return "rows of attention by chunks are not followed yet"
    if facts.windows:
        return "layers with windows of several sizes are not followed yet"
    if facts.window is None or facts.window < 1:
        return "the size of the sliding windows is not known"
    return None


def _states_unknown(facts: EngineFacts) -> str | None:
    """Return why it is not known which states a hybrid has where; None if it is known."""
    for name, why in STATE_SETTINGS.items():
        if name in facts.settings:
            return why
    if facts.states not in _STATES:
        return f"the recurrent states of {facts.states or 'another attention'} are not followed yet"
    if facts.copies:
        return "states that the prefix cache has in another format are not followed"
    if facts.strategy == "extra_buffer_lazy":
        return "states whose slots are handed out during a step are not followed yet"
    if not facts.commits:
        return "states that the next step takes out of the drafts' are not followed"
    return None


#: Names of the arguments that rules look at.
ARGUMENTS: Final = frozenset([*SETTINGS, *STATE_SETTINGS, HOST, STORAGE])

_Rule = tuple[Callable[[EngineFacts], bool], Callable[[EngineFacts], str]]

_RULES: Final[tuple[_Rule, ...]] = (
    (lambda f: f.device != "cuda", lambda f: f"the device {f.device!r} is not followed"),
    (lambda f: not f.samples, lambda f: "an engine that samples no tokens is not followed yet"),
    (
        lambda f: f.encodes,
        lambda f: "rows of an encoder, which are in front of the tokens', are not followed yet",
    ),
    (
        lambda f: bool(_unknown_rows(f)),
        lambda f: f"the rows of {_unknown_rows(f)} are not known to be one per slot",
    ),
    (
        lambda f: f.slots not in (_OF_WINDOWS if f.rows == "SWAKVPool" else _ALLOCATORS),
        lambda f: f"the slots of {f.slots} are not known",
    ),
    (
        lambda f: f.slots == _OF_WINDOWS[1] and _windows_unknown(f) is not None,
        lambda f: str(_windows_unknown(f)),
    ),
    (
        lambda f: HOST in f.settings and not f.host,
        lambda f: "rows that this HiCache copies to the host are not followed",
    ),
    (lambda f: f.table not in _TABLES, lambda f: f"the table {f.table} is not known"),
    (
        lambda f: f.algorithm not in _METHODS,
        lambda f: f"the drafts of {f.algorithm} are not followed yet",
    ),
)


def cannot_watch(facts: EngineFacts) -> str | None:
    """Return a sentence why an engine cannot be watched, the first that applies; None if it can.

    Args:
        facts: the engine's.
    """
    for name, why in SETTINGS.items():
        if name in facts.settings:
            return why
    return next((why(facts) for applies, why in _RULES if applies(facts)), None)


def left_out(facts: EngineFacts) -> dict[str, str]:
    """Return the groups of a watched engine that are not watched, by name, with a sentence why.

    These are at most ``WINDOWS`` and ``STATES``.

    Args:
        facts: the engine's.
    """
    brought = "what a storage of HiCache's brings is not followed" if _stores(facts) else None
    why, found = _windows_unknown(facts) or brought, {}
    if facts.slots == _OF_WINDOWS[0] and why is not None:
        found[WINDOWS] = why
    why = _states_unknown(facts) or brought
    if facts.table == "HybridReqToTokenPool" and why is not None:
        found[STATES] = why
    return found


def cannot_contain(facts: EngineFacts) -> str | None:
    """Return a sentence why a watched engine's wrong rows cannot be contained; None if they can.

    They cannot where a storage of HiCache's may bring them back.

    Args:
        facts: the engine's.
    """
    if not _stores(facts):
        return None
    return "rows that were wrong may be in a storage of HiCache's, which brings them back"


def _stores(facts: EngineFacts) -> bool:
    """Tell whether HiCache is on, with a storage behind it."""
    return STORAGE in facts.settings and HOST in facts.settings
