"""The choice of ``recurrent="auto"``: its rule, the numbers behind it, and its rows of the table.

It never changes tokens, so it takes "exact" or leaves the states to stock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .engine import GATED_DELTA, KNOWN_STATES, OLMO_DELTA, EngineFacts
from .measured import of_stock
from .rule_type import Rule

#: "auto" takes "exact" where more requests than these may run at once. Up to so many, the kernels
#: of a verify step take as long as stock's fused one, or longer.
FEW: Final = 8

#: It takes "exact" where so many times as many requests fit, of ``TOKENS`` tokens each.
GAIN: Final = 1.5
TOKENS: Final = 4096

#: Engines whose tokens and states were seen to be stock's to the bit on a GPU: types of models,
#: with the names that users know, and attention backends and cache formats of their other layers.
SEEN_MODELS: Final[Mapping[str, str]] = {"qwen3_5_text": "Qwen3.5"}
SEEN_ATTENTION: Final = ("FLASH_ATTN",)
SEEN_FORMATS: Final = ("auto", "bfloat16")

#: The dtype of states with which its time was measured.
MEASURED_STATES: Final = "float32"

#: By vLLM's kernel and number of requests: the part of its time that the states' kernels of a
#: verify step take with "exact": Qwen3.5-9B's layers, float32 states, four drafts, an H200.
EXACT_OF_STOCK: Final = {
    kernel: of_stock(f"exact, by vLLM's {kernel} kernel") for kernel in ("fused", "Triton")
}

#: By tokens of a request, and whether the prefix cache is on: how many times as many requests
#: vLLM's own planning holds with one state block each, of the same model with four drafts.
HELD_OF_STOCK: Final = {
    (tokens, cached): share
    for cached, name in (
        (False, "requests held"),
        (True, "requests held with a prefix cache"),
    )
    for tokens, share in of_stock(name).items()
}


def rule_in_words() -> str:
    """State the rule in two sentences."""
    seen = f"{', '.join(SEEN_MODELS.values())} with {MEASURED_STATES} states on one GPU, with "
    seen += "vLLM's V2 model runner, over "
    seen += f"bfloat16 rows with {', '.join(SEEN_ATTENTION)}"
    return (
        f'`"auto"` takes `"exact"` on a GPU where three things hold: its tokens and states were '
        f"seen to be stock's to the bit and its time was measured with vLLM 0.32.0 ({seen}); "
        f"more than {FEW} requests may run at once (`max_num_seqs`); and at least {GAIN} times as "
        f"many of them fit into the cache, at {TOKENS} tokens each (`max_model_len` if that "
        "is less). Everywhere else it leaves the states to stock, and says which of the three is "
        "missing."
    )


def measured_exact() -> str:
    """Return words on the measured time of "exact", with many requests and with few."""
    fused, triton = (by_requests(found) for found in EXACT_OF_STOCK.values())
    return (
        f"on an H200 the states' kernels of a verify step took {fused} (Qwen3.5-9B, 4 drafts, "
        f"float32 states, by vLLM's fused kernel; by its Triton kernel {triton})"
    )


def by_requests(found: Mapping[int, float]) -> str:
    """Return words that list shares of stock's time by number of requests."""
    (least, part), *others = found.items()
    more = ", ".join(f"{part:.2f} with {count}" for count, part in others)
    return f"{part:.2f} of stock's time with {least} request, {more}"


def takes(facts: EngineFacts) -> str:
    """Return a sentence on an engine's gain if "auto" took "exact".

    Args:
        facts: of an engine in which no rule of the table speaks against windows.
    """
    return (
        f'"auto" takes "exact": {facts.gain:.2f} times as many requests of {facts.gain_tokens} '
        f"tokens fit as in stock; {measured_exact()}"
    )


def _auto(facts: EngineFacts) -> bool:
    """Return whether the setting is "auto", for states that kvtxn knows."""
    return facts.states == "auto" and facts.recurrent in KNOWN_STATES


def _on_gpu(facts: EngineFacts) -> bool:
    return _auto(facts) and facts.device == "cuda"


