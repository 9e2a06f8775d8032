"""The vLLM section of ``kvtxn doctor``: decided by the table the plug-in decides by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from ..config import POLICIES
from .vllm_facts import ON_GPU, RUNNERS, SUPPORTED, Facts
from .vllm_matrix import matrix
from .vllm_policy import decide
from .vllm_settings import settings

#: Settings of models whose layers may have sinks.
_SINKS: Final = (
    "attention_sinks",
    "add_swa_attention_sink_bias",
    "add_full_attention_sink_bias",
)

#: What only a loaded model tells for certain, as far as its configuration gives it away.
FROM_MODEL: Final[Mapping[str, Callable[[Any], bool]]] = {
    "kv_sharing": lambda model: bool(getattr(model, "num_kv_shared_layers", 0)),
    "sinks": lambda model: (
        model.model_type == "gpt_oss" or any(bool(getattr(model, name, False)) for name in _SINKS)
    ),
    "alibi": lambda model: model.model_type == "bloom" or bool(getattr(model, "alibi", False)),
}

#: Said with every decision about an engine that does not run yet.
ASSUMED: Final = (
    "no attention sinks, ALiBi or layers that share rows beyond what the model's configuration "
    "says, and vLLM's own choice of attention unless one is named; of an engine that runs, its log "
    "line 'vllm.active' or 'vllm.inactive' has the last word"
)


def report(engine_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """What kvtxn would do in the vLLM that is installed.

    Args:
        engine_args: arguments of an engine, as for ``LLM(...)``; None judges the plainest
            speculating engine on this machine.

    Returns:
        The release, the engine that is judged, each policy's outcome with its reason, and
        what "auto" comes to for every kind of engine on this device.
        What only a loaded model can tell is taken from ``FROM_MODEL``; see ``ASSUMED``.

    Raises:
        ConfigError: the arguments ask kvtxn for something that is not valid.
        BackendUnavailableError: or for a backend that is not registered.
    """
    from . import vllm_internals as internals
    from . import vllm_internals_gpu as inside

    if engine_args is None:
        device = internals.device_type()
        runner = RUNNERS.get(device, (Facts().runner,))[-1]  # the one that vLLM prefers there
        facts = Facts(version=internals.version(), device=device, runner=runner)
        if device == "cuda" and facts.version in ON_GPU:
            facts = attrs.evolve(facts, flash=inside.flash_version())
    else:
        settings(engine_args.get("additional_config"), max_rows=1)
        facts = engine_facts(internals.config_from(engine_args))
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
            "assumed": ASSUMED,
        },
        "policies": [
            f"{asked} -> {decision.policy} ({decision.reason})"
            for asked, decision in decisions.items()
        ],
        "matrix": [str(row) for row in matrix(facts)],
    }


def engine_facts(config: Any) -> Facts:
    """What a ``VllmConfig`` says, and what its model's configuration gives away."""
    from . import vllm_internals as internals
    from . import vllm_internals_gpu as inside

    facts = internals.config_facts(config)
    if facts.version not in SUPPORTED:
        return facts
    model = config.model_config.hf_text_config
    changes: dict[str, Any] = {fact: says(model) for fact, says in FROM_MODEL.items()}
    if facts.device == "cuda" and facts.version in ON_GPU:
        named = config.attention_config.backend
        changes["attention"] = named and named.name
        if changes["attention"] in (None, "FLASH_ATTN") and not facts.mla:
            changes["flash"] = inside.flash_version(config)
    return attrs.evolve(facts, **changes)
