"""The SGLang section of ``kvtxn doctor``: whether the ledger can watch this release."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...errors import ConfigError
from .plugin import VARIABLE
from .seam import hook_points
from .settings import read_settings
from .supported import SEEN


def report(engine_args: Mapping[str, object] | None) -> dict[str, object]:
    """Report whether the hooks fit the installed SGLang, which is not imported.

    Args:
        engine_args: arguments of a vLLM engine; they say nothing of SGLang's.

    Returns:
        By heading, the release, what its hook points are, whether the ledger can watch its engines,
        and what the settings in the environment come to; without SGLang only that.
    """
    release = hook_points.release()
    if release is None:
        return {"version": "SGLang is not installed"}
    wrong, more = hook_points.moved(), hook_points.moved(hook_points.OPTIONAL)
    uncontained = hook_points.moved(hook_points.CONTAINING)
    seen = ", ".join(SEEN)
    audit = f"""the ledger can watch it; {VARIABLE}='{{"audit": "ledger"}}' asks for it"""
    return {
        "version": f"{release} (engines of {seen} were seen running beside the ledger)",
        "hook points": wrong or "as expected",
        **({"left out": more} if more else {}),
        **({"wrong rows are logged, and not contained": uncontained} if uncontained else {}),
        "audit": "the ledger cannot watch it: hook points have moved" if wrong else audit,
        "settings": _settings(),
    }


def _settings() -> str:
    """Return the environment's settings in words, or why they are not valid or not there."""
    text = os.environ.get(VARIABLE)
    if not text:
        return f"{VARIABLE} is not set: SGLang runs as if kvtxn were not there"
    try:
        return str(read_settings(text))
    except ConfigError as error:
        return str(error)
