"""Rules about releases of vLLM that were not checked; part of the table in ``policy.rules``."""

from __future__ import annotations

from typing import Final

from . import supported
from .engine import EngineFacts
from .rule_type import ON_ONE_GPU, UNLISTED, Rule

#: Ends the reason where a release was not checked.
_TRIAL: Final = (
    "; with the setting 'unchecked' windows start after a self-test, but not beside a KV "
    "connector, on pipeline stages or over recurrent states"
)


def on_trial(facts: EngineFacts) -> bool:
    """Return whether windows need a self-test: nothing was checked, the user allows it."""
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
