"""Rules about engines whose layers keep recurrent states; part of the table in ``policy.rules``."""

from __future__ import annotations

from typing import Final

from . import supported
from .engine import GATED_DELTA, OTHER_STATES, EngineFacts
from .rule import Rule


def _gated(facts: EngineFacts) -> bool:
    """Tell whether states of gated delta nets on a CPU are to be in the windows."""
    return facts.device == "cpu" and facts.recurrent == GATED_DELTA and facts.states != "off"


def _held(facts: EngineFacts) -> bool:
    """Tell whether nothing speaks against states in the windows."""
    known = facts.version in supported.STATE_RELEASES and not facts.cached_states
    return _gated(facts) and known and (facts.dtype, facts.state_dtype) == ("bfloat16", "float32")


#: An engine whose states are in the windows.
_WITH_STATES: Final = {"recurrent": GATED_DELTA, "states": "exact", "dtype": "bfloat16"}


#: In order of precedence.
STATE_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "states on other devices",
        "windows",
        lambda f: f.recurrent is not None and f.device != "cpu",
        "kvtxn's vLLM plug-in does not support recurrent layers on device {device} yet",
        {"device": "cuda", "runner": "v2", "recurrent": GATED_DELTA},
    ),
    Rule(
        "other states",
        "windows",
        lambda f: f.device == "cpu" and f.recurrent == OTHER_STATES,
        "vLLM's CPU operators verify drafts over the states of gated delta nets (Qwen3-Next, "
        "Qwen3.5) and of no other recurrent layers",
        {"recurrent": OTHER_STATES},
    ),
    Rule(
        "states not asked for",
        "windows",
        lambda f: f.device == "cpu" and f.recurrent == GATED_DELTA and f.states == "off",
        'the model has recurrent states, and the settings lack "recurrent": "exact"',
        {"recurrent": GATED_DELTA, "dtype": "bfloat16"},
    ),
    Rule(
        "release for states",
        "windows",
        lambda f: (
            _gated(f)
            and (f.version in supported.RELEASES or f.unchecked)
            and f.version not in supported.STATE_RELEASES
        ),
        "recurrent states were not checked with vLLM {version}; supported: "
        + ", ".join(supported.STATE_RELEASES),
        {**_WITH_STATES, "version": "0.31.0"},
    ),
    Rule(
        "gated delta nets in other dtypes",
        "windows",
        lambda f: _gated(f) and f.dtype != "bfloat16",
        "vLLM's CPU operators of gated delta nets do not take {dtype}, with or without kvtxn",
        {**_WITH_STATES, "dtype": "float32"},
    ),
    Rule(
        "state dtype",
        "windows",
        lambda f: _gated(f) and f.state_dtype != "float32",
        "kvtxn was not checked with {state_dtype} states",
        {**_WITH_STATES, "state_dtype": "bfloat16"},
    ),
    Rule(
        "cached states",
        "windows",
        lambda f: _gated(f) and f.cached_states,
        "the prefix cache keeps states at block boundaries, which takes GPU kernels of vLLM's: set "
        "enable_prefix_caching to False",
        {**_WITH_STATES, "cached_states": True},
    ),
    Rule(
        "states wait for the commit",
        "others",
        _held,
        "a recurrent state cannot be taken back to the middle of a window",
        _WITH_STATES,
    ),
)
