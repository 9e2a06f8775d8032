"""The SGLang section of ``kvtxn doctor``: whether the ledger can watch this release."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...doctor import LACKS
from ...errors import ConfigError
from ..serving.audit_settings import AuditSettings
from .plugin import VARIABLE
from .seam import hook_points
from .settings import read_settings
from .supported import SEEN


def report(engine_args: Mapping[str, object] | None) -> dict[str, object]:
    """Report whether the hooks fit the installed SGLang, which is not imported.

    Args:
        engine_args: arguments of a vLLM engine; they say nothing of SGLang's.

    Returns:
        The release, what its hook points are, whether the ledger can watch its engines, what the
        settings in the environment come to, and what of it an engine does not get.
    """
    release = hook_points.release()
    if release is None:
        return {"version": "SGLang is not installed"}
    wrong, more = hook_points.moved(), hook_points.moved(hook_points.OPTIONAL)
    uncontained = hook_points.moved(hook_points.CONTAINING)
    seen = ", ".join(SEEN)
    said, wanted = _settings()
    audit = f"""the ledger can watch it; {VARIABLE}='{{"audit": "ledger"}}' asks for it"""
    return {
        "version": f"{release} (engines of {seen} were seen running beside the ledger)",
        "hook points": wrong or "as expected",
        **({"left out": more} if more else {}),
        **({"wrong rows are logged, and not contained": uncontained} if uncontained else {}),
        "audit": "the ledger cannot watch it: hook points have moved" if wrong else audit,
        "settings": said,
        **({LACKS: lacks} if (lacks := _lacking(wanted, wrong, uncontained)) else {}),
    }


def _settings() -> tuple[str, AuditSettings | None]:
    """Say what the settings in the environment come to; return them, and None if not valid."""
    text = os.environ.get(VARIABLE)
    if not text:
        return f"{VARIABLE} is not set: SGLang runs as if kvtxn were not there", AuditSettings()
    try:
        return str(found := read_settings(text)), found
    except ConfigError as error:
        return str(error), None


def _lacking(wanted: AuditSettings | None, wrong: list[str], uncontained: list[str]) -> list[str]:
    """Name what is asked for, and not had with these hook points; settings that are not valid."""
    if wanted is None:
        return ["a start, since the settings are not valid"]
    lacks = [f"audit {wanted.audit}"] if wrong and wanted.audit != "off" else []
    contains = wanted.audit != "off" and wanted.on_violation == "contain"
    return [*lacks, "on_violation contain"] if contains and uncontained else lacks
