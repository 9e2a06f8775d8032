"""The vLLM section of ``kvtxn doctor``: decided by the table the plug-in decides by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ..config import POLICIES
from .vllm_matrix import matrix
from .vllm_policy import RUNNERS, SUPPORTED, Facts, decide
from .vllm_settings import settings


def report(engine_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """What kvtxn would do in the vLLM that is installed.

    Args:
        engine_args: arguments of an engine, as for ``LLM(...)``; None judges the plainest
            speculating engine on this machine.

    Returns:
        The release, the engine that is judged, each policy's outcome with its reason, and
        what "auto" comes to for every kind of engine on this device.
        What only a loaded model can tell (sinks, shared caches) is assumed to be absent.

    Raises:
        ConfigError: the arguments ask kvtxn for something that is not valid.
        BackendUnavailableError: or for a backend that is not registered.
    """
    from . import vllm_internals as internals

    if engine_args is None:
        device = internals.device_type()
        runner = RUNNERS.get(device, (Facts().runner,))[-1]  # the one that vLLM prefers there
        facts = Facts(version=internals.version(), device=device, runner=runner)
    else:
        settings(engine_args.get("additional_config"), max_rows=1)
        facts = internals.config_facts(internals.config_from(engine_args))
    plain = attrs.asdict(Facts())
    special = {k: v for k, v in attrs.asdict(facts).items() if v != plain[k]}
    decisions = {asked: decide(asked, facts) for asked in POLICIES}
    return {
        "version": f"{facts.version} (supported: {', '.join(SUPPORTED)})",
        "engine": {
            "device": facts.device,
            "runner": facts.runner,
            "method": facts.method,
            **special,
        },
        "policies": [
            f"{asked} -> {decision.policy} ({decision.reason})"
            for asked, decision in decisions.items()
        ],
        "matrix": [str(row) for row in matrix(facts)],
    }
