"""Rules about releases of vLLM that were not checked; part of the table in ``policy.rules``."""

from __future__ import annotations

from typing import Final

from . import supported
from .rule_type import Rule

#: Ends the reason where a release was not checked.
_TRIAL: Final = "; with the setting 'unchecked' windows start after a self-test"

#: In order of precedence, before all other rules.
RELEASE_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "version",
        "windows",
        lambda f: f.device != "cuda" and f.version not in supported.RELEASES and not f.unchecked,
        "vLLM {version} was not checked; supported: " + ", ".join(supported.RELEASES) + _TRIAL,
        {"version": "0.26.0"},
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
        {"device": "cuda", "runner": "v2", "version": "0.26.0"},
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
        {"device": "cuda", "runner": "v2", "version": "0.33.0", "tensor_parallel": 2},
    ),
    Rule(
        "MTP on GPUs",
        "windows",
        lambda f: (
            f.device == "cuda"
            and f.method == "mtp"
            and f.version in supported.NO_MTP_RELEASES
            and not f.unchecked
        ),
        "engines with MTP were not run on a GPU with vLLM {version}; the setting 'unchecked' lets "
        "them start",
        {"device": "cuda", "runner": "v2", "version": "0.31.0", "method": "mtp"},
    ),
)
