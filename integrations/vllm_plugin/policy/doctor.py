"""The vLLM section of ``kvtxn doctor``; it decides by ``policy.rules``, as the plug-in does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from ....config import POLICIES
from ..audit.expected import in_words
from ..internals import Foreign, audited, workers
from ..internals import config as engine_config
from ..settings import PluginSettings, settings
from . import supported
from .engine import EngineFacts
from .matrix import matrix
from .moved import compare, is_checked
from .rules import check_states, decide

#: Printed with every decision about an engine that does not run yet.
ASSUMED: Final = (
    "attention sinks, ALiBi and shared rows as the model's configuration says, and the attention "
    "that vLLM chooses unless one is named; a running engine's log line, kvtxn.active or "
    "kvtxn.inactive, has the last word"
)

#: Printed for GPUs.
SPARE_BLOCKS: Final = (
    "deferred on a GPU writes every draft, rejected ones too, to spare blocks behind those that "
    "vLLM hands out; the cache's own slots get settled and accepted rows only"
)


def report(engine_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Report what kvtxn would do in the vLLM that is installed.

    Args:
        engine_args: arguments of the engine to judge, as for ``LLM(...)``; None for the plainest
            speculating engine on this machine.

    Returns:
        The release, the engine that is judged, each policy's outcome with its reason, the audit if
        the user asks for one, and what "auto" comes to for every kind of engine on this device.
        Facts that only a loaded model can tell are guessed by ``internals.config.FROM_MODEL``; see
        ``ASSUMED``.

    Raises:
        ConfigError: a setting in ``additional_config={"kvtxn": {...}}`` is not valid.
        BackendUnavailableError: no backend of that name is registered.
    """
    violations = {}
    if engine_args is None:
        facts = engine_config.plain_facts()
    else:
        wanted = settings(engine_args.get("additional_config"), 1, workers.device_type())
        config = engine_config.config_from(engine_args)
        facts = engine_config.expected_facts(config)
        check_states(wanted, facts)
        violations = _violations(wanted, config)
    plain = attrs.asdict(EngineFacts())
    special = {k: v for k, v in attrs.asdict(facts).items() if v != plain[k]}
    decisions = {asked: decide(asked, facts) for asked in POLICIES}
    known = ", ".join(supported.releases_for(facts.device))
    return {
        "version": f"{facts.version} (supported: {known})",
        **_moved(facts),
        "engine": {
            "device": facts.device,
            "runner": facts.runner,
            "method": facts.method,
            **special,
        },
        "assumed": ASSUMED,
        "policies": [
            f"{asked} -> {decision.policy} ({decision.reason})"
            for asked, decision in decisions.items()
        ],
        "audit": in_words(facts),
        **violations,
        **({"spare blocks": SPARE_BLOCKS} if facts.device == "cuda" else {}),
        "matrix": [str(row) for row in matrix(facts)],
    }


def _moved(facts: EngineFacts) -> dict[str, Any]:
    """Compare the hook points of a release that was not checked; empty for one that was."""
    if is_checked(facts.version, facts.device):
        return {}
    found = compare(facts.version, facts.device)
    return {
        "compared with": f"{found.version}, the nearest release that was checked: "
        f"{len(found.moves)} of {found.compared} hook points moved",
        "moved": [str(move) for move in found.moves],
    }


def _violations(wanted: PluginSettings | None, config: Foreign) -> dict[str, Any]:
    """Say what a violation does in the audit that the user asks for; empty without one."""
    if wanted is None or wanted.audit == "off" or audited.unwatched(config) is not None:
        return {}
    why = audited.uncontained(config) if wanted.on_violation == "contain" else None
    outcome = "" if why is None else f" -> log ({why})"
    return {"on_violation": f"{wanted.on_violation}{outcome}"}
