"""Rules about engines whose layers keep recurrent states; part of the table in ``policy.rules``.

The choice of ``recurrent="auto"`` is here, too: its rule, the numbers behind it, and its rows of
the table. It never changes tokens, so it takes "exact" or leaves the states to stock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from . import supported
from .decision import ON_ONE_GPU, Rule, of_stock
from .engine_facts import (
    GATED_DELTA,
    KNOWN_STATES,
    MAMBA2,
    OLMO_DELTA,
    OTHER_STATES,
    SHORT_CONV,
    EngineFacts,
)

# -- what "auto" chooses --------------------------------------------------------------

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
    """Return Markdown that says where ``recurrent: "auto"`` takes "exact"."""
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
    """Return words that list shares of stock's time by number of requests, in their order."""
    (least, part), *others = found.items()
    more = ", ".join(f"{part:.2f} with {count}" for count, part in others)
    return f"{part:.2f} of stock's time with {least} request, {more}"


def takes(facts: EngineFacts) -> str:
    """Return the sentence that "auto" takes "exact", with its gain and its measured time."""
    return (
        f'"auto" takes "exact": {facts.gain:.2f} times as many requests of {facts.gain_tokens} '
        f"tokens fit as in stock; {measured_exact()}"
    )


def _auto(facts: EngineFacts) -> bool:
    """Tell whether the setting is "auto", for states that kvtxn knows."""
    return facts.states == "auto" and facts.recurrent in KNOWN_STATES


def _chosen_on_gpu(facts: EngineFacts) -> bool:
    """Tell whether the setting is "auto", for states that kvtxn knows, on a GPU."""
    return _auto(facts) and facts.device == "cuda"


def _unmeasured(facts: EngineFacts) -> bool:
    """Tell whether "exact" was not compared or timed with this kind or dtype of states."""
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
        lambda f: _chosen_on_gpu(f) and f.runner == "v1",
        f'{_LEAVES}: the time that "exact" takes was not measured with vLLM\'s V1 model runner; '
        f"{_INSTEAD}",
        {**TAKEN, "runner": "v1"},
    ),
    Rule(
        "states chosen unmeasured",
        "windows",
        lambda f: _chosen_on_gpu(f) and _unmeasured(f),
        f'{_LEAVES}: the time that "exact" takes was not measured with {{recurrent}} and '
        f"{{state_dtype}} states; {_INSTEAD}",
        {**TAKEN, "state_dtype": "bfloat16"},
    ),
    Rule(
        "states chosen over ranks",
        "windows",
        lambda f: _chosen_on_gpu(f) and f.tensor_parallel > 1,
        f"{_UNSEEN} under tensor parallelism with captured graphs; {_INSTEAD}",
        {**TAKEN, "tensor_parallel": 2},
    ),
    Rule(
        "states chosen unseen",
        "windows",
        lambda f: _chosen_on_gpu(f) and f.model not in SEEN_MODELS,
        f"{_UNSEEN} with model type {{model}}; {_INSTEAD}",
        {**TAKEN, "model": "qwen3_next"},
    ),
    Rule(
        "states chosen beside unseen rows",
        "windows",
        lambda f: _chosen_on_gpu(f) and f.kv_cache_dtype not in SEEN_FORMATS,
        f"{_UNSEEN} beside a KV cache of format {{kv_cache_dtype}}; {_INSTEAD}",
        {**TAKEN, "kv_cache_dtype": "fp8"},
    ),
    Rule(
        "states chosen beside unseen attention",
        "windows",
        lambda f: _chosen_on_gpu(f) and f.attention not in (None, *SEEN_ATTENTION),
        f"{_UNSEEN} beside attention backend {{attention}}; {_INSTEAD}",
        {**TAKEN, "attention": "TRITON_ATTN"},
    ),
    Rule(
        "states chosen for few requests",
        "windows",
        lambda f: _chosen_on_gpu(f) and f.most_requests <= FEW,
        f"{_LEAVES}: at most {{most_requests}} requests run at once (max_num_seqs), and up to "
        f'{FEW} "exact" takes as long as stock or longer; {_INSTEAD}',
        {**TAKEN, "most_requests": 8},
    ),
    Rule(
        "states chosen for little room",
        "windows",
        lambda f: _chosen_on_gpu(f) and f.gain < GAIN,
        f'{_LEAVES}: with "exact" {{gain}} times as many requests of {{gain_tokens}} tokens would '
        f"fit, and it takes {GAIN}; {_INSTEAD}",
        {**TAKEN, "gain": 1.27},
    ),
)


