"""Parts of documents that say what the code has: releases, kinds of violations, metrics."""

from __future__ import annotations

from collections.abc import Sequence

from ..audit.findings import AUDIT_FAMILIES
from ..integrations.audit_command.verdict import MEANING
from ..integrations.vllm_plugin.policy import supported
from ..metrics import FAMILIES
from .common.markdown import words


def releases() -> str:
    """Return the releases of vLLM that were checked, as a line of a list."""
    several, some = supported.MORE_GPU_RELEASES, supported.GPU_RELEASES
    places = {
        "GPUs": several,
        "one GPU": [each for each in some if each not in several],
        "CPUs": supported.RELEASES,
    }
    said = [f"{_listed(versions)} on {place}" for place, versions in places.items() if versions]
    return f"- Releases of vLLM: {'; '.join(said)}."


def violations() -> str:
    """Return the kinds of violations, and the meaning of each."""
    return words(["kind", "it means"], [[f"`{kind}`", said] for kind, said in MEANING.items()])


def metrics() -> str:
    """Return the metrics of a vLLM engine, and the labels that each has of its own."""
    from ..integrations.vllm_plugin.metrics.prometheus import ACTIVE  # vLLM brings its library

    rows = []
    for family in (ACTIVE, *FAMILIES, *AUDIT_FAMILIES):
        labels = [family.label] if family.label else []
        labels += ["rank"] if family.per_rank else []
        rows.append([f"`{family.name}`", ", ".join(f"`{each}`" for each in labels), family.help])
    return words(["metric", "labels", "meaning"], rows)


def _listed(names: Sequence[str]) -> str:
    """Return names as a sentence lists them."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
