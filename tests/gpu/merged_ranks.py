"""The reports of an engine's ranks on its states, made into one."""

from __future__ import annotations

from typing import Any


def merged(seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all ranks saw as one: digests side by side, numbers of states added up.

    Args:
        seen: by rank, what ``Watch.take`` returned.
    """
    first = seen[0]
    if len(seen) == 1:
        return first
    digests = {
        key: [part for each in seen for part in each["digests"].get(key, ())]
        for key in first["digests"]
    }
    counts = dict(first["counts"])
    for name in counts:
        if "stray" in name or name.endswith("_changed"):
            counts[name] = sum(each["counts"].get(name, 0) for each in seen)
    recurred = {
        name: (max if name == "worst" else sum)(each["recurred"][name] for each in seen)
        for name in first["recurred"]
    }
    return {**first, "digests": digests, "counts": counts, "recurred": recurred}