# -- rules about states ---------------------------------------------------------------

#: Dtypes of a model and of its states that were checked on a GPU with each kind of layer.
_ON_GPU: Final = (("bfloat16", "float32"), ("bfloat16", "bfloat16"))

#: By device, and by kind of recurrent layer: dtypes of a model and of its states that were checked.
_CHECKED: Final[Mapping[str, Mapping[str, tuple[tuple[str, str], ...]]]] = {
    "cpu": {
        GATED_DELTA: (("bfloat16", "float32"),),
        OLMO_DELTA: (),
        MAMBA2: (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")),
        SHORT_CONV: (("float32", "float32"), ("bfloat16", "bfloat16")),
    },
    "cuda": dict.fromkeys((GATED_DELTA, OLMO_DELTA, MAMBA2, SHORT_CONV), _ON_GPU),
}


def _known(facts: EngineFacts) -> bool:
    """Tell whether kvtxn knows the operators of the model's recurrent layers on this device."""
    if facts.recurrent == OLMO_DELTA:
        return facts.device == "cuda"
    return facts.device in _CHECKED and facts.recurrent in KNOWN_STATES


def _asked(facts: EngineFacts) -> bool:
    """Tell whether the user asks for states in the windows, and kvtxn knows their layers."""
    return _known(facts) and facts.states != "off"


def _on_gpu(facts: EngineFacts) -> bool:
    """Tell whether the user asks for states in the windows of an engine on a GPU."""
    return _asked(facts) and facts.device == "cuda"


def _foreign_dtype(facts: EngineFacts) -> bool:
    """Tell whether vLLM itself lacks the model's dtype: gated delta nets on a CPU want bfloat16."""
    return facts.device == "cpu" and facts.recurrent == GATED_DELTA and facts.dtype != "bfloat16"


def _checked_dtypes(facts: EngineFacts) -> set[str]:
    """Return the dtypes of states that were checked with a model of this dtype and kind.

    Those on the engine's device count.
    """
    pairs = _CHECKED.get(facts.device, {}).get(facts.recurrent or "", ())
    return {states for model, states in pairs if model == facts.dtype}


def _unchecked(facts: EngineFacts) -> bool:
    """Tell whether kvtxn was not checked with the dtypes of the model and of its states.

    False for layers that kvtxn does not know, and for dtypes that vLLM does not take; states of no
    known dtype pass, if some dtype was checked.
    """
    known = facts.recurrent in _CHECKED.get(facts.device, ())
    if not known or _foreign_dtype(facts):
        return False
    checked = _checked_dtypes(facts)
    return not checked or facts.state_dtype not in {None, *checked}


def _held(facts: EngineFacts) -> bool:
    """Tell whether windows of an engine on a CPU can hold its states, by all rules about them."""
    if facts.device == "cuda" or facts.states in ("fast", "auto"):
        return False
    known = facts.version in supported.STATE_RELEASES and not facts.cached_states
    ranks = facts.tensor_parallel == 1 or facts.recurrent == GATED_DELTA
    right = not _foreign_dtype(facts) and not _unchecked(facts) and not facts.connectors
    return _asked(facts) and known and ranks and right


def _over_ranks(facts: EngineFacts) -> bool:
    """Tell whether states may be spread over ranks: that was checked, or the user allows it.

    It was checked for gated delta nets; others may be on a GPU.
    """
    if facts.recurrent == GATED_DELTA:
        return True
    return facts.device == "cuda" and _on_trial(facts)


def _on_trial(facts: EngineFacts) -> bool:
    """Tell whether the user allows states in windows where they were not compared with stock."""
    return facts.unchecked and facts.states != "auto"


#: The reason why an engine with other recurrent layers cannot have "fast".
NO_FAST_FORM: Final = (
    "kvtxn has fast kernels for the gated delta nets of Qwen and for Mamba-2 layers, and none for "
    "{recurrent}"
)

#: By value of ``recurrent``: its effect on a GPU, as in the doctor and the documents.
PROMISES: Final[Mapping[str, str]] = {
    "exact": "vLLM's own kernels verify and commit: states and tokens are stock's to the bit",
    "fast": "kvtxn's kernels verify and commit, each state is read once per verify and written "
    "once per commit, all layers in one launch: tokens part from stock's at near-ties alone",
}


#: The part of stock's time that the kernels of a verify step take with "fast", by number of
#: requests: Qwen3.5-9B's layers beside vLLM's fused kernel, float32 states, four drafts, an H200.
FAST_OF_STOCK: Final = of_stock("fast")


#: The same for a whole engine of that model: its time per token as a part of stock's.
FAST_PER_TOKEN: Final = of_stock("fast, per token")


#: The same for an engine of Nemotron-H 8B.
FAST_PER_TOKEN_OF_MAMBA2: Final = of_stock("fast, per token of Mamba-2")


def measured_fast(recurrent: str | None) -> str:
    """Return words on the measured time of "fast" for models with these recurrent layers.

    Those of Nemotron-H for Mamba-2 layers, of Qwen3.5 for others.
    """
    if recurrent == MAMBA2:
        return (
            f"on an H200 a token of a whole engine took {by_requests(FAST_PER_TOKEN_OF_MAMBA2)} "
            "(Nemotron-H 8B, 4 drafts, float32 states)"
        )
    return (
        f"on an H200 the states' kernels of a verify step took {by_requests(FAST_OF_STOCK)}, and a "
        f"token of a whole engine {by_requests(FAST_PER_TOKEN)} (Qwen3.5-9B, 4 drafts, float32 "
        "states)"
    )


def without_fast_form(facts: EngineFacts) -> bool:
    """Tell whether kvtxn knows a model's recurrent layers, and has no fast kernels for them."""
    return facts.recurrent in (OLMO_DELTA, SHORT_CONV)


#: An engine whose states are in the windows.
_WITH_STATES: Final = {"recurrent": GATED_DELTA, "states": "exact", "dtype": "bfloat16"}
_WITH_STATES_ON_GPU: Final = {**_WITH_STATES, "device": "cuda", "runner": "v2"}


#: In order of precedence.
STATE_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "other states",
        "windows",
        lambda f: f.device in _CHECKED and f.recurrent == OTHER_STATES,
        "kvtxn knows vLLM's operators of gated delta nets (Qwen3-Next, Qwen3.5, OLMo hybrid), "
        "Mamba-2 (Nemotron-H, Granite 4, Falcon-H1) and short convolutions (LFM2); of other "
        "recurrent layers it would have to know which states a verify step reads and writes",
        {"recurrent": OTHER_STATES},
    ),
    Rule(
        "states by Triton alone",
        "windows",
        lambda f: f.device == "cpu" and f.recurrent == OLMO_DELTA,
        "vLLM computes {recurrent} by Triton kernels alone, which need a GPU, with or without "
        "kvtxn",
        {"recurrent": OLMO_DELTA},
    ),
    Rule(
        "release for states",
        "windows",
        lambda f: (
            _known(f)
            and (f.version in supported.releases_for(f.device) or f.unchecked)
            and f.version not in supported.state_releases_for(f.device)
        ),
        "recurrent states were not checked with vLLM {version} on device {device}; supported: "
        "{state_releases}; the setting 'unchecked' does not let them start",
        {**_WITH_STATES, "version": ON_ONE_GPU},
    ),
    Rule(
        "states not asked for",
        "windows",
        lambda f: _known(f) and f.states == "off",
        'the model has recurrent states, and the settings lack "recurrent": "exact"{or_auto}',
        {"recurrent": GATED_DELTA, "dtype": "bfloat16"},
    ),
    ON_CPUS,
    Rule(
        "fast states on CPUs",
        "windows",
        lambda f: _asked(f) and f.device == "cpu" and f.states == "fast",
        "vLLM's own operators are exact on a CPU, and kvtxn has no faster ones: set "
        '"recurrent" to "exact"',
        {**_WITH_STATES, "states": "fast"},
    ),
    Rule(
        "states without fast kernels",
        "windows",
        lambda f: _on_gpu(f) and f.states == "fast" and without_fast_form(f),
        f'{NO_FAST_FORM}: set "recurrent" to "exact"',
        {**_WITH_STATES_ON_GPU, "states": "fast", "recurrent": OLMO_DELTA},
    ),
    Rule(
        "states over ranks with the V1 runner",
        "windows",
        lambda f: _on_gpu(f) and f.runner == "v1" and f.tensor_parallel > 1 and not _on_trial(f),
        "with vLLM's V1 model runner recurrent states over several ranks were not compared with "
        "stock on a GPU{trial}",
        {**_WITH_STATES_ON_GPU, "runner": "v1", "tensor_parallel": 2},
    ),
    Rule(
        "states over stages",
        "windows",
        lambda f: _on_gpu(f) and f.pipeline_parallel > 1,
        "kvtxn was not checked with recurrent states under pipeline parallelism: each step that is "
        "under way would need buffers of its own for rows",
        {**_WITH_STATES_ON_GPU, "pipeline_parallel": 2},
    ),
    Rule(
        "gated delta nets in other dtypes",
        "windows",
        lambda f: _asked(f) and _foreign_dtype(f),
        "vLLM's CPU operators of gated delta nets do not take {dtype}, with or without kvtxn",
        {**_WITH_STATES, "dtype": "float32"},
    ),
    Rule(
        "state dtype",
        "windows",
        lambda f: _asked(f) and _unchecked(f) and "float32" in _checked_dtypes(f),
        "kvtxn was not checked with {state_dtype} states of a {dtype} model; set "
        "mamba_ssm_cache_dtype to 'float32'",
        {**_WITH_STATES, "state_dtype": "bfloat16"},
    ),
    Rule(
        "dtype of a model with states",
        "windows",
        lambda f: _asked(f) and _unchecked(f) and "float32" not in _checked_dtypes(f),
        "kvtxn was not checked with {state_dtype} states of a {dtype} model",
        {**_WITH_STATES, "recurrent": MAMBA2, "dtype": "float16", "state_dtype": "float16"},
    ),
    Rule(
        "states over ranks",
        "windows",
        lambda f: _asked(f) and f.tensor_parallel > 1 and not _over_ranks(f),
        "kvtxn was not checked with {recurrent} under tensor parallelism on device {device}{trial}",
        {**_WITH_STATES, "recurrent": MAMBA2, "tensor_parallel": 2},
    ),
    Rule(
        "states beside a connector",
        "windows",
        lambda f: _asked(f) and bool(f.connectors),
        "kvtxn was not checked with recurrent states beside a KV connector, which would have to "
        "read them after their commit",
        {**_WITH_STATES, "connectors": ("ExampleConnector",)},
    ),
    Rule(
        "cached states",
        "windows",
        lambda f: _asked(f) and f.cached_states and f.device == "cpu",
        "the prefix cache keeps states at block boundaries, and where drafts are verified vLLM "
        "moves those states by Triton kernels alone: set enable_prefix_caching to False",
        {**_WITH_STATES, "cached_states": True},
    ),
    Rule(
        "states by other kernels",
        "windows",
        lambda f: _on_gpu(f) and f.odd_states is not None,
        "{odd_states}",
        {**_WITH_STATES_ON_GPU, "odd_states": "the model has no layers of attention"},
    ),
    Rule(
        "states in the middle of prompts",
        "windows",
        lambda f: _on_gpu(f) and f.inner_states and not _on_trial(f),
        "kvtxn was not checked with FlashInfer's kernel of prompts, which since vLLM 0.33 leaves "
        "states of gated delta nets in the middle of a prompt for the prefix cache: set "
        "gdn_prefill_backend to 'triton'{trial}",
        {**_WITH_STATES_ON_GPU, "cached_states": True, "inner_states": True},
    ),
    *CHOICE_RULES,
    Rule(
        "states wait for the commit",
        "others",
        _held,
        "a recurrent state cannot be taken back to the middle of a window",
        _WITH_STATES,
    ),
)