def _unmeasured(facts: EngineFacts) -> bool:
    """Return whether "exact" was not compared or timed with this kind and dtype of states."""
    return facts.recurrent != GATED_DELTA or facts.state_dtype != MEASURED_STATES


#: An engine for which "auto" takes "exact".
TAKEN: Final[Mapping[str, object]] = {
    **{"device": "cuda", "runner": "v2", "dtype": "bfloat16", "recurrent": GATED_DELTA},
    **{"states": "auto", "state_dtype": MEASURED_STATES, "model": "qwen3_5_text"},
    **{"most_requests": 128, "gain": 2.09, "gain_tokens": 4096},
}

_LEAVES: Final = '"recurrent": "auto" leaves the states to stock here'
_UNSEEN: Final = f'{_LEAVES}: "exact" was not compared with stock on a GPU'
_INSTEAD: Final = 'set "recurrent" to "exact" to hold them anyway'

#: A row for the beginning of the rules about states: another reason would mislead.
ON_CPUS: Final = Rule(
    "states chosen on CPUs",
    "windows",
    lambda f: _auto(f) and f.device == "cpu" and f.recurrent != OLMO_DELTA,
    f"{_LEAVES}, whose text with drafts is not greedy's on a CPU: windows would change it; set "
    '"recurrent" to "exact" for the text of greedy decoding',
    {"recurrent": GATED_DELTA, "states": "auto", "dtype": "bfloat16"},
)

#: Rows for their end, in order of precedence.
CHOICE_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "states chosen with the V1 runner",
        "windows",
        lambda f: _on_gpu(f) and f.runner == "v1",
        f'{_LEAVES}: the time that "exact" takes was not measured with vLLM\'s V1 model runner; '
        f"{_INSTEAD}",
        {**TAKEN, "runner": "v1"},
    ),
    Rule(
        "states chosen unmeasured",
        "windows",
        lambda f: _on_gpu(f) and _unmeasured(f),
        f'{_LEAVES}: the time that "exact" takes was not measured with {{recurrent}} and '
        f"{{state_dtype}} states; {_INSTEAD}",
        {**TAKEN, "state_dtype": "bfloat16"},
    ),
    Rule(
        "states chosen over ranks",
        "windows",
        lambda f: _on_gpu(f) and f.tensor_parallel > 1,
        f"{_UNSEEN} under tensor parallelism with captured graphs; {_INSTEAD}",
        {**TAKEN, "tensor_parallel": 2},
    ),
    Rule(
        "states chosen unseen",
        "windows",
        lambda f: _on_gpu(f) and f.model not in SEEN_MODELS,
        f"{_UNSEEN} with model type {{model}}; {_INSTEAD}",
        {**TAKEN, "model": "qwen3_next"},
    ),
    Rule(
        "states chosen beside unseen rows",
        "windows",
        lambda f: _on_gpu(f) and f.kv_cache_dtype not in SEEN_FORMATS,
        f"{_UNSEEN} beside a KV cache of format {{kv_cache_dtype}}; {_INSTEAD}",
        {**TAKEN, "kv_cache_dtype": "fp8"},
    ),
    Rule(
        "states chosen beside unseen attention",
        "windows",
        lambda f: _on_gpu(f) and f.attention not in (None, *SEEN_ATTENTION),
        f"{_UNSEEN} beside attention backend {{attention}}; {_INSTEAD}",
        {**TAKEN, "attention": "TRITON_ATTN"},
    ),
    Rule(
        "states chosen for few requests",
        "windows",
        lambda f: _on_gpu(f) and f.most_requests <= FEW,
        f"{_LEAVES}: at most {{most_requests}} requests run at once (max_num_seqs), and up to "
        f'{FEW} "exact" takes as long as stock or longer; {_INSTEAD}',
        {**TAKEN, "most_requests": 8},
    ),
    Rule(
        "states chosen for little room",
        "windows",
        lambda f: _on_gpu(f) and f.gain < GAIN,
        f'{_LEAVES}: with "exact" {{gain}} times as many requests of {{gain_tokens}} tokens would '
        f"fit, and it takes {GAIN}; {_INSTEAD}",
        {**TAKEN, "gain": 1.27},
    ),
)
